"""The tables of a backward: which tiles in which order, and the turns of a deterministic run."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnkit.jit import emulation
from attnkit.schedule.deterministic_order import Turns, turns
from attnkit.schedule.first_writer import Firsts, chosen, firsts
from attnkit.schedule.scheduler import Schedule, Shape, schedule_backward
from attnkit.schedule.work_list import fitted, full_runs
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.forward import _ON_HOST, _SMS_EMULATED, _sms

if TYPE_CHECKING:
    from attnkit.splice.backward_settings import Settings

UNIT = 64 * 64  # floats of a unit of the kernel's sums
COUNTS = 8  # counters of a split kv tile, see `templates.sm90.backward_epilogue`


@dataclass(frozen=True, eq=False)
class Work:
    """Tables of the kernel.

    Attributes:
        pieces, partial, full: see `templates.sm90.backward.Backward`.
        order: turns of a deterministic run, with the semaphores as they are between launches.
        marks: of the chunks of dQ, if somebody waits for them.
        stored: the first part of a sum of dQ is stored, and nobody clears it.
        units: of the sums of dQ, of shared dK and dV, and of dK and dV of split kv tiles.
        rows: of the statistics.
        counts: counters of the kernel.
        workers: CTAs, or pairs of them.
        cost: estimated warp instructions in the emulator.
    """

    pieces: Tensor
    partial: Tensor
    full: Tensor
    order: tuple[Tensor, ...]
    marks: int
    stored: bool
    units: tuple[int, int, int, int]
    rows: int
    counts: int
    workers: int
    cost: float

    def to(self, device: torch.device) -> Work:
        """The same tables on a device."""
        return replace(
            self,
            pieces=self.pieces.to(device),
            partial=self.partial.to(device),
            full=self.full.to(device),
            order=tuple(t.to(device) for t in self.order),
        )

    def turn_tables(self) -> tuple[Tensor, ...]:
        """The tables of turns; semaphores of its own for every launch."""
        return (self.order[0].clone(), *self.order[1:]) if self.order else ()


_lists: weakref.WeakKeyDictionary[BlockRuns, dict[Any, Work]] = weakref.WeakKeyDictionary()


def work_of(
    runs: BlockRuns | None,
    settings: Settings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    emulated: bool,
) -> Work:
    """The tables for runs and tensors, made once."""
    block = settings.block
    if runs is None:
        runs = full_runs(query.shape[2], key.shape[2], block, query.device)
    known = _lists.setdefault(runs, {})
    count = workers(query.device, emulated)
    wanted = (settings, query.shape, key.shape, value.shape, emulated, count)
    if wanted not in known:
        tiles = query.shape[0] * query.shape[1] * max(runs.q_blocks, runs.kv_blocks)
        near = runs.to("cpu") if tiles <= _ON_HOST else runs
        made = _tables(fitted(near, block), settings, query, key, count, emulated)
        known[wanted] = made.to(query.device)
        if query.is_cuda and not torch.cuda.is_current_stream_capturing():
            # other streams may read the tables next
            torch.cuda.current_stream(query.device).synchronize()
    return known[wanted]


def workers(device: torch.device, emulated: bool) -> int:
    """CTAs that a device runs at once."""
    return emulation.ctas(_SMS_EMULATED) if emulated else _sms(device)


def _tables(
    runs: BlockRuns,
    settings: Settings,
    query: Tensor,
    key: Tensor,
    workers: int,
    emulated: bool,
) -> Work:
    config = settings.values
    batch, heads = query.shape[:2]
    wide, deep, rows = config["width"], config["value_width"], config["block_q"]
    schedule, first = scheduled(runs, settings, query, key, workers)
    units = [batch * heads * runs.q_blocks * (rows * wide // UNIT), 0, 0, 0]
    if config["accumulate"]:
        tiles = key.shape[0] * key.shape[1] * runs.kv_blocks * (settings.block[1] // 64)
        units[1:3] = [tiles * wide // 64, tiles * deep // 64]
        shared = 0
    else:
        shared = schedule.split.shape[0]  # kv tiles whose pieces meet in the kernel
        units[3] = shared * (settings.block[1] // 64) * (wide + deep) // 64
    pieces = schedule.table().contiguous()
    stored = isinstance(first, Firsts)
    dq, dk = (settings.ctas * n for n in settings.template.SEMAPHORES)
    if isinstance(first, Firsts):
        pieces[:, 3] = first.stop
    visited = int(pieces[:, [6, 9]].sum()) if emulated else 0
    return Work(
        pieces,
        _pairs(runs.partial_t.start, runs.partial_t.length),
        _pairs(runs.full_t.start, runs.full_t.length),
        _order(turns(runs, schedule), runs, schedule.shape, (dq, dk), bool(units[1]))
        if config["turns"]
        else (),
        2 * batch * heads * runs.q_blocks * (stored and not config["turns"]),
        stored,
        (units[0], units[1], units[2], units[3]),
        batch * heads * runs.q_blocks * rows,
        1 + COUNTS * shared,
        min(schedule.workers, schedule.pieces),
        emulation.attention_work(visited, schedule.pieces, block=settings.block, products=5),
    )


def scheduled(
    runs: BlockRuns, settings: Settings, query: Tensor, key: Tensor, workers: int
) -> tuple[Schedule, Firsts | str]:
    """The order of the kv tiles, and who stores the first part of dQ's sums or why nobody does.

    Args:
        runs: tiles in the kernel's sizes.
        query, key: for their shapes.
        workers: CTAs that a device runs at once.
    """
    config, template = settings.values, settings.template
    wide, rows = config["width"], config["block_q"]
    batch, heads = query.shape[:2]
    size = rows * (2 * (wide + config["value_width"]) + 4 * wide)
    shape = Shape(batch, heads, size, kv_heads=key.shape[1], kv_batch=key.shape[0])
    schedule = schedule_backward(
        runs,
        shape,
        workers=max(1, workers // settings.ctas),
        cost=template.prices(settings),
        order=config["turns"] or "longest",
        split=template.splits(settings),
    )
    if not template.stores(settings):
        return schedule, "this kernel always adds"
    if config["turns"]:
        return schedule, firsts(runs, schedule)
    found = chosen(runs, schedule, batch * heads * runs.q_blocks * rows * wide)
    return (schedule, found) if isinstance(found, str) else found


def _order(
    found: Turns, runs: BlockRuns, shape: Shape, semaphores: tuple[int, int], shared: bool
) -> tuple[Tensor, ...]:
    """Semaphores; kept runs and first and last turn of every (b, h, q block); the runs; turns of
    pieces.

    Args:
        found: turns of the schedule.
        runs, shape: what was scheduled.
        semaphores: of a tile of dQ, and of dK or dV.
        shared: whether dK and dV are sums too.
    """
    kept = found.kept
    rows = torch.stack([kept.row_ptr[:-1], kept.row_ptr[1:], found.first, found.last], 1)
    full = (shape.batch, shape.heads, runs.q_blocks)
    own = (runs.batch, runs.heads, runs.q_blocks)
    first = found.first.view(own).expand(full).reshape(-1, 1).expand(-1, semaphores[0])
    pairs = (shape.kv_batch or shape.batch) * (shape.kv_heads or shape.heads) * runs.kv_blocks
    others = found.first.new_zeros(shared * 2 * semaphores[1] * pairs)
    return (
        torch.cat([first.reshape(-1), others]),
        rows.view(*own, 4).expand(*full, 4).reshape(-1, 4).contiguous(),
        kept.start,
        kept.length,
        found.group,
    )


def _pairs(start: Tensor, length: Tensor) -> Tensor:
    """int32 [2, runs + 1]: a kernel takes no empty tensors."""
    pairs = torch.stack([start, length])
    return torch.cat([pairs, pairs.new_zeros(2, 1)], 1)

"""Running the backward of a variant with the Hopper kernels: hooks, work list, launch."""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit import emulation, expr
from attnkit.compiled import Build, Source, kernel
from attnkit.emulator import Undefined
from attnkit.expr import Node
from attnkit.schedule import Shape, schedule_backward
from attnkit.sparse import EMPTY, FULL, PARTIAL, BlockRuns
from attnkit.splice.program import Lists, Program
from attnkit.splice.sm90 import _SMS_EMULATED, ARCH, _intervals, _sms
from attnkit.splice.sm90_call import loadable, readable
from attnkit.turns import Turns, turns
from attnkit.versions import VersionedCache
from attnkit.worklist import full_runs, refined

UNIT = 64 * 64  # floats of a unit of the kernel's sums
KV_TILE = 128
ROLES = {
    "load": range(1),
    "add": range(1, 3),
    "consumer 0": range(4, 8),
    "consumer 1": range(8, 12),
}


_bounds: VersionedCache[Any] = VersionedCache(128)


@dataclass(frozen=True)
class Settings:
    """What is fixed when the kernels are compiled.

    Attributes:
        config: arguments of a `BackwardConfig`.
        head_dims: of query and value.
    """

    config: tuple[tuple[str, Any], ...]
    head_dims: tuple[int, int]

    @property
    def values(self) -> dict[str, Any]:
        """The config as a dictionary."""
        return dict(self.config)


# On a GPU the backward kernels have to be asked for: an earlier state of them has run there, this one
# in the emulator only.
SWITCH = "ATTNKIT_HOPPER_BACKWARD"


def supports(
    program: Program, query: Tensor, value: Tensor, runs: BlockRuns | None, emulated: bool
) -> bool:
    """Whether the kernels can compute this backward."""
    if (
        query.dtype not in (torch.bfloat16, torch.float16)
        or max(query.shape[-1], value.shape[-1]) > 128
    ):
        return False
    if program.checked or not (emulated or (query.is_cuda and os.environ.get(SWITCH) == "1")):
        return False
    fits = runs is None or not (runs.block[0] % 64 or runs.block[1] % KV_TILE)
    return fits or not program.listed  # lists that overrule the mask cannot be joined to tiles


def backward(
    program: Program,
    grads: tuple[Tensor, Tensor | None],
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    captured: Lists,
    runs: BlockRuns | None,
    scale: float,
    wanted: Sequence[bool],
    *,
    deterministic: bool = False,
    emulated: bool = False,
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:
    """Gradients of attention.

    Args:
        program: the graphs; `supports` must hold.
        grads: of the output and of the LSE; None for none.
        saved: query, key, value, output and LSE of the forward.
        captured: tensors of the score and of the mask.
        runs: tiles to visit; None for all.
        scale: softmax scale.
        wanted: for each tensor of the score, whether its gradient is.
        deterministic: form the sums of dQ, dK and dV in a fixed order. Those of captured tensors
            are not.
        emulated: execute the kernels on the CPU.

    Returns:
        The gradients of query, key and value; float32 gradients of the score's tensors, None where
        not wanted.
    """
    query, key, value, out = (loadable(t) for t in saved[:4])
    grad_out, lse = loadable(grads[0]), saved[4].detach().contiguous()
    grad_lse = lse if grads[1] is None else grads[1].detach().contiguous()
    settings = _settings(query, key, value, deterministic)
    work = _work(runs, settings, query, key, value, emulated)
    config, device = settings.values, query.device
    empty = functools.partial(torch.empty, dtype=torch.float32, device=device)
    units = work.units
    sums = empty(sum(units) * UNIT)
    sums[units[0] * UNIT :].zero_()
    rows_lse, rows_delta = empty(work.rows), empty(work.rows)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=device) for t in (query, key, value))
    run = functools.partial(_run, emulated=emulated)
    run(
        _prepare(settings, grads[1] is not None),
        (out, grad_out, lse, grad_lse, rows_lse, rows_delta, sums),
    )
    kept = (program, query.shape, key.shape, device)
    ends, mask_tensors = _bounds.get(
        kept, captured[1], lambda: _intervals(program, captured[1], query, key)
    )
    tensors = [readable(t, device) for t in (*captured[0], *mask_tensors)]
    totals = [
        torch.zeros(t.shape, dtype=torch.float32, device=device) if need else None
        for t, need in zip(captured[0], wanted, strict=True)
    ]
    added = [t.reshape(1) if t.ndim == 0 else t for t in totals if t is not None]
    source = _main(
        program,
        ends,
        settings,
        tuple((str(t.dtype).removeprefix("torch."), t.ndim, t.stride(-1) == 1) for t in tensors),
        tuple(wanted),
    )
    outputs = (dk, dv) if config["accumulate"] or not emulated else (Undefined(dk), Undefined(dv))
    run(
        source,
        (
            *(query, key, value, grad_out, *outputs, rows_lse, rows_delta, sums),
            *(work.pieces, work.partial, work.full),
            torch.zeros(1, dtype=torch.int32, device=device),
            *(*tensors, *added, *work.turn_tables()),
            *(scale, query.shape[1] // key.shape[1], work.workers),
        ),
        work=work.cost,
    )
    first = 0
    for grad, count, factor, block in (
        (dq, units[0], scale, config["block_q"]),
        (dk, units[1], scale, KV_TILE),
        (dv, units[2], 1.0, KV_TILE),
    ):
        if count:
            run(_finish(settings, grad.shape[-1], block), (sums, grad, first, factor))
        first += count
    return (dq, dk, dv), totals


def _settings(query: Tensor, key: Tensor, value: Tensor, deterministic: bool) -> Settings:
    shared = key.shape[:2] != query.shape[:2]
    config = {
        "dtype": str(query.dtype).removeprefix("torch."),
        "width": _width(query.shape[-1]),
        "value_width": _width(value.shape[-1]),
        "block_q": 64,
        "accumulate": shared,
        "turns": "descending" if deterministic else "",
    }
    return Settings(tuple(sorted(config.items())), (query.shape[-1], value.shape[-1]))


def _width(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128


@dataclass(frozen=True, eq=False)
class _Work:
    """Tables of the kernel.

    Attributes:
        pieces, partial, full: see `templates.sm90.backward.Backward`.
        order: turns of a deterministic run, with the semaphores as they are between launches.
        units: of the sums of dQ, dK and dV.
        rows: of the statistics.
        workers: CTAs.
        cost: estimated warp instructions in the emulator.
    """

    pieces: Tensor
    partial: Tensor
    full: Tensor
    order: tuple[Tensor, ...]
    units: tuple[int, int, int]
    rows: int
    workers: int
    cost: float

    def turn_tables(self) -> tuple[Tensor, ...]:
        """The tables of turns; semaphores of its own for every launch."""
        return (self.order[0].clone(), *self.order[1:]) if self.order else ()


_lists: weakref.WeakKeyDictionary[BlockRuns, dict[Any, _Work]] = weakref.WeakKeyDictionary()


def _work(
    runs: BlockRuns | None,
    settings: Settings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    emulated: bool,
) -> _Work:
    """The tables for runs and tensors, made once."""
    block = (settings.values["block_q"], KV_TILE)
    if runs is None:
        runs = full_runs(query.shape[2], key.shape[2], block, query.device)
    known = _lists.setdefault(runs, {})
    wanted = (settings, query.shape, key.shape, value.shape, emulated)
    if wanted not in known:
        known[wanted] = _tables(fitted(runs, block), settings, query, key, emulated)
    return known[wanted]


def _tables(
    runs: BlockRuns, settings: Settings, query: Tensor, key: Tensor, emulated: bool
) -> _Work:
    config = settings.values
    batch, heads = query.shape[:2]
    wide, deep, rows = config["width"], config["value_width"], config["block_q"]
    shape = Shape(
        batch,
        heads,
        rows * (2 * (wide + deep) + 4 * wide),
        kv_heads=key.shape[1],
        kv_batch=key.shape[0],
    )
    workers = _SMS_EMULATED if emulated else _sms(query.device)
    order = config["turns"] or "longest"
    schedule = schedule_backward(runs, shape, workers=workers, order=order, split=False)
    units = [batch * heads * runs.q_blocks * (rows * wide // UNIT), 0, 0]
    if config["accumulate"]:
        pairs = key.shape[0] * key.shape[1] * runs.kv_blocks
        units[1:] = [pairs * 2 * wide // 64, pairs * 2 * deep // 64]
    pieces = schedule.table().contiguous()
    visited = int(pieces[:, [6, 9]].sum()) if emulated else 0
    return _Work(
        pieces,
        _pairs(runs.partial_t.start, runs.partial_t.length),
        _pairs(runs.full_t.start, runs.full_t.length),
        _order(turns(runs, schedule), runs, shape, units, rows * wide // 2)
        if config["turns"]
        else (),
        (units[0], units[1], units[2]),
        batch * heads * runs.q_blocks * rows,
        min(workers, schedule.pieces),
        emulation.attention_work(visited, schedule.pieces, block=(rows, KV_TILE), products=5),
    )


def _order(
    found: Turns, runs: BlockRuns, shape: Shape, units: Sequence[int], chunk: int
) -> tuple[Tensor, ...]:
    """Semaphores; first and last kept run of every (b, h, q block); the runs; turns of pieces."""
    kept = found.kept
    bounds = torch.stack([kept.row_ptr[:-1], kept.row_ptr[1:]], 1)
    full = (shape.batch, shape.heads, runs.q_blocks)
    shared = (runs.batch, runs.heads, runs.q_blocks)
    first = found.first.view(shared).expand(full).reshape(-1, 1).expand(-1, 2)
    others = found.first.new_zeros(sum(units[1:]) * UNIT // chunk)
    return (
        torch.cat([first.reshape(-1), others]),
        bounds.view(*shared, 2).expand(*full, 2).reshape(-1, 2).contiguous(),
        kept.start,
        kept.length,
        found.group,
    )


def _pairs(start: Tensor, length: Tensor) -> Tensor:
    """int32 [2, runs + 1]: a kernel takes no empty tensors."""
    pairs = torch.stack([start, length])
    return torch.cat([pairs, pairs.new_zeros(2, 1)], 1)


def fitted(runs: BlockRuns, block: tuple[int, int]) -> BlockRuns:
    """The same tiles in other sizes: cut, or joined where the sizes do not divide.

    A joined tile is FULL or EMPTY only if all of its parts are.
    """
    if not any(own % new for own, new in zip(runs.block, block, strict=True)):
        return refined(runs, block)
    least = (math.gcd(runs.block[0], block[0]), math.gcd(runs.block[1], block[1]))
    states = refined(runs, least).states()
    rows, columns = -(-runs.q_len // block[0]), -(-runs.kv_len // block[1])
    high, wide = block[0] // least[0], block[1] // least[1]
    missing = (0, columns * wide - states.shape[3], 0, rows * high - states.shape[2])

    def parts(beyond: int) -> Tensor:
        padded = torch.nn.functional.pad(states, missing, value=beyond)
        return padded.view(*states.shape[:2], rows, high, columns, wide).transpose(3, 4).flatten(4)

    whole, none = (parts(FULL) == FULL).all(-1), (parts(EMPTY) == EMPTY).all(-1)
    joined = torch.where(whole, FULL, torch.where(none, EMPTY, PARTIAL)).to(torch.int8)
    return BlockRuns.from_states(joined, runs.q_len, runs.kv_len, block)


def _run(source: Source, arguments: Sequence[Any], *, emulated: bool, work: float = 0.0) -> None:
    if emulated:
        emulation.run_emulated(kernel(source), arguments, work=work, roles=ROLES)
    else:
        kernel(source)(*arguments)


def _title(settings: Settings) -> str:
    return f"{settings.values['dtype']} {settings.head_dims[0]}x{settings.head_dims[1]}"


@functools.lru_cache(maxsize=64)
def _prepare(settings: Settings, with_lse: bool) -> Source:
    """The kernel of the rows' statistics."""

    def build() -> Build:
        from attnkit.splice.fakes_backward import prepare_arguments
        from attnkit.templates.sm90.backward_config import BackwardConfig
        from attnkit.templates.sm90.backward_edges import Prepare

        config = BackwardConfig(**settings.values)
        return Build(
            Prepare(config, with_lse), prepare_arguments(config.dtype, settings.head_dims[1])
        )

    key = f"sm90 backward prepare\n{settings} {with_lse}"
    return Source(key, ARCH, build, f"prepare {_title(settings)}")


@functools.lru_cache(maxsize=64)
def _finish(settings: Settings, head_dim: int, block: int) -> Source:
    """The kernel that rounds a gradient."""

    def build() -> Build:
        from attnkit.splice.fakes_backward import finish_arguments
        from attnkit.templates.sm90.backward_config import BackwardConfig
        from attnkit.templates.sm90.backward_edges import Finish

        config = BackwardConfig(**settings.values)
        return Build(
            Finish(config, _width(head_dim), block), finish_arguments(config.dtype, head_dim)
        )

    key = f"sm90 backward finish\n{settings} {head_dim} {block}"
    return Source(key, ARCH, build, f"finish {_title(settings)}")


@functools.lru_cache(maxsize=1024)
def _main(
    program: Program,
    ends: tuple[tuple[Node, Node], ...] | None,
    settings: Settings,
    captured: tuple[tuple[str, int, bool], ...],
    wanted: tuple[bool, ...],
) -> Source:
    """The kernel of the gradients."""

    def build() -> Build:
        from attnkit.cute_hooks_backward import GraphBackward
        from attnkit.splice.fakes_backward import main_arguments
        from attnkit.templates.sm90.backward import Backward
        from attnkit.templates.sm90.backward_config import BackwardConfig

        config = BackwardConfig(**settings.values)
        hooks = GraphBackward(
            program.score,
            program.mask,
            ends,
            scores=len(wanted),
            listed=program.listed,
            wanted=wanted,
        )
        totals = [ndim for (_, ndim, _), need in zip(captured, wanted, strict=False) if need]
        arguments = main_arguments(
            config.dtype, settings.head_dims, captured, totals, bool(config.turns)
        )
        return Build(Backward(config, hooks), arguments)

    bounds = "" if ends is None else expr.text(*(n for pair in ends for n in pair))
    shape = (len(ends) if ends is not None else None, captured, wanted)
    key = "\n".join(["sm90 backward", program.text, bounds, str(settings), str(shape)])
    return Source(key, ARCH, build, f"backward {_title(settings)}")

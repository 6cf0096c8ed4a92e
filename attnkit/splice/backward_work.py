"""Build the tables of a backward kernel: work tiles, runs, order of deterministic accumulation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnkit.schedule.arrivals import few_visits
from attnkit.schedule.deterministic_order import DeterministicOrder, deterministic_order
from attnkit.schedule.first_writer import FirstWriters, choose_first_writers, first_writers
from attnkit.schedule.scheduler import Schedule, Shape, schedule_backward
from attnkit.schedule.short_tail import with_short_tail
from attnkit.schedule.whole_heads import WholeHeads, choose_whole_heads, meets_few_kv_tiles
from attnkit.schedule.work_list import full_runs, packed, retile
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.backward_template import BackwardSettings
from attnkit.splice.runs_cache import cached_for_runs, on_host_if_few, wait_for_tables
from attnkit.splice.workers import REFERENCE_SMS

UNIT = 64 * 64  # floats in one unit of the kernel's float32 accumulators in memory
COUNTERS = 8  # counters of a split kv tile, see `templates.sm90.backward_epilogue`


@dataclass(frozen=True, eq=False)
class BackwardWork:
    """Holds the tables that the main backward kernel reads, and the sizes of its workspace.

    Attributes:
        work_tiles, partial, full: see `templates.sm90.backward.Backward`.
        order: tables of the order of deterministic accumulation, see `_order`. The first holds the
            initial values of the semaphores. Empty if the order is not fixed, or if a CTA computes
            whole heads.
        flags: number of flags or counters for the chunks of dQ; 0 if no CTA waits for them.
        first_writer: whether the first kv tile of a row stores its part of dQ, so that dQ needs no
            memset.
        starts: int32 [heads], see `attnkit.schedule.whole_heads`; None unless a CTA computes whole
            heads.
        visits: int32 [B * H * q tiles], how many kv tiles visit each q tile, if the kernel counts
            them; else None.
        leaders: number of counters of stored blocks of dS, if batch element 0 stores the gradient of
            a bias before others add theirs; else 0.
        units: number of units (`UNIT` floats) of the float32 sums: of dQ, of shared dK, of shared
            dV, and of dK and dV of split kv tiles together.
        rows: number of rows that have an LSE and a delta.
        counters: number of counters of the kernel.
        workers: number of CTAs, or of pairs of CTAs, to launch.
        cost: estimated warp instructions in the emulator; 0 on a GPU.
    """

    work_tiles: Tensor
    partial: Tensor
    full: Tensor
    order: tuple[Tensor, ...]
    flags: int
    first_writer: bool
    starts: Tensor | None
    visits: Tensor | None
    leaders: int
    units: tuple[int, int, int, int]
    rows: int
    counters: int
    workers: int
    cost: float

    @property
    def writes_dq(self) -> bool:
        """Return whether the main kernel writes dQ in its dtype, so that no postprocess has to."""
        return self.starts is not None or self.visits is not None

    def to(self, device: torch.device) -> BackwardWork:
        """Return a copy whose tables are on `device`."""
        return replace(
            self,
            work_tiles=self.work_tiles.to(device),
            partial=self.partial.to(device),
            full=self.full.to(device),
            order=tuple(t.to(device) for t in self.order),
            starts=None if self.starts is None else self.starts.to(device),
            visits=None if self.visits is None else self.visits.to(device),
        )


def backward_work(
    runs: BlockRuns | None,
    settings: BackwardSettings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workers: int,
    emulated: bool,
    learned: bool = False,
    leaders: bool = False,
) -> BackwardWork:
    """Return the tables of a backward on the device of `query`, cached under `runs`.

    Args:
        runs: tiles to visit; None for all.
        settings: compile-time settings of the kernels.
        query, key, value: tensors of the call; only their shapes and device are read.
        workers: number of CTAs that run at once.
        emulated: whether the kernels are executed on the CPU.
        learned: whether captured tensors need a gradient.
        leaders: whether batch element 0 should lead, see `BackwardWork.leaders`.
    """
    if runs is None:
        runs = full_runs(query.shape[2], key.shape[2], settings.block, query.device)
    tiles = runs

    def build() -> BackwardWork:
        rows = query.shape[0] * query.shape[1] * max(tiles.q_blocks, tiles.kv_blocks)
        fine = retile(on_host_if_few(tiles, rows), settings.block)
        tables = build_tables(fine, settings, query, key, workers, emulated, learned, leaders)
        tables = tables.to(query.device)
        wait_for_tables(query.device)
        return tables

    shapes = query.shape, key.shape, value.shape
    return cached_for_runs(
        runs, ("backward", settings, shapes, emulated, workers, learned, leaders), build
    )


def build_tables(
    runs: BlockRuns,
    settings: BackwardSettings,
    query: Tensor,
    key: Tensor,
    workers: int,
    emulated: bool,
    learned: bool = False,
    leaders: bool = False,
) -> BackwardWork:
    """Build the tables of a backward from `runs` in the kernel's tile sizes, on their device."""
    head = runs
    if settings.pack_gqa:
        runs = packed(runs, query.shape[1] // key.shape[1])
    batch, heads = query.shape[0], _heads(settings, query, key)
    (wide, deep), (rows, columns) = settings.widths, settings.block
    schedule, first = scheduled(runs, settings, query, key, workers, head)
    if leaders:
        led, _ = scheduled(runs, settings, query, key, workers, head, always_adds=True)
        leaders = batch_ascends(led)
        schedule, first = (led, "no CTA may wait for dQ") if leaders else (schedule, first)
    whole: WholeHeads | str = "sums of captured gradients leave no registers"
    if not learned:
        other = schedule, first
        if (
            settings.deterministic
            and settings.template.whole_heads(settings)
            and meets_few_kv_tiles(runs)
        ):
            # Whole heads add in a fixed order anyway, so they are chosen wherever they are faster than
            # any order. The choice is the same on all devices, because the order of sums depends on it.
            other = scheduled(runs, settings.in_any_order(), query, key, REFERENCE_SMS, head)
        whole = whole_heads(runs, settings, *other, head)
    if isinstance(whole, WholeHeads):
        schedule = whole.schedule._replace(workers=schedule.workers)
        first = "a CTA computes whole heads"
    free = not (learned or leaders or isinstance(whole, WholeHeads))
    visits = arrivals(runs, settings, first, (batch, heads)) if free else None
    units = [batch * heads * runs.q_blocks * (rows * wide // UNIT), 0, 0, 0]
    if settings.values["accumulate"]:
        tiles = key.shape[0] * key.shape[1] * runs.kv_blocks * (columns // 64)
        units[1:3] = [tiles * wide // 64, tiles * deep // 64]
        split = 0
    else:
        split = schedule.split.shape[0]  # number of kv tiles that several work tiles share
        units[3] = split * (columns // 64) * (wide + deep) // 64
    work_tiles = schedule.table().contiguous()
    first_writer = isinstance(first, FirstWriters)
    if isinstance(first, FirstWriters):
        work_tiles[:, 3] = first.stop
    parts = settings.template.column_parts(settings.widths)
    ctas = min(schedule.workers, parts * schedule.work_tile_count)
    if isinstance(whole, WholeHeads):
        whole.fill(work_tiles)
        ctas = min(schedule.workers, whole.starts.numel())
        units[0] = ctas * units[0] // (batch * heads)
    order: tuple[Tensor, ...] = ()
    if settings.deterministic and not isinstance(whole, WholeHeads):
        dq, dk = (settings.ctas * parts * n for n in settings.template.semaphores(settings))
        order = _order(
            deterministic_order(runs, schedule), runs, schedule.shape, (dq, dk), bool(units[1])
        )
    waits = (first_writer and not order) or visits is not None
    return BackwardWork(
        work_tiles=work_tiles,
        partial=_pairs(runs.partial_t.start, runs.partial_t.length),
        full=_pairs(runs.full_t.start, runs.full_t.length),
        order=order,
        flags=2 * batch * heads * runs.q_blocks if waits else 0,
        first_writer=first_writer,
        visits=visits,
        starts=whole.starts if isinstance(whole, WholeHeads) else None,
        leaders=runs.kv_blocks * heads * runs.q_blocks * leaders,
        units=(units[0], units[1], units[2], units[3]),
        rows=batch * heads * runs.q_blocks * rows,
        counters=1 + COUNTERS * split,
        workers=ctas,
        cost=_emulation_cost(work_tiles, settings.block, parts) if emulated else 0.0,
    )


def _emulation_cost(work_tiles: Tensor, block: tuple[int, int], parts: int) -> float:
    """Estimate the warp instructions that the emulator executes for these work tiles.

    `parts` is the number of the kernel's work tiles for each of these.
    """
    from attnkit.jit import emulation

    visited, count = parts * int(work_tiles[:, [6, 9]].sum()), parts * len(work_tiles)
    return emulation.attention_work(visited, count, block=block, products=5)


def _heads(settings: BackwardSettings, query: Tensor, key: Tensor) -> int:
    """Return the number of heads of the schedule: kv heads if their query heads are packed."""
    return key.shape[1] if settings.pack_gqa else query.shape[1]


def scheduled(
    runs: BlockRuns,
    settings: BackwardSettings,
    query: Tensor,
    key: Tensor,
    workers: int,
    head: BlockRuns | None = None,
    always_adds: bool = False,
) -> tuple[Schedule, FirstWriters | str]:
    """Schedule the kv tiles, and choose at which q tiles each work tile is first writer of dQ.

    Args:
        runs: tiles to visit, in the kernel's tile sizes; of packed heads if they are packed.
        settings: compile-time settings of the kernels.
        query, key: tensors of the call; only their shapes are read.
        workers: number of CTAs that run at once.
        head: tiles of one head if `runs` packs several.
        always_adds: whether no work tile may be first writer.

    Returns:
        The schedule; and its first writers, or the reason as text why it has none.
    """
    template, (wide, deep), (rows, _) = settings.template, settings.widths, settings.block
    batch, heads = query.shape[0], _heads(settings, query, key)
    size = rows * (2 * (wide + deep) + 4 * wide)
    shape = Shape(
        batch,
        heads,
        size,
        kv_heads=key.shape[1],
        kv_batch=key.shape[0],
        batch_together=settings.bias_first,
    )
    workers = max(1, workers // settings.ctas)
    if settings.deterministic:
        # the list stays that of the reference; the kernel has the CTAs of this device
        schedule = fixed_order(runs, settings, shape)._replace(workers=workers)
    else:
        schedule = schedule_backward(
            runs,
            shape,
            workers=workers,
            cost=template.cost(settings),
            split=template.splits(settings),
        )
    if always_adds or not template.first_writer(settings):
        return schedule, "this kernel always adds"
    if settings.deterministic:
        one = runs if head is None else head
        return schedule, first_writers(one, schedule, heads=runs.q_blocks // one.q_blocks)
    floats = batch * heads * runs.q_blocks * rows * wide
    choice = choose_first_writers(runs, schedule, floats, head)
    return (schedule, choice) if isinstance(choice, str) else choice


def fixed_order(runs: BlockRuns, settings: BackwardSettings, shape: Shape) -> Schedule:
    """Schedule the kv tiles so that gradients are summed in the same order on every device."""
    schedule = schedule_backward(
        runs,
        shape,
        workers=max(1, REFERENCE_SMS // settings.ctas),
        cost=settings.template.cost(settings),
        order=settings.values["sum_order"],
        split=False,
    )
    return with_short_tail(runs, schedule) if schedule.order == "descending" else schedule


def batch_ascends(schedule: Schedule) -> bool:
    """Return whether the list has batch element 0 before the others, for each kv tile of a head.

    Work tiles may then wait for that of batch element 0: those that they wait for are claimed
    before them.
    """
    shape, device = schedule.shape, schedule.b.device
    place = (schedule.h * schedule.blocks + schedule.tile).to(torch.int64)
    index = torch.arange(place.numel(), device=device)
    lead = schedule.b == 0
    size = shape.heads * schedule.blocks
    last = torch.full((size,), -1, device=device)
    last = last.scatter_reduce(0, place[lead], index[lead], "amax")
    return bool((index > last[place])[~lead].all())


def arrivals(
    runs: BlockRuns, settings: BackwardSettings, first: FirstWriters | str, sizes: tuple[int, int]
) -> Tensor | None:
    """Return how many kv tiles visit each q tile, or None if the kernel should not count them.

    The rule is in `attnkit.schedule.arrivals`. `first` is the result of `scheduled`; the sizes are
    batch and (packed) heads.
    """
    if isinstance(first, FirstWriters) or not settings.template.arrivals(settings):
        return None
    return few_visits(runs, *sizes)


def whole_heads(
    runs: BlockRuns,
    settings: BackwardSettings,
    schedule: Schedule,
    first: FirstWriters | str,
    head: BlockRuns | None = None,
) -> WholeHeads | str:
    """Return a schedule by whole heads if it is predicted to be faster, or the reason against it.

    Args:
        runs, settings, head: see `scheduled`.
        schedule, first: its result.
    """
    if not settings.template.whole_heads(settings):
        return "this kernel does not compute whole heads"
    shape = schedule.shape
    floats = shape.batch * shape.heads * runs.q_blocks * settings.block[0] * settings.widths[0]
    return choose_whole_heads(runs, schedule, first, floats, head)


def _order(
    order: DeterministicOrder,
    runs: BlockRuns,
    shape: Shape,
    semaphores: tuple[int, int],
    shared: bool,
) -> tuple[Tensor, ...]:
    """Build the kernel's tables for accumulation in a fixed order.

    Args:
        order: order in which the work tiles of the schedule add to dQ, and to shared dK and dV.
        runs, shape: tiles, and shape of the tensors, for which the schedule was built.
        semaphores: number of semaphores for a tile of dQ, and for a tile of dK or dV.
        shared: whether several work tiles add to dK and dV.

    Returns:
        Five int32 tensors: the initial values of the semaphores; [b * h * q tiles, 4], for each row
        the indices at which its visited runs begin and end, and its first and last kv tile; the
        starts of the visited runs; their lengths; [work tiles, 2], see `DeterministicOrder.group`.
    """
    visited = order.visited
    begin, end = visited.row_ptr[:-1][order.mask_row], visited.row_ptr[1:][order.mask_row]
    first = order.first[:, None].expand(-1, semaphores[0])
    pairs = (shape.kv_batch or shape.batch) * (shape.kv_heads or shape.heads) * runs.kv_blocks
    others = order.first.new_zeros(shared * 2 * semaphores[1] * pairs)
    return (
        torch.cat([first.reshape(-1), others]),
        torch.stack([begin, end, order.first, order.last], 1),
        visited.start,
        visited.length,
        order.group,
    )


def _pairs(start: Tensor, length: Tensor) -> Tensor:
    """Return starts and lengths of runs as int32 [2, runs + 1].

    The last column is zero, because kernels reject empty tensors.
    """
    pairs = torch.stack([start, length])
    return torch.cat([pairs, pairs.new_zeros(2, 1)], 1)

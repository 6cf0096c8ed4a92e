"""Draw random block runs, shapes and schedules, and walk schedules in plain Python."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from attnkit.schedule.scheduler import ORDERS, Schedule, Shape, schedule_backward, schedule_forward
from attnkit.schedule.split_kv import Cost
from attnkit.sparsity.block_runs import EMPTY, FULL, PARTIAL, BlockRuns, Runs

Tile = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """Hold the arguments of a schedule."""

    runs: BlockRuns
    shape: Shape
    workers: int
    cost: Cost
    l2_bytes: int
    order: str
    split: bool
    backward: bool

    def schedule(self, **changes: object) -> Schedule:
        make = schedule_backward if self.backward else schedule_forward
        options = {name: getattr(self, name)
                   for name in ("workers", "cost", "l2_bytes", "order", "split")}  # fmt: skip
        return make(self.runs, self.shape, **(options | changes))

    def lists(self) -> dict[Tile, tuple[list[int], list[int]]]:
        """Return (PARTIAL tiles, FULL tiles) of each output tile, from the dense grid."""
        states = self.runs.states()
        if self.backward:
            states = states.transpose(2, 3)
        states = states.expand(self.shape.batch, self.shape.heads, -1, -1)
        found = {}
        for b, pages in enumerate(states):
            for h, page in enumerate(pages):
                for tile, row in enumerate(page.tolist()):
                    found[b, h, tile] = (
                        [i for i, s in enumerate(row) if s == PARTIAL],
                        [i for i, s in enumerate(row) if s == FULL],
                    )
        return found

    def unit(self, b: int, h: int) -> tuple[int, int]:
        """Return (batch element, head) of the tensors that head h reads: K, V; backward: Q, dO."""
        if self.backward:
            return b, h
        group = self.shape.heads // (self.shape.kv_heads or self.shape.heads)
        return (0 if self.shape.kv_batch == 1 else b), h // group


@st.composite
def cases(
    draw: st.DrawFn,
    orders: tuple[str, ...] = ORDERS,
    backward: bool | None = None,
    most: int = 12,
) -> Case:
    """Draw small runs with arguments of a schedule, some of which force splits."""
    batch, kv_heads, group = (draw(st.integers(1, n)) for n in (2, 2, 3))
    heads = kv_heads * group
    rows, columns = draw(st.integers(1, most)), draw(st.integers(1, most))
    own = draw(st.booleans()), draw(st.booleans())
    size = (batch if own[0] else 1, heads if own[1] else 1, rows, columns)
    cells = draw(st.lists(st.sampled_from([EMPTY, PARTIAL, FULL]), min_size=1, max_size=16))
    number = size[0] * size[1] * rows * columns
    line = torch.tensor(cells, dtype=torch.int8).repeat_interleave(draw(st.integers(1, 5)))
    states = line.repeat(number)[:number].view(size)
    kv_batch = draw(st.sampled_from([0, 1, batch]))
    runs = BlockRuns.from_states(states.contiguous(), rows * 2, columns * 3, (2, 3))
    return Case(
        runs=runs,
        shape=Shape(batch, heads, draw(st.integers(1, 4)), kv_heads, kv_batch),
        workers=draw(st.integers(1, 9)),
        cost=Cost(*(draw(st.integers(low, 9)) for low in (1, 1, 0, 0))),
        l2_bytes=draw(st.integers(1, 60)),
        order=draw(st.sampled_from(orders)),
        split=draw(st.booleans()),
        backward=draw(st.booleans()) if backward is None else backward,
    )


def walk(cursor: list[int], runs: Runs) -> list[int]:
    """Return the tiles that a cursor (run, skip, count) visits, in a kernel's order."""
    run, skip, count = cursor
    found: list[int] = []
    while len(found) < count:
        start, length = int(runs.start[run]), int(runs.length[run])
        found += range(start + skip, start + min(length, skip + count - len(found)))
        run, skip = run + 1, 0
    return found


def walked(case: Case, schedule: Schedule) -> list[tuple[Tile, int, list[int], list[int]]]:
    """Return (output tile, slot, PARTIAL tiles, FULL tiles) of each work tile, in list order."""
    runs = case.runs
    full, partial = (runs.full_t, runs.partial_t) if case.backward else (runs.full, runs.partial)
    return [
        ((r[0], r[1], r[2]), r[3], walk(r[4:7], partial), walk(r[7:10], full))
        for r in schedule.table().tolist()
    ]

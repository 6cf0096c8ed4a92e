"""Order float32 additions to the same memory by semaphores in global memory.

A semaphore has the turn: the number of the kv block that adds next to a sum. A CTA waits until the
semaphore equals its own kv block, adds, and stores the kv block that follows in the row
(`attnkit.schedule.deterministic_order`). The last kv block stores the first one again, so that the
next launch can use the tables.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, const_expr, cute

from attnkit.templates.common.work_tile import WorkTile


class OrderTable(IntEnum):
    """Indices of the tensors in the kernel argument `order`, all int32.

    With only first writers, the argument has one tensor: the flags of the chunks of dQ.
    """

    SEMAPHORE = 0  # [chunks of dQ, then chunks of dK, then chunks of dV]
    ROW = 1  # [B * H * q blocks, 4], see `OrderRow`
    RUN_START = 2  # [runs] of kv blocks, PARTIAL and FULL together
    RUN_LENGTH = 3
    TILE_TURN = 4  # [work tiles, 2]: turn at dK and dV of the kv head, and the number of turns


class OrderRow(IntEnum):
    """Indices of the words in a q block's entry in `OrderTable.ROW`."""

    RUNS_BEGIN = 0
    RUNS_END = 1
    FIRST_TURN = 2
    LAST_TURN = 3


@cute.jit
def wait_turn(semaphore: cute.Pointer, turn: Int32):
    """Spin until the semaphore equals `turn`.

    Bulk copies that follow need `fence_bulk`, because this load is of another proxy.
    """
    now = read_turn(semaphore)
    while now != turn:
        now = read_turn(semaphore)


def read_turn(semaphore: Any) -> Any:
    """Return the turn that a semaphore has, without waiting; see `wait_turn` for copies that follow."""
    return cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")


def fence_bulk() -> None:
    """Order the warp's later bulk copies after its earlier reads."""
    cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()  # waits for the fence: no branch must come between them


@cute.jit
def poll_turn(semaphore: cute.Pointer, turn: Int32, chunk: Int32):
    """Return `chunk` if its semaphore equals `turn`, else -1, without waiting."""
    ready = Int32(-1)
    if read_turn(semaphore) == turn:
        fence_bulk()
        ready = chunk
    return ready


@cute.jit
def following_turn(ascending: Constexpr, turn: Int32, row: tuple, tables: list):
    """Return the kv block that adds to a row after kv block `turn`; the first one after the last.

    If the last kv block of a descending order is above the first, the row has one run, and the order
    goes on from its lowest to its highest kv block (`attnkit.schedule.short_tail`).

    Args:
        ascending: whether kv blocks add in ascending order.
        turn: the kv block that adds now.
        row: the row's entry, see `OrderRow`.
        tables: see `OrderTable`.
    """
    low, high, first, last = row
    following = turn + (1 if const_expr(ascending) else -1)
    if turn == last:
        following = first
    elif low + 1 != high:
        following = _across_runs(
            ascending, turn, (low, high), tables[OrderTable.RUN_START],
            tables[OrderTable.RUN_LENGTH],
        )  # fmt: skip
    if const_expr(not ascending):
        if last > first:
            lowest = tables[OrderTable.RUN_START][low]
            if turn == lowest:
                following = lowest + tables[OrderTable.RUN_LENGTH][low] - 1
    return following


@cute.jit
def _across_runs(
    ascending: Constexpr, turn: Int32, bounds: tuple, starts: cute.Tensor, lengths: cute.Tensor
):
    """Return the next turn of a row that has several runs; `turn` is not the last one."""
    low, high = bounds
    following = Int32(0)
    for i in cutlass.range(low, high, unroll=1):
        if const_expr(ascending):
            if turn >= starts[i] and turn < starts[i] + lengths[i]:
                following = turn + 1
                if turn + 1 == starts[i] + lengths[i]:
                    following = starts[i + 1]
        else:
            if turn >= starts[i] and turn < starts[i] + lengths[i]:
                following = turn - 1
                if turn == starts[i]:
                    following = starts[i - 1] + lengths[i - 1] - 1
    return following


@cute.jit
def look_up_turn(ascending: Constexpr, turn: Int32, row: Int32, tables: list):
    """Return the kv block that adds to q block `row` after kv block `turn`."""
    entry = tuple(tables[OrderTable.ROW][row, i] for i in OrderRow)
    return following_turn(ascending, turn, entry, tables)


@cute.jit
def following_or_lookup(
    ascending: Constexpr, turn: Int32, following: Int32, chunk: Int32, tables: list
):
    """Return `following`, or look up the next turn in the tables if `following` is -1.

    Args:
        chunk: chunk of dQ; a q block has two.
    """
    if following < 0:
        following = look_up_turn(ascending, turn, chunk >> 1, tables)
    return following


def write_turn(config: Any, info: Any, record: Any, tables: Any, item: Any) -> None:
    """Write a work tile's turn at dK and dV to its record, if the config needs one.

    Args:
        config: its `sum_order` and `accumulate` say whether the sums have an order and are shared.
        info: int32 words in shared memory.
        record: index of the record's first word in `info`.
        tables: see `OrderTable`.
        item: row of the work list.
    """
    if config.sum_order and config.accumulate:
        info[record + WorkTile.TURN] = tables[OrderTable.TILE_TURN][item, 0]
        info[record + WorkTile.NUM_TURNS] = tables[OrderTable.TILE_TURN][item, 1]

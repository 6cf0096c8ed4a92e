"""Add float32 sums in a fixed order, by semaphores in global memory.

A semaphore holds the turn: the kv block that adds next to a sum. A CTA waits until it holds its own
kv block, adds, and stores the one that follows in the row (`attnkit.schedule.deterministic_order`).
The last one stores the first again, so that the tables are ready for the next launch.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
from cutlass import Constexpr, Int32, const_expr, cute

from attnkit.templates.common.work_tile import WorkTile


class OrderTable(IntEnum):
    """Numbers the tensors of the kernel argument `order`, all int32.

    With first writers alone the argument has one tensor: the flags of the chunks of dQ.
    """

    SEMAPHORE = 0  # [chunks of dQ, then of dK and of dV]
    ROW = 1  # [B * H * q blocks, 4], see `OrderRow`
    RUN_START = 2  # [runs] of kv blocks, PARTIAL and FULL together
    RUN_LENGTH = 3
    TILE_TURN = 4  # [work tiles, 2]: turn at dK and dV of the kv head, and how many turns there are


class OrderRow(IntEnum):
    """Numbers the words of a q block's entry in `OrderTable.ROW`."""

    RUNS_BEGIN = 0
    RUNS_END = 1
    FIRST_TURN = 2
    LAST_TURN = 3


@cute.jit
def wait_turn(semaphore: cute.Pointer, turn: Int32):
    """Spin until a semaphore holds a turn.

    Bulk copies that follow need `fence_bulk`: they are of another proxy than this load.
    """
    now = cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")
    while now != turn:
        now = cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")


def fence_bulk() -> None:
    """Order the later bulk copies of a warp after its earlier reads."""
    cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()  # waits for the fence: no branch must come between them


@cute.jit
def poll_turn(semaphore: cute.Pointer, turn: Int32, chunk: Int32):
    """Return the chunk if its semaphore holds the turn, else -1; does not wait."""
    ready = Int32(-1)
    if cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu") == turn:
        fence_bulk()
        ready = chunk
    return ready


@cute.jit
def following_turn(ascending: Constexpr, turn: Int32, row: tuple, tables: list):
    """Return the kv block that adds to a row after another; after the last one, the first.

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
    return following


@cute.jit
def _across_runs(
    ascending: Constexpr, turn: Int32, bounds: tuple, starts: cute.Tensor, lengths: cute.Tensor
):
    """Return the next turn in a row of several runs; `turn` is not the last one."""
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
def following_or_lookup(
    ascending: Constexpr, turn: Int32, following: Int32, chunk: Int32, tables: list
):
    """Return `following`, or where it is -1 look the next turn up in the tables.

    Args:
        chunk: of dQ; a q block has two.
    """
    if following < 0:
        entry = tuple(tables[OrderTable.ROW][chunk >> 1, i] for i in OrderRow)
        following = following_turn(ascending, turn, entry, tables)
    return following


def write_turn(config: Any, info: Any, record: Any, tables: Any, item: Any) -> None:
    """Write a work tile's turn at dK and dV to its record, where the config needs one.

    Args:
        config: its `sum_order` and `accumulate` say whether the sums have an order and are shared.
        info: int32 words in shared memory.
        record: word at which the record begins.
        tables: see `OrderTable`.
        item: row of the work list.
    """
    if config.sum_order and config.accumulate:
        info[record + WorkTile.TURN] = tables[OrderTable.TILE_TURN][item, 0]
        info[record + WorkTile.NUM_TURNS] = tables[OrderTable.TILE_TURN][item, 1]

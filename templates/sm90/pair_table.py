"""Copy a table of pairs to shared memory in a Hopper forward consumer.

Each warpgroup has its own copy, because warpgroups work on different heads at the same time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.sm90.config import (
    TABLE_COLUMNS,
    TABLE_ROWS,
    TABLE_STRIDE,
    WARPGROUP_THREADS,
)
from attnkit.templates.sm90.forward_barriers import epilogue_sync

BATCH = 8  # loads in flight of a thread


def in_shared_memory(
    hooks: ForwardHooks, site: Site, memory: cute.Pointer, warpgroup: Int32
) -> Site:
    """Copy the table of the site's head to shared memory; return a site that reads the copy.

    All threads of the warpgroup call it, when they have read the table of the previous work tile.

    Args:
        hooks: hooks of the variant.
        site: position of the work tile.
        memory: f32 [warpgroups, TABLE_ROWS, TABLE_STRIDE] in shared memory.
        warpgroup: index of the warpgroup.
    """
    slot, table = hooks.pair_table(site)
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % WARPGROUP_THREADS
    own = memory + warpgroup * (TABLE_ROWS * TABLE_STRIDE)
    column, first = thread % TABLE_COLUMNS, thread // TABLE_COLUMNS
    # positions beyond the table get copies of its last row and column, which nobody reads
    inside = cutlass.min(column, Int32(table.shape[1]) - 1)
    step = WARPGROUP_THREADS // TABLE_COLUMNS
    epilogue_sync(warpgroup)
    for start in range(0, TABLE_ROWS, step * BATCH):
        rows = [first + (start + step * i) for i in range(BATCH)]
        last = Int32(table.shape[0]) - 1
        values = [Float32(table[cutlass.min(row, last), inside]) for row in rows]
        for row, value in zip(rows, values, strict=True):
            (own + (row * TABLE_STRIDE + column)).store(value)
    epilogue_sync(warpgroup)
    tensors = list(site.tensors)
    tensors[slot] = _view(own, tensors[slot].shape)
    return replace(site, tensors=tensors)


def _view(memory: cute.Pointer, shape: Any) -> cute.Tensor:
    """Return a tensor of `shape` whose last two axes are the table in shared memory."""
    strides = (*(0 for _ in shape[:-2]), TABLE_STRIDE, 1)
    return cute.make_tensor(memory, cute.make_layout(tuple(shape), stride=strides))

"""Cache values derived from a mask's block runs, such as work lists and kernel tables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.graph_capture import is_capturing
from attnkit.util import caches

T = TypeVar("T")

# Work of up to this many rows of tiles is scheduled on the host. The torch operators there cost
# less than their launches on a GPU, and much less at the first call, when a GPU loads their code.
_FEW_ROWS = 1 << 15

_derived: weakref.WeakKeyDictionary[BlockRuns, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
caches.register(_derived.clear)


def cached_for_runs(runs: BlockRuns, key: Hashable, build: Callable[[], T]) -> T:
    """Return `build()`, cached under (`runs`, `key`) for the lifetime of `runs`."""
    known = _derived.setdefault(runs, {})
    if key not in known:
        known[key] = build()
    value: T = known[key]
    return value


def on_host_if_few(runs: BlockRuns, rows: int) -> BlockRuns:
    """Copy `runs` to the CPU if `rows`, the rows of tiles over all heads, is at most 2**15."""
    return runs if rows > _FEW_ROWS else runs.to("cpu")


def wait_for_tables(device: torch.device) -> None:
    """Synchronize the current stream after it wrote tables, so that any stream may read them."""
    if device.type == "cuda" and not is_capturing(device):
        torch.cuda.current_stream(device).synchronize()

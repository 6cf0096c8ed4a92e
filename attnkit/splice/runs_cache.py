"""Cache values that are computed from the tiles of a mask, such as the tables of kernels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.graph_capture import is_capturing
from attnkit.util import caches

T = TypeVar("T")

# Up to this many rows of tiles the work is ordered on the host. There the operators cost less than
# their launches on a GPU, and much less at the first call, where the GPU loads the code of each.
_FEW_ROWS = 1 << 15

_derived: weakref.WeakKeyDictionary[BlockRuns, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
caches.register(_derived.clear)


def cached_for_runs(runs: BlockRuns, key: Hashable, build: Callable[[], T]) -> T:
    """Return `build()`, cached under the runs and a key for as long as the runs live."""
    known = _derived.setdefault(runs, {})
    if key not in known:
        known[key] = build()
    value: T = known[key]
    return value


def on_host_if_few(runs: BlockRuns, rows: int) -> BlockRuns:
    """Move runs to the host if there are few rows of tiles in all heads."""
    return runs if rows > _FEW_ROWS else runs.to("cpu")


def wait_for_tables(device: torch.device) -> None:
    """Wait until the current stream has written tables, as other streams may read them next."""
    if device.type == "cuda" and not is_capturing(device):
        torch.cuda.current_stream(device).synchronize()

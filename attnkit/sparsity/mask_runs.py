"""Classify the tiles of a traced mask and prove its indices, once for each state of its tensors.

`check_lengths` and `mask_runs` cache their results until a captured tensor changes. The first call
that needs the modules that classify tiles imports them.
"""

from __future__ import annotations

import torch

from attnkit.errors import DeviceError
from attnkit.graph.ir import Node, reads
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.sparsity.index_bounds import check_bounds
from attnkit.tracing.float64_checks import float64_slots
from attnkit.tracing.guards import data_slots
from attnkit.tracing.tracer import Traced
from attnkit.util import caches
from attnkit.util.tensor_cache import VersionedCache
from attnkit.util.torch_private import is_fake

_HOST_LIMIT = 1 << 16  # largest q_len + kv_len at which the CPU computes the tiles for a GPU

_runs: VersionedCache[tuple[BlockRuns, frozenset[Node]]] = VersionedCache(64)
_proofs: VersionedCache[frozenset[Node]] = VersionedCache(256)
caches.register(_runs.clear)
caches.register(_proofs.clear)


def check_lengths(
    function: Traced, q_len: int, kv_len: int, batch: int, heads: int
) -> frozenset[Node]:
    """Prove that a traced function's indices stay inside its captured tensors at these lengths.

    The proof is cached until a captured tensor on which it depends is replaced or edited.

    Returns:
        The loads whose index is not proven to be in range; they must be checked at run time.

    Raises:
        BoundsError: an index leaves its captured tensor, or integer arithmetic leaves int32.
        DeviceError: a captured tensor has no data.
    """
    for name, t in zip(function.names, function.tensors, strict=True):
        if t.is_meta or is_fake(t):
            raise DeviceError(
                f"the {function.kind}_mod reads the tensor {name!r}, which has no data (a "
                f"{type(t).__name__} on {t.device}); capture a tensor with data"
            )
    names = reads(function.root)
    batch, heads = (batch if "b" in names else 1), (heads if "h" in names else 1)

    def prove() -> frozenset[Node]:
        return check_bounds(
            [function.root],
            function.tensors,
            function.names,
            q_len=q_len,
            kv_len=kv_len,
            batch=batch,
            heads=heads,
        )

    tensors = function.tensors
    kinds = tuple((t.shape, t.dtype, t.device) for t in tensors)
    key = (function.root, function.names, q_len, kv_len, batch, heads, kinds)
    slots = data_slots(function.root, float64_slots(tensors))
    return _proofs.get(key, [tensors[i] for i in slots], prove)


def mask_runs(
    mask: Traced,
    *,
    q_len: int,
    kv_len: int,
    block: tuple[int, int],
    batch: int,
    heads: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[BlockRuns, frozenset[Node]]:
    """Return the runs of a traced mask's tiles, and the loads to check at run time.

    The result is cached until a captured tensor is replaced or edited in place.

    Args:
        mask: a traced mask_mod; its captured tensors on `device`.
        q_len, kv_len: lengths in positions, at least 1.
        block: (q, kv) positions of a tile.
        batch, heads: batch size and number of query heads; the runs have 1 instead where the mask
            does not read b, or h.
        device: device of the runs.
        dtype: dtype of floats in the mask: float64 for float64 queries, else float32.

    Returns:
        The runs, and the loads whose index must be checked at run time.

    Raises:
        BoundsError: an index leaves its captured tensor, or integer arithmetic leaves int32.
    """
    names = reads(mask.root)
    batch, heads = (batch if "b" in names else 1), (heads if "h" in names else 1)

    def build() -> tuple[BlockRuns, frozenset[Node]]:
        checked = check_lengths(mask, q_len, kv_len, batch, heads)
        shape = q_len, kv_len, batch, heads
        runs = None
        if device.type != "cpu" and not checked:
            runs = _runs_by_intervals(mask, shape, block, device, dtype)
        if runs is None:
            from attnkit.sparsity.classify import classify

            runs = classify(
                mask.root,
                mask.tensors,
                q_len=q_len,
                kv_len=kv_len,
                block=block,
                batch=batch,
                heads=heads,
                device=device if _has_data(mask) else torch.device("cpu"),
                dtype=dtype,
                names=mask.names,
            )
        return runs.to(device), checked

    key = (mask.root, mask.names, q_len, kv_len, batch, heads, block, device, dtype)
    return _runs.get(key, mask.tensors, build)


def _has_data(mask: Traced) -> bool:
    """Return whether the mask captures tensors on a GPU."""
    return any(t.device.type != "cpu" for t in mask.tensors)


def _runs_by_intervals(
    mask: Traced,
    shape: tuple[int, int, int, int],
    block: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> BlockRuns | None:
    """Classify tiles for a GPU from row intervals, or return None if a row is not one interval.

    Every operator on a GPU costs a launch, and its first use costs milliseconds. So the work runs
    on the GPU only if the mask reads data there, or the lengths are large.
    """
    q_len, kv_len, batch, heads = shape
    data = _has_data(mask)
    from attnkit.sparsity.intervals.normal_form import Intervals, find_intervals
    from attnkit.sparsity.intervals.tiles import tiles_of

    intervals = find_intervals(
        mask,
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=heads,
        dtype=dtype,
        device=device,
        search=data,
    )
    if not isinstance(intervals, Intervals):
        return None
    on_gpu = data or q_len + kv_len > _HOST_LIMIT
    return tiles_of(intervals, block, dtype, device if on_gpu else torch.device("cpu"))

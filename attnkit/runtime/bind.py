"""Trace a score_mod and a mask, check that their indices stay in bounds, and classify tiles."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, DeviceError, ShapeError
from attnkit.graph import ir
from attnkit.graph.eval_torch import mask_dtype
from attnkit.graph.ir import Node
from attnkit.graph.simplify import TRUE
from attnkit.runtime.data_guard import DataGuard
from attnkit.sparsity.block_mask import BlockMask, check_mask_shape
from attnkit.sparsity.block_runs import BlockRuns, from_flex
from attnkit.sparsity.mask_runs import check_lengths, mask_runs
from attnkit.splice import Captured, Program, compute_dtype
from attnkit.tracing.axes import Sizes
from attnkit.tracing.built_for import check_built_for
from attnkit.tracing.float64_checks import check_precision, float64_slots
from attnkit.tracing.guards import data_slots, trace_cached
from attnkit.tracing.tracer import Traced
from attnkit.util import caches
from attnkit.util.arguments import check_captured, index_instead
from attnkit.util.data_state import settled_state_of
from attnkit.util.tensor_cache import VersionedCache

# Names of PyTorch's block lists, in the order of `flex_lists`.
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")

_flex_runs: VersionedCache[BlockRuns] = VersionedCache(64)
caches.register(_flex_runs.clear)


@dataclass(frozen=True)
class TracedVariant:
    """Holds the traced graphs of a score_mod and a mask.

    Attributes:
        score, mask: the traces; None for a missing function.
        block_mask: the mask as the caller passed it. It may be a `BlockMask`, which has lengths, or
            PyTorch's, which also has block lists.
        score_mod: the score_mod as the caller passed it, with its declared tables.
    """

    score: Traced | None
    mask: Traced | None
    block_mask: Any = None
    score_mod: Any = None

    def data_guard(self) -> DataGuard:
        """Return a guard of the data on which the tiles and the bounds proofs depend.

        The order is that of `CallKey.data`: the score's tensors, block lists, the mask's tensors.
        """
        tensors: list[Tensor] = []
        names: list[str] = []
        slots: tuple[int, ...] = ()
        if self.score is not None:
            slots = data_slots(self.score.root, float64_slots(self.score.tensors))
            tensors += [self.score.tensors[i] for i in slots]
            names += [self.score.names[i] for i in slots]
        lists = self.block_lists_data()
        tensors += lists
        names += LISTS[: len(lists)]
        if self.mask is not None:
            tensors += self.mask.tensors
            names += self.mask.names
        states = [settled_state_of(t) for t in tensors]
        return DataGuard(states, names, slots, len(lists))

    def block_lists_data(self) -> tuple[Tensor, ...]:
        """Return the block lists of PyTorch's BlockMask; () for another mask."""
        return flex_lists(self.block_mask)[0] if is_flex(self.block_mask) else ()

    @property
    def block_lists(self) -> tuple[int, int] | None:
        """Return the tile sizes of PyTorch's BlockMask; None for another mask."""
        if not is_flex(self.block_mask):
            return None
        rows, columns = self.block_mask.BLOCK_SIZE
        return rows, columns


@dataclass(frozen=True)
class Bound:
    """Holds the graphs and the tiles of a variant for the shapes of one call.

    Attributes:
        score: the traced score_mod; None if it does not change the score.
        mask: the traced mask_mod; None if it keeps everything.
        runs: tiles to visit; None for all.
        lists_override_mask: whether the runs come from block lists of PyTorch's BlockMask, which
            override the mask_mod.
        program: the graphs in the form that kernels and operators take.
    """

    score: Traced | None
    mask: Traced | None
    runs: BlockRuns | None
    lists_override_mask: bool
    program: Program

    @property
    def captured(self) -> Captured:
        """Return the tensors that the score and the mask capture."""
        return Captured(*(() if t is None else t.tensors for t in (self.score, self.mask)))


def check_functions(score_mod: Any, mask: Any) -> None:
    """Raise an ArgumentError if a score_mod or a mask has the wrong type.

    Raises:
        ArgumentError: `score_mod` is not a function, or `mask` is neither a function nor a mask.
    """
    if score_mod is not None and not callable(score_mod):
        raise ArgumentError(
            "score_mod must be a function score_mod(score, b, h, q, kv) or None, got "
            f"{type(score_mod).__name__}"
        )
    if mask is not None and not is_flex(mask) and not isinstance(mask, BlockMask):
        if isinstance(mask, Tensor) or not callable(mask):
            raise ArgumentError(
                "block_mask must be a BlockMask, a Mask, a function mask_mod(b, h, q, kv) or "
                f"None, got {type(mask).__name__}{index_instead(mask)}"
            )


def trace(score_mod: Any, mask: Any, device: torch.device) -> TracedVariant:
    """Trace a score_mod and a mask, or look up their cached traces.

    Args:
        score_mod: `score_mod(score, b, h, q, kv) -> score`, or None.
        mask: a `Mask`, a `mask_mod(b, h, q, kv) -> bool`, a `BlockMask` (PyTorch's too), or None.
        device: device of the query.

    Raises:
        ArgumentError: `score_mod` is not a function, or `mask` is neither a function nor a mask.
        TraceError: a function cannot be traced.
    """
    check_functions(score_mod, mask)
    score = None if score_mod is None else trace_cached(score_mod, "score", device)
    has_blocks = is_flex(mask) or isinstance(mask, BlockMask)
    mask_mod = mask.mask_mod if has_blocks else mask
    graph = None if mask_mod is None else trace_cached(mask_mod, "mask", device)
    return TracedVariant(score, graph, mask, score_mod)


def prove(variant: TracedVariant, query: Tensor, key: Tensor) -> frozenset[Node]:
    """Check that the graphs are valid for these tensors: devices, lengths, indices, rounding.

    Returns:
        The loads whose index could not be proven to stay inside its tensor. The cpu template checks
        them at run time. GPU kernels do not support such graphs.

    Raises:
        BoundsError, ShapeError, DTypeError, DeviceError: see `flex_attention`.
    """
    score, mask, block_mask = variant.score, variant.mask, variant.block_mask
    for what, t in (("score_mod", score), ("mask_mod", mask)):
        if t is not None:
            check_captured(what, t.names, t.tensors, query.device)
            check_precision(t, compute_dtype(query))
    batch, heads, q_len, kv_len = *query.shape[:3], key.shape[2]
    sizes = Sizes(batch, heads, q_len, kv_len, key.shape[1])
    unproven = frozenset[Node]()
    if score is not None:
        check_built_for(variant.score_mod, sizes)
        unproven |= check_lengths(score, q_len, kv_len, batch, heads)
    if mask is None:
        return unproven
    if is_flex(block_mask) or isinstance(block_mask, BlockMask):
        _check_block_mask(block_mask, mask, query, key)
    check_built_for(getattr(block_mask, "mask_mod", block_mask), sizes)
    return unproven | check_lengths(mask, q_len, kv_len, batch, heads)


def _check_block_mask(block_mask: Any, mask: Traced, query: Tensor, key: Tensor) -> None:
    """Raise an error if a BlockMask was built for other shapes or another device."""
    check_mask_shape(block_mask.shape[0], block_mask.shape[1], block_mask.seq_lengths, query, key)
    if isinstance(block_mask, BlockMask):
        names = ir.reads(mask.root)
        for name, what, own, size in (
            ("b", "batch", block_mask.shape[0], query.shape[0]),
            ("h", "heads", block_mask.shape[1], query.shape[1]),
        ):
            if name in names and own != size:
                raise ShapeError(
                    f"block_mask was built for {what} {own} and its mask_mod reads {name}, query "
                    f"has {what} {size}; build it for {what} {size}"
                )
        if block_mask.device != query.device:
            raise DeviceError(
                f"block_mask was built for {block_mask.device}, query is on {query.device}; build "
                f"it with device={str(query.device)!r}"
            )
    elif block_mask.kv_num_blocks.device != query.device:
        raise DeviceError(
            f"block_mask is on {block_mask.kv_num_blocks.device}, query is on {query.device}; "
            f"move it with block_mask.to({str(query.device)!r})"
        )


def classify(
    variant: TracedVariant,
    unproven: frozenset[Node],
    query: Tensor,
    key: Tensor,
    block: tuple[int, int],
) -> Bound:
    """Classify the tiles of a call as EMPTY, PARTIAL or FULL; return them with the graphs.

    Args:
        variant: the graphs.
        unproven: result of `prove`.
        query, key: tensors of the call.
        block: (query, kv) tile sizes.
    """
    score, mask = variant.score, variant.mask
    if score is not None and score.root is ir.arg("score"):
        score = None
    runs, lists_override_mask = None, False
    if mask is not None:
        runs, lists_override_mask = _runs(variant, mask, query, key, block)
        if mask.root is TRUE:
            mask = None
            runs = runs if lists_override_mask else None
    program = Program(
        None if score is None else score.root,
        None if mask is None else mask.root,
        lists_override_mask=lists_override_mask and mask is not None,
    )
    if unproven:
        names = (score.names if score else ()), (mask.names if mask else ())
        program = replace(program, checked=unproven, names=names)
    return Bound(score, mask, runs, lists_override_mask, program)


def _runs(
    variant: TracedVariant, mask: Traced, query: Tensor, key: Tensor, block: tuple[int, int]
) -> tuple[BlockRuns, bool]:
    """Return the tiles to visit, and whether they come from block lists that override the mask."""
    block_mask = variant.block_mask
    if is_flex(block_mask):
        lists, settings = flex_lists(block_mask)
        return _flex_runs.get(settings, lists, lambda: from_flex(block_mask)), True
    batch, heads, q_len, kv_len = *query.shape[:3], key.shape[2]
    if isinstance(block_mask, BlockMask):
        batch, heads, q_len, kv_len = block_mask.shape
    runs, _ = mask_runs(
        mask,
        q_len=q_len,
        kv_len=kv_len,
        block=block,
        batch=batch,
        heads=heads,
        device=query.device,
        dtype=mask_dtype(mask.root, mask.tensors),
    )
    return runs, False


def flex_lists(mask: Any) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Return the block lists of PyTorch's BlockMask and a hashable key of its other settings."""
    lists = mask.kv_num_blocks, mask.kv_indices
    full = mask.full_kv_num_blocks, mask.full_kv_indices
    has_full = full[0] is not None and full[1] is not None
    return (*lists, *full) if has_full else lists, (*mask.BLOCK_SIZE, *mask.seq_lengths, has_full)


def is_flex(mask: Any) -> bool:
    """Return whether `mask` is PyTorch's BlockMask, without importing the module of that class."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(mask, module.BlockMask)

"""`Variant`: a score_mod and a mask, and what they become for given tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, DeviceError
from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.graph.simplify import TRUE
from attnkit.runtime.reuse.call_cache import flex_lists
from attnkit.sparsity.block_mask import BlockMask, check_lengths, check_mask_shape, mask_runs
from attnkit.sparsity.block_runs import BlockRuns, from_flex
from attnkit.splice import Program, compute_dtype
from attnkit.tracing.float64_checks import check_precision
from attnkit.tracing.guards import trace_cached
from attnkit.tracing.mask import check_built_for
from attnkit.tracing.tracer import Traced
from attnkit.util.arguments import check_captured
from attnkit.util.tensor_cache import VersionedCache

_bounds: VersionedCache[frozenset[Node]] = VersionedCache(256)
_flex_runs: VersionedCache[BlockRuns] = VersionedCache(64)


@dataclass(frozen=True)
class Bound:
    """A variant traced and classified for one call.

    Attributes:
        score: the traced score_mod, None where it leaves the score as it is.
        mask: the traced mask_mod, None where it keeps everything.
        runs: tiles to visit, None for all.
        listed: the runs say more than the mask_mod (PyTorch's BlockMask with its own block lists).
        program: the graphs for the operators.
    """

    score: Traced | None
    mask: Traced | None
    runs: BlockRuns | None
    listed: bool
    program: Program


@dataclass(frozen=True, eq=False)
class Variant:
    """An attention variant: what a module holds, and what `flex_attention` makes.

    Hashable by its functions, printable as formulas, callable on query, key and value. A function
    whose closure, defaults, globals or attributes change is traced again at the next call.

    Args:
        score_mod: `score_mod(score, b, h, q, kv) -> score`, or None.
        mask: a `Mask`, a `mask_mod(b, h, q, kv) -> bool`, a `BlockMask` (PyTorch's too), or None.

    Raises:
        TraceError: a function cannot be traced.
        ArgumentError: mask is none of these.

    >>> from attnkit import Variant
    >>> print(Variant(lambda score, b, h, q, kv: score * 2, lambda b, h, q, kv: q >= kv))
    score(score, b, h, q, kv) = score * 2.0
    mask(b, h, q, kv) = kv <= q
    """

    score_mod: Callable[..., Any] | None = None
    mask: Any = None

    def __post_init__(self) -> None:
        if self.score_mod is not None and not callable(self.score_mod):
            raise ArgumentError(
                "score_mod must be a function score_mod(score, b, h, q, kv) or None, got "
                f"{type(self.score_mod).__name__}"
            )
        mask = self.mask
        if mask is not None and not _is_flex(mask) and not isinstance(mask, BlockMask):
            if isinstance(mask, Tensor) or not callable(mask):
                raise ArgumentError(
                    "block_mask must be a BlockMask, a Mask, a function mask_mod(b, h, q, kv) or "
                    f"None, got {type(mask).__name__}"
                )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Variant):
            return NotImplemented
        return self.score_mod is other.score_mod and self.mask is other.mask

    def __hash__(self) -> int:
        return hash((id(self.score_mod), id(self.mask)))

    def __str__(self) -> str:
        parts = self.trace(torch.device("cpu"))
        return "\n".join(str(t) for t in parts if t is not None) or "softmax attention"

    def trace(self, device: torch.device) -> tuple[Traced | None, Traced | None]:
        """The traced score_mod and mask_mod, None where there is none."""
        score = None if self.score_mod is None else trace_cached(self.score_mod, "score", device)
        block = _is_flex(self.mask) or isinstance(self.mask, BlockMask)
        mod = self.mask.mask_mod if block else self.mask
        return score, None if mod is None else trace_cached(mod, "mask", device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Attention with this variant; options as of `attnkit.flex_attention`."""
        from attnkit.runtime.api import flex_attention  # ops builds on variants

        return flex_attention(query, key, value, self.score_mod, self.mask, **options)

    def bind(self, query: Tensor, key: Tensor, block: tuple[int, int]) -> Bound:
        """Trace, prove the indices and classify the tiles for these tensors.

        Raises:
            TraceError, BoundsError, ShapeError, DTypeError, DeviceError: as documented for
                flex_attention.
        """
        score, mask = self.trace(query.device)
        for what, t in (("score_mod", score), ("mask_mod", mask)):
            if t is not None:
                check_captured(what, t.names, t.tensors, query.device)
                check_precision(t, compute_dtype(query))
        checked = frozenset[Node]()
        if score is not None and score.root is ir.arg("score"):
            score = None
        if score is not None:
            checked |= _score_bounds(score, query, key)
        runs, listed = None, False
        if mask is not None:
            runs, more, listed = self._runs(mask, query, key, block)
            checked |= more
            if mask.root is TRUE:
                mask = None
                runs = runs if listed else None
        program = Program(
            None if score is None else score.root,
            None if mask is None else mask.root,
            listed=listed and mask is not None,
        )
        if checked:
            names = (score.names if score else ()), (mask.names if mask else ())
            program = replace(program, checked=checked, names=names)
        return Bound(score, mask, runs, listed, program)

    def _runs(
        self, mask: Traced, query: Tensor, key: Tensor, block: tuple[int, int]
    ) -> tuple[BlockRuns, frozenset[Node], bool]:
        given = self.mask
        batch, heads, q_len, kv_len = *query.shape[:2], query.shape[2], key.shape[2]
        check_built_for(getattr(given, "mask_mod", given), q_len, kv_len)
        if _is_flex(given):
            check_mask_shape(given.shape[0], given.shape[1], given.seq_lengths, query, key)
            if given.kv_num_blocks.device != query.device:
                raise DeviceError(
                    f"block_mask is on {given.kv_num_blocks.device}, query is on {query.device}; "
                    f"move it with block_mask.to({str(query.device)!r})"
                )
            checked = check_lengths(mask, q_len, kv_len, batch, heads)
            listed, rest = flex_lists(given)
            return _flex_runs.get(rest, listed, lambda: from_flex(given)), checked, True
        if isinstance(given, BlockMask):
            check_mask_shape(given.shape[0], given.shape[1], given.seq_lengths, query, key)
            if given.device != query.device:
                raise DeviceError(
                    f"block_mask was built for {given.device}, query is on {query.device}; build "
                    f"it with device={str(query.device)!r}"
                )
            return *given.checked_runs(compute_dtype(query), block), False
        runs, checked = mask_runs(
            mask,
            q_len=q_len,
            kv_len=kv_len,
            block=block,
            batch=batch,
            heads=heads,
            device=query.device,
            dtype=compute_dtype(query),
        )
        return runs, checked, False


def _score_bounds(score: Traced, query: Tensor, key: Tensor) -> frozenset[Node]:
    lengths = (query.shape[2], key.shape[2], query.shape[0], query.shape[1])
    return _bounds.get(
        (score.root, score.names, lengths), score.tensors, lambda: check_lengths(score, *lengths)
    )


def lists_of(mask: Any) -> tuple[int, int] | None:
    """Tile sizes of block lists that overrule the mask function; None where there are none."""
    return (mask.BLOCK_SIZE[0], mask.BLOCK_SIZE[1]) if _is_flex(mask) else None


def _is_flex(mask: Any) -> bool:
    """Whether this is PyTorch's BlockMask (whose module is not imported for the question)."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(mask, module.BlockMask)

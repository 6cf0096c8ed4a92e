"""Attention that is settled when it runs: what a call becomes inside torch.compile.

There, tensors have no data and lengths may be symbols, so tiles cannot be found nor indices be
proven. A call becomes one of the operators
`torch.ops.attnkit.attention`, which carries the graphs as text; it is settled when it runs, and
found again by calls like it (`repeats`). One compiled program so serves every length.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit.errors import UnsupportedError
from attnkit.graph import ir
from attnkit.runtime import torch_ops
from attnkit.runtime.prepare import planned, settled
from attnkit.runtime.reuse.call_cache import Likeness
from attnkit.runtime.torch_ops import Settled
from attnkit.runtime.variant import Variant
from attnkit.sparsity.block_mask import BlockMask
from attnkit.sparsity.block_runs import BLOCK
from attnkit.splice import BackwardInputs, Captured, KernelCall, compute_dtype, output_like
from attnkit.tracing.float64_checks import float64_slots
from attnkit.tracing.guards import depends_on_data
from attnkit.tracing.tracer import Traced
from attnkit.util.arguments import check_scale, check_tensors

ATTENTION = (
    "(Tensor query, Tensor key, Tensor value, Tensor[] score_tensors, Tensor[] mask_tensors, "
    "Tensor[] lists, SymInt[] sizes, str request, float? scale) "
    "-> (Tensor out, Tensor lse, Tensor max_scores)"
)
ATTENTION_BACKWARD = (
    "(Tensor grad_out, Tensor grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor lse, Tensor[] score_tensors, Tensor[] mask_tensors, Tensor[] lists, SymInt[] sizes, "
    "str request, float? scale, bool[] wanted) "
    "-> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor[] dcaptured)"
)

# What the tensors' strides are may decide which kernel can read them. A CUDA graph that torch.compile
# records by itself would replay the tiles of tables as they were.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)
torch.library.define("attnkit::attention", ATTENTION, tags=_TAGS)
torch.library.define("attnkit::attention_backward", ATTENTION_BACKWARD, tags=_TAGS)


@dataclass(frozen=True)
class Request:
    """What is known of a call before its tensors are.

    Attributes:
        score, mask: text of the graphs, "" where there is none.
        score_names, mask_names: of their captured tensors.
        kind: "plain", "block" (a `BlockMask`) or "flex" (PyTorch's): what `sizes` and `lists` are.
        block: tile sizes that the caller gave, empty where none.
        backend, enable_gqa, deterministic: as of `flex_attention`.
        need_max: the row maxima are wanted.
    """

    score: str = ""
    mask: str = ""
    score_names: tuple[str, ...] = ()
    mask_names: tuple[str, ...] = ()
    kind: str = "plain"
    block: tuple[int, ...] = ()
    backend: str = "auto"
    enable_gqa: bool = False
    deterministic: bool = False
    need_max: bool = False

    @functools.cached_property
    def text(self) -> str:
        """The request as an operator carries it; `parse` reads it back."""
        return json.dumps(asdict(self))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Request:
        """Read a `text` back."""
        found: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.items()
        }
        return Request(**values)

    def traces(
        self, scores: Sequence[Tensor], masks: Sequence[Tensor]
    ) -> tuple[Traced | None, Traced | None]:
        """The graphs with captured tensors."""
        score = mask = None
        if self.score:
            score = Traced("score", ir.parse(self.score), tuple(scores), self.score_names)
        if self.mask:
            mask = Traced("mask", ir.parse(self.mask), tuple(masks), self.mask_names)
        return score, mask


def _unused(*_: Any) -> Any:
    raise AssertionError("the graph of this function is known")


class _KnownBlockMask(BlockMask):
    """A block mask whose graph is known."""

    def __init__(self, mask: Traced, sizes: Sequence[int], device: torch.device) -> None:
        batch, heads, q_len, kv_len, *block = sizes
        super().__init__(
            _unused,
            batch=batch,
            heads=heads,
            q_len=q_len,
            kv_len=kv_len,
            block=(block[0], block[1]),
            device=device,
        )
        self._known = mask

    def traced(self) -> Traced:
        return self._known


class _Known(Variant):
    """A variant whose graphs are known."""

    def __init__(self, score: Traced | None, mask: Traced | None, given: Any) -> None:
        super().__init__(None if score is None else _unused, given)
        object.__setattr__(self, "_traces", (score, mask))

    def trace(self, device: torch.device) -> tuple[Traced | None, Traced | None]:
        found: tuple[Traced | None, Traced | None] = self._traces  # type: ignore[attr-defined]
        return found


def _variant(
    request: Request,
    scores: Sequence[Tensor],
    masks: Sequence[Tensor],
    lists: Sequence[Tensor],
    sizes: Sequence[int],
    device: torch.device,
) -> Variant:
    """The variant of a call."""
    score, mask = request.traces(scores, masks)
    given: Any = None if mask is None else _unused
    if request.kind == "block" and mask is not None:
        given = _KnownBlockMask(mask, sizes, device)
    elif request.kind == "flex":
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        partial, full = lists[:2], lists[2:] or (None, None)
        given = FlexBlockMask(
            (sizes[2], sizes[3]),
            partial[0],
            partial[1],
            full[0],
            full[1],
            *(None, None, None, None),  # the transposed lists, which are not read
            BLOCK_SIZE=(sizes[0], sizes[1]),
            mask_mod=_unused,
        )
    return _Known(score, mask, given)


def _settled(
    request: Request,
    qkv: tuple[Tensor, Tensor, Tensor],
    captured: tuple[Sequence[Tensor], Sequence[Tensor]],
    lists: Sequence[Tensor],
    sizes: Sequence[int],
    scale: float,
) -> Settled:
    """What a call comes to, known from an earlier one like it or settled now."""
    query, key, value = qkv
    scores, masks = (tuple(tensors) for tensors in captured)
    ordered = request.deterministic or torch.are_deterministic_algorithms_enabled()
    data = (*masks, *lists, *(scores if _counts(request.score, float64_slots(scores)) else ()))
    at = (
        *("deferred", request, tuple(sizes), ordered, scale > 0),
        *((t.shape, t.stride(), t.dtype, t.device) for t in (*qkv, *scores, *masks)),
        *map(id, data),
    )
    like = Likeness(at, None, None, scores, masks, data)
    found = like.settled()
    if found is not None:
        return found
    check_tensors(*qkv, request.enable_gqa)
    variant = _variant(request, scores, masks, lists, sizes, query.device)
    block = (request.block[0], request.block[1]) if request.block else BLOCK
    plan, bound = planned(variant, query, key, value, request.backend, block, ())
    if plan.template == "eager":
        raise UnsupportedError(
            'backend="eager" is no operator that torch.compile can hold; call it outside of the '
            'compiled function, or take backend="cpu"'
        )
    fresh = settled(plan, bound, ordered=ordered, need_max=request.need_max)
    like.keep(fresh)
    return fresh


@functools.lru_cache(maxsize=1024)
def _counts(score: str, slots: frozenset[int]) -> bool:
    return bool(score) and depends_on_data(ir.parse(score), slots)


@torch.library.impl("attnkit::attention", "CompositeExplicitAutograd")
@torch.no_grad()
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_tensors: Sequence[Tensor],
    mask_tensors: Sequence[Tensor],
    lists: Sequence[Tensor],
    sizes: Sequence[int],
    request: str,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    factor = check_scale(scale, query.shape[-1])
    captured = score_tensors, mask_tensors
    made = _settled(Request.parse(request), (query, key, value), captured, lists, sizes, factor)
    scores, masks = _as_settled(made, score_tensors, mask_tensors)
    out, lse, top = torch_ops.run(made, query, key, value, scores, masks, factor)
    return out, lse, lse.new_empty(0) if top is None else top


def _as_settled(
    made: Settled, scores: Sequence[Tensor], masks: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The captured tensors, none where a graph came to nothing."""
    program = made.program
    return scores if program.score is not None else (), masks if program.mask is not None else ()


@torch.library.impl("attnkit::attention_backward", "CompositeExplicitAutograd")
@torch.no_grad()
def _attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    score_tensors: Sequence[Tensor],
    mask_tensors: Sequence[Tensor],
    lists: Sequence[Tensor],
    sizes: Sequence[int],
    request: str,
    scale: float | None,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    factor = check_scale(scale, query.shape[-1])
    captured = score_tensors, mask_tensors
    made = _settled(Request.parse(request), (query, key, value), captured, lists, sizes, factor)
    scores, masks = _as_settled(made, score_tensors, mask_tensors)
    inputs = BackwardInputs(
        query=query,
        key=key,
        value=value,
        out=out,
        lse=lse,
        grad_out=grad_out,
        grad_lse=grad_lse if grad_lse.numel() else None,
        captured=Captured(scores, masks),
        needs_grad=wanted[: len(scores)],
        scale=factor,
    )
    call = KernelCall(made.template, made.program, made.runs, made.need_max)
    dquery, dkey, dvalue, own = torch_ops.gradients(call, inputs)
    if len(own) < len(wanted):  # the score does not read them after all
        pairs = zip(score_tensors, wanted, strict=True)
        own = [torch.zeros_like(t) if need else query.new_empty(0) for t, need in pairs]
    return dquery, dkey, dvalue, own


@torch.library.register_fake("attnkit::attention")  # type: ignore[untyped-decorator]
def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=compute_dtype(query))
    top = torch.empty_like(lse) if Request.parse(rest[-2]).need_max else lse.new_empty(0)
    return output_like(query, value.shape[-1]), lse, top


@torch.library.register_fake("attnkit::attention_backward")  # type: ignore[untyped-decorator]
def _attention_backward_fake(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    pairs = zip(rest[2], rest[-1], strict=True)
    captured = [torch.empty_like(t) if need else query.new_empty(0) for t, need in pairs]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), captured


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, scores, masks, lists, *ctx.rest = inputs
    out, lse, top = output
    ctx.mark_non_differentiable(top)
    ctx.save_for_backward(query, key, value, out, lse, *scores, *masks, *lists)
    ctx.counts = len(scores), len(masks)
    ctx.wanted = [t.requires_grad for t in scores]
    ctx.set_materialize_grads(False)


def _gradient(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    query, key, value, out, lse, *tensors = ctx.saved_tensors
    scores, masks = ctx.counts
    lists = tensors[:scores], tensors[scores : scores + masks], tensors[scores + masks :]
    dquery, dkey, dvalue, captured = torch.ops.attnkit.attention_backward(
        torch.zeros_like(out) if grad_out is None else grad_out,
        lse.new_empty(0) if grad_lse is None else grad_lse,
        *(query, key, value, out, lse, *lists, *ctx.rest, ctx.wanted),
    )
    own = [g if need else None for g, need in zip(captured, ctx.wanted, strict=True)]
    none: list[Any] = [[None] * len(tensors) for tensors in lists[1:]]
    # torch wants an empty list for an empty list, of numbers too
    sizes: list[None] | None = None if ctx.rest[0] else []
    return dquery, dkey, dvalue, own, *none, sizes, None, None


torch.library.register_autograd("attnkit::attention", _gradient, setup_context=_save)
torch.library.register_autograd("attnkit::attention_backward", torch_ops.no_second)


def requested(
    score: Traced | None,
    mask: Traced | None,
    kind: str,
    block: tuple[int, ...],
    backend: str,
    enable_gqa: bool,
    deterministic: bool,
    need_max: bool,
) -> Request:
    """The request of a call; as `Request`."""
    return Request(
        "" if score is None else ir.text(score.root),
        "" if mask is None else ir.text(mask.root),
        () if score is None else score.names,
        () if mask is None else mask.names,
        kind,
        tuple(block),
        backend,
        enable_gqa,
        deterministic,
        need_max,
    )

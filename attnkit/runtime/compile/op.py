"""Define `torch.ops.attnkit.attention`, the operator of a call inside torch.compile.

At compile time, tensors have no data and lengths may be symbolic, so tiles cannot be classified and
indices cannot be checked. The operator takes the graphs as text. When it runs, it prepares the call
or looks it up in the call cache. One compiled program serves all sequence lengths.
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
from attnkit.runtime.bind import TracedVariant
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.data_guard import raise_if_stale
from attnkit.runtime.prepare import prepare
from attnkit.runtime.prepared_call import PreparedCall
from attnkit.runtime.reuse.call_cache import CallKey, lookup, store
from attnkit.schedule.plan import parse_backend
from attnkit.sparsity.block_mask import BlockMask
from attnkit.splice import BackwardInputs, Captured, ForwardInputs
from attnkit.tracing.float64_checks import float64_slots
from attnkit.tracing.guards import data_slots
from attnkit.tracing.tracer import Traced
from attnkit.util.arguments import BLOCK_OPTIONS, AuxRequest, check_scale
from attnkit.util.data_state import setting

ATTENTION = (
    "(Tensor query, Tensor key, Tensor value, Tensor[] score_tensors, Tensor[] mask_tensors, "
    "Tensor[] lists, SymInt[] sizes, str request, float? scale) "
    "-> (Tensor out, Tensor lse, Tensor max_scores, Tensor digest)"
)
ATTENTION_BACKWARD = (
    "(Tensor grad_out, Tensor grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor lse, Tensor digest, Tensor[] score_tensors, Tensor[] mask_tensors, Tensor[] lists, "
    "SymInt[] sizes, "
    "str request, float? scale, bool[] needs_grad) "
    "-> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor[] dcaptured)"
)

# needs_exact_strides: the strides of a tensor decide whether TMA can read it. cudagraph_unsafe: a
# CUDA graph captured by torch.compile would replay with tiles that may be out of date.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)
torch.library.define("attnkit::attention", ATTENTION, tags=_TAGS)
torch.library.define("attnkit::attention_backward", ATTENTION_BACKWARD, tags=_TAGS)


@dataclass(frozen=True)
class Request:
    """Holds the properties of a call that are known at compile time.

    Attributes:
        score, mask: text of the graphs; "" without the function.
        score_names, mask_names: names of the captured tensors.
        kind: type of the mask, which determines the operator arguments `sizes` and `lists`: "plain"
            (a function), "block" (a `BlockMask`) or "flex" (PyTorch's BlockMask).
        block: tile sizes that the caller passed; () if none.
        backend, enable_gqa, deterministic: as in `flex_attention`.
        need_max: whether to return the row maxima.
        sink: whether the last of the score's tensors is an attention sink.
        signature: version of the operators' arguments and results. Torch stores compiled graphs on
            disk under a key that contains the text of the request, so a graph of another version is
            never used.
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
    sink: bool = False
    signature: int = 3

    @property
    def kernel_options(self) -> dict[str, int] | None:
        """Return `block` as `kernel_options` of `flex_attention`; None if it is empty."""
        return dict(zip(BLOCK_OPTIONS, self.block, strict=True)) if self.block else None

    @functools.cached_property
    def text(self) -> str:
        """Return the request as JSON text for the operator; `parse` is the inverse."""
        return json.dumps(asdict(self))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Request:
        """Build a request from its `text`."""
        fields: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return Request(**values)

    def variant(
        self, tensors: OperatorTensors, sizes: Sequence[int], device: torch.device
    ) -> TracedVariant:
        """Build the `TracedVariant` from the graphs, the captured tensors and the block lists.

        Args:
            tensors: tensor arguments of the operator.
            sizes: sizes of the mask, whose meaning depends on `kind`.
            device: device of the query.
        """
        score = mask = None
        if self.score:
            captured = tuple(tensors.captured.scores)[: len(self.score_names)]
            score = Traced("score", ir.parse(self.score), captured, self.score_names)
        if self.mask:
            captured = tuple(tensors.captured.masks)
            mask = Traced("mask", ir.parse(self.mask), captured, self.mask_names)
        block_mask: Any = None if mask is None else _graph_is_known
        if self.kind == "block" and mask is not None:
            batch, heads, q_len, kv_len, *block = sizes
            block_mask = BlockMask(
                _graph_is_known,
                batch=batch,
                heads=heads,
                q_len=q_len,
                kv_len=kv_len,
                block=(block[0], block[1]),
                device=device,
            )
        elif self.kind == "flex":
            block_mask = _flex_block_mask(tensors.lists, sizes)
        return TracedVariant(score, mask, block_mask)


def _graph_is_known(*_: Any) -> Any:
    raise AssertionError("the graph of this function is known, so it is never traced")


def _flex_block_mask(lists: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    """Build PyTorch's BlockMask from block lists; `sizes` is (*BLOCK_SIZE, *seq_lengths)."""
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    partial, full = lists[:2], lists[2:] or (None, None)
    return FlexBlockMask(
        (sizes[2], sizes[3]),
        partial[0],
        partial[1],
        full[0],
        full[1],
        None,  # the transposed lists, which are not read
        None,
        None,
        None,
        BLOCK_SIZE=(sizes[0], sizes[1]),
        mask_mod=_graph_is_known,
    )


@dataclass(frozen=True, eq=False)
class OperatorTensors:
    """Holds the tensor arguments of the operators.

    Attributes:
        query, key, value: as in `flex_attention`.
        captured: tensors that the graphs capture.
        lists: block lists of PyTorch's BlockMask; empty for another mask.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    captured: Captured
    lists: Sequence[Tensor]


def _prepared(
    request: Request, tensors: OperatorTensors, sizes: Sequence[int], scale: float
) -> tuple[PreparedCall, ForwardInputs]:
    """Look up or prepare the call of an operator; return it and the inputs to run it with."""
    raise_if_stale()
    query, key, value = tensors.query, tensors.key, tensors.value
    scores, masks = (tuple(part) for part in tensors.captured)
    own = scores[:-1] if request.sink else scores  # what the score graph reads
    call = AttentionCall(
        query,
        key,
        value,
        scale=scale,
        enable_gqa=request.enable_gqa,
        kernel_options=request.kernel_options,
        return_aux=AuxRequest(max_scores=request.need_max),
        backend=request.backend,
        deterministic=request.deterministic,
        sink=scores[-1] if request.sink else None,
    )
    slots = _data_slots(request.score, float64_slots(own))
    data = (*[own[i] for i in slots], *tensors.lists, *masks)
    key_parts = (
        "operator",
        request,
        tuple(sizes),
        call.is_deterministic,
        scale > 0,
        *[(t.shape, t.stride(), t.dtype, t.device) for t in (query, key, value, *scores, *masks)],
        *map(id, data),
        setting.trusts,
    )
    call_key = CallKey(key_parts, None, None, Captured(scores, masks), data)
    prepared = lookup(call_key)
    if prepared is None:
        if parse_backend(request.backend)[0] == "eager":
            raise UnsupportedError(
                'backend="eager" is no operator that torch.compile can hold; call it outside of the '
                'compiled function, or take backend="cpu"'
            )
        variant = request.variant(tensors, sizes, query.device)
        prepared = prepare(call, variant, launchable=False).call
        store(call_key, prepared)
    program = prepared.kernel_call.program  # None for a graph that simplified to nothing
    captured = Captured(
        own if program.score is not None else (), masks if program.mask is not None else ()
    )
    return prepared, call.inputs(captured)


@functools.lru_cache(maxsize=1024)
def _data_slots(score: str, slots: frozenset[int]) -> tuple[int, ...]:
    return data_slots(ir.parse(score), slots) if score else ()


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    captured = Captured(score_tensors, mask_tensors)
    tensors = OperatorTensors(query, key, value, captured, lists)
    factor = check_scale(scale, query.shape[-1])
    prepared, inputs = _prepared(Request.parse(request), tensors, sizes, factor)
    out, lse, top = torch_ops.run(prepared, inputs)
    digest = torch.tensor([prepared.guard.digest()], dtype=torch.int64, device="cpu")
    return out, lse, lse.new_empty(0) if top is None else top, digest


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
    digest: Tensor,
    score_tensors: Sequence[Tensor],
    mask_tensors: Sequence[Tensor],
    lists: Sequence[Tensor],
    sizes: Sequence[int],
    request: str,
    scale: float | None,
    needs_grad: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    captured = Captured(score_tensors, mask_tensors)
    tensors = OperatorTensors(query, key, value, captured, lists)
    factor = check_scale(scale, query.shape[-1])
    prepared, forward = _prepared(Request.parse(request), tensors, sizes, factor)
    prepared.guard.check_digest(int(digest))
    if prepared.kernel_call.check is None:
        prepared.guard.check()
    grads = grad_out, grad_lse if grad_lse.numel() else None
    # tensors of a score graph that simplified to nothing; a sink follows them
    unread = len(needs_grad) - len(forward.captured.scores)
    inputs = BackwardInputs.of(forward, (out, lse), grads, needs_grad[unread:])
    dquery, dkey, dvalue, dcaptured = torch_ops.gradients(prepared.kernel_call, inputs)
    pairs = zip(score_tensors[:unread], needs_grad[:unread], strict=True)
    zeros = [torch.zeros_like(t) if need else query.new_empty(0) for t, need in pairs]
    return dquery, dkey, dvalue, zeros + dcaptured


@torch.library.register_fake("attnkit::attention")  # type: ignore[untyped-decorator]
def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    digest = torch.empty(1, dtype=torch.int64, device="cpu")
    return *torch_ops.fake_outputs(query, value, Request.parse(rest[-2]).need_max), digest


@torch.library.register_fake("attnkit::attention_backward")  # type: ignore[untyped-decorator]
def _attention_backward_fake(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    out, lse, _, *others = rest  # without the digest, which only this backward has
    gradients: tuple[Tensor, Tensor, Tensor, list[Tensor]] = torch_ops.fake_gradients(
        grad_out, grad_lse, query, key, value, out, lse, *others
    )
    return gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, scores, masks, lists, sizes, request, scale = inputs
    out, lse, top, digest = output
    ctx.mark_non_differentiable(top, digest)
    ctx.save_for_backward(query, key, value, out, lse, digest, *scores, *masks, *lists)
    ctx.options = list(sizes), request, scale
    ctx.counts = len(scores), len(masks)
    ctx.needs_grad = [t.requires_grad for t in scores]
    ctx.set_materialize_grads(False)


def _gradient(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Tensor | None
) -> tuple[Any, ...]:
    every = ctx.saved_tensors  # selective checkpointing lets them be read once
    (*saved, digest), tensors = every[:6], every[6:]
    scores, masks = ctx.counts
    lists = tensors[:scores], tensors[scores : scores + masks], tensors[scores + masks :]
    sizes, request, scale = ctx.options
    dquery, dkey, dvalue, captured = torch.ops.attnkit.attention_backward(
        *torch_ops.operator_tensors(grad_out, grad_lse, saved),
        digest,
        *lists,
        sizes,
        request,
        scale,
        ctx.needs_grad,
    )
    dcaptured = [g if need else None for g, need in zip(captured, ctx.needs_grad, strict=True)]
    none: list[Any] = [[None] * len(tensors) for tensors in lists[1:]]
    # torch expects an empty list as the gradient of an empty list, even of a list of numbers
    dsizes: list[None] | None = None if sizes else []
    return dquery, dkey, dvalue, dcaptured, *none, dsizes, None, None


torch.library.register_autograd("attnkit::attention", _gradient, setup_context=_save)
torch.library.register_autograd("attnkit::attention_backward", torch_ops.refuse_second_derivative)


def request_of(
    score: Traced | None,
    mask: Traced | None,
    kind: str,
    block: tuple[int, ...],
    backend: str,
    enable_gqa: bool,
    deterministic: bool,
    need_max: bool,
    sink: bool,
) -> Request:
    """Build the `Request` of a call from its traces; see `Request` for the other arguments."""
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
        sink,
    )

"""The operators `torch.ops.attnkit.forward` and `.backward`, with autograd outside of them.

Graphs cross as canonical text, block runs as a list of index tensors with their sizes, captured
tensors as tensor lists: the operators hold no state and their schema does not depend on the
variant. Where nothing in torch would see a call of an operator (no mode, transform or subclass),
what it does is done directly: that takes a tenth of the time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit.errors import UnsupportedError
from attnkit.runtime.reuse.backward_fast_path import Backwards
from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.splice import (
    Attention,
    BackwardInputs,
    Captured,
    ForwardInputs,
    KernelCall,
    Program,
    backward_replay,
    compute_dtype,
    output_like,
    prepare_forward,
    run_backward,
    run_forward,
)
from attnkit.util.torch_state import refuse_transforms, undisturbed

FORWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor[] score_tensors, Tensor[] mask_tensors, "
    "Tensor[] runs, int[] layout, str program, str template, float scale, bool need_max) "
    "-> (Tensor out, Tensor lse, Tensor max_scores)"
)
BACKWARD = (
    "(Tensor grad_out, Tensor grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor lse, Tensor[] score_tensors, Tensor[] mask_tensors, Tensor[] runs, int[] layout, "
    "str program, str template, float scale, bool[] wanted) "
    "-> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor[] dcaptured)"
)

torch.library.define("attnkit::forward", FORWARD)
torch.library.define("attnkit::backward", BACKWARD)

# runs that were taken apart, by their first tensor: what is cached per BlockRuns is found again
_whole: weakref.WeakValueDictionary[int, BlockRuns] = weakref.WeakValueDictionary()


def unpack(runs: BlockRuns | None) -> tuple[list[Tensor], list[int]]:
    """Take block runs apart into what an operator can carry."""
    if runs is None:
        return [], []
    tensors = [
        t
        for part in (runs.full, runs.partial, runs.full_t, runs.partial_t)
        for t in (part.row_ptr, part.start, part.length)
    ]
    _whole[id(tensors[0])] = runs
    return tensors, [runs.q_len, runs.kv_len, *runs.block, runs.batch, runs.heads]


def pack(tensors: Sequence[Tensor], layout: Sequence[int]) -> BlockRuns | None:
    """Put block runs together again; the same object where it still lives."""
    if not tensors:
        return None
    known = _whole.get(id(tensors[0]))
    if known is not None and known.full.row_ptr is tensors[0]:
        return known
    parts = [Runs(*tensors[i : i + 3]) for i in range(0, 12, 3)]
    q_len, kv_len, block_q, block_kv, batch, heads = layout
    return BlockRuns(q_len, kv_len, (block_q, block_kv), batch, heads, *parts)


@torch.library.impl("attnkit::forward", "CompositeExplicitAutograd")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_tensors: Sequence[Tensor],
    mask_tensors: Sequence[Tensor],
    runs: Sequence[Tensor],
    layout: Sequence[int],
    program: str,
    template: str,
    scale: float,
    need_max: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, top = run_forward(
        KernelCall(template, Program.parse(program), pack(runs, layout), need_max),
        ForwardInputs(query, key, value, Captured(score_tensors, mask_tensors), scale),
    )
    return out, lse, lse.new_empty(0) if top is None else top


@torch.library.impl("attnkit::backward", "CompositeExplicitAutograd")
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    score_tensors: Sequence[Tensor],
    mask_tensors: Sequence[Tensor],
    runs: Sequence[Tensor],
    layout: Sequence[int],
    program: str,
    template: str,
    scale: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    return gradients(
        KernelCall(template, Program.parse(program), pack(runs, layout)),
        BackwardInputs(
            query=query,
            key=key,
            value=value,
            out=out,
            lse=lse,
            grad_out=grad_out,
            grad_lse=grad_lse if grad_lse.numel() else None,
            captured=Captured(score_tensors, mask_tensors),
            needs_grad=wanted,
            scale=scale,
        ),
    )


def gradients(
    call: KernelCall, inputs: BackwardInputs
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of query, key, value and the score's tensors, empty where not needed."""
    gradients, captured = run_backward(call, inputs)
    shaped = [
        inputs.query.new_empty(0) if g is None else g.to(t.dtype)
        for g, t in zip(captured, inputs.captured.scores, strict=True)
    ]
    return *gradients, shaped


@torch.library.register_fake("attnkit::forward")  # type: ignore[untyped-decorator]
def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    need_max = rest[-1]
    lse = query.new_empty(query.shape[:3], dtype=compute_dtype(query))
    return (
        output_like(query, value.shape[-1]),
        lse,
        torch.empty_like(lse) if need_max else lse.new_empty(0),
    )


@torch.library.register_fake("attnkit::backward")  # type: ignore[untyped-decorator]
def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    score_tensors, wanted = rest[2], rest[-1]
    captured = [
        torch.empty_like(t) if need else query.new_empty(0)
        for t, need in zip(score_tensors, wanted, strict=True)
    ]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), captured


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, score_tensors, mask_tensors, runs, layout, program, template, scale, _ = (
        inputs
    )
    out, lse, top = output
    ctx.mark_non_differentiable(top)
    ctx.save_for_backward(query, key, value, out, lse, *score_tensors, *mask_tensors, *runs)
    ctx.counts = len(score_tensors), len(mask_tensors)
    ctx.rest = list(layout), program, template, scale
    ctx.wanted = [t.requires_grad for t in score_tensors]
    ctx.set_materialize_grads(False)


def _gradient(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    query, key, value, out, lse, *lists = ctx.saved_tensors
    scores, masks = ctx.counts
    score_tensors, mask_tensors = lists[:scores], lists[scores : scores + masks]
    layout, program, template, scale = ctx.rest
    dquery, dkey, dvalue, captured = torch.ops.attnkit.backward(
        torch.zeros_like(out) if grad_out is None else grad_out,
        lse.new_empty(0) if grad_lse is None else grad_lse,
        *(query, key, value, out, lse),
        *(score_tensors, mask_tensors, lists[scores + masks :]),
        *(layout, program, template, scale, ctx.wanted),
    )
    own = [g if need else None for g, need in zip(captured, ctx.wanted, strict=True)]
    none = [None] * masks, [None] * (len(lists) - scores - masks)
    # torch wants a list of as many gradients for a list of tensors, and an empty list for any
    sizes: list[None] | None = None if layout else []
    return dquery, dkey, dvalue, own, *none, sizes, None, None, None, None


torch.library.register_autograd("attnkit::forward", _gradient, setup_context=_save)


def no_second(ctx: Any, *_: Any) -> None:
    """The backward of a backward.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "attnkit's attention has no second derivative; call backward without create_graph=True, "
        'or use backend="eager" (dense, differentiable any number of times)'
    )


torch.library.register_autograd("attnkit::backward", no_second)


# Out, LSE and the row maxima or None.
Made: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
# An `Attention` that may give None, and then has done nothing.
Attempt: TypeAlias = Callable[[Tensor, Tensor, Tensor, Captured, float], Made | None]


@dataclass(eq=False)
class Settled:
    """All that is decided of a call before it is made.

    Attributes:
        template, program, runs: what computes which tiles.
        need_max: whether the row maxima are wanted.
        attention: the template's forward, once it was prepared for tensors like those of the call.
        backwards: quicker ways of its backward.
    """

    template: str
    program: Program
    runs: BlockRuns | None
    need_max: bool
    attention: Attention | None = None
    backwards: Backwards = field(default_factory=Backwards)


_NO_GRADIENT = (None,) * 5  # of what stands before the query


class _Recorded(torch.autograd.Function):
    """What autograd does with the operators, without them."""

    @staticmethod
    def forward(
        ctx: Any,
        settled: Settled,
        again: Attempt | None,
        scale: float,
        masks: Sequence[Tensor],
        whole: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *scores: Tensor,
    ) -> Tensor | Made:
        captured = Captured(scores, masks)
        made = None if again is None else again(query, key, value, captured, scale)
        if made is None:
            assert settled.attention is not None
            made = settled.attention(query, key, value, captured, scale)
        out, lse, top = made
        ctx.save_for_backward(query, key, value, out, lse, *scores, *masks)
        if top is not None:
            ctx.mark_non_differentiable(top)
        ctx.call = settled, scale, [t.requires_grad for t in scores]
        ctx.set_materialize_grads(False)
        return made if whole else out

    @staticmethod
    def backward(
        ctx: Any,
        grad_out: Tensor | None,
        grad_lse: Tensor | None = None,
        _: Tensor | None = None,
    ) -> tuple[Any, ...]:
        kept = ctx.saved_tensors
        settled, scale, wanted = ctx.call
        if grad_out is not None:
            made = settled.backwards.made(grad_out, grad_lse, kept, scale, wanted)
            if made is not None:
                return *_NO_GRADIENT, *made
        query, key, value, out, lse, *captured = kept
        scores, masks = captured[: len(wanted)], captured[len(wanted) :]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        saved = query, key, value, out, lse
        given = [grad_out, *saved, *captured, *([] if grad_lse is None else [grad_lse])]
        if torch.is_grad_enabled() or not undisturbed(given):
            runs, layout = unpack(settled.runs)
            dquery, dkey, dvalue, own = torch.ops.attnkit.backward(
                *(grad_out, lse.new_empty(0) if grad_lse is None else grad_lse, *saved),
                *(scores, [_detached(t) for t in masks], runs, layout, settled.program.text),
                *(settled.template, scale, wanted),
            )
        else:
            call = KernelCall(settled.template, settled.program, settled.runs, settled.need_max)
            inputs = BackwardInputs(
                query=query,
                key=key,
                value=value,
                out=out,
                lse=lse,
                grad_out=grad_out,
                grad_lse=grad_lse,
                captured=Captured(scores, masks),
                needs_grad=wanted,
                scale=scale,
            )
            dquery, dkey, dvalue, own = gradients(call, inputs)
            settled.backwards.learn(
                *(grad_out, grad_lse, kept, scale, wanted), lambda: backward_replay(call, inputs)
            )
        gradients_of_scores = [g if need else None for g, need in zip(own, wanted, strict=True)]
        return *_NO_GRADIENT, dquery, dkey, dvalue, *gradients_of_scores


def run(
    settled: Settled,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Sequence[Tensor],
    masks: Sequence[Tensor],
    scale: float,
) -> Made:
    """Make a call; differentiable in query, key, value, LSE and the score's tensors.

    Args:
        settled: the call.
        query, key, value: as those that it was settled for.
        scores, masks: captured tensors.
        scale: factor on q k^T.

    Raises:
        UnsupportedError: a forward-mode derivative, or a transform of torch.func, is wanted.
    """
    if not undisturbed((query, key, value, *scores, *masks)):
        refuse_transforms((query, key, value, *scores))
        runs, layout = unpack(settled.runs)
        out, lse, top = torch.ops.attnkit.forward(
            *(query, key, value, list(scores), [_detached(t) for t in masks]),
            *(runs, layout, settled.program.text, settled.template, scale, settled.need_max),
        )
        return out, lse, top
    attention = settled.attention
    if attention is None:
        with torch.no_grad():
            call = KernelCall(settled.template, settled.program, settled.runs, settled.need_max)
            inputs = ForwardInputs(query, key, value, Captured(scores, masks), scale)
            attention = settled.attention = prepare_forward(call, inputs)
    if records((query, key, value, *scores)):
        found: Made = record(settled, None, scale, masks, True, query, key, value, *scores)
        return found
    return attention(query, key, value, Captured(scores, masks), scale)


def records(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any([t.requires_grad for t in tensors])


# Makes a prepared, undisturbed call with autograd: (settled, again, scale, masks, whole, query, key,
# value, *scores) -> out, LSE and row maxima; `whole` or the output alone. `again` is a quicker way
# than the attention of `settled`, or None. `Function.apply` itself looks at each argument for what
# functorch left behind, in Python: here it is known already that there is nothing of the kind.
record: Callable[..., Any] = super(torch.autograd.Function, _Recorded).apply


def _detached(t: Tensor) -> Tensor:
    """The tensor without its gradient; itself if it has none, as caches go by identity."""
    return t.detach() if t.requires_grad else t

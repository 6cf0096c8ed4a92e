"""The operators `torch.ops.attnkit.forward` and `.backward`, with autograd outside of them.

Graphs cross as canonical text, block runs as a list of index tensors with their sizes, captured
tensors as tensor lists: the operators hold no state and their schema does not depend on the
variant.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit.errors import UnsupportedError
from attnkit.sparse import BlockRuns, Runs
from attnkit.splice import Program, compute_dtype, run_backward, run_forward

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
        template,
        Program.parse(program),
        (query, key, value),
        (score_tensors, mask_tensors),
        pack(runs, layout),
        scale,
        need_max,
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
    gradients, captured = run_backward(
        template,
        Program.parse(program),
        (grad_out, grad_lse if grad_lse.numel() else None),
        (query, key, value, out, lse),
        (score_tensors, mask_tensors),
        pack(runs, layout),
        scale,
        wanted,
    )
    shaped = [
        query.new_empty(0) if g is None else g.to(t.dtype)
        for g, t in zip(captured, score_tensors, strict=True)
    ]
    return *gradients, shaped


def _out_like(query: Tensor, width: int) -> Tensor:
    """An empty output: [B, Hq, Sq, width] in the query's dtype and order of strides."""
    strides = query.stride()
    order = sorted(range(4), key=lambda axis: -strides[axis])
    shape = [*query.shape[:3], width]
    inverse = [order.index(axis) for axis in range(4)]
    return query.new_empty([shape[axis] for axis in order]).permute(inverse)


@torch.library.register_fake("attnkit::forward")  # type: ignore[untyped-decorator]
def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    need_max = rest[-1]
    lse = query.new_empty(query.shape[:3], dtype=compute_dtype(query))
    return (
        _out_like(query, value.shape[-1]),
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


def _no_second(ctx: Any, *_: Any) -> None:
    raise UnsupportedError(
        "attnkit's attention has no second derivative; call backward without create_graph=True, "
        'or use backend="eager" (dense, differentiable any number of times)'
    )


torch.library.register_autograd("attnkit::backward", _no_second)


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_tensors: Sequence[Tensor],
    mask_tensors: Sequence[Tensor],
    runs: BlockRuns | None,
    program: Program,
    template: str,
    scale: float,
    need_max: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a program with a template; differentiable in query, key, value, LSE and score tensors."""
    tensors, layout = unpack(runs)
    out, lse, top = torch.ops.attnkit.forward(
        *(query, key, value, list(score_tensors), [t.detach() for t in mask_tensors]),
        *(tensors, layout, program.text, template, scale, need_max),
    )
    return out, lse, top

"""Define `torch.ops.attnkit.column_sums`, the second pass of a call that returns column sums.

It has the arguments of `torch.ops.attnkit.attention`, and the LSE which that one returned. The LSE
is no differentiable input: what query and key change of it is part of their gradients here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnkit.runtime import torch_ops
from attnkit.runtime.compile.op import (
    TAGS,
    OperatorInputs,
    gradients_after_value,
    prepared_call,
    save,
    saved,
)
from attnkit.splice import compute_dtype
from attnkit.splice.column_sums import column_sums, column_sums_backward

_COMMON = (
    "Tensor query, Tensor key, Tensor value, Tensor[]? score_tensors, Tensor[]? mask_tensors, "
    "Tensor[]? lists, SymInt[]? sizes, SymInt[]? ints, Tensor[]? floats, str request, float? scale"
)
COLUMN_SUMS = f"({_COMMON}, Tensor lse) -> (Tensor sums, Tensor digest)"
COLUMN_SUMS_BACKWARD = (
    f"({_COMMON}, Tensor lse, Tensor grad, Tensor digest, bool[] needs_grad) "
    "-> (Tensor dquery, Tensor dkey, Tensor[] dcaptured)"
)
torch.library.define("attnkit::column_sums", COLUMN_SUMS, tags=TAGS)
torch.library.define("attnkit::column_sums_backward", COLUMN_SUMS_BACKWARD, tags=TAGS)


@torch.library.impl("attnkit::column_sums", "CompositeExplicitAutograd")
@torch.no_grad()
def _column_sums(*arguments: Any) -> tuple[Tensor, Tensor]:
    *others, lse = arguments
    own = OperatorInputs.of(*others)
    kernel_call = torch_ops.kernel_call_of(own.request, own.lists, own.sizes)
    if kernel_call is None:
        call = prepared_call(own)
        sums = column_sums(call.prepared.kernel_call, call.inputs, lse)
        data = call.prepared.guard.digest()
    else:
        sums, data = column_sums(kernel_call, own.forward, lse), 0
    return sums, torch.tensor([data], dtype=torch.int64, device="cpu")


@torch.library.impl("attnkit::column_sums_backward", "CompositeExplicitAutograd")
@torch.no_grad()
def _column_sums_backward(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    *others, lse, grad, digest, needs_grad = arguments
    own = OperatorInputs.of(*others)
    kernel_call = torch_ops.kernel_call_of(own.request, own.lists, own.sizes)
    if kernel_call is not None:
        dquery, dkey, found = column_sums_backward(kernel_call, own.forward, lse, grad, needs_grad)
        return dquery, dkey, torch_ops.with_fake_strides(found, own.scores)
    call = prepared_call(own)
    call.prepared.guard.check_digest(int(digest))
    call.prepared.guard.check()
    needed = [needs_grad[i] for i in call.read]
    dquery, dkey, found = column_sums_backward(
        call.prepared.kernel_call, call.inputs, lse, grad, needed
    )
    return dquery, dkey, call.spread(found, own.scores, needs_grad)


@torch.library.register_fake("attnkit::column_sums")  # type: ignore[untyped-decorator]
def _column_sums_fake(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = *query.shape[:2], key.shape[2]
    digest = torch.empty(1, dtype=torch.int64, device="cpu")
    return query.new_empty(shape, dtype=compute_dtype(query)), digest


@torch.library.register_fake("attnkit::column_sums_backward")  # type: ignore[untyped-decorator]
def _column_sums_backward_fake(*arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    own, needs_grad = OperatorInputs.of(*arguments[:-4]), arguments[-1]
    captured = [
        torch.empty_like(t) if need else own.query.new_empty(0)
        for t, need in zip(own.scores, needs_grad, strict=True)
    ]
    return torch.empty_like(own.query), torch.empty_like(own.key), captured


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *others, lse = inputs
    ctx.mark_non_differentiable(output[1])
    save(ctx, OperatorInputs.of(*others), lse, output[1])


def _gradient(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    own, (lse, digest) = saved(ctx)
    if grad is None:  # only the digest was used, which has no gradient
        grad = lse.new_zeros(()).expand(*own.query.shape[:2], own.key.shape[2])
    torch_ops.refuse_batched_gradients([grad])
    dquery, dkey, captured = torch.ops.attnkit.column_sums_backward(
        own.query, own.key, own.value, *own.after_value, lse, grad, digest, ctx.needs_grad
    )
    return dquery, dkey, None, *gradients_after_value(ctx, captured), None


torch.library.register_autograd("attnkit::column_sums", _gradient, setup_context=_save)
torch.library.register_autograd("attnkit::column_sums_backward", torch_ops.refuse_second_derivative)

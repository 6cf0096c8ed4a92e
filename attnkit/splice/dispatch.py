"""Dispatch a kernel call to GPU kernels or to the `cpu` template.

A call launches GPU kernels if its template has kernels for it. Otherwise it runs the torch
operators of the `cpu` template, which work on any device. `import attnkit` imports the modules of a
GPU forward, so that the first call does not wait for them. All other modules are imported at their
first use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from attnkit.splice import forward
from attnkit.splice.kernel_call import BackwardInputs, Captured, ForwardInputs, KernelCall
from attnkit.splice.program import compute_dtype
from attnkit.util.torch_private import in_autocast

if TYPE_CHECKING:
    from attnkit.splice.replay import Replay

Attention: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Captured, float], tuple[Tensor, Tensor, Tensor | None]
]  # query, key, value, captured tensors, scale -> out, LSE, row maxima


def run_forward(call: KernelCall, inputs: ForwardInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the forward of `call`; return out, LSE, and row maxima (None unless `call.need_max`)."""
    attention = prepare_forward(call, inputs)
    return attention(inputs.query, inputs.key, inputs.value, inputs.captured, inputs.scale)


def prepare_forward(call: KernelCall, inputs: ForwardInputs) -> Attention:
    """Return a function that runs the forward of `call` on tensors like `inputs`.

    The function accepts other tensors of the same shapes, strides, dtypes and devices, and a scale
    of the same sign. The tensors that the mask captures must be the same objects with the same
    data, because the block runs depend on that data.
    """
    if call.spec.target is not None:
        return forward.prepare(call, inputs)
    from attnkit.splice.cpu import CpuHooks
    from attnkit.templates import cpu

    def attention(
        query: Tensor, key: Tensor, value: Tensor, captured: Captured, scale: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.no_grad(), _without_autocast(query):
            hooks = CpuHooks(call.program, *captured, compute_dtype(query), query.device)
            return cpu.forward(query, key, value, call.runs, hooks, scale, need_max=call.need_max)

    return attention


def run_backward(
    call: KernelCall, inputs: BackwardInputs
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:
    """Run the backward of `call`; return the gradients of q, k, v and of captured tensors.

    A deterministic template returns the same bits at every run.

    Returns:
        The gradients of query, key and value; and the gradients of the score graph's captured
        tensors by slot, in the compute dtype, None where none is needed.
    """
    if call.spec.target is not None:
        from attnkit.splice import backward

        if backward.supports(call, inputs):
            return backward.prepare(call, inputs)(inputs)
    from attnkit.splice.cpu import CpuHooks
    from attnkit.templates import cpu

    query = inputs.query
    with _without_autocast(query):
        hooks = CpuHooks(
            call.program, *inputs.captured, compute_dtype(query), query.device, inputs.needs_grad
        )
        gradients = cpu.backward(
            inputs.grad_out,
            inputs.grad_lse,
            query,
            inputs.key,
            inputs.value,
            inputs.out,
            inputs.lse,
            call.runs,
            hooks,
            inputs.scale,
        )
        return gradients, hooks.gradients


def backward_replay(call: KernelCall, inputs: BackwardInputs) -> Replay | None:
    """Return a `Replay` that relaunches the kernels of this backward; None if that is impossible.

    Returns:
        A callable. It takes a list of query, key, value, output, gradient of the output, LSE,
        captured tensors, and the gradient of the LSE if there is one. It returns the gradients of
        query, key and value, and the float32 gradients that the score's captured tensors need.
    """
    if call.spec.target is None or call.spec.deterministic:
        return None  # deterministic kernels need new semaphores at each launch
    from attnkit.splice import backward

    if not backward.supports(call, inputs):
        return None
    prepared = backward.prepare(call, inputs)
    return prepared.replay if prepared.scale == inputs.scale else None


def _without_autocast(query: Tensor) -> AbstractContextManager[Any]:
    """Return a context that disables autocast, which would round the operands of matmuls."""
    if in_autocast():
        return torch.autocast(query.device.type, enabled=False)
    return nullcontext()

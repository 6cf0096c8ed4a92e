"""Dispatch a kernel call to GPU kernels or to the `cpu` template.

A call launches GPU kernels if its template has kernels for it. Otherwise it runs the torch
operators of the `cpu` template, which work on any device. `import attnkit` imports the modules of a
GPU forward, so that the first call does not wait for them. All other modules are imported at their
first use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from attnkit.splice import forward
from attnkit.splice.kernel_call import BackwardInputs, Captured, ForwardInputs, KernelCall
from attnkit.splice.program import compute_dtype
from attnkit.util.torch_private import in_autocast

if TYPE_CHECKING:
    from attnkit.splice.distance_calls import DistanceCall
    from attnkit.splice.sink_gradient import RepeatedBackward

_log = logging.getLogger("attnkit.splice")

Attention: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Captured, float],
    tuple[Tensor, Tensor, Tensor | None, Tensor | None],
]  # query, key, value, captured tensors, scale -> out, LSE, row maxima, entropies


def run_forward(
    call: KernelCall, inputs: ForwardInputs
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run the forward of `call`; return out, LSE, row maxima and entropies of the rows.

    The maxima are None unless `call.need_max`, the entropies unless `call.need_entropy`.
    """
    attention = prepare_forward(call, inputs)
    return attention(inputs.query, inputs.key, inputs.value, inputs.captured, inputs.scale)


def forward_checks(call: KernelCall) -> bool:
    """Return whether the forward kernel of `call` compares captured data with its fingerprints."""
    target = call.spec.target
    return call.check is not None and target is not None and forward.checks_data(target)


def prepare_forward(call: KernelCall, inputs: ForwardInputs) -> Attention:
    """Return a function that runs the forward of `call` on tensors like `inputs`.

    The function accepts other tensors of the same shapes, strides, dtypes and devices, and a scale
    of the same sign. The tensors that the mask captures must be the same objects with the same
    data, because the block runs depend on that data.
    """
    if call.spec.target is not None:
        call = _with_weights(call)
        program, extras = call.program, call.program.extras
        count = len(inputs.captured.scores) - extras
        scores, others = inputs.captured.scores[:count], inputs.captured.scores[count:]
        captured = Captured(tuple(scores), inputs.captured.masks)
        plain = replace(call, program=program.bare())
        tables = _tables(plain, replace(inputs, captured=captured))
        if tables is None:
            return forward.prepare(call, inputs)
        own = replace(tables.inner.program, sink=program.sink, dropout=program.dropout)
        inner = replace(tables.inner, program=own)
        example = tables.example(captured)
        example = Captured((*example.scores, *others), example.masks)
        kernels = forward.prepare(inner, replace(inputs, captured=example))
        needs_grad = [t.requires_grad for t in scores]
        if any(needs_grad):  # now, because it may synchronize, and a backward must not
            tables.prepare_gradients(captured, needs_grad)
        return tables.forward(kernels, extras)
    from attnkit.splice.cpu import CpuHooks
    from attnkit.templates import cpu

    def attention(
        query: Tensor, key: Tensor, value: Tensor, captured: Captured, scale: float
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        with torch.no_grad(), _without_autocast(query):
            heads = query.shape[1]
            hooks = CpuHooks(call.program, *captured, compute_dtype(query), query.device, heads)
            return cpu.forward(
                query,
                key,
                value,
                call.runs,
                hooks,
                scale,
                need_max=call.need_max,
                need_entropy=call.need_entropy,
            )

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

        plain, own = _without_extras(_with_weights(call), inputs)
        tables = _tables(plain, own)
        if tables is not None:
            kernels = _with_tables(tables, own, tables.example(own.captured))
            if backward.supports(tables.inner, kernels):
                return _backward_with_tables(tables, own)
        reason = backward.reason_against(plain, own)
        if not reason:
            return backward.prepare(plain, own)(own)
        if _log.isEnabledFor(logging.INFO):
            from attnkit.util.log import once  # which is needed only here

            once(
                _log,
                f"torch operators compute the backward of the {call.template} kernel: {reason}",
            )
    from attnkit.splice.cpu import CpuHooks
    from attnkit.templates import cpu

    if call.check is not None:
        call.check.launch_backward()
    query = inputs.query
    with _without_autocast(query):
        hooks = CpuHooks(
            call.program,
            *inputs.captured,
            compute_dtype(query),
            query.device,
            query.shape[1],
            inputs.needs_grad,
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
            entropy=inputs.entropy,
            grad_entropy=inputs.grad_entropy,
        )
        return gradients, hooks.gradients


def _with_weights(call: KernelCall) -> KernelCall:
    """Return a call whose score graph includes the sigmoid of its normalization, if it has one."""
    program = call.program.weights
    return call if program is call.program else replace(call, program=program)


def _without_extras(call: KernelCall, inputs: BackwardInputs) -> tuple[KernelCall, BackwardInputs]:
    """Return a backward whose score's tensors are those that the graph reads.

    The LSE has the sink, whose gradient is apart. The state of dropout has a place of its own.
    """
    if not call.program.extras:
        return call, inputs
    if call.program.sink:
        inputs = inputs.without_sink()
    if call.program.dropout:
        inputs = inputs.without_dropout()
    return replace(call, program=call.program.bare()), inputs


def _tables(call: KernelCall, inputs: ForwardInputs | BackwardInputs) -> DistanceCall | None:
    """Return what computes tables by distance for a call of GPU kernels; None if nothing does."""
    if call.program.score is None:
        return None
    from attnkit.splice.distance_calls import distance_call

    return distance_call(call, inputs)


def _with_tables(tables: DistanceCall, inputs: BackwardInputs, own: Captured) -> BackwardInputs:
    """Return the inputs of the kernels of a backward whose captured tensors are `own`."""
    needs_grad = tables.needs_grad(inputs.needs_grad)
    return replace(inputs, captured=own, needs_grad=needs_grad)


def _backward_with_tables(
    tables: DistanceCall, inputs: BackwardInputs
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:
    """Run a backward whose kernels read tables by distance; see `run_backward`."""
    from attnkit.splice import backward

    tables.prepare_gradients(inputs.captured, inputs.needs_grad)
    with torch.no_grad():
        own, near, memo = tables.tables(inputs.captured.scores)
        kernel = _with_tables(tables, inputs, Captured(own.scores, inputs.captured.masks))
        gradients, found = backward.prepare(tables.inner, kernel)(kernel)
        count = len(kernel.captured.scores)
        found, others = found[:count], found[count:]
        return gradients, [*tables.gradients(near, memo, found, inputs.needs_grad), *others]


def backward_replay(call: KernelCall, inputs: BackwardInputs) -> RepeatedBackward | None:
    """Return a function that relaunches this backward; None if that is impossible.

    Returns:
        A callable. It takes a list of query, key, value, output, gradient of the output, LSE,
        captured tensors, and the gradient of the LSE if there is one. It returns the gradients of
        query, key and value, and the float32 gradients that the score's captured tensors need.
    """
    if call.spec.target is None:
        return None
    from attnkit.splice import backward

    call, own = _without_extras(_with_weights(call), inputs)
    tables = _tables(call, own)
    if tables is not None:
        kernels = _with_tables(tables, own, tables.example(own.captured))
        if backward.supports(tables.inner, kernels):
            prepared = backward.prepare(tables.inner, kernels)
            if prepared.replay is None or prepared.scale != own.scale:
                return None
            return tables.replayed(prepared.replay, own.needs_grad)
    if not backward.supports(call, own):
        return None
    prepared = backward.prepare(call, own)
    return prepared.replay if prepared.scale == own.scale else None


def _without_autocast(query: Tensor) -> AbstractContextManager[Any]:
    """Return a context that disables autocast, which would round the operands of matmuls."""
    if in_autocast():
        return torch.autocast(query.device.type, enabled=False)
    return nullcontext()

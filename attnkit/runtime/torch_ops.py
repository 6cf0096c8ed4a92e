"""Run a prepared call with autograd, through a torch operator or directly.

`torch.ops.attnkit.attention` (`runtime.compile.op`) takes graphs as canonical text, block runs as a
list of index tensors with their sizes, and captured tensors as tensor lists. So the operator is
stateless, and its schema does not depend on the variant. If nothing in torch intercepts operators
(no mode, transform or subclass), the call runs directly, in a tenth of the host time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnkit.errors import UnsupportedError
from attnkit.runtime.data_guard import raise_if_stale
from attnkit.runtime.prepared_call import PreparedCall
from attnkit.sparsity.block_runs import BlockRuns, Runs
from attnkit.splice import (
    BackwardInputs,
    Captured,
    ForwardInputs,
    ForwardOutputs,
    KernelCall,
    Program,
    RepeatedForward,
    backward_replay,
    compute_dtype,
    prepare_forward,
    run_backward,
)
from attnkit.splice.fingerprint_check import stale_report
from attnkit.util.arguments import refuse_functional
from attnkit.util.outputs import output_like
from attnkit.util.torch_private import (
    in_batched_gradients,
    is_batched,
    is_grad_tracking,
    is_intercepted,
)

_PREPARED = "prepared"

# Id of the first tensor of block runs -> the runs, so that `pack` returns the object that `unpack`
# received. Kernels cache tables per BlockRuns object.
_runs_by_tensor: weakref.WeakValueDictionary[int, BlockRuns] = weakref.WeakValueDictionary()


def unpack(runs: BlockRuns | None) -> tuple[list[Tensor], list[int]]:
    """Convert block runs to arguments of an operator: tensors and ints. `pack` is the inverse."""
    if runs is None:
        return [], []
    tensors = [
        t
        for part in (runs.full, runs.partial, runs.full_t, runs.partial_t)
        for t in (part.row_ptr, part.start, part.length)
    ]
    _runs_by_tensor[id(tensors[0])] = runs
    return tensors, [runs.q_len, runs.kv_len, *runs.block, runs.batch, runs.heads]


def pack(tensors: Sequence[Tensor], layout: Sequence[int]) -> BlockRuns | None:
    """Convert the results of `unpack` to block runs, the same object if it still exists."""
    if not tensors:
        return None
    original = _runs_by_tensor.get(id(tensors[0]))
    if original is not None and original.full.row_ptr is tensors[0]:
        return original
    parts = [Runs(*tensors[i : i + 3]) for i in range(0, 12, 3)]
    q_len, kv_len, block_q, block_kv, batch, heads = layout
    return BlockRuns(q_len, kv_len, (block_q, block_kv), batch, heads, *parts)


def request_of(call: KernelCall) -> str:
    """Return the text that stands for a prepared call among the arguments of the operator."""
    needed = str(int(call.need_max)), str(int(call.need_entropy))
    return "|".join((_PREPARED, call.template, *needed, call.program.text))


def needed_outputs(request: str) -> tuple[bool, bool] | None:
    """Return whether a text of `request_of` asks for row maxima, and for entropies of rows.

    The result is None for another text.
    """
    kind, *rest = request.split("|", 4)
    return (bool(int(rest[1])), bool(int(rest[2]))) if kind == _PREPARED else None


def kernel_call_of(
    request: str, runs: Sequence[Tensor], layout: Sequence[int]
) -> KernelCall | None:
    """Build the prepared call of a text of `request_of`; return None for another text.

    Args:
        request: the text.
        runs, layout: what `unpack` returned for the block runs of the call.
    """
    needed = needed_outputs(request)
    if needed is None:
        return None
    _, template, _, _, program = request.split("|", 4)
    return KernelCall(template, Program.parse(program), pack(runs, layout), *needed)


def without_none(results: ForwardOutputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return results of a forward with an empty tensor for None, which no operator can return."""
    out, lse, top, entropy = results
    none = lse.new_empty(0)
    return out, lse, none if top is None else top, none.clone() if entropy is None else entropy


def gradients(
    call: KernelCall, inputs: BackwardInputs
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run a backward; return the gradients of query, key, value and the score's tensors.

    A gradient that is not needed is an empty tensor, because an operator cannot return None.
    """
    gradients, captured = run_backward(call, inputs)
    cast = [
        inputs.query.new_empty(0) if g is None else g.to(t.dtype)
        for g, t in zip(captured, inputs.captured.scores, strict=True)
    ]
    return *gradients, cast


def fake_outputs(
    query: Tensor, value: Tensor, need_max: bool, need_entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate output, LSE, row maxima and entropies; what is not needed is empty."""
    lse = query.new_empty(query.shape[:3], dtype=compute_dtype(query))
    top, entropy = (
        torch.empty_like(lse) if need else lse.new_empty(0) for need in (need_max, need_entropy)
    )
    return output_like(query, value.shape[-1]), lse, top, entropy


def fake_gradients(
    grad_out: Tensor,
    grad_lse: Tensor,
    grad_entropy: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Allocate the gradients of query, key, value and the score's tensors.

    Args:
        grad_out, grad_lse, grad_entropy, query, key, value: the first arguments of a backward
            operator.
        rest: the other arguments of the operator. `rest[3]` are the tensors that the score
            captures, `rest[-1]` says for each whether its gradient is needed.
    """
    score_tensors, needs_grad = rest[3], rest[-1]
    captured = [
        torch.empty_like(t) if need else query.new_empty(0)
        for t, need in zip(score_tensors, needs_grad, strict=True)
    ]
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), captured


def with_fake_strides(gradients: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy gradients of captured tensors whose strides are not those that the fake operator gives.

    A compiled graph is made with the fake strides. It may hold a `view` of a gradient that no other
    strides allow.

    Args:
        gradients: one for each tensor; one that is not needed is empty and stays as it is.
        tensors: the captured tensors.
    """
    likes = [torch.empty_like(t, device="meta") for t in tensors]
    return [
        g if g.shape != t.shape or g.stride() == like.stride() else torch.empty_like(t).copy_(g)
        for g, t, like in zip(gradients, tensors, likes, strict=True)
    ]


def operator_tensors(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None], saved: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the leading tensor arguments of a backward operator: the gradients, then `saved`.

    An operator cannot take None. A missing gradient of the output is replaced by zeros, a missing
    one of the LSE or the entropies by an empty tensor.

    Args:
        grads: gradients of output, LSE and entropies; None for zero.
        saved: query, key, value, output, LSE and entropies (any tensor if their gradient is None).
    """
    out, lse = saved[3:5]
    grad_out, *others = grads
    return (
        torch.zeros_like(out) if grad_out is None else grad_out,
        *(lse.new_empty(0) if g is None else g for g in others),
        *saved,
    )


def refuse_second_derivative(ctx: Any, *_: Any) -> None:
    """Raise an UnsupportedError, because attention has no second derivative.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "attnkit's attention has no second derivative; call backward without create_graph=True, "
        'or use backend="eager" (dense, differentiable any number of times)'
    )


NO_TENSORS = Captured((), ())
_NO_GRADIENT = (None,) * 5  # gradients of the arguments of `_Attention.forward` before the query


class _Attention(torch.autograd.Function):
    """Autograd function that runs a prepared call directly, without torch operators."""

    @staticmethod
    def forward(
        ctx: Any,
        prepared: PreparedCall,
        relaunch: RepeatedForward | None,
        scale: float,
        masks: Sequence[Tensor],
        all_outputs: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *scores: Tensor,
    ) -> Tensor | ForwardOutputs:
        captured = Captured(scores, masks) if scores or masks else NO_TENSORS
        result = None if relaunch is None else relaunch(query, key, value, captured, scale)
        if result is None:
            assert prepared.attention is not None
            result = prepared.attention(query, key, value, captured, scale)
        out, lse, top, entropy = result
        rows = [] if entropy is None else [entropy]
        ctx.save_for_backward(query, key, value, out, lse, *scores, *masks, *rows)
        if top is not None:
            ctx.mark_non_differentiable(top)
        ctx.call = prepared, scale, [t.requires_grad for t in scores]
        ctx.set_materialize_grads(False)
        return result if all_outputs else out

    @staticmethod
    def backward(
        ctx: Any,
        grad_out: Tensor | None,
        grad_lse: Tensor | None = None,
        _: Tensor | None = None,
        grad_entropy: Tensor | None = None,
    ) -> tuple[Any, ...]:
        prepared, scale, needs_grad = ctx.call
        saved, rows = ctx.saved_tensors, None
        if prepared.kernel_call.need_entropy:
            *saved, entropy = saved
            rows = None if grad_entropy is None else (entropy, grad_entropy)
        grads = differentiate(prepared, scale, needs_grad, saved, grad_out, grad_lse, rows)
        return *_NO_GRADIENT, *grads


def differentiate(
    prepared: PreparedCall,
    scale: float,
    needs_grad: list[bool],
    saved: Sequence[Tensor],
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    rows: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """Run the backward of a call that has run.

    Args:
        prepared: the prepared call.
        scale: the scale of the forward.
        needs_grad: for each tensor that the score captures, whether its gradient is needed.
        saved: query, key, value, output, LSE, and the tensors that score and mask capture.
        grad_out, grad_lse: gradients of output and LSE; None for zero.
        rows: the entropies of the rows, and their gradient; None for a gradient of zero.

    Returns:
        The gradients of query, key, value and the score's tensors; None where not needed.

    Raises:
        StaleDataError: captured data was changed since the forward.
    """
    # tested here because most calls need neither, and two function calls cost a microsecond
    if stale_report.code[0]:
        raise_if_stale()
    if prepared.guard.states:
        scores = 5 + len(needs_grad)
        prepared.guard.check_saved(saved[5:scores], saved[scores:])
        if prepared.kernel_call.check is None:
            prepared.guard.launch_backward()
    if grad_out is not None and rows is None:
        gradients = prepared.backward.try_fast_path(grad_out, grad_lse, saved, scale, needs_grad)
        if gradients is not None:
            return gradients
    query, key, value, out, lse, *tensors = saved
    captured = Captured(tensors[: len(needs_grad)], tensors[len(needs_grad) :])
    forward = ForwardInputs(query, key, value, captured, scale)
    grads = torch.zeros_like(out) if grad_out is None else grad_out, grad_lse
    inputs = BackwardInputs.of(forward, (out, lse), grads, needs_grad, rows)
    return _backward_of(prepared, inputs, saved)


def _backward_of(
    prepared: PreparedCall, inputs: BackwardInputs, saved: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Run a backward and store its relaunch; return the gradients in the order of the inputs."""
    call, needs_grad = prepared.kernel_call, list(inputs.needs_grad)
    grads = inputs.grad_out, inputs.grad_lse, inputs.grad_entropy
    given = [g for g in grads if g is not None]
    if torch.is_grad_enabled() or is_intercepted([*saved, *given]):
        refuse_batched_gradients(given)
        if call.check is not None:  # the operator has no kernels that compare data
            call.check.launch_backward()
        runs, layout = unpack(call.runs)
        scores, masks = inputs.captured
        dquery, dkey, dvalue, captured = torch.ops.attnkit.attention_backward(
            *operator_tensors(
                grads, [*saved[:5], inputs.lse if inputs.entropy is None else inputs.entropy]
            ),
            torch.zeros(1, dtype=torch.int64, device="cpu"),
            scores,
            [detached(t) for t in masks],
            runs,
            layout,
            [],
            [],
            request_of(call),
            inputs.scale,
            needs_grad,
        )
    else:
        dquery, dkey, dvalue, captured = gradients(call, inputs)
        if inputs.grad_entropy is None:
            prepared.backward.remember(inputs, saved, lambda: backward_replay(call, inputs))
    dcaptured = [g if need else None for g, need in zip(captured, needs_grad, strict=True)]
    return dquery, dkey, dvalue, *dcaptured


def run(prepared: PreparedCall, inputs: ForwardInputs) -> ForwardOutputs:
    """Run a prepared call with autograd support; return out, LSE, row maxima and entropies.

    Autograd can differentiate out, LSE and entropies in query, key, value and the score's captured
    tensors. Maxima and entropies that the call does not return are None (or empty).

    Args:
        prepared: the prepared call.
        inputs: tensors with the geometry for which the call was prepared.

    Raises:
        UnsupportedError: the call is inside a forward-mode derivative or a torch.func transform.
    """
    query, key, value, scale = inputs.query, inputs.key, inputs.value, inputs.scale
    scores, masks = inputs.captured
    if prepared.is_dense:
        prepared.guard.check()
        assert prepared.attention is not None
        return prepared.attention(query, key, value, inputs.captured, scale)
    if is_intercepted((query, key, value, *scores, *masks)):
        prepared.guard.check()
        refuse_functional("query", query)
        refuse_transforms((query, key, value, *scores))
        call = prepared.kernel_call
        runs, layout = unpack(call.runs)
        *intercepted, _ = torch.ops.attnkit.attention(
            query,
            key,
            value,
            list(scores),
            [detached(t) for t in masks],
            runs,
            layout,
            [],
            [],
            request_of(call),
            scale,
        )
        return tuple(intercepted)
    if prepared.launches_check:
        prepared.guard.check()
    if prepared.attention is None:
        with torch.no_grad():
            prepared.attention = prepare_forward(prepared.kernel_call, inputs)
    if is_recorded((query, key, value, *scores)):
        _refuse_inference_tensors((query, key, value, *scores, *masks))
        result: ForwardOutputs = record(
            prepared, None, scale, masks, True, query, key, value, *scores
        )
        return result
    return prepared.attention(query, key, value, inputs.captured, scale)


def is_recorded(tensors: Iterable[Tensor]) -> bool:
    """Return whether grad mode is enabled and one of the tensors requires grad."""
    return torch.is_grad_enabled() and any([t.requires_grad for t in tensors])


# Function that runs a prepared call with autograd: (prepared, relaunch, scale, masks, all_outputs,
# query, key, value, *scores) -> (out, LSE, row maxima) if `all_outputs`, else out. `relaunch` may
# be None. This is `Function.apply` without its Python wrapper, which unwraps dead functorch
# wrappers from each argument. `is_intercepted` has already excluded functorch.
record: Callable[..., Any] = super(torch.autograd.Function, _Attention).apply


def refuse_batched_gradients(gradients: Iterable[Tensor]) -> None:
    """Raise an UnsupportedError for batched gradients, for which the backward has no rule.

    Raises:
        UnsupportedError: autograd computes several gradients at once, or a gradient is batched.
    """
    if in_batched_gradients() or any(is_batched(t) for t in gradients):
        raise UnsupportedError(
            "attnkit's attention has no rule for batched gradients (is_grads_batched=True, "
            "jacobian with vectorize=True, or vmap over a backward); call torch.autograd.grad once "
            'for each gradient, or use backend="eager" (dense)'
        )


def _refuse_inference_tensors(tensors: Iterable[Tensor]) -> None:
    """Raise an UnsupportedError for inference tensors, which autograd cannot save for a backward.

    Raises:
        UnsupportedError: a tensor was created in inference mode.
    """
    for t in tensors:
        if t.is_inference():
            raise UnsupportedError(
                f"a tensor of shape {tuple(t.shape)} was created in torch.inference_mode(), and "
                "autograd cannot save it for the backward; clone it outside of inference mode"
            )


def detached(t: Tensor) -> Tensor:
    """Return `t` detached if it requires grad, else `t` itself, since caches compare identity."""
    return t.detach() if t.requires_grad else t


def refuse_forward_mode() -> NoReturn:
    """Raise an UnsupportedError, because attention has no forward-mode derivative.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "attnkit's attention has no forward-mode derivative; take the reverse mode, or use "
        'backend="eager" (dense, differentiable in both)'
    )


def refuse_transforms(tensors: Iterable[Tensor]) -> None:
    """Raise an UnsupportedError for tensors whose torch.func transform an operator would drop.

    Raises:
        UnsupportedError: a tensor is batched by vmap, has a forward-mode tangent, or is tracked by
            torch.func.grad.
    """
    if any(is_batched(t) for t in tensors):
        raise UnsupportedError(
            "attnkit's attention has no rule for torch.func.vmap; give it batches, or take "
            'backend="eager" (dense)'
        )
    # torch drops the tangents of an operator's inputs if no gradient is recorded
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        refuse_forward_mode()
    if any(is_grad_tracking(t) for t in tensors):
        raise UnsupportedError(
            "attnkit's attention has no rule for torch.func.grad; take torch.autograd, or "
            'backend="eager" (dense)'
        )

"""Prepare a call: trace, check indices, plan, classify tiles, schedule, compile."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnkit.codegen.score_form import adds_only_slope
from attnkit.graph.eval_torch import computes_float64
from attnkit.graph.ir import Node
from attnkit.runtime.bind import Bound, TracedVariant, classify, prove, trace
from attnkit.runtime.call import AttentionCall, CallSettings
from attnkit.runtime.prepared_call import ColumnSums, PreparedCall
from attnkit.runtime.reuse.backward import BackwardReuse
from attnkit.schedule import plan as plans
from attnkit.schedule.plan import Plan
from attnkit.schedule.targets import ORDERED, of_template
from attnkit.sparsity.block_runs import BLOCK, FULL, PARTIAL
from attnkit.splice import (
    Attention,
    Captured,
    ForwardOutputs,
    KernelCall,
    forward_checks,
    prepare_forward,
)
from attnkit.tracing.tracer import Traced
from attnkit.util import devices
from attnkit.util.torch_private import is_intercepted

_log = logging.getLogger("attnkit.runtime")


@dataclass(frozen=True)
class Preparation:
    """Holds the result of `prepare`.

    Attributes:
        plan: backend, template and tile sizes, with the reasons.
        bound: the graphs, the tiles and the captured tensors.
        call: the prepared call, which serves all calls of the same geometry.
    """

    plan: Plan
    bound: Bound
    call: PreparedCall


def prepare(
    call: AttentionCall, variant: TracedVariant | None = None, *, launchable: bool = True
) -> Preparation:
    """Prepare a call without running it: trace, check, plan, classify, schedule, compile.

    The plan comes before the classification of tiles, because it chooses the tile sizes.

    Args:
        call: the arguments of `flex_attention`.
        variant: the graphs, if the functions are already traced (in `torch.compile`).
        launchable: whether to also schedule the work and compile the kernels.

    Raises:
        See `flex_attention`.
    """
    start = time.perf_counter()
    settings = call.check()
    query, key = call.query, call.key
    if variant is None:  # trace: run both functions once on symbols
        variant = trace(call.score_mod, call.block_mask, query.device)
    guard = variant.data_guard()  # before anything is derived from the data of tensors
    unproven = prove(variant, query, key)  # indices stay inside their tensors, and in int32
    plan = _plan(call, settings, variant, unproven)  # template and tile sizes
    bound = classify(variant, unproven, query, key, plan.block)  # EMPTY, PARTIAL, FULL
    ordered = call.is_deterministic and of_template(plan.template) is not None
    template = plan.template + (ORDERED if ordered else "")
    check = None
    if of_template(plan.template) is not None:
        check = guard.kernel_check(query.device, masked=bound.program.mask is not None)
    program = replace(
        bound.program,
        sink=call.sink is not None,
        dropout=call.dropout is not None,
        normalization=call.normalization,
    )
    kernel_call = KernelCall(
        template,
        program,
        bound.runs,
        need_max=settings.aux.needs_row_maxima,
        need_entropy=settings.aux.entropy,
        check=check,
    )
    prepared = PreparedCall(kernel_call, BackwardReuse(), guard)
    prepared.launches_check = guard.on_gpu and not forward_checks(kernel_call)
    if plan.template == "eager":
        prepared.attention, prepared.is_dense = _dense(bound, kernel_call), True
        prepared.column_sums = _dense_column_sums(bound, kernel_call)
    elif launchable:
        inputs = call.inputs(bound.captured)
        scores, masks = inputs.captured
        if not is_intercepted((query, key, call.value, *scores, *masks)):
            with torch.no_grad():  # schedule the tiles, compile or load the kernels
                prepared.attention = prepare_forward(kernel_call, inputs)
    if _log.isEnabledFor(logging.DEBUG):
        took = 1e3 * (time.perf_counter() - start)
        _log.debug("prepared a call in %.1f ms, %s: %s", took, call.described(), plan.template)
    return Preparation(plan, bound, prepared)


def _plan(
    call: AttentionCall, settings: CallSettings, variant: TracedVariant, unproven: frozenset[Node]
) -> Plan:
    """Choose template and tile sizes; use the cpu template if the kernel must not be used."""
    query, backend = call.query, call.backend
    plan = plans.choose(
        backend,
        device=query.device.type,
        block=settings.block,
        notes=settings.notes,
        call=_plan_facts(call, settings, variant),
    )
    reason = _reason_against_kernel(plan, call, variant, unproven)
    if reason:
        if backend != "auto":
            raise plans.no_kernel_error(backend, reason)
        cpu = plans.choose(
            "cpu", device=query.device.type, block=settings.block, notes=settings.notes
        )
        plan = replace(cpu, reason=cpu.reason.replace("asked for", reason))
    if backend == "auto" and plan.template == "cpu":
        _log_torch_operators(call, plan)
    return plan


def _log_torch_operators(call: AttentionCall, plan: Plan) -> None:
    """Log why torch operators run a call: at INFO for a GPU, where a kernel could be expected."""
    level = logging.INFO if call.query.is_cuda else logging.DEBUG
    if _log.isEnabledFor(level):
        from attnkit.util.log import once  # which is needed only here

        once(_log, f"no kernel runs a call, {call.described()}: {plan.reason}", level)


def _plan_facts(call: AttentionCall, settings: CallSettings, variant: TracedVariant) -> plans.Call:
    """Build the `plans.Call`, which holds the properties of a call that a plan depends on."""
    query, aux = call.query, settings.aux
    # statistics need registers, and the products add no slope that is divided by a scale of 0
    light = not (aux.needs_row_maxima or aux.entropy) and settings.scale > 0
    score = None if variant.score is None else variant.score.root
    return plans.Call(
        dtype=str(query.dtype).removeprefix("torch."),
        head_dim=query.shape[-1],
        value_dim=call.value.shape[-1],
        capability=devices.compute_capability(query.device),
        listed_block=variant.block_lists,
        fixed=settings.block is not BLOCK,
        modded=score is not None or call.normalization == "sigmoid",
        only_slope=light and call.normalization == "softmax" and adds_only_slope(score),
        dropout=call.dropout is not None,
        masked=variant.block_mask is not None,
        q_len=query.shape[-2],
    )


def _reason_against_kernel(
    plan: Plan, call: AttentionCall, variant: TracedVariant, unproven: frozenset[Node]
) -> str:
    """Return the reason why the GPU kernel of a plan must not be used; "" if it may be used."""
    target = of_template(plan.template)
    if target is None:
        return ""
    if unproven:
        return (
            "an index of a captured tensor could not be proven to stay inside it, and a kernel does "
            "not check indices; write the index so that its range shows, with clamp for example"
        )
    if call.dropout is not None and call.normalization != "softmax":
        return (
            f"with normalization={call.normalization!r} no kernel has dropout; leave dropout_p out to "
            "take a kernel"
        )
    if variant.mask is not None and computes_float64(variant.mask.root):
        return (
            "the mask computes in float64, and a kernel in float32; write .float() where float32 "
            "will do"
        )
    if call.backend != "auto":
        return ""
    from attnkit.runtime import hardware_gate  # imports `jit`, which only GPU calls need

    return hardware_gate.reason_against(target, call.query.device)


def _dense(bound: Bound, call: KernelCall) -> Attention:
    """Return a forward function that runs the dense reference on the graphs in `bound`.

    `call` says whether the captured tensors end with the state of dropout and a sink, what makes
    the weights, and what to return.
    """
    from attnkit.runtime import reference  # which other backends do not need

    def attention(
        query: Tensor, key: Tensor, value: Tensor, captured: Captured, scale: float
    ) -> ForwardOutputs:
        with torch.autocast(query.device.type, enabled=False):
            mask, allowed = _dense_mask(bound, query, key)
            scores, sink = call.program.split_sink(captured.scores)
            _, dropout = call.program.split_dropout(scores)
            return reference.attention(
                query,
                key,
                value,
                bound.score,
                mask,
                scale=scale,
                allowed=allowed,
                sink=sink,
                dropout=dropout,
                need_entropy=call.need_entropy,
                normalization=call.program.normalization,
            )

    return attention


def _dense_column_sums(bound: Bound, call: KernelCall) -> ColumnSums:
    """Return a function that sums the weights of each key with the dense reference."""
    from attnkit.runtime import reference  # which other backends do not need

    def column_sums(query: Tensor, key: Tensor, captured: Captured, scale: float) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            mask, allowed = _dense_mask(bound, query, key)
            return reference.column_sums(
                query,
                key,
                bound.score,
                mask,
                scale=scale,
                allowed=allowed,
                sink=call.program.split_sink(captured.scores)[1],
                normalization=call.program.normalization,
            )

    return column_sums


def _dense_mask(bound: Bound, query: Tensor, key: Tensor) -> tuple[Traced | None, Tensor | None]:
    """Return what the dense reference applies: the mask_mod, or what block lists allow."""
    allowed = _allowed(bound, query, key)
    return (bound.mask if allowed is None else None), allowed


def _allowed(bound: Bound, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the dense bool mask of PyTorch's block lists and mask_mod; None without lists."""
    if not bound.lists_override_mask or bound.runs is None:
        return None
    states = bound.runs.states()
    for axis, size in ((2, bound.runs.block[0]), (3, bound.runs.block[1])):
        states = states.repeat_interleave(size, dim=axis)
    states = states[:, :, : query.shape[2], : key.shape[2]]
    inside = torch.ones((), dtype=torch.bool, device=query.device)
    if bound.mask is not None:
        from attnkit.runtime import reference

        inside = reference.dense_mask(bound.mask, query, key)  # what the mask_mod says
    return (states == FULL) | ((states == PARTIAL) & inside)

"""From a variant and tensors to a settled call: the plan, the tiles, what runs them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnkit.runtime import hardware_gate
from attnkit.runtime.torch_ops import Settled
from attnkit.runtime.variant import Bound, Variant, lists_of
from attnkit.schedule.plan import Call, Plan, choose, refused
from attnkit.schedule.targets import ORDERED, of_template
from attnkit.sparsity.block_runs import BLOCK


def planned(
    variant: Variant,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    backend: str,
    block: tuple[int, int],
    notes: tuple[str, ...],
) -> tuple[Plan, Bound]:
    """The plan of a call, and the variant bound for it.

    Args:
        variant: score_mod and mask.
        query, key, value: as of `flex_attention`.
        backend: as there.
        block, notes: what `check_options` made of kernel_options.
    """
    call = _call(query, value, variant, block is not BLOCK)
    plan = choose(backend, device=query.device.type, block=block, notes=notes, call=call)
    bound = variant.bind(query, key, plan.block)
    reason = _doubts(bound, plan, backend, query)
    if reason:
        plan = _without_kernel(backend, reason, query, block, notes)
        bound = variant.bind(query, key, plan.block)
    return plan, bound


def settled(plan: Plan, bound: Bound, *, ordered: bool, need_max: bool) -> Settled:
    """A planned call, ready to be made.

    Args:
        plan, bound: of `planned`.
        ordered: the backward forms its sums in a fixed order.
        need_max: the row maxima are wanted.
    """
    template = plan.template + (ORDERED if ordered and of_template(plan.template) else "")
    return Settled(template, bound.program, bound.runs, need_max)


def _call(query: Tensor, value: Tensor, variant: Variant, fixed: bool) -> Call:
    """What a plan must know of the tensors."""
    capability = None
    if query.device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(query.device)
    dtype = str(query.dtype).removeprefix("torch.")
    listed, modded = lists_of(variant.mask), variant.score_mod is not None
    masked, q_len = variant.mask is not None, query.shape[-2]
    dims = query.shape[-1], value.shape[-1]
    return Call(dtype, *dims, capability, listed, fixed, modded, masked, q_len)


def _doubts(bound: Bound, plan: Plan, backend: str, query: Tensor) -> str:
    """Why a kernel that the plan has chosen is not to be taken, empty if it is."""
    target = of_template(plan.template)
    if target is None:
        return ""
    if bound.program.checked:
        return (
            "an index of a captured tensor could not be proven to stay inside it, and a kernel does "
            "not check indices; write the index so that its range shows, with clamp for example"
        )
    return hardware_gate.doubt(target, query.device) if backend == "auto" else ""


def _without_kernel(
    backend: str, reason: str, query: Tensor, block: tuple[int, int], notes: tuple[str, ...]
) -> Plan:
    """The plan where a kernel is not to be taken."""
    if backend != "auto":
        raise refused(backend, reason)
    plan = choose("cpu", device=query.device.type, block=block, notes=notes)
    return replace(plan, reason=plan.reason.replace("asked for", reason))

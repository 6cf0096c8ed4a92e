"""What one attention call gives: outputs and gradients, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.runtime import reference
from attnkit.runtime.variant import Variant
from attnkit.testing.case import Case
from attnkit.tracing.tracer import Traced
from attnkit.util.arguments import AuxRequest

Quantities = dict[str, Tensor]

OUTPUTS = ("out", "lse", "max_scores")
INPUTS = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class Captured:
    """The leaf tensors that a score_mod's gradient flows to, with names for the report."""

    names: tuple[str, ...] = ()
    tensors: tuple[Tensor, ...] = ()


def captured_leaves(score: Traced | None) -> Captured:
    """The captured tensors that require grad; for a computed one, the leaves behind it."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, t in zip(score.names, score.tensors, strict=True) if score is not None else ():
        leaves = _leaves(t)
        for i, leaf in enumerate(leaves):
            own = name if leaf is t else f"{name} (leaf {i})"
            found.setdefault(id(leaf), (own, leaf))
    return Captured(tuple(n for n, _ in found.values()), tuple(t for _, t in found.values()))


def _leaves(t: Tensor) -> list[Tensor]:
    if not t.requires_grad:
        return []
    if t.grad_fn is None:
        return [t]
    seen, stack, leaves = set(), [t.grad_fn], []
    while stack:
        function = stack.pop()
        if function in seen:
            continue
        seen.add(function)
        variable = getattr(function, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        stack.extend(f for f, _ in function.next_functions if f is not None)
    return leaves


def differentiate(
    case: Case, results: Sequence[Tensor], inputs: Sequence[Tensor], captured: Captured
) -> Quantities:
    """Gradients through the output alone and through the LSE alone: neither can hide the other."""
    out, lse = results[:2]
    found = dict(zip(OUTPUTS, (r.detach() for r in results), strict=True))
    grad_out, grad_lse = case.cotangents(out.device)
    targets = [*inputs, *captured.tensors]
    names = [f"d{name}" for name in (*INPUTS, *captured.names)]
    for result, grad, through in (
        (out, grad_out.to(out.dtype), ""),
        (lse, grad_lse.to(lse.dtype), " through lse"),
    ):
        gradients: Sequence[Tensor | None] = [None] * len(targets)
        if result.requires_grad:
            gradients = torch.autograd.grad(
                result, targets, grad, retain_graph=True, allow_unused=True
            )
        for name, target, g in zip(names, targets, gradients, strict=True):
            found[name + through] = torch.zeros_like(target) if g is None else g
    return found


def run(
    variant: Variant,
    case: Case,
    captured: Captured,
    *,
    backend: str,
    device: torch.device,
    block: tuple[int, int] | None = None,
) -> Quantities:
    """Attention by a backend.

    Args:
        variant: what to run.
        case: sizes, dtype and seed.
        captured: of the variant.
        backend: as of `flex_attention`.
        device: where to run.
        block: tile sizes, the plan's own if None.
    """
    inputs = case.inputs(device)
    out, aux = variant(
        *inputs,
        scale=case.scale,
        enable_gqa=case.heads != case.kv_heads,
        return_aux=AuxRequest(lse=True, max_scores=True),
        kernel_options=None if block is None else {"BLOCK_M": block[0], "BLOCK_N": block[1]},
        backend=backend,
    )
    return differentiate(case, (out, aux.lse, aux.max_scores), inputs, captured)


def in_dtype(score: Traced, dtype: torch.dtype) -> Traced:
    """The same score_mod over its captured tensors in a compute dtype.

    They are converted, not detached: a gradient is summed in that dtype, and rounded to the leaf's
    own at the end.
    """
    tensors = tuple(t.to(dtype) if t.dtype.is_floating_point else t for t in score.tensors)
    return dataclasses.replace(score, tensors=tensors)


def oracle(
    score: Traced | None,
    kept: Tensor | None,
    case: Case,
    captured: Captured,
    device: torch.device,
) -> Quantities:
    """Dense attention in float64, captured tensors included.

    Args:
        score: the traced score_mod.
        kept: the dense mask, broadcastable to [B, Hq, Sq, Skv]; None keeps everything.
        case: sizes, dtype and seed.
        captured: leaves to differentiate by.
        device: where to run.
    """
    query, key, value = (t.detach().to(torch.float64).requires_grad_() for t in case.inputs(device))
    score = None if score is None else in_dtype(score, torch.float64)
    results = reference.attention(query, key, value, score, scale=case.scale, allowed=kept)
    return differentiate(case, results, (query, key, value), captured)

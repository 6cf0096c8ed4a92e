"""Compute the outputs and gradients of one attention call, as a dict from name to tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit.runtime.variant import Variant
from attnkit.testing import plain
from attnkit.testing.case import Case
from attnkit.testing.dropped import seeded
from attnkit.tracing.tracer import Traced
from attnkit.util.arguments import AuxRequest

Quantities = dict[str, Tensor]

OUTPUTS = ("out", "lse", "max_scores", "entropy", "column_sums")
# Outputs that have gradients, and what the names of gradients through them end with.
THROUGH = {
    "out": "",
    "lse": " through lse",
    "entropy": " through entropy",
    "column_sums": " through column_sums",
}
INPUTS = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class Captured:
    """Holds the leaf tensors that get gradients through a score_mod, and their names in reports."""

    names: tuple[str, ...] = ()
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class DenseCall:
    """Describes a dense attention call, for the oracle and for samples of its rounding error.

    Attributes:
        score_mod: the user's function, or None.
        kept: the dense mask, broadcastable to [B, Hq, Sq, Skv]; None without a mask.
        case: sizes, dtype and seed.
        captured: leaf tensors to differentiate with respect to.
        device: where to run.
        sink: attention sink [Hq], one of the tensors of `captured` if it requires grad; None for
            none.
        survivors: factors that dropout gives the weights, [B, Hq, Sq, Skv]; None without dropout.
    """

    score_mod: Callable[..., Any] | None
    kept: Tensor | None
    case: Case
    captured: Captured
    device: torch.device
    sink: Tensor | None = None
    survivors: Tensor | None = None


def captured_leaves(score: Traced | None) -> Captured:
    """Return the leaf tensors that get gradients through the captured tensors of `score`."""
    by_id: dict[int, tuple[str, Tensor]] = {}
    for name, t in zip(score.names, score.tensors, strict=True) if score is not None else ():
        leaves = _leaves(t)
        for i, leaf in enumerate(leaves):
            leaf_name = name if leaf is t else f"{name} (leaf {i})"
            by_id.setdefault(id(leaf), (leaf_name, leaf))
    return Captured(tuple(n for n, _ in by_id.values()), tuple(t for _, t in by_id.values()))


def differentiated(
    score_mod: Callable[..., Any] | None, score: Traced | None, device: torch.device
) -> Captured:
    """Return all leaf tensors on which the result of `score_mod` depends, according to autograd.

    Tensors that the trace `score` captured come first, with their names. Other tensors are found by
    a call of the function, so a tensor that the tracer missed still has its gradient compared.
    """
    captured = captured_leaves(score)
    if score_mod is None:
        return captured
    seen = {id(t) for t in captured.tensors}
    one = plain.modified(score_mod, torch.zeros(1, 1, 1, 1, device=device))
    others = [t for t in _leaves(one) if id(t) not in seen]
    names = tuple(f"captured tensor {list(t.shape)}" for t in others)
    return Captured(captured.names + names, captured.tensors + tuple(others))


def _leaves(t: Tensor) -> list[Tensor]:
    """Return the leaf tensors from which `t` was computed, or `t` itself if it is a leaf."""
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


def with_sink(captured: Captured, sink: Tensor | None) -> Captured:
    """Return `captured` with the attention sink as the last tensor, if there is one that learns."""
    if sink is None or not sink.requires_grad:
        return captured
    return Captured((*captured.names, "sink"), (*captured.tensors, sink))


def differentiate(
    case: Case, results: Mapping[str, Tensor], inputs: Sequence[Tensor], captured: Captured
) -> Quantities:
    """Compute the gradients of each differentiable result by itself; return all results by name.

    Args:
        case: provides the incoming gradients.
        results: results by name, see `OUTPUTS`.
        inputs: query, key and value.
        captured: leaf tensors to differentiate with respect to.

    Returns:
        Results and gradients by name, such as "out", "dquery" and "dquery through lse".
    """
    quantities = {name: result.detach() for name, result in results.items()}
    targets = [*inputs, *captured.tensors]
    names = [f"d{name}" for name in (*INPUTS, *captured.names)]
    for output, through in THROUGH.items():
        if output not in results:
            continue
        result = results[output]
        grad = case.cotangent(output, result.device).to(result.dtype)
        gradients: Sequence[Tensor | None] = [None] * len(targets)
        if result.requires_grad:
            gradients = torch.autograd.grad(
                result, targets, grad, retain_graph=True, allow_unused=True
            )
        for name, target, g in zip(names, targets, gradients, strict=True):
            quantities[name + through] = torch.zeros_like(target) if g is None else g
    return quantities


def run(
    variant: Variant,
    case: Case,
    captured: Captured,
    *,
    backend: str,
    device: torch.device,
    block: tuple[int, int] | None = None,
    sink: Tensor | None = None,
) -> Quantities:
    """Run the forward and backward of a variant with a backend; return all results by name.

    Args:
        variant: the variant to run.
        case: sizes, dtype and seed.
        captured: the variant's captured leaf tensors.
        backend: backend of `flex_attention`.
        device: where to run.
        block: (q, kv) tile sizes; None uses those of the plan.
        sink: attention sink [Hq]; None for none. It is not passed if the normalization stands for it.
    """
    inputs = case.inputs(device)
    with seeded(case.dropout_seed, device):
        out, aux = variant(
            *inputs,
            scale=case.scale,
            enable_gqa=case.heads != case.kv_heads,
            return_aux=_request(case),
            kernel_options=None if block is None else {"BLOCK_M": block[0], "BLOCK_N": block[1]},
            backend=backend,
            sink=sink if case.normalization == "softmax" else None,
            normalization=case.normalization,
            dropout_p=case.dropout_p,
        )
    found = {name: getattr(aux, name) for name in case.results if name != "out"}
    return differentiate(case, {"out": out, **found}, inputs, captured)


def _request(case: Case) -> AuxRequest:
    """Return the request of the statistics that are compared for a case."""
    names = AuxRequest._fields
    return AuxRequest(**{name: True for name in case.results if name in names})


def in_dtype(score: Traced, dtype: torch.dtype) -> Traced:
    """Return `score` with its captured float tensors converted to `dtype`.

    The conversion is part of the autograd graph, so a gradient is summed in `dtype` and rounded
    once to the dtype of the leaf.
    """
    tensors = tuple(t.to(dtype) if t.dtype.is_floating_point else t for t in score.tensors)
    return dataclasses.replace(score, tensors=tensors)


def oracle(call: DenseCall) -> Quantities:
    """Run dense attention in float64 with the user's function; return all results by name."""
    inputs = [t.detach().to(torch.float64).requires_grad_() for t in call.case.inputs(call.device)]
    return _dense(call, inputs)


def dense(call: DenseCall) -> Quantities:
    """Run dense attention in the case's dtype (scores at least float32); return results by name."""
    return _dense(call, call.case.inputs(call.device))


def _dense(call: DenseCall, inputs: Sequence[Tensor]) -> Quantities:
    query, key, value = inputs
    results = plain.attention(
        query,
        key,
        value,
        call.score_mod,
        call.kept,
        scale=call.case.scale,
        sink=call.sink,
        survivors=call.survivors,
        normalization=call.case.kind,
    )
    return differentiate(call.case, by_name(call.case, results), inputs, call.captured)


def by_name(case: Case, dense: plain.DenseResult) -> Quantities:
    """Return the results of dense attention that are compared for a case."""
    found = {**dense._asdict(), "column_sums": dense.weights.sum(2)}
    return {name: found[name] for name in case.results}

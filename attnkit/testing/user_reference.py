"""Compare the oracle with the user's own dense attention (the argument `reference`).

A reference may compute tables in float32 for float64 inputs, so the tolerance is at least that of
float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from attnkit.errors import ArgumentError
from attnkit.testing.quantities import INPUTS, DenseCall, Quantities, dense
from attnkit.testing.report import Row
from attnkit.testing.tolerance import compare

#: reference(query, key, value, scale) -> out, see `check_variant`.
Reference: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def reference_rows(
    reference: Reference,
    call: DenseCall,
    gold: Quantities,
    samples: Sequence[Quantities],
    notes: list[str],
) -> list[Row]:
    """Compare the output and gradients of the user's dense attention with those of the oracle.

    Args:
        reference: the user's function.
        call: the attention call.
        gold: results of the oracle, by name.
        samples: results with rounding errors of the dtype, whose errors set the limits.
        notes: list to which notes on values that are not compared are appended.

    Raises:
        ArgumentError: the result of `reference` is not a tensor of the output's shape.
    """
    case = call.case
    inputs = [t.detach().to(torch.float64).requires_grad_() for t in case.inputs(call.device)]
    key, value = (
        t.expand(case.batch, -1, -1, -1).repeat_interleave(case.heads // case.kv_heads, 1)
        for t in inputs[1:]
    )
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    out = reference(inputs[0], key, value, scale)
    shape = (*case.shapes[0][:3], case.value_dim)
    if not isinstance(out, Tensor) or tuple(out.shape) != shape:
        came = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ArgumentError(
            f"reference must return the output, a tensor of shape {shape}, got {came}"
        )
    results = {"out": out.detach()}
    masked = (
        gold["lse"] == -torch.inf if "lse" in gold else out.new_zeros(shape[:3], dtype=torch.bool)
    )
    if results["out"][masked].isnan().any():
        notes.append(
            "the reference gives NaN in fully masked rows, where attnkit gives 0; such rows, and "
            "gradients of calls with such rows, are not compared with the reference"
        )
        results["out"] = results["out"].masked_fill(masked[..., None], 0.0)
    else:
        results |= _gradients(out, inputs, call, notes)
    expected = {name: gold[name] for name in results}
    narrow = case
    if case.dtype == torch.float64:
        narrow = dataclasses.replace(case, dtype=torch.float32)
        samples = [dense(dataclasses.replace(call, case=narrow))]
    rows = compare(results, expected, samples, narrow, "reference")
    return [dataclasses.replace(row, case=case) for row in rows]


def _gradients(
    out: Tensor, inputs: Sequence[Tensor], call: DenseCall, notes: list[str]
) -> Quantities:
    """Return the gradients of the reference's output by name, for the tensors that it uses."""
    names = [f"d{name}" for name in (*INPUTS, *call.captured.names)]
    targets = [*inputs, *call.captured.tensors]
    cotangent = call.case.cotangents(call.device)[0].to(out.dtype)
    gradients: Sequence[Tensor | None] = [None] * len(targets)
    if out.requires_grad:
        gradients = torch.autograd.grad(out, targets, cotangent, allow_unused=True)
    unused = [name for name, g in zip(names, gradients, strict=True) if g is None]
    if unused:
        notes.append(f"autograd finds no {', '.join(unused)} in the reference: not compared there")
    return {name: g for name, g in zip(names, gradients, strict=True) if g is not None}

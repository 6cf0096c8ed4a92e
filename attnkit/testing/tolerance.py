"""Compare results with the float64 oracle: the error may be at most twice that of dense attention.

The error of dense attention in the same dtype measures the rounding error of that dtype for this
input. If dense attention happens to be (nearly) exact, the limit is a few machine epsilons of the
largest value instead. No limit is tuned to a case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.testing.case import Case
from attnkit.testing.quantities import OUTPUTS, Quantities
from attnkit.testing.report import Row

FACTOR = 2.0
# Factor for gradients of captured tensors with 16-bit inputs. Each backend sums them over many
# scores in its own order, and either the reference or the kernel rounds each term to 16 bits.
CAPTURED_16_BIT_FACTOR = 3.0
ULPS = 4.0


def compare(
    results: Quantities,
    gold: Quantities,
    rough: Sequence[Quantities],
    case: Case,
    backend: str,
) -> list[Row]:
    """Compare the results of a backend with the oracle; return one row for each quantity.

    Args:
        results: results of the backend, by name.
        gold: results of the float64 oracle, by name.
        rough: results with rounding errors of the dtype, whose errors set the limits: the dense
            reference in the case's dtype and results of `rounding` and `shuffled`.
        case: sizes and dtype.
        backend: name of the backend, for the report.
    """
    rows = []
    names = list(gold)
    if gold["out"].isnan().any():  # gradients through a NaN are not meaningful
        names = [name for name in OUTPUTS if name in gold]
    for name in names:
        expected = gold[name].to(torch.float64)
        result, *samples = (r[name].to(torch.float64) for r in (results, *rough))
        comparable = expected.isfinite()
        for sample in samples:
            comparable &= sample.isfinite()
        error = (result - expected).abs().masked_fill(~comparable, 0)
        wrong = comparable & ~result.isfinite()
        if name in OUTPUTS:  # a NaN of the oracle must be a NaN of the backend
            wrong |= expected.isnan() & ~result.isnan()
        error = error.masked_fill(wrong, torch.inf)
        factor, ulp = _limits(name, case, results[name].dtype)
        allowed = ULPS * ulp * float(expected.abs().masked_fill(~comparable, 0).max())
        for sample in samples:
            largest = (sample - expected).abs().masked_fill(~comparable, 0).max()
            allowed = max(allowed, factor * float(largest))
        rows.append(Row(name, backend, float(error.max()), allowed, case, place(error)))
    return rows


def _limits(name: str, case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """Return (factor on the reference's error, machine epsilon) for the quantity `name`."""
    unit = torch.finfo(case.dtype).eps
    base = name.removesuffix(" through lse")
    if base in OUTPUTS or base in ("dquery", "dkey", "dvalue"):
        return FACTOR, unit
    # a gradient is stored in the captured tensor's own dtype
    wide = case.dtype in (torch.float32, torch.float64)
    return FACTOR if wide else CAPTURED_16_BIT_FACTOR, max(unit, torch.finfo(dtype).eps)


def exact(name: str, backend: str, found: Tensor, expected: Tensor, case: Case) -> Row:
    """Compare two tensors that must be equal; the error of the row is the number of differences."""
    differ = (found != expected) & ~(found.isnan() & expected.isnan())
    return Row(name, backend, float(differ.sum()), 0.0, case, place(differ.to(torch.float64)))


def place(error: Tensor) -> str:
    """Return the index of the largest element of `error` as text; "" if all are 0."""
    if error.ndim == 0 or error.numel() == 0 or float(error.max()) == 0:
        return ""
    at = torch.unravel_index(error.argmax(), error.shape)
    return str([int(i) for i in at])

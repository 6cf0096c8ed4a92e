"""How far a result may be from the float64 oracle: twice as far as dense attention in its dtype.

The error of the dense reference says what the dtype can give on this input. Where it happens to be
(nearly) exact, a few units in the last place of the largest value are allowed instead. Nothing is
tuned to a case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.testing.case import Case
from attnkit.testing.quantities import OUTPUTS, Quantities
from attnkit.testing.report import Row

FACTOR = 2.0
# Captured gradients sum over many scores in an order of the backend's own, each rounded to 16 bits
# in the reference but not in the kernel, or the other way around.
CAPTURED_16_BIT_FACTOR = 3.0
ULPS = 4.0


def compare(
    results: Quantities,
    gold: Quantities,
    rough: Sequence[Quantities],
    case: Case,
    backend: str,
) -> list[Row]:
    """Compare the results of a backend with the oracle.

    Args:
        results: of the backend.
        gold: of the float64 oracle.
        rough: samples of what the dtype can give: the dense reference in the case's dtype, and
            the noise of `rounding`.
        case: sizes and dtype.
        backend: for the report.
    """
    rows = []
    names = OUTPUTS if gold["out"].isnan().any() else gold  # a NaN has no gradients to compare
    for name in names:
        expected = gold[name].to(torch.float64)
        found, *samples = (r[name].to(torch.float64) for r in (results, *rough))
        comparable = expected.isfinite()
        for sample in samples:
            comparable &= sample.isfinite()
        error = (found - expected).abs().masked_fill(~comparable, 0)
        wrong = comparable & ~found.isfinite()
        if name in OUTPUTS:  # NaN passes through
            wrong |= expected.isnan() & ~found.isnan()
        error = error.masked_fill(wrong, torch.inf)
        factor, ulp = _limits(name, case, results[name].dtype)
        allowed = ULPS * ulp * float(expected.abs().masked_fill(~comparable, 0).max())
        for sample in samples:
            own = (sample - expected).abs().masked_fill(~comparable, 0).max()
            allowed = max(allowed, factor * float(own))
        rows.append(Row(name, backend, float(error.max()), allowed, case, place(error)))
    return rows


def _limits(name: str, case: Case, dtype: torch.dtype) -> tuple[float, float]:
    """Factor on the reference's error, and the relative unit in the last place."""
    unit = torch.finfo(case.dtype).eps
    base = name.removesuffix(" through lse")
    if base in OUTPUTS or base in ("dquery", "dkey", "dvalue"):
        return FACTOR, unit
    # a gradient is stored in the captured tensor's own dtype
    wide = case.dtype in (torch.float32, torch.float64)
    return FACTOR if wide else CAPTURED_16_BIT_FACTOR, max(unit, torch.finfo(dtype).eps)


def exact(name: str, backend: str, found: Tensor, expected: Tensor, case: Case) -> Row:
    """A row for values that must be equal; the error is the number of differences."""
    differ = (found != expected) & ~(found.isnan() & expected.isnan())
    return Row(name, backend, float(differ.sum()), 0.0, case, place(differ.to(torch.float64)))


def place(error: Tensor) -> str:
    """Index of the largest error, empty if there is none."""
    if error.ndim == 0 or error.numel() == 0 or float(error.max()) == 0:
        return ""
    at = torch.unravel_index(error.argmax(), error.shape)
    return str([int(i) for i in at])

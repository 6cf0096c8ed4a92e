"""Compare results with the float64 oracle: the error may be at most twice that of dense attention.

The error of dense attention in the same dtype measures the rounding error of that dtype for this
input. No limit is tuned to a case.

Each row is compared by itself, so that a wrong small row is found beside large ones. A row is one
query of the output, its statistics and dQ, and one key of column sums, dK and dV. The gradient of a
captured tensor is compared as a whole.

Dense attention may be exact in a row by chance, so a floor is added to a row's limit: `ULPS`
machine epsilons of the row's own largest value, plus as many epsilons of float32 (of float64 for
float64) of the tensor's largest value. The second term is needed because a row can be small by
cancellation: dQ behind tanh is a multiple of 1 - tanh(s)^2, whose rounding error does not shrink
with it. Kernels compute such terms in float32, so for 16-bit tensors that term is small. The limit
of a whole tensor is the larger of both parts, as an error of many numbers is rarely small by
chance.
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
WIDE = torch.float32  # kernels compute in this dtype, or in float64
GRADIENTS = ("dquery", "dkey", "dvalue")


def compare(
    results: Quantities,
    gold: Quantities,
    rough: Sequence[Quantities],
    case: Case,
    backend: str,
) -> list[Row]:
    """Compare the results of a backend with the oracle; return one `Row` for each quantity.

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
        sizes, *errors = (
            _rows(name, t.abs().masked_fill(~comparable, 0)).amax(1)
            for t in (expected, *(s - expected for s in samples))
        )
        measured = torch.stack(errors).amax(0)
        allowed = _allowed(name, case, results[name].dtype, sizes, measured)
        rows.append(_worst(name, backend, error, allowed, case))
    return rows


def _allowed(name: str, case: Case, dtype: torch.dtype, sizes: Tensor, measured: Tensor) -> Tensor:
    """Return the allowed error of each row of a quantity.

    Args:
        name: name of the quantity.
        case: the call.
        dtype: dtype of the quantity.
        sizes: largest value of each row.
        measured: largest error of the reference in each row.
    """
    own, inner = (torch.finfo(t) for t in (case.dtype, torch.promote_types(case.dtype, WIDE)))
    if _has_rows(name):
        # Kernels may flush numbers below `tiny`, so sums lose digits below `tiny / eps`. Results
        # are multiples of the smallest subnormal number.
        underflow = max(inner.tiny / inner.eps, own.tiny * own.eps)
        floor = own.eps * sizes + inner.eps * sizes.max() + underflow
        return FACTOR * measured + ULPS * floor
    # a gradient is stored in the captured tensor's own dtype
    factor = FACTOR if inner.dtype == own.dtype else CAPTURED_16_BIT_FACTOR
    return (factor * measured).maximum(ULPS * max(own.eps, torch.finfo(dtype).eps) * sizes)


def _has_rows(name: str) -> bool:
    """Return whether a quantity has a row for each query or key."""
    return name.partition(" through ")[0] in (*OUTPUTS, *GRADIENTS)


def _rows(name: str, t: Tensor) -> Tensor:
    """Return a quantity as [rows, elements of a row]."""
    if not _has_rows(name):
        return t.reshape(1, -1)
    one = name in OUTPUTS and name != "out"
    return t.reshape(-1, 1) if one else t.reshape(-1, t.shape[-1])


def _worst(name: str, backend: str, error: Tensor, allowed: Tensor, case: Case) -> Row:
    """Return a `Row` for the row with the largest error / allowed.

    Args:
        name: name of the quantity.
        backend: name of the backend.
        error: error of each element.
        allowed: allowed error of each row.
        case: the call.
    """
    elements = _rows(name, error)
    largest, at = elements.max(1)
    ratio = torch.where(largest > 0, largest / allowed, -allowed)  # no error: the strictest row
    among = largest.masked_fill(ratio < ratio.max(), -1)  # several may be infinite
    row = int(among.argmax())
    where = ""
    if error.ndim and largest[row] > 0:
        flat = torch.tensor(row * elements.shape[1]) + at[row].cpu()
        where = str([int(i) for i in torch.unravel_index(flat, error.shape)])
    return Row(name, backend, float(largest[row]), float(allowed[row]), case, where)


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

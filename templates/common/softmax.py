"""Compute the results of a row: the part of the softmax that both forward kernels share."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute

from attnkit.templates.common.constants import LN2, NEG_INF


def row_results(
    total: Float32,
    gap: Float32 | None,
    row_max: Float32 | None,
    highest: Float32,
    factor: Float32 | None,
    lse_term: Float32 | None,
) -> tuple[Float32, Float32, Float32]:
    """Compute the output scale, the LSE and the largest score of a finished row.

    Args:
        total: sum of the row's P.
        gap: correction for roundings, added to `total` where it divides the output; None for 0.
        row_max: the reference that P was computed against; None for none.
        highest: the largest score; read only where the kernel writes the maxima.
        factor: what scores are multiplied by to be in log2 units; None for 1.
        lse_term: what to add to the row's LSE, see `ForwardHooks.lse`; None for nothing.

    Returns:
        What to multiply the output by, the LSE and the largest score, natural units. A fully masked
        row has 0, -inf and -inf.
    """
    masked = total == Float32(0.0)
    divisor = total if gap is None else total + gap
    scale = cutlass.select_(masked, Float32(0.0), cute.arch.rcp_approx(divisor))
    unit = Float32(1.0) if factor is None else factor
    lse = cute.math.log(total)  # once a row: exact, as an LSE may be the result
    if row_max is not None:
        lse = lse + row_max * (unit * LN2)
    if lse_term is not None:
        # The scores lack this term, so that an infinite one shows only here: -inf masks the row,
        # +inf and NaN make it NaN (x - x is 0 for finite x, NaN otherwise).
        wiped = lse_term == Float32(NEG_INF)
        lse = lse + cutlass.select_(wiped, lse_term, lse_term + (lse_term - lse_term))
        spoiled = cutlass.select_(wiped, Float32(0.0), scale + (lse_term - lse_term))
        scale = cutlass.select_(masked | wiped, Float32(0.0), spoiled)
    lse = cutlass.select_(masked, Float32(NEG_INF), lse)
    max_score = highest * unit * LN2
    if lse_term is not None:
        empty = max_score == Float32(NEG_INF)
        max_score = cutlass.select_(empty, max_score, max_score + lse_term)
    return scale, lse, max_score


def largest(values: list[Any], nan: bool) -> Any:
    """Return the largest of Float32 values; NaN passes if `nan`, otherwise it is skipped."""
    most = values[0]
    for x in values[1:]:
        most = cute.arch.fmax(most, x, nan=nan)
    return most

"""Compute the final results of a row, the softmax code that both forward kernels share."""

from __future__ import annotations

from typing import Any, Protocol

import cutlass
from cutlass import Float32, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import LEAST_EXPONENT, LN2, LOG2_E, NEG_INF


def row_results(
    total: Float32,
    gap: Float32 | None,
    row_max: Float32 | None,
    highest: Float32,
    factor: Float32 | None,
    lse_term: Float32 | None,
    sink: Float32 | None = None,
) -> tuple[Float32, Float32, Float32]:
    """Compute the output scale, the LSE and the largest score of a finished row.

    Args:
        total: sum of the row's P.
        gap: rounding correction, added to `total` where it divides the output; None for 0.
        row_max: the row maximum that was subtracted to compute P; None if nothing was subtracted.
        highest: the largest score; used only if the kernel writes the maxima.
        factor: factor that converts scores to log2 units; None for 1.
        lse_term: term to add to the row's LSE, see `ForwardHooks.lse_offset`; None for 0.
        sink: attention sink, one more logit of the row in natural units; None for none.

    Returns:
        The factor of the output, the LSE and the largest score, in natural units. A fully masked
        row has 0, -inf (the sink, if there is one) and -inf.
    """
    if sink is not None:
        scale, lse = _with_sink(total, gap, row_max, factor, lse_term, sink)
        return scale, lse, _max_score(highest, factor, lse_term)
    masked = total == Float32(0.0)
    divisor = total if gap is None else total + gap
    scale = cutlass.select_(masked, Float32(0.0), cute.arch.rcp_approx(divisor))
    unit = Float32(1.0) if factor is None else factor
    lse = cute.math.log(total)  # accurate log: the LSE may be a result, and it is once per row
    if row_max is not None:
        lse = lse + row_max * (unit * LN2)
    if lse_term is not None:
        # The scores lack this term, so that an infinite term takes effect only here: -inf masks the
        # row, +inf and NaN make it NaN (x - x is 0 for finite x, NaN otherwise).
        wiped = lse_term == Float32(NEG_INF)
        lse = lse + cutlass.select_(wiped, lse_term, lse_term + (lse_term - lse_term))
        spoiled = cutlass.select_(wiped, Float32(0.0), scale + (lse_term - lse_term))
        scale = cutlass.select_(masked | wiped, Float32(0.0), spoiled)
    lse = cutlass.select_(masked, Float32(NEG_INF), lse)
    return scale, lse, _max_score(highest, factor, lse_term)


def _max_score(highest: Float32, factor: Float32 | None, lse_term: Float32 | None) -> Float32:
    """Return the largest score of a row in natural units; see `row_results`."""
    max_score = highest * (Float32(1.0) if factor is None else factor) * LN2
    if lse_term is not None:
        empty = max_score == Float32(NEG_INF)
        max_score = cutlass.select_(empty, max_score, max_score + lse_term)
    return max_score


def _with_sink(
    total: Float32,
    gap: Float32 | None,
    row_max: Float32 | None,
    factor: Float32 | None,
    lse_term: Float32 | None,
    sink: Float32,
) -> tuple[Float32, Float32]:
    """Return the factor of the output and the LSE of a row with an attention sink.

    The sum of the scores and the sink are each taken relative to the larger of the sink and the row
    maximum, so that neither overflows. The arguments are those of `row_results`.
    """
    masked = total == Float32(0.0)
    unit = Float32(1.0) if factor is None else factor
    own = Float32(0.0) if row_max is None else row_max * (unit * LN2)  # what `total` is relative to
    if lse_term is not None:
        masked = masked | (lse_term == Float32(NEG_INF))
        own = own + lse_term
    base = cute.arch.fmax(own, sink)
    decay = device.exp2((own - base) * Float32(LOG2_E))
    share = device.exp2((sink - base) * Float32(LOG2_E))
    divisor = total if gap is None else total + gap
    scale = decay * cute.arch.rcp_approx(divisor * decay + share)
    lse = base + cute.math.log(total * decay + share)
    # the sum over no keys is 0, whatever the sink
    return cutlass.select_(masked, Float32(0.0), scale), cutlass.select_(masked, sink, lse)


def row_entropy(
    total: Float32,
    moment: Float32,
    row_max: Float32 | None,
    factor: Float32 | None,
    lse_term: Float32 | None,
    sink: Float32 | None = None,
) -> Float32:
    """Compute the entropy of a finished row in nats: log(total) - ln(2) moment / total.

    The arguments but `moment` are those of `row_results`. A fully masked row has 0.

    Args:
        total: sum of the row's P.
        moment: sum of P log2(P) over the row.
        row_max: the row maximum that was subtracted to compute P; None if nothing was subtracted.
        factor: factor that converts scores to log2 units; None for 1.
        lse_term: term that the scores of the row lack; None for 0.
        sink: attention sink, one more logit of the row in natural units; None for none.
    """
    masked = total == Float32(0.0)
    if lse_term is not None:
        masked = masked | (lse_term == Float32(NEG_INF))
    if sink is not None:
        unit = Float32(1.0) if factor is None else factor
        own = Float32(0.0) if row_max is None else row_max * (unit * LN2)
        own = own if lse_term is None else own + lse_term
        base = cute.arch.fmax(own, sink)
        keys, alone = ((x - base) * Float32(LOG2_E) for x in (own, sink))
        decay, share = device.exp2(keys), device.exp2(alone)
        moment = rescaled_moment(moment, total, keys, decay) + share * at_least(alone)
        total = total * decay + share
    # an accurate log and division: the result may be a difference of nearly equal numbers
    entropy = cute.math.log(total) - moment / total * Float32(LN2)
    entropy = cute.arch.fmax(entropy, Float32(0.0), nan=True)  # a rounded difference may be below 0
    if lse_term is not None:
        entropy = entropy + (lse_term - lse_term)  # +inf and NaN make the row NaN
    return cutlass.select_(masked, Float32(0.0), entropy)


def at_least(exponent: Float32) -> Float32:
    """Return `exponent` clamped, so that its product with 2**exponent is 0 for -inf."""
    return cute.arch.fmax(exponent, Float32(LEAST_EXPONENT))


def rescaled_moment(moment: Float32, total: Float32, change: Float32, scale: Float32) -> Float32:
    """Return the sum of P log2(P) after each P was multiplied by `scale` = 2**`change`.

    Args:
        moment: sum of P log2(P).
        total: sum of P, before it is multiplied.
        change: logarithm of the scale in base 2, which may be -inf.
        scale: the factor of P.
    """
    return (moment + at_least(change) * total) * scale


class StatisticsConfig(Protocol):
    """Describes the fields of a forward's config that `write_statistics` reads."""

    @property
    def need_max(self) -> bool: ...
    @property
    def need_entropy(self) -> bool: ...


def write_statistics(config: StatisticsConfig, to: cute.Tensor, row: tuple, values: tuple) -> None:
    """Write the statistics of a row that the config needs.

    Args:
        config: the config of the forward.
        to: f32 [B, H, S] of maxima. With `need_entropy`, f32 [1 or 2, B, H, S]: entropies, then
            maxima if needed.
        row: batch element, head and row.
        values: largest score and entropy of the row.
    """
    max_score, entropy = values
    if config.need_entropy:
        to[(0, *row)] = entropy
        if config.need_max:
            to[(1, *row)] = max_score
    elif config.need_max:
        to[row] = max_score


def own_sink(sink: Float32 | None, split_slot: Any) -> Float32 | None:
    """Return the sink to add in the epilogue of a work tile; None if there is none.

    It is -inf for a part of split rows, because `Combine` adds the sink to the merged row.

    Args:
        sink: result of the hook `sink`.
        split_slot: slot of the part, negative for a whole row.
    """
    if sink is None:
        return None
    return cutlass.select_(split_slot >= 0, Float32(NEG_INF), sink)


def largest(values: list[Any], nan: bool) -> Any:
    """Return the largest of `values` (Float32); `nan` propagates NaN instead of skipping it."""
    most = values[0]
    for x in values[1:]:
        most = cute.arch.fmax(most, x, nan=nan)
    return most

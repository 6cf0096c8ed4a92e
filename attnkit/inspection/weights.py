"""Describe what makes the weights of a call: normalization, sink, dropout, and its statistics."""

from __future__ import annotations

from collections.abc import Iterator

from attnkit.util.arguments import AuxRequest
from attnkit.util.dropout import STEPS, threshold_of

_FORMULAS = {
    "softmax": "weight = exp(s) / sum(exp(s)), over the keys that the mask keeps",
    "sink": "weight = exp(s) / (exp(sink[h]) + sum(exp(s))), over the keys that the mask keeps",
    "softmax1": "weight = exp(s) / (1 + sum(exp(s))), over the keys that the mask keeps",
    "sigmoid": "weight = 1 / (1 + exp(-s)), 0 where masked; d weight / d s = weight * (1 - weight)",
    "none": "weight = s, 0 where masked",
}


def describe_weights(
    normalization: str = "softmax",
    has_sink: bool = False,
    dropout_p: float = 0.0,
    aux: AuxRequest | None = None,
) -> str:
    """Format what makes the weights of the modified scores s, and what statistics cost.

    Args:
        normalization, dropout_p: as in `flex_attention`.
        has_sink: whether there is an attention sink.
        aux: the auxiliary outputs; None for none.

    >>> print(describe_weights("softmax1"))
    weight = exp(s) / (1 + sum(exp(s))), over the keys that the mask keeps
    """
    lines = [_FORMULAS["sink" if has_sink and normalization == "softmax" else normalization]]
    threshold = threshold_of(dropout_p)
    if threshold:
        lines.append(
            f"dropout: a weight is dropped with probability {threshold}/{STEPS}, or else "
            f"multiplied by {STEPS}/{STEPS - threshold}; statistics do not change"
        )
    return "\n".join([*lines, *(() if aux is None else _statistics(aux))])


def _statistics(aux: AuxRequest) -> Iterator[str]:
    rows = [n for n in ("lse", "max_scores", "max_logits", "entropy") if getattr(aux, n)]
    if rows:
        yield f"{', '.join(rows)}: of the same pass"
    if aux.column_sums:
        yield (
            "column_sums: a second pass over the tiles, one more product of query and key in torch "
            "operators; two of them, and those of the gradients, in the backward"
        )

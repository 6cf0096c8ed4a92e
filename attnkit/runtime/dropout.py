"""Draw the random state of a call's dropout."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnkit.util.dropout import draw_state, threshold_of


def state_of(dropout_p: Any, query: Any) -> Tensor | None:
    """Return the random state of a call, int64 [2] on the device of the query; None for none.

    Args:
        dropout_p: the argument of `flex_attention`, unchecked.
        query: the query, unchecked.

    Raises:
        ArgumentError, OptionError: `dropout_p` is not a number in [0, 1).
        UnsupportedError: torch cannot draw random numbers here.
    """
    if not isinstance(query, Tensor):
        threshold_of(dropout_p)
        return None  # the call refuses this query
    return draw_state(dropout_p, query.device)

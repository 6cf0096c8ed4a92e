"""Draw the random state of a call's dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnkit.util.dropout import draw_state, threshold_of


@dataclass(frozen=True, eq=False)
class Drawn:
    """Stands for `dropout_p` in a call whose caller has drawn the state, to keep it.

    Attributes:
        state: a result of `state_of`, not None.
    """

    state: Tensor


def state_of(dropout_p: Any, query: Any) -> Tensor | None:
    """Return the random state of a call, int64 [2] on the device of the query; None for none.

    Args:
        dropout_p: the argument of `flex_attention`, unchecked; or a `Drawn`.
        query: the query, unchecked.

    Raises:
        ArgumentError, OptionError: `dropout_p` is not a number in [0, 1).
        UnsupportedError: torch cannot draw random numbers here.
    """
    if isinstance(dropout_p, Drawn):
        return dropout_p.state
    if not isinstance(query, Tensor):
        threshold_of(dropout_p)
        return None  # the call refuses this query
    return draw_state(dropout_p, query.device)

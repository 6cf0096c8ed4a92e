"""Sum the gradient of an attention sink from the parts that the preprocess kernel writes.

Each warp of that kernel writes the sum over its rows. Torch adds the parts in a fixed order, so the
gradient has the same bits at every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from attnkit.splice.backward_template import BackwardSettings
from attnkit.splice.replay import Replay

# Function that relaunches a backward, as `Replay` does; the gradient of a sink is the last.
RepeatedBackward: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor] | None]

_WARP_ROWS = 16  # rows of a warp of the preprocess


def parts_shape(settings: BackwardSettings, query: Tensor) -> tuple[int, int, int]:
    """Return the shape of the parts of the gradient: [B, Hq, warps of the preprocess]."""
    batch, heads, length = query.shape[:3]
    rows = settings.block[0]
    return batch, heads, -(-length // rows) * (rows // _WARP_ROWS)


def sum_parts(parts: Tensor) -> Tensor:
    """Return the float32 gradient [Hq], the sum of its parts."""
    return parts.sum((0, 2))


def summed(replay: Replay | None) -> RepeatedBackward | None:
    """Return a function that relaunches a backward, and sums the parts of the sink's gradient.

    `replay` returns dQ, dK, dV, the parts, and the gradients of the score's tensors. The function
    returns dQ, dK, dV, the gradients of the score's tensors, and that of the sink.
    """
    if replay is None:
        return None

    def run(inputs: Sequence[Tensor]) -> list[Tensor] | None:
        found = replay(inputs)
        if found is None:
            return None
        dq, dk, dv, parts, *totals = found
        return [dq, dk, dv, *totals, sum_parts(parts)]

    return run

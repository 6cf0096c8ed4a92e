"""Sum values whose weights are the modified scores, without a softmax.

No score needs the others of its row. The gradient of a modified score is dP = dO v^T where the mask
keeps it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class WeightedSum:
    """Accumulates the values of some rows, multiplied by their weights."""

    def __init__(self, survivor_scale: Tensor | None = None) -> None:
        self._survivor_scale = survivor_scale  # of the weights that dropout keeps
        self._acc: Tensor | None = None  # [lanes, rows, Dv]

    def add(self, weights: Tensor, v: Tensor, survivors: Tensor | None = None) -> None:
        """Add the weights [lanes, rows, width], 0 where masked, times their values `v`.

        `survivors` are the weights that dropout keeps, bool, None for all; it drops in place.
        """
        if survivors is not None:
            weights.mul_(survivors)
        self._acc = torch.bmm(weights, v) if self._acc is None else self._acc.baddbmm_(weights, v)

    def finish(self, out: Tensor) -> None:
        """Write the sums to `out` [nb, nh, rows, Dv]; 0 for rows without keys."""
        if self._acc is None:
            out.zero_()
            return
        if self._survivor_scale is not None:
            self._acc.mul_(self._survivor_scale)
        out.copy_(self._acc.view(out.shape))

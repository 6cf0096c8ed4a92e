"""Compute dS of the Hopper backward if the derivative of the mod is a learned factor of the row.

Gradients of the modified scores are dF = P (dP - delta). dK gets dS = J dF from registers, where J
is the factor of the row, and dQ gets dF from shared memory: `backward_row_factors` multiplies dQ by
J, and finds the gradient of J without work per score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.sm90.dropout import BackwardDropout


@dataclass(frozen=True)
class RowSlopes:
    """Computes dS and dF.

    Attributes:
        hooks: hooks of the variant.
        dtype: dtype of the operands.
    """

    hooks: BackwardHooks
    dtype: Any

    def allocate(self, scores: cute.Tensor) -> cute.Tensor | None:
        """Return registers for J of a thread's rows, f32 [rows]; None without `row_factors`."""
        if not self.hooks.row_factors:
            return None
        return cute.make_rmem_tensor(cute.size(scores) // 2, Float32)

    def compute_ds(
        self,
        probs: cute.Tensor,
        dp: cute.Tensor,
        factors: cute.Tensor,
        ds: cute.Tensor,
        p: cute.Tensor,
        dropout: BackwardDropout | None,
    ) -> cute.Tensor:
        """Compute dS into `ds`, the operand of dK; return dF, the operand of dQ.

        Args:
            probs: f32 P.
            dp: f32 dP - delta.
            factors: f32 J of the thread's rows.
            ds: dS in the dtype, written.
            p: P in the dtype, which loses the elements that are dropped.
            dropout: drops elements; None without dropout.
        """
        df = cute.make_rmem_tensor(ds.layout, self.dtype)  # dtype [64, block_q] / 128 threads
        results, pairs = cute.recast_tensor(ds, Int32), cute.recast_tensor(df, Int32)
        packed = cute.recast_tensor(p, Int32)
        for i in range(0, cute.size(dp), 2):  # two rows of a column
            low, high = dp[i], dp[i + 1]
            if dropout is not None:
                low, high = dropout.dp(i, low, high)
                packed[i // 2] = dropout.p(i, packed[i // 2])
            low, high = probs[i] * low, probs[i + 1] * high
            pairs[i // 2] = device.pack(low, high, self.dtype)
            row = 2 * (i // 4)
            low, high = low * factors[row], high * factors[row + 1]
            results[i // 2] = device.pack(low, high, self.dtype)
        return df

"""Subtract LSE and delta of the rows in an extra k-step of the MMAs; see `common.lse_in_mma`."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute

from attnkit.templates.common.lse_in_mma import CORE_WORDS, nonzero_scale, write_factor
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_config import BackwardConfig


class LseInMma:
    """Writes the extra columns of K and V, and issues the extra k-step.

    Args:
        config: `less_lse` and `less_delta` say which MMAs have an extra k-step.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config

    def scale(self, scale: Float32) -> Any:
        """Return `scale`, or `nonzero_scale(scale)` if the MMA divides LSE by it."""
        return nonzero_scale(scale) if self.config.less_lse else scale

    def statistics(self, lse: cute.Tensor, delta: cute.Tensor, stage: Int32, row0: Int32) -> Any:
        """Return LSE and -delta of the thread's rows, each None if the MMAs subtract it.

        Args:
            lse, delta: statistics in shared memory, with the layouts of `layouts`.
            stage: stage of the q block.
            row0: the thread's first row within the block.

        Returns:
            f32 [block_q / 2] each, in shared memory.
        """
        c = self.config
        return (
            None if c.less_lse else self._rows(lse, stage, row0),
            None if c.less_delta else self._rows(delta, stage, row0),
        )

    def _rows(self, statistic: cute.Tensor, stage: Int32, row0: Int32) -> cute.Tensor:
        start = statistic.iterator + (stage * self.config.block_q + row0)
        return cute.make_tensor(start.align(16), cute.make_layout(self.config.block_q // 2))

    def layouts(self) -> tuple[Any, Any]:
        """Return the layouts of LSE and delta in shared memory, [words of the rows, stages]."""
        c = self.config
        (lse, delta), rows = c.words, c.block_q // c.ctas
        plain = cute.make_layout((c.block_q, c.q_stages))
        return (
            cute.make_layout((rows * lse, 1 if c.two_cta else c.q_stages)) if c.less_lse else plain,
            cute.make_layout((rows * delta, c.stages)) if c.less_delta else plain,
        )

    def write_factors(self, start: cute.Pointer, scale: Float32) -> None:
        """Write the extra columns of K and of V, one core matrix each, from one warp."""
        for i, x in enumerate((Float32(0.5) / self.scale(scale), Float32(0.5))):
            write_factor(start + i * CORE_WORDS, x)
        # the tensor cores read the columns by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def subtract(self, out: Int32, factors: Int32, rows: Int32) -> None:
        """Issue the extra k-step that subtracts a statistic from S^T = K Q^T or dP^T = V dO^T.

        Args:
            out: tensor-memory address of S^T or dP^T.
            factors, rows: shared addresses of the extra columns of K or V, and of Q or dO.
        """
        c = self.config
        device.issue_mma(
            out,
            factors >> 4,
            rows >> 4,
            device.instruction_descriptor(c.ctas * c.rows_kv, c.block_q, BFloat16),
            True,
            a_in_tmem=False,
            ctas=c.ctas,
            # stride 0: one core matrix represents all rows of K or V
            strides=(0, 4 * CORE_WORDS),
        )

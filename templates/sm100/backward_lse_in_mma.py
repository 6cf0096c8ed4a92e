"""LSE and delta of the rows as one more step of the products; see `common.lse_in_mma`."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, cute

from attnkit.templates.common.lse_in_mma import CORE_WORDS, nonzero_scale, write_factor
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_config import BackwardConfig


class LseInMma:
    """Writes the factors of the step and issues it.

    Args:
        config: `less_lse` and `less_delta` say which products have such a step.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config

    def scale(self, scale: Any) -> Any:
        """Return the softmax scale by which LSE was divided."""
        return nonzero_scale(scale) if self.config.less_lse else scale

    def statistics(self, lse: cute.Tensor, delta: cute.Tensor, stage: Any, row0: Any) -> Any:
        """Return LSE and -delta of the thread's rows; None for what the products subtract.

        Args:
            lse, delta: in shared memory, of `layouts`.
            stage: of the q block.
            row0: the thread's first row within the block.

        Returns:
            f32 [block_q / 2] each, in shared memory.
        """
        c = self.config
        return (
            None if c.less_lse else self._rows(lse, stage, row0),
            None if c.less_delta else self._rows(delta, stage, row0),
        )

    def _rows(self, statistic: cute.Tensor, stage: Any, row0: Any) -> cute.Tensor:
        start = statistic.iterator + (stage * self.config.block_q + row0)
        return cute.make_tensor(start.align(16), cute.make_layout(self.config.block_q // 2))

    def layouts(self) -> tuple[Any, Any]:
        """Return layouts of LSE and delta in shared memory, [words of the rows, stages]."""
        c = self.config
        (lse, delta), rows = c.words, c.block_q // c.ctas
        plain = cute.make_layout((c.block_q, c.q_stages))
        return (
            cute.make_layout((rows * lse, 1 if c.two_cta else c.q_stages)) if c.less_lse else plain,
            cute.make_layout((rows * delta, c.stages)) if c.less_delta else plain,
        )

    def write_factors(self, start: cute.Pointer, scale: Any) -> None:
        """Write the columns of K and of V, a core matrix each, by one warp."""
        for i, x in enumerate((Float32(0.5) / self.scale(scale), Float32(0.5))):
            write_factor(start + i * CORE_WORDS, x)
        # the tensor cores read them by the async proxy
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def subtract(self, out: Any, factors: Any, rows: Any) -> None:
        """Add the step of a statistic to a product of rows of K or V with those of Q or dO.

        Args:
            out: tensor-memory address of the product.
            factors, rows: shared addresses of the columns of K or V, and of Q or dO.
        """
        c = self.config
        device.multiply(
            out,
            factors >> 4,
            rows >> 4,
            device.shape(c.ctas * c.rows_kv, c.block_q, BFloat16),
            True,
            in_tensor=False,
            ctas=c.ctas,
            # strides of zero: all of K's or V's core matrices are one
            strides=(0, 4 * CORE_WORDS),
        )

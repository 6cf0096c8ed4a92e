"""LSE and delta of the rows as one more step of the products; see `common.lse_in_mma`."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, cute

from attnkit.templates.common.lse_in_mma import CORE_WORDS, nonzero_scale, write_factor
from attnkit.templates.sm100 import backward_device as device


class Rows:
    """The part of a backward kernel that has the statistics in its products."""

    config: Any

    def score_scale(self, scale: Any) -> Any:
        """The softmax scale as LSE was divided by it."""
        return nonzero_scale(scale) if self.config.less_lse else scale

    def statistics(self, stats: Any, stage: Any, row0: Any) -> tuple[Any, Any]:
        """LSE and -delta of the thread's rows, in shared memory; None for what the products have."""
        c = self.config
        return (
            None if c.less_lse else self.part(stats[0], stage, row0),
            None if c.less_delta else self.part(stats[1], stage, row0),
        )

    def part(self, statistic: Any, stage: Any, row0: Any) -> Any:
        """A statistic of the thread's rows, in shared memory."""
        start = statistic.iterator + (stage * self.config.block_q + row0)
        return cute.make_tensor(start.align(16), cute.make_layout(self.config.block_q // 2))

    def rows_layouts(self) -> tuple[Any, Any]:
        """Layouts of the statistics in shared memory, a stage a column."""
        c = self.config
        (lse, delta), rows = c.words, c.block_q // c.ctas
        plain = cute.make_layout((c.block_q, c.q_stages))
        return (
            cute.make_layout((rows * lse, 1 if c.pair else c.q_stages)) if c.less_lse else plain,
            cute.make_layout((rows * delta, c.stages)) if c.less_delta else plain,
        )

    def write_factors(self, start: Any, scale: Any) -> None:
        """The columns of K and of V, a core matrix each, by one warp."""
        for i, x in enumerate((Float32(0.5) / self.score_scale(scale), Float32(0.5))):
            write_factor(start + i * CORE_WORDS, x)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def subtract(self, out: Any, factors: Any, rows: Any) -> None:
        """Add the step of a statistic to a product of rows of K or V with those of Q or dO."""
        c = self.config
        device.multiply(
            out,
            factors >> 4,
            rows >> 4,
            device.shape(c.ctas * c.rows_kv, c.block_q, BFloat16),
            True,
            in_tensor=False,
            ctas=c.ctas,
            strides=(0, 4 * CORE_WORDS),
        )

"""S less LSE / scale by one more step of its products, in the Hopper backward.

See `common.lse_in_mma` for the columns. Where a mod adds slope * (kv - q), as ALiBi does, the same
step adds -slope / scale * v as well, where v is a row's position in the q block: what is left of
the distance is the same for a whole column of the tile (`backward_distance`). v is exact in
bfloat16. K's columns are then a0 a0 a1 a0 a1 a2 t0 t1 0 0 0 0 0 0 t2 0, of a = 1 / scale and of
t = -slope / scale. They change with the head, so that they are an operand in registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import LOG2_E
from attnkit.templates.common.lse_in_mma import (
    ROW_WORDS,
    factor_columns,
    nonzero_scale,
    split_bfloat16,
    write_factor,
)
from attnkit.templates.sm90.backward_config import ROWS


class LessLse:
    """The part of a backward kernel that subtracts LSE from the scores by their product."""

    config: Any
    hooks: Any
    inclined: bool  # and adds -slope / scale * v

    def score_scale(self, scale: Any) -> Any:
        """The softmax scale as LSE was divided by it."""
        return nonzero_scale(scale) if self.config.less_lse else scale

    @cute.jit
    def write_factors(self, start: cute.Pointer, scale: Float32, warp: Int32):
        """K's columns, by one warp."""
        if warp == 1:
            write_factor(start, Float32(0.5) / self.score_scale(scale))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()

    def incline(self, step: tuple, site: Any) -> None:
        """Write K's columns of a head with a slope to registers."""
        slope = self.hooks.distance(site, self.hooks.head(site))
        one = Float32(1.0) / site.scale
        t = split_bfloat16(-slope * one * Float32(1.0 / LOG2_E))
        words = factor_columns(split_bfloat16(one), t[:2])
        lane = cute.arch.lane_idx() % ROW_WORDS
        low, high = words[0], device.pack(t[2], Float32(0.0), BFloat16)
        for k in range(1, ROW_WORDS):
            low = cutlass.select_(lane == k, words[k], low)
        high = cutlass.select_(lane == ROW_WORDS - 1, high, Int32(0))
        out = cute.recast_tensor(step[0], Int32)
        for i in range(2):  # rows 8 apart
            out[i], out[2 + i] = low, high

    def step_of_lse(self, mma: Any, start: Any, lse: Any) -> tuple[Any, Any]:
        """The operands of the step: K's columns, and Q's by stage.

        Args:
            mma: products of bfloat16, with K's columns in registers if `inclined`.
            start: where these are in shared memory otherwise.
            lse: the statistics, a stage a column.
        """
        c, thr = self.config, mma.get_slice(0)
        rows = c.block_q // 8
        own = cute.make_layout(((8, ROWS // 8), (8, 2), 1), stride=((8, 0), (1, 0), 0))
        all_rows = cute.make_layout(
            ((8, rows), (8, 2), c.q_stages), stride=((8, 64), (1, 0), 64 * rows)
        )
        of_k, of_q = (
            cute.make_tensor(cute.recast_ptr(at.align(128), dtype=BFloat16), layout)
            for at, layout in ((start, own), (lse.iterator, all_rows))
        )
        if self.inclined:
            a = cute.make_rmem_tensor(thr.partition_shape_A((ROWS, 16)), BFloat16)[None, None, 0]
        else:
            a = mma.make_fragment_A(thr.partition_A(of_k))[None, None, 0, 0]
        return a, mma.make_fragment_B(thr.partition_B(of_q))[None, None, 0, None]

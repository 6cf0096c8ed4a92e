"""Subtract LSE / scale from S inside its MMA, with one extra k-step, in the Hopper backward.

See `common.lse_in_mma` for the extra columns. If a mod adds slope * (kv - q), as ALiBi does, the
same k-step also adds -slope / scale * v, where v is a row's position in the q block. v is exact in
bfloat16. The rest of the distance is the same for a whole column of the block (`backward_alibi`).
K's extra columns are then a0 a0 a1 a0 a1 a2 t0 t1 0 0 0 0 0 0 t2 0, for a = 1 / scale and
t = -slope / scale. They depend on the head, and therefore are an operand in registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import LOG2_E
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.lse_in_mma import (
    ROW_WORDS,
    factor_columns,
    nonzero_scale,
    split_bfloat16,
    write_factor,
)
from attnkit.templates.common.site import Site
from attnkit.templates.sm90.backward_config import ROWS, BackwardConfig

STEP = 16  # columns of a k-step
FACTOR_WARP = 1  # the warp that writes K's extra columns


class LseInMma:
    """Writes the extra columns of K, and creates the operands of the extra k-step.

    Args:
        config: `less_lse` says whether there is an extra k-step.
        hooks: hooks of the variant; its `distance_term` may give a slope.
    """

    def __init__(self, config: BackwardConfig, hooks: BackwardHooks) -> None:
        self.config = config
        self.hooks = hooks
        self.with_slope = config.less_lse and hooks.has_distance_term

    def scale(self, scale: Any) -> Any:
        """Return `scale`, or `nonzero_scale(scale)` if LSE or a bias is divided by it."""
        divides = self.config.less_lse or self.config.bias_first
        return nonzero_scale(scale) if divides else scale

    @cute.jit
    def write_factors(self, start: cute.Pointer, scale: Float32, warp: Int32):
        """Write K's extra columns to shared memory, by warp `FACTOR_WARP`; not with a slope."""
        if warp == FACTOR_WARP:
            write_factor(start, Float32(0.5) / self.scale(scale))
            # the tensor cores read the columns by the async proxy
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()

    def write_slope(self, k_columns: cute.Tensor, site: Site) -> None:
        """Write K's extra columns of a head with a slope to `k_columns`, bf16 [64, 16] / 128."""
        slope = self.hooks.distance_term(site, self.hooks.head(site))
        inverse = Float32(1.0) / site.scale
        t = split_bfloat16(-slope * inverse * Float32(1.0 / LOG2_E))
        words = factor_columns(split_bfloat16(inverse), t[:2])
        lane = cute.arch.lane_idx() % ROW_WORDS
        low, high = words[0], device.pack(t[2], Float32(0.0), BFloat16)
        for k in range(1, ROW_WORDS):
            low = cutlass.select_(lane == k, words[k], low)
        high = cutlass.select_(lane == ROW_WORDS - 1, high, Int32(0))
        out = cute.recast_tensor(k_columns, Int32)
        for i in range(2):  # rows 8 apart
            out[i], out[2 + i] = low, high

    def operands(self, mma: Any, factors: Any, lse: cute.Tensor) -> tuple[Any, Any]:
        """Return the operands of the extra k-step: K's columns, and Q's columns by stage.

        Args:
            mma: the bfloat16 MMA, with K's columns in registers if `with_slope`.
            factors: pointer to K's columns in shared memory, used unless `with_slope`.
            lse: words of the rows' columns in shared memory, [words, stages].
        """
        c, thr = self.config, mma.get_slice(0)
        cores = c.block_q // 8
        # strides of zero repeat one core matrix for all rows of K, and a row's first eight columns
        of_k = cute.make_layout(((8, ROWS // 8), (8, 2), 1), stride=((8, 0), (1, 0), 0))
        of_q = cute.make_layout(
            ((8, cores), (8, 2), c.q_stages), stride=((8, 64), (1, 0), 64 * cores)
        )
        k_smem, q_smem = (  # bf16 [64, 16, 1], bf16 [block_q, 16, stages]
            cute.make_tensor(cute.recast_ptr(at.align(128), dtype=BFloat16), layout)
            for at, layout in ((factors, of_k), (lse.iterator, of_q))
        )
        if self.with_slope:
            shape = thr.partition_shape_A((ROWS, STEP))
            a = cute.make_rmem_tensor(shape, BFloat16)[None, None, 0]  # bf16 [64, 16] / 128 threads
        else:
            a = mma.make_fragment_A(thr.partition_A(k_smem))[None, None, 0, 0]
        return a, mma.make_fragment_B(thr.partition_B(q_smem))[None, None, 0, None]

"""Subtract LSE / scale from S inside its product, by one more step, in the Hopper backward.

See `common.lse_in_mma` for the columns. Where a mod adds slope * (kv - q), as ALiBi does, the same
step also adds -slope / scale * v, where v is a row's position in the q block. The rest of the
distance is the same for a whole column of the block (`backward_alibi`). v is exact in bfloat16. K's
columns are then a0 a0 a1 a0 a1 a2 t0 t1 0 0 0 0 0 0 t2 0, of a = 1 / scale and of
t = -slope / scale. They change with the head, so they are an operand in registers.
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

STEP = 16  # columns of a step of a product
FACTOR_WARP = 1  # the warp that writes K's columns


class LseInMma:
    """Writes the extra columns of K, and creates the operands of the extra step.

    Args:
        config: `less_lse` says whether there is such a step.
        hooks: the variant; its `distance` may give a slope.
    """

    def __init__(self, config: BackwardConfig, hooks: BackwardHooks) -> None:
        self.config = config
        self.hooks = hooks
        self.with_slope = config.less_lse and hooks.has_distance_term

    def scale(self, scale: Any) -> Any:
        """Return the softmax scale by which LSE was divided."""
        return nonzero_scale(scale) if self.config.less_lse else scale

    @cute.jit
    def write_factors(self, start: cute.Pointer, scale: Float32, warp: Int32):
        """Write K's columns to shared memory, by warp `FACTOR_WARP`; not for `with_slope`."""
        if warp == FACTOR_WARP:
            write_factor(start, Float32(0.5) / self.scale(scale))
            # the tensor cores read it by the async proxy
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()

    def write_slope(self, k_columns: cute.Tensor, site: Site) -> None:
        """Write K's columns of a head with a slope to registers, bf16 [64, 16] / 128 threads."""
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
        """Return the operands of the step: K's columns, and Q's by stage.

        Args:
            mma: products of bfloat16, with K's columns in registers if `with_slope`.
            factors: pointer to K's columns in shared memory otherwise.
            lse: words of the rows' columns in shared memory, [words, stages].
        """
        c, thr = self.config, mma.get_slice(0)
        cores = c.block_q // 8
        # strides of zero repeat one core matrix for all of K, and a row's first half as its second
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

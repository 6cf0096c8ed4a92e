"""LSE and delta of the rows as one more step of the products.

A thread of the computing warps has one kv position, or two, and needs the statistics of many rows,
which it would read from shared memory one by one. Instead S^T = K Q^T gets 16 more columns of K and
of Q whose products sum to -LSE / scale, and where the config says so dP^T = V dO^T others for
-delta: then P = 2**(factor S), dS = P dP, and nobody reads these statistics.

A float32 number x is the sum of three bfloat16 numbers x0 + x1 + x2, to its last bit. A row of Q's
columns is x0 x1 x0 x2 x1 x0 v v of -LSE, where v is its place in the q tile, one of K's
a0 a0 a1 a0 a1 a2 0 0 of a = 1 / (2 scale): the products that are left out are below 2**-24 of the
largest. The step has 16 columns, of which the last eight are the first eight once more, hence the
half. These columns are bfloat16 whatever the dtype of the tensors.

In shared memory they are core matrices without swizzle, eight rows of eight columns in 128 bytes.
All rows of K's columns are equal, so that one core matrix, with strides of zero, is all of them.

Where a mod adds slope * (kv - q), as ALiBi does, the same step adds -slope / scale * v, and what is
left of the distance is the same for a whole column of the tile (`backward_distance`). v is exact in
bfloat16. K's columns are then a0 a0 a1 a0 a1 a2 t0 t1 0 0 0 0 0 0 t2 0, of a = 1 / scale and of
t = -slope / scale. They change with the head, so that they are an operand in registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from attnkit.templates.common import device
from attnkit.templates.sm90.backward_config import ROWS
from attnkit.templates.sm90.backward_edges import Prepare, store_vector
from attnkit.templates.sm90.backward_math import LOG2_E

WORDS = 4  # 32-bit words of a row: eight columns
CORE = 8 * WORDS  # of a core matrix
LEAST = 2.0**-60  # scales nearer to zero are taken for this: S * scale rounds to nothing


def parts(x: Any) -> tuple[Any, Any, Any]:
    """Three float32 that bfloat16 can hold and that sum to x."""
    found, rest = [], x
    for _ in range(3):
        word = device.pack(rest, Float32(0.0), BFloat16)
        one = cute.arch.inline_ptx(
            "shl.b32 {$w0}, {$r0}, 16;", write_only_types=[Float32], read_only_args=[word]
        )
        found.append(one)
        rest = rest - one
    return found[0], found[1], found[2]


def columns(x: tuple[Any, Any, Any], factor: bool, last: Any = (0.0, 0.0)) -> list[Any]:
    """The eight columns of a number by its parts, two a word; `factor`: those of K and V."""
    order = (x[0], x[0], x[1], x[0], x[1], x[2]) if factor else (x[0], x[1], x[0], x[2], x[1], x[0])
    pairs = ((order[0], order[1]), (order[2], order[3]), (order[4], order[5]), last)
    return [device.pack(Float32(low), Float32(high), BFloat16) for low, high in pairs]


def away_from_zero(scale: Any) -> Any:
    """A scale that can be divided by."""
    small = cutlass.max(scale, -scale) < Float32(LEAST)
    return cutlass.select_(small, Float32(LEAST), scale)


def write_factor(start: Any, x: Any) -> None:
    """The columns of K or V, one core matrix, by one warp; a fence must follow."""
    lane = cute.arch.lane_idx()
    word, own = columns(parts(x), True), Int32(0)
    for k in range(3):
        own = cutlass.select_(lane % WORDS == k, word[k], own)
    (start + lane).store(own)


class PrepareColumns(Prepare):
    """`Prepare` where LSE or delta, or both, are columns of the products, as the config says."""

    config: Any

    def put(
        self, at: Any, less: Any, statistic: Any, delta: Any, rows_lse: Any, rows_delta: Any
    ) -> None:
        """Write what the products subtract as columns, the rest as numbers."""
        if self.config.less_lse:
            self.write_columns(rows_lse, at, less)
        else:
            rows_lse[at] = statistic
        if self.config.less_delta:
            self.write_columns(rows_delta, at, delta)
        else:
            rows_delta[at] = delta

    def write_columns(self, rows: Any, at: Any, value: Any) -> None:
        """The columns of a row."""
        v = Float32(at % self.config.block_q)
        store_vector(rows.iterator + at * WORDS, columns(parts(value), False, (v, v)))


class LessLse:
    """The part of a backward kernel that subtracts LSE from the scores by their product."""

    config: Any
    hooks: Any
    inclined: bool  # and adds -slope / scale * v

    def score_scale(self, scale: Any) -> Any:
        """The softmax scale as LSE was divided by it."""
        return away_from_zero(scale) if self.config.less_lse else scale

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
        t = parts(-slope * one * Float32(1.0 / LOG2_E))
        words = columns(parts(one), True, t[:2])
        lane = cute.arch.lane_idx() % WORDS
        low, high = words[0], device.pack(t[2], Float32(0.0), BFloat16)
        for k in range(1, WORDS):
            low = cutlass.select_(lane == k, words[k], low)
        high = cutlass.select_(lane == WORDS - 1, high, Int32(0))
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

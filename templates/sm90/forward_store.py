"""What leaves the Hopper forward: output tiles, the rows' statistics, tiles that keep nothing."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import LN2, NEG_INF
from attnkit.templates.sm90.forward_load import LIVE
from attnkit.templates.sm90.softmax import row_of

STORE = 5  # the first of the named barriers for the warpgroups' output tiles
VECTOR = 8  # elements of 16 bytes


class ForwardStores:
    """The part of a forward kernel that writes."""

    config: Any
    dtype: Any
    factor: Any

    def conclude(self, tile: Any, terms: Any, stats: Any, results: Any, place: Any) -> None:
        """Write the rows' statistics; `scale` is what the output is to be multiplied by.

        Args:
            terms: what the rows' LSE have beyond the softmax, or None.
        """
        row_max, row_sum, scale, highest = stats
        factor = self.factor(tile)
        for r in range(2):
            total = device.quad_sum(row_sum[r])
            dead = total == Float32(0.0)
            scale[r] = cutlass.select_(dead, Float32(0.0), cute.arch.rcp_approx(total))
            unit = Float32(1.0) if factor is None else factor
            term = terms[r]
            value = cute.math.log(total)  # once a row: exact, as an LSE may be the result
            if self.config.softmax != "bounded":
                value = value + row_max[r] * (unit * LN2)
            if term is not None:
                # the term was left out of the scores: an infinite one shows here
                wiped = term == Float32(NEG_INF)
                value = value + cutlass.select_(wiped, term, term + (term - term))
                odd = cutlass.select_(wiped, Float32(0.0), scale[r] + (term - term))
                scale[r] = cutlass.select_(dead | wiped, Float32(0.0), odd)
            value = cutlass.select_(dead, Float32(NEG_INF), value)
            most = highest[r] * unit * LN2
            if term is not None:
                empty = most == Float32(NEG_INF)
                most = cutlass.select_(empty, most, most + term)
            self.write_row(results, value, most, place, r)

    def normalise(self, acc: Any, stats: Any) -> None:
        """Divide the output by the sums."""
        for i in range(cute.size(acc)):
            acc[i] = acc[i] * stats[2][row_of(i)]

    @cute.jit
    def write_row(
        self, results: tuple, value: Float32, most: Float32, place: tuple, r: cutlass.Constexpr
    ):
        """Write a row's LSE, and its maximum if it is wanted."""
        lse, top, _, part_lse, _ = results
        row, within, h, b, slot, lane = place
        if lane % 4 == 0:
            if slot >= 0:
                part_lse[slot, within + 8 * r] = value
            elif row + 8 * r < lse.shape[2]:
                lse[b, h, row + 8 * r] = value
                if const_expr(self.config.need_max):
                    top[b, h, row + 8 * r] = most

    def write_part(self, acc: Any, mma: Any, parts: Any, slot: Any, wg: Any, thread: Any) -> None:
        """Write the output of a part of a row as float32."""
        tile = cute.local_tile(parts[slot, None, None], (64, self.config.value_width), (wg, 0))
        to = mma.partition_C(tile)
        for i in range(cute.size(acc)):
            to[i] = acc[i]

    def pack(self, values: Any, packed: Any) -> None:
        """P or the output, from float32 to pairs of the operands' type."""
        pairs = cute.recast_tensor(packed, Int32)
        for i in range(cute.size(pairs)):
            pairs[i] = device.pack(values[2 * i], values[2 * i + 1], self.dtype)

    @cute.jit
    def write_tile(self, acc: cute.Tensor, output: tuple, wg: Int32, warp: Int32):
        """Bring a warpgroup's output to shared memory, for TMA."""
        store, rounded, source, target = output
        self.pack(acc, rounded)
        if warp % 4 == 0:  # the last tile's output has left shared memory
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=STORE + wg, number_of_threads=128)
        cute.copy(store, source, target[None, None, None, wg])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=STORE + wg, number_of_threads=128)

    @cute.jit
    def write_rows(self, acc: cute.Tensor, rounded: cute.Tensor, out: cute.Tensor, place: tuple):
        """Write a warpgroup's output from registers, 32 bytes of a row by the four lanes of a quad.

        Lanes of a pair swap a word of every other group of eight columns, for eight bytes each.
        """
        row, _, h, b, _, lane = place
        self.pack(acc, rounded)
        words = cute.recast_tensor(rounded, Int32)
        odd = (lane & 1) != 0
        first = 8 * (lane & 1) + 4 * ((lane & 3) >> 1)
        groups, depth = cute.size(words) // 2, out.shape[3]
        turned = cute.make_rmem_tensor(groups, Int32)
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(groups // 2):
                low, high = words[4 * j + r], words[4 * j + 2 + r]
                got = cute.arch.shuffle_sync_bfly(cutlass.select_(odd, low, high), 1)
                turned[2 * j] = cutlass.select_(odd, got, low)
                turned[2 * j + 1] = cutlass.select_(odd, high, got)
            if row + 8 * r < out.shape[2]:
                start = cute.domain_offset((b, h, row + 8 * r, first), out).iterator
                pairs = cute.recast_tensor(turned, self.dtype)
                for j in cutlass.range_constexpr(groups // 2):
                    if const_expr(16 * j + 16 <= depth):
                        self._write(pairs, start, j)
                    elif const_expr(16 * j < depth):
                        if first < 8:
                            self._write(pairs, start, j)

    def _write(self, pairs: Any, start: Any, j: int) -> None:
        four = cute.make_layout(4)
        source = cute.make_tensor(pairs.iterator + 4 * j, four)
        cute.autovec_copy(source, cute.make_tensor((start + 16 * j).align(8), four))

    @cute.jit
    def clear(
        self, pieces: cute.Tensor, out: cute.Tensor, lse: cute.Tensor, top: cute.Tensor, warp: Int32
    ):
        """Two warps: tiles that keep nothing, which stand at the end of the list."""
        c = self.config
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        chunks = out.shape[3] // VECTOR
        zero = cute.make_rmem_tensor(VECTOR, self.dtype)
        zero.fill(0.0)
        index = pieces[0, LIVE] + 2 * cta + warp
        while index < pieces.shape[0]:
            b, h, tile = pieces[index, 0], pieces[index, 1], pieces[index, 2]
            first = tile * c.block_q
            rows = cutlass.min(Int32(c.block_q), out.shape[2] - first)
            for i in cutlass.range(lane, rows * chunks, 32, unroll=4):
                at = b, h, first + i // chunks, i % chunks * VECTOR
                start = cute.domain_offset(at, out).iterator.align(16)
                cute.autovec_copy(zero, cute.make_tensor(start, cute.make_layout(VECTOR)))
            for i in cutlass.range(lane, rows, 32, unroll=1):
                lse[b, h, first + i] = Float32(NEG_INF)
                if const_expr(c.need_max):
                    top[b, h, first + i] = Float32(NEG_INF)
            index += 2 * ctas

"""Write the results of the Hopper forward: output tiles, LSE, and fully masked tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from attnkit.templates.common import device
from attnkit.templates.common.cache_policy import evict_first
from attnkit.templates.common.constants import NEG_INF
from attnkit.templates.common.forward_work import WorkItem
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.softmax import row_entropy, row_results, write_statistics
from attnkit.templates.common.tma import partition
from attnkit.templates.sm90.config import (
    WARP_THREADS,
    WARPGROUP_ROWS,
    WARPGROUP_WARPS,
    ForwardConfig,
)
from attnkit.templates.sm90.forward_barriers import epilogue_sync
from attnkit.templates.sm90.forward_mma import ForwardMma
from attnkit.templates.sm90.forward_producer import Work
from attnkit.templates.sm90.scores import ROW_STEP, ROWS, row_of
from attnkit.templates.sm90.softmax import RowState

VECTOR = 8  # elements of 16 bytes
QUAD = 4  # lanes that hold a row of an accumulator


@dataclass(frozen=True)
class Results:
    """Holds the tensors in global memory that the kernel writes.

    Attributes:
        out: [B, H, S, Dv].
        lse: f32 [B, H, S].
        max_scores: f32 [B, H, S], written only if the config has `need_max`. If it has
            `need_entropy`, f32 [1 or 2, B, H, S]: entropies, then maxima if needed.
        split_out: f32 [slots, block_q, Dv], output of the parts of split rows.
        split_lse: f32 [slots, block_q], LSE of the parts of split rows.
    """

    out: cute.Tensor
    lse: cute.Tensor
    max_scores: cute.Tensor
    split_out: cute.Tensor
    split_lse: cute.Tensor


@dataclass(frozen=True)
class RowPlace:
    """Describes the position of a thread's first row; the second is 8 rows below.

    Attributes:
        row: position of the row in the sequence.
        tile_row: position of the row in the work tile.
        work: the work tile.
        lane: index of the thread in its warp.
    """

    row: Int32
    tile_row: Int32
    work: Work
    lane: Int32


@dataclass(frozen=True)
class OutputTile:
    """Holds the copies of a thread's output from registers to shared memory and to global memory.

    Attributes:
        copy: copy from registers to shared memory (stmatrix).
        rounded: 16 bits [64, head_dim_v] / 128 threads, in the layout of `acc_o`.
        source: the same registers, partitioned for `copy`.
        target: the thread's part of the output tile in shared memory, (..., warpgroup).
        tma: copy from shared memory to global memory.
        tma_from: output tile in shared memory, (elements, warpgroup).
        tma_to: output in global memory, (elements, 64 rows, head, batch).
    """

    copy: Any
    rounded: cute.Tensor
    source: cute.Tensor
    target: cute.Tensor
    tma: cute.CopyAtom
    tma_from: cute.Tensor
    tma_to: cute.Tensor


class Epilogue:
    """Normalises and stores the output of a work tile.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
    """

    def __init__(self, config: ForwardConfig, hooks: ForwardHooks) -> None:
        self.config = config
        self.hooks = hooks
        self.dtype = device.DTYPES[config.dtype]

    def output_tile(
        self, mma: ForwardMma, smem_o: cute.Tensor, tma: tuple, thread: Int32
    ) -> OutputTile:
        """Create the copies of a thread's part of the output."""
        tma_o, o_tiles = tma
        copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype), mma.pv
        )
        thr_copy = copy.get_slice(thread)
        # 16 bits [64, head_dim_v] / 128 threads
        rounded = cute.make_rmem_tensor(mma.acc_o.layout, self.dtype)
        source, target = thr_copy.retile(rounded), thr_copy.partition_D(smem_o)
        tma_from, tma_to = partition(
            tma_o, smem_o, o_tiles, (WARPGROUP_ROWS, self.config.head_dim_v), (None, 0, None, None)
        )
        return OutputTile(copy, rounded, source, target, tma_o, tma_from, tma_to)

    def write_rows(
        self,
        factor: Float32 | None,
        lse_terms: list[Float32 | None],
        sink: Float32 | None,
        state: RowState,
        results: Results,
        place: RowPlace,
    ) -> None:
        """Write LSE and statistics of the thread's rows, and set `state.scale`, the factor of O.

        Without a softmax there is none of them.
        """
        if self.config.weights:
            return
        for r in range(ROWS):
            total = device.quad_sum(state.sum[r])
            row_max = None if self.config.softmax == "no-max" else state.max[r]
            state.scale[r], lse, max_score = row_results(
                total, None, row_max, state.highest[r], factor, lse_terms[r], sink
            )
            entropy = Float32(0.0)
            if self.config.need_entropy:
                moment = device.quad_sum(state.moment[r])
                entropy = row_entropy(total, moment, row_max, factor, lse_terms[r], sink)
            self._write_row(results, lse, (max_score, entropy), place, r)

    @cute.jit
    def _write_row(
        self,
        results: Results,
        value: Float32,
        statistics: tuple,
        place: RowPlace,
        r: cutlass.Constexpr,
    ):
        """Write the results of row `r` from the first lane of the quad.

        `value` is the LSE, `statistics` are the maximum and the entropy, written if needed.
        """
        lse, max_scores, split_lse = results.lse, results.max_scores, results.split_lse
        work, row = place.work, place.row
        if place.lane % QUAD == 0:
            if work.split_slot >= 0:
                split_lse[work.split_slot, place.tile_row + ROW_STEP * r] = value
            elif row + ROW_STEP * r < lse.shape[2]:
                lse[work.batch, work.head, row + ROW_STEP * r] = value
                where = work.batch, work.head, row + ROW_STEP * r
                write_statistics(self.config, max_scores, where, statistics)

    def normalise(self, acc_o: cute.Tensor, state: RowState) -> None:
        """Multiply the output accumulator by `state.scale`, the reciprocal of the row sums."""
        if self.config.weights:
            return
        for i in range(cute.size(acc_o)):
            acc_o[i] = acc_o[i] * state.scale[row_of(i)]

    @cute.jit
    def store(
        self,
        mma: ForwardMma,
        output: OutputTile,
        results: Results,
        place: RowPlace,
        warpgroup: Int32,
        warp: Int32,
    ):
        """Store a warpgroup's output to global memory.

        Parts of split rows are stored in float32. Whole rows are stored from registers or by TMA.
        """
        work = place.work
        if work.split_slot >= 0:  # float32, for `Combine`
            self.store_split(mma, results, place, warpgroup)
        elif const_expr(self.config.store_from_registers):
            self.store_from_registers(mma.acc_o, output.rounded, results.out, place)
        else:
            self.copy_to_smem(mma.acc_o, output, warpgroup)
            if warp % WARPGROUP_WARPS == 0:
                q_rows = work.q_block * self.config.warpgroups + warpgroup
                target = output.tma_to[None, q_rows, work.head, work.batch]
                source = output.tma_from[None, warpgroup]
                cute.copy(output.tma, source, target, cache_policy=evict_first())
                cute.arch.cp_async_bulk_commit_group()

    def store_split(
        self, mma: ForwardMma, results: Results, place: RowPlace, warpgroup: Int32
    ) -> None:
        """Store the float32 output of a part of split rows to its slot."""
        tile = cute.local_tile(  # f32 [64, head_dim_v]
            results.split_out[place.work.split_slot, None, None],
            (WARPGROUP_ROWS, self.config.head_dim_v),
            (warpgroup, 0),
        )
        target = mma.thr_pv.partition_C(tile)  # f32 [64, head_dim_v] / 128 threads
        for i in range(cute.size(mma.acc_o)):
            target[i] = mma.acc_o[i]

    def pack(self, values: cute.Tensor, packed: cute.Tensor) -> None:
        """Round float32 `values` (P or the output) to the config's dtype and pack them in pairs."""
        pairs = cute.recast_tensor(packed, Int32)  # i32, two values each
        for i in range(cute.size(pairs)):
            pairs[i] = device.pack(values[2 * i], values[2 * i + 1], self.dtype)

    def await_previous_store(self, warpgroup: Int32) -> None:
        """Wait until the output tile in shared memory may be overwritten.

        The TMA store of the previous work tile has then read it. Only the warp that issued the
        store waits for it. The barrier then releases the other warps.
        """
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        epilogue_sync(warpgroup)

    def copy_to_smem(self, acc_o: cute.Tensor, output: OutputTile, warpgroup: Int32) -> None:
        """Round a warpgroup's output and copy it to shared memory, for a TMA store."""
        self.pack(acc_o, output.rounded)
        cute.copy(output.copy, output.source, output.target[None, None, None, warpgroup])
        # stmatrix writes by the generic proxy and TMA reads by the async proxy. Each thread fences
        # its own writes before the barrier, after which one warp issues the TMA store.
        cute.arch.fence_proxy("async.shared", space="cta")
        epilogue_sync(warpgroup)

    @cute.jit
    def store_from_registers(
        self,
        acc_o: cute.Tensor,
        rounded: cute.Tensor,
        out: cute.Tensor,
        place: RowPlace,
    ):
        """Store a warpgroup's output from registers; the lanes of a quad store 32 bytes of a row.

        The two lanes of a pair exchange a word of every other group of eight columns, so that each
        lane stores eight contiguous bytes.
        """
        row, lane = place.row, place.lane
        self.pack(acc_o, rounded)
        words = cute.recast_tensor(rounded, Int32)  # i32, pairs of neighbouring columns
        odd = (lane & 1) != 0
        first = 8 * (lane & 1) + 4 * ((lane & 3) >> 1)
        groups = cute.size(words) // 2
        swapped = cute.make_rmem_tensor(groups, Int32)  # i32, words of one row in store order
        for r in cutlass.range_constexpr(ROWS):
            for j in cutlass.range_constexpr(groups // 2):
                low, high = words[4 * j + r], words[4 * j + 2 + r]
                other = cute.arch.shuffle_sync_bfly(cutlass.select_(odd, low, high), 1)
                swapped[2 * j] = cutlass.select_(odd, other, low)
                swapped[2 * j + 1] = cutlass.select_(odd, high, other)
            if row + ROW_STEP * r < out.shape[2]:
                position = place.work.batch, place.work.head, row + ROW_STEP * r, first
                start = cute.domain_offset(position, out).iterator
                values = cute.recast_tensor(swapped, self.dtype)
                self._store_row(values, start, first, place, groups // 2, out.shape[3])

    @cute.jit
    def _store_row(
        self,
        values: Any,
        start: Any,
        first: Int32,
        place: RowPlace,
        groups: cutlass.Constexpr,
        depth: cutlass.Constexpr,
    ):
        """Store the thread's 8 bytes of each group of 16 columns that the output has.

        Args:
            values: 16 bits [4 * groups], the thread's values in store order.
            start: address of the thread's first value in the row.
            first: column of the thread's first value.
            place: position of the rows.
            groups: number of groups.
            depth: columns of the output.
        """
        for j in cutlass.range_constexpr(groups):
            if const_expr(16 * j + 16 <= depth):
                self._store_group(values, start, j)
            elif const_expr(16 * j < depth):
                if first < 8:
                    self._store_group(values, start, j)

    def _store_group(self, values: Any, start: Any, j: int) -> None:
        """Store the thread's 8 bytes of column group `j` (16 columns)."""
        four = cute.make_layout(4)
        source = cute.make_tensor(values.iterator + 4 * j, four)  # 16 bits [4]
        target = cute.make_tensor((start + 16 * j).align(8), four)  # 16 bits [4]
        cute.autovec_copy(source, target)

    @cute.jit
    def clear_masked_tiles(
        self, work_tiles: cute.Tensor, results: Results, captured: list, warp: Int32
    ):
        """Write the results of the fully masked work tiles: zeros, and an LSE of -inf or the sink.

        These work tiles are at the end of the work list.

        Args:
            work_tiles: the work list.
            results: tensors to write.
            captured: captured tensors.
            warp: index of the clearing warp, from 0.
        """
        c = self.config
        out, lse, max_scores = results.out, results.lse, results.max_scores
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        chunks = out.shape[3] // VECTOR
        zero = cute.make_rmem_tensor(VECTOR, self.dtype)  # 16 bits [8]
        zero.fill(0.0)
        index = work_tiles[0, WorkItem.NUM_LIVE] + c.clearing_warps * cta + warp
        while index < work_tiles.shape[0]:
            batch, head = work_tiles[index, WorkItem.BATCH], work_tiles[index, WorkItem.HEAD]
            q_block = work_tiles[index, WorkItem.Q_BLOCK]
            first = q_block * c.block_q
            rows = cutlass.min(Int32(c.block_q), out.shape[2] - first)
            for i in cutlass.range(lane, rows * chunks, WARP_THREADS, unroll=4):
                position = batch, head, first + i // chunks, i % chunks * VECTOR
                start = cute.domain_offset(position, out).iterator.align(16)
                cute.autovec_copy(zero, cute.make_tensor(start, cute.make_layout(VECTOR)))
            empty = self._lse_without_keys(captured, head)
            for i in cutlass.range(lane, rows, WARP_THREADS, unroll=1):
                lse[batch, head, first + i] = empty
                masked = Float32(NEG_INF), Float32(0.0)
                write_statistics(c, max_scores, (batch, head, first + i), masked)
            index += c.clearing_warps * ctas

    def _lse_without_keys(self, captured: list, head: Int32) -> Float32:
        """Return the LSE of fully masked rows of a head: the sink, or -inf if there is none."""
        sink = self.hooks.sink(captured, head)
        return Float32(NEG_INF) if sink is None else sink

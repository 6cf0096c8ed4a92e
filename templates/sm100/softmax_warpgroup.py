"""Run the softmax warpgroups of the Blackwell forward: load S from tensor memory, store P back.

A thread has one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from attnkit.templates.common.forward_work import Scalars
from attnkit.templates.common.softmax import own_sink, write_statistics
from attnkit.templates.sm100 import device
from attnkit.templates.sm100.config import ROWS, WARPGROUP_WARPS, ForwardConfig
from attnkit.templates.sm100.cta_group import CtaGroup
from attnkit.templates.sm100.forward_barriers import ForwardBarriers
from attnkit.templates.sm100.forward_work import BlockRing, RowNumbers, Work, WorkRing
from attnkit.templates.sm100.softmax import RowState, Softmax, TileValues, UpperHalf, total_of

P_STEP = 16  # columns of P that are computed and stored together


@dataclass(frozen=True)
class RowResults:
    """Holds the tensors in global memory that the softmax writes.

    Attributes:
        lse: f32 [B, H, S].
        max_scores: f32 [B, H, S], written only if the config has `need_max`. If it has
            `need_entropy`, f32 [1 or 2, B, H, S]: entropies, then maxima if needed.
        split_lse: f32 [slots, block_q], LSE of the parts of split rows.
    """

    lse: cute.Tensor
    max_scores: cute.Tensor
    split_lse: cute.Tensor


@dataclass(frozen=True)
class RowThread:
    """Describes a thread of a softmax warpgroup and its state for the whole kernel.

    Attributes:
        t: query tile of the CTA; each has a softmax warpgroup.
        row: row within the query tile, the lane of tensor memory.
        place: row counted over all query tiles, the thread's index.
        state: running softmax of the row.
        gaps: f32 [128 * q_tiles] in shared memory: for each row, the change of the sum if the
            largest P of each block is rounded. It is in shared memory because no register is left.
    """

    t: Int32
    row: Int32
    place: Int32
    state: RowState
    gaps: cute.Tensor


class SoftmaxWarpgroup:
    """Runs the role of a softmax warpgroup.

    Args:
        config: compile-time configuration.
        softmax: computes P of a row.
        group: the CTAs that compute MMAs together.
    """

    def __init__(self, config: ForwardConfig, softmax: Softmax, group: CtaGroup) -> None:
        self.config = config
        self.softmax = softmax
        self.group = group

    @cute.jit
    def run(
        self,
        gaps: cute.Tensor,
        row_numbers: RowNumbers,
        work_ring: WorkRing,
        block_ring: BlockRing,
        bars: ForwardBarriers,
        results: RowResults,
        captured: list,
        scalars: Scalars,
    ):
        """Compute P and the LSE of the warpgroup's query tile, for all work tiles."""
        c = self.config
        thread_idx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        t, row = warp // WARPGROUP_WARPS, thread_idx % ROWS
        place = thread_idx  # equal to t * ROWS + row, but needs no register
        state = RowState.create(c.need_entropy)
        thread = RowThread(t, row, place, state, gaps)
        row_numbers = row_numbers.of_tile(t)
        kv_idx, tile_idx = Int32(0), Int32(0)
        work = work_ring.wait(tile_idx)
        while work.valid != 0:
            origin = work.q_block * c.block_q
            site = self.softmax.site(captured, work.batch, work.head, scalars, origin)
            tile_row = self.group.query_tile(t) * ROWS + row
            q, heads = work.q_block * c.block_q + tile_row, results.lse.shape[1]
            tile = self.softmax.begin_tile(site, q, heads)
            state.reset()
            gaps[place] = Float32(0.0)
            # masked blocks first; the loop over the other blocks has no mask instructions
            for _ in cutlass.range(work.num_masked, unroll=1):
                self.block(True, kv_idx, tile_idx, tile, thread, row_numbers, block_ring, bars)
                kv_idx += 1
            for _ in cutlass.range(work.num_blocks - work.num_masked, unroll=1):
                self.block(False, kv_idx, tile_idx, tile, thread, row_numbers, block_ring, bars)
                kv_idx += 1
            sink = self.sink(work_ring, tile_idx, captured)
            # the correction is for an output with the largest P, which dropout may drop
            gap = None if self.softmax.hooks.has_dropout else gaps[place]
            scale, lse, statistics = self.softmax.finish(tile, state, gap, sink)
            row_numbers.wait_empty(kv_idx + tile_idx)  # earlier scales: one per block and per tile
            row_numbers.write(place, scale)
            # read the record again, which saves registers in the mainloop
            work = work_ring.wait(tile_idx)
            work_ring.release(tile_idx)
            tile_row = self.group.query_tile(t) * ROWS + device.opaque_copy(row, tile_idx)
            if const_expr(c.value_parts == 1):
                self.write_row(results, lse, statistics, work, tile_row)
            elif work.value_part == 0:
                self.write_row(results, lse, statistics, work, tile_row)
            tile_idx += 1
            work = work_ring.wait(tile_idx)
        work_ring.release(tile_idx)

    def sink(self, work_ring: WorkRing, tile_idx: Int32, captured: list) -> Float32 | None:
        """Return the sink that this work tile adds to its rows; None if the variant has none.

        The record is read again, which saves registers in the mainloop.
        """
        if not self.softmax.hooks.has_sink:
            return None
        work = work_ring.wait(tile_idx)
        return own_sink(self.softmax.hooks.sink(captured, work.head), work.split_slot)

    def block(
        self,
        masked: bool,
        kv_idx: Int32,
        tile_idx: Int32,
        tile: TileValues,
        thread: RowThread,
        row_numbers: RowNumbers,
        block_ring: BlockRing,
        bars: ForwardBarriers,
    ) -> None:
        """Compute P of one block from S in tensor memory, and store P back to it.

        Args:
            masked: whether the block needs the mask.
            kv_idx, tile_idx: indices of the block and the work tile in this CTA.
            tile: values of the work tile.
            thread: state of the thread.
            row_numbers: scales for the correction.
            block_ring: indices of the kv blocks.
            bars: mbarriers.
        """
        c, softmax = self.config, self.softmax
        t, row, place, state, gaps = (
            thread.t, thread.row, thread.place, thread.state, thread.gaps,
        )  # fmt: skip
        wide, u = softmax.chunk(masked), c.s_stage(t, kv_idx)
        column = c.s_column(u)
        number = block_ring.read(kv_idx)
        row_numbers.wait_empty(kv_idx + tile_idx)
        upper = None
        if c.halves:
            upper = UpperHalf(bars.s_full + u, c.s_phase(kv_idx), bars.s_empty + u)
        ready = bars.s_half if c.halves else bars.s_full
        cute.arch.mbarrier_wait(ready + u, c.s_phase(kv_idx))
        scores = softmax.scores(tile, number, masked, row, column, upper)
        factor, sums = softmax.factor(tile), [None] * (0 if c.weights else softmax.sums)
        if c.weights:
            row_numbers.write(place, Float32(1.0))
        else:
            scale = softmax.move_maximum(state, scores.peak, factor)
            # the correction may rescale O while this warpgroup computes P
            row_numbers.write(place, scale)
            gaps[place] = gaps[place] * scale + softmax.rounding(scores.peak, state.max[0], factor)
        step = min(wide, P_STEP)
        # compute a step before the previous one is stored, so that the MUFU unit stays busy
        ahead = step if softmax.hooks.only_scales and not masked else 0
        pending: list[Any] = []
        for start in range(0, c.block_kv + ahead, step):
            if start < c.block_kv:
                i, low = divmod(start, wide)
                values = scores.chunks[i][low : low + step]
                base = scores.bases[i]
                reference = state.max[0]
                pending.append(
                    softmax.weights(values, factor)
                    if c.weights
                    else softmax.compute_p(values, start, base, reference, factor, state)
                )
            end = start + step - ahead
            if end > 0:
                # P in 16 bits takes half of the columns of S, the upper ones
                softmax.store_p(
                    pending.pop(0), row, column + (c.block_kv + end - step) // 2, sums,
                    softmax.survivors(tile, number, end - step),
                )  # fmt: skip
            if end in c.p_parts:
                cute.arch.fence_view_async_tmem_store()
                self.group.arrive_leader(bars.p_full[c.p_parts.index(end)] + u)
        if not c.weights:
            state.sum[0] = state.sum[0] * scale + total_of(sums)

    @cute.jit
    def write_row(
        self,
        results: RowResults,
        value: Float32,
        statistics: tuple,
        work: Work,
        tile_row: Int32,
    ):
        """Write LSE of one row, and its (maximum, entropy) if the config needs them.

        Without a softmax there is none of them.
        """
        lse, max_scores, split_lse = results.lse, results.max_scores, results.split_lse
        row = work.q_block * self.config.block_q + tile_row
        if const_expr(self.config.weights):
            pass
        elif work.split_slot >= 0:
            split_lse[work.split_slot, tile_row] = value
        elif row < lse.shape[2]:
            lse[work.batch, work.head, row] = value
            where = work.batch, work.head, row
            write_statistics(self.config, max_scores, where, statistics)

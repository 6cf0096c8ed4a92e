"""The softmax warpgroups of the Blackwell forward, a thread a row: S from tensor memory, P back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from attnkit.templates.common.forward_work import Scalars
from attnkit.templates.sm100 import device
from attnkit.templates.sm100.config import ROWS, WARPGROUP_WARPS, ForwardConfig
from attnkit.templates.sm100.cta_group import CtaGroup
from attnkit.templates.sm100.forward_barriers import ForwardBarriers
from attnkit.templates.sm100.forward_work import BlockRing, RowNumbers, Work, WorkRing
from attnkit.templates.sm100.softmax import RowState, Softmax, TileValues, UpperHalf, total_of

P_STEP = 16  # columns of P that are computed and stored together


@dataclass(frozen=True)
class RowResults:
    """What the softmax writes, in global memory.

    Attributes:
        lse: f32 [B, H, S].
        max_scores: f32 [B, H, S], written only if the config needs the maxima.
        split_lse: f32 [slots, block_q], LSE of the parts of split rows.
    """

    lse: cute.Tensor
    max_scores: cute.Tensor
    split_lse: cute.Tensor


@dataclass(frozen=True)
class RowThread:
    """A thread of a softmax warpgroup and what it has throughout the kernel.

    Attributes:
        t: the query tile of the CTA, as many as there are softmax warpgroups.
        row: within the query tile, the lane of tensor memory.
        place: among the rows of all query tiles: the number of the thread.
        state: of the row.
        gaps: f32 [128 * q_tiles] in shared memory: what roundings of the largest P of each block add
            to a row's sum; a register for it would be one too many.
    """

    t: Int32
    row: Int32
    place: Int32
    state: RowState
    gaps: cute.Tensor


class SoftmaxWarpgroup:
    """The role of a softmax warpgroup.

    Args:
        config: the kernel's configuration.
        softmax: of a row.
        group: the CTAs that share products.
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
        """Compute P of all blocks of a query tile, and the LSE of its rows."""
        c = self.config
        thread_idx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        t, row = warp // WARPGROUP_WARPS, thread_idx % ROWS
        place = thread_idx  # t * ROWS + row, and no register more
        state = RowState.create()
        thread = RowThread(t, row, place, state, gaps)
        row_numbers = row_numbers.of_tile(t)
        kv_idx, tile_idx = Int32(0), Int32(0)
        work = work_ring.wait(tile_idx)
        while work.valid != 0:
            origin = work.q_block * c.block_q
            site = self.softmax.site(captured, work.batch, work.head, scalars, origin)
            tile_row = self.group.query_tile(t) * ROWS + row
            tile = self.softmax.begin_tile(site, work.q_block * c.block_q + tile_row)
            state.reset()
            gaps[place] = Float32(0.0)
            # Masked blocks first, the others after: the second loop has no mask instructions.
            for _ in cutlass.range(work.num_masked, unroll=1):
                self.block(True, kv_idx, tile_idx, tile, thread, row_numbers, block_ring, bars)
                kv_idx += 1
            for _ in cutlass.range(work.num_blocks - work.num_masked, unroll=1):
                self.block(False, kv_idx, tile_idx, tile, thread, row_numbers, block_ring, bars)
                kv_idx += 1
            scale, lse, max_score = self.softmax.finish(tile, state, gaps[place])
            row_numbers.wait_empty(kv_idx + tile_idx)  # one number a block and one a tile before
            row_numbers.write(place, scale)
            # read again: held through the loops, it would take registers from them
            work = work_ring.wait(tile_idx)
            work_ring.release(tile_idx)
            tile_row = self.group.query_tile(t) * ROWS + device.opaque_copy(row, tile_idx)
            self.write_row(results, lse, max_score, work, tile_row)
            tile_idx += 1
            work = work_ring.wait(tile_idx)
        work_ring.release(tile_idx)

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
        """Softmax of one block: S from tensor memory, P back to it.

        Args:
            masked: whether the block needs the mask.
            kv_idx, tile_idx: how many blocks and work tiles this CTA has had before.
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
        factor = softmax.factor(tile)
        scale = softmax.move_maximum(state, scores.peak, factor)
        # the correction may rescale O while this warpgroup computes P
        row_numbers.write(place, scale)
        gaps[place] = gaps[place] * scale + softmax.rounding(scores.peak, state.max[0], factor)
        sums: list[Any] = [None] * softmax.sums
        step = min(wide, P_STEP)
        # computed before what comes before it is stored: the exponential unit goes on meanwhile
        ahead = step if softmax.hooks.only_scales and not masked else 0
        pending: list[Any] = []
        for start in range(0, c.block_kv + ahead, step):
            if start < c.block_kv:
                i, low = divmod(start, wide)
                values = scores.chunks[i][low : low + step]
                base = scores.bases[i]
                pending.append(softmax.compute_p(values, start, base, state.max[0], factor))
            end = start + step - ahead
            if end > 0:
                # P in 16 bits takes half of the columns of S, the upper ones
                softmax.store_p(pending.pop(0), row, column + (c.block_kv + end - step) // 2, sums)
            if end in c.p_parts:
                cute.arch.fence_view_async_tmem_store()
                self.group.arrive_leader(bars.p_full[c.p_parts.index(end)] + u)
        state.sum[0] = state.sum[0] * scale + total_of(sums)

    @cute.jit
    def write_row(
        self,
        results: RowResults,
        value: Float32,
        max_score: Float32,
        work: Work,
        tile_row: Int32,
    ):
        """Write a row's LSE, and its maximum if the config needs it."""
        lse, max_scores, split_lse = results.lse, results.max_scores, results.split_lse
        row = work.q_block * self.config.block_q + tile_row
        if work.split_slot >= 0:
            split_lse[work.split_slot, tile_row] = value
        elif row < lse.shape[2]:
            lse[work.batch, work.head, row] = value
            if const_expr(self.config.need_max):
                max_scores[work.batch, work.head, row] = max_score

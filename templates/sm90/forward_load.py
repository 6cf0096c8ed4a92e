"""The warps that load for the Hopper forward: pieces of work, their blocks, TMA.

One warp takes pieces from the work list while the tile before is computed. The other walks the runs of
a piece from the last block to the first, and tells the consumers through shared memory what each
stage holds, so that they never see lists.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from attnkit.templates.common.tma import partition

# int32 words of a piece of work: b, h, tile, slot; a cursor of three into the PARTIAL and one into
# the FULL runs; how many of its blocks come first and are masked; how many pieces of the list keep
# anything, which come first
PIECE, LIVE = 12, 11
# where things are in `info`: the blocks of the K stages, records of eight words of the last tiles,
# enough that one stays until its tile is written, and the piece that was claimed
RECORD, RECORDS = 8, 4
CLAIMED = RECORD + 8 * RECORDS
WORDS = CLAIMED + 16
AHEAD = 2  # blocks before the end of a piece, the next one is claimed


class ForwardLoads:
    """The part of a forward kernel that loads."""

    config: Any
    hooks: Any

    def stage(self, count: Any) -> Any:
        """Ring slot of the count-th block."""
        return count & (self.config.stages - 1)

    def phase(self, count: Any) -> Any:
        """Parity of the lap of the count-th block."""
        return (count >> (self.config.stages.bit_length() - 1)) & 1

    def query_stage(self, count: Any) -> Any:
        """Ring slot of the count-th tile."""
        return count & (self.config.query_stages - 1)

    def query_phase(self, count: Any) -> Any:
        """Parity of the lap of the count-th tile."""
        return (count >> (self.config.query_stages.bit_length() - 1)) & 1

    def record(self, count: Any) -> Any:
        """Where the record of the count-th tile is."""
        return RECORD + 8 * (count & (RECORDS - 1))

    @cute.jit
    def claim(self, pieces: cute.Tensor, counter: cute.Tensor, info: cute.Tensor, bars: tuple):
        """A warp: takes pieces from the list and puts them into shared memory, one ahead."""
        full, free = bars
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        live = pieces[0, LIVE]
        index, count = Int32(cta), Int32(0)
        while index < live:
            words = [pieces[index, i] for i in range(PIECE)]
            cute.arch.mbarrier_wait(free, (count & 1) ^ 1)
            with cute.arch.elect_one():  # the lane that stores them announces them
                for i in cutlass.range_constexpr(PIECE):
                    info[CLAIMED + i] = words[i]
                cute.arch.mbarrier_arrive(full)
            count += 1
            cute.arch.mbarrier_wait(free, (count & 1) ^ 1)
            following = index + ctas
            if const_expr(self.config.dynamic):  # from a counter: a CTA that is ahead takes more
                old = Int32(0)
                if cute.arch.lane_idx() == 0:
                    old = cute.arch.atomic_add(counter.iterator, Int32(1))
                    if old == live - 1:  # the last of the launch leaves it at zero
                        counter[0] = Int32(0)
                following = cute.arch.shuffle_sync(old, 0) + ctas
            index = following
        with cute.arch.elect_one():
            info[CLAIMED] = Int32(-1)
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def produce(
        self,
        atoms: tuple,
        tiles: tuple,
        smem: tuple,
        claims: tuple,
        bars: tuple,
        info: cute.Tensor,
        partial: cute.Tensor,
        full: cute.Tensor,
        numbers: tuple,
    ):
        """The producer warp: blocks of the claimed pieces, TMA loads."""
        c = self.config
        tma_q, tma_k, tma_v = atoms
        claimed, unclaimed = claims
        _, group, _, _, kv_batch = numbers
        q_full, q_free, k_full, k_free, v_full, v_free = bars
        width, deep, bn = c.width, c.value_width, c.block_kv
        query = (tma_q, *partition(tma_q, smem[0], tiles[0], (64, width), (None, 0, None, None)))
        k_to, k_from = partition(tma_k, smem[1], tiles[1], (bn, width), (None, 0, None, None))
        value = (tma_v, *partition(tma_v, smem[2], tiles[2], (deep, bn), (0, None, None, None)))
        k_bytes = 2 * bn * width
        kc, vc, tc = Int32(0), Int32(0), Int32(0)
        # the block whose V is loaded next: one behind K
        before, h_before, b_before = Int32(-1), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(claimed, 0)
        b = info[CLAIMED]
        while b >= 0:
            h, tile, slot = info[CLAIMED + 1], info[CLAIMED + 2], info[CLAIMED + 3]
            cursors = tuple(info[CLAIMED + 4 + i] for i in range(6))
            masked = info[CLAIMED + 10]
            total = cursors[2] + cursors[5]
            near = cutlass.min(total, AHEAD)
            h_kv, b_kv = h // group, cutlass.min(b, kv_batch - 1)
            record = (tile, h, b, masked, total - masked, Int32(1), slot)
            own = self.query_stage(tc)
            free = q_free + own, self.query_phase(tc) ^ 1
            if const_expr(not c.chained):  # who has given back the last block of K is done with Q
                free = k_free + self.stage(kc - 1), self.phase(kc - 1)
            self.load_query(query, tc, record, q_full + own, free, info)
            for kind in cutlass.range_constexpr(2):
                runs = partial if const_expr(kind == 0) else full
                run, take, left = cursors[3 * kind : 3 * kind + 3]
                while left > 0:
                    final, steps = runs[0, run] + take - 1, cutlass.min(take, left)
                    for j in cutlass.range(steps, unroll=1):
                        if total == near:
                            cute.arch.mbarrier_arrive(unclaimed)  # each lane has read them
                        n = final - j
                        mark = n
                        if const_expr(kind == 1 and self.hooks.listed):
                            mark = ~n
                        s = self.stage(kc)
                        cute.arch.mbarrier_wait(k_free + s, self.phase(kc) ^ 1)
                        with cute.arch.elect_one():
                            info[s] = mark
                            cute.arch.mbarrier_arrive_and_expect_tx(k_full + s, k_bytes)
                        cute.copy(
                            tma_k,
                            k_from[None, n, h_kv, b_kv],
                            k_to[None, s],
                            tma_bar_ptr=k_full + s,
                        )
                        kc += 1
                        if before >= 0:
                            at = before, h_before, b_before
                            self.load_value(value, vc, at, v_full, v_free)
                            vc += 1
                        before, h_before, b_before = n, h_kv, b_kv
                        total -= 1
                    left -= steps
                    run -= 1
                    if left > 0:
                        take = runs[1, run]
            if const_expr(not c.chained):
                self.load_value(value, vc, (before, h_before, b_before), v_full, v_free)
                vc += 1
                before = Int32(-1)
            tc += 1
            cute.arch.mbarrier_wait(claimed, tc & 1)
            b = info[CLAIMED]
        s = self.query_stage(tc)
        if const_expr(c.chained):
            cute.arch.mbarrier_wait(q_free + s, self.query_phase(tc) ^ 1)
        else:
            cute.arch.mbarrier_wait(k_free + self.stage(kc - 1), self.phase(kc - 1))
        with cute.arch.elect_one():
            info[self.record(tc) + 5] = Int32(0)
            cute.arch.mbarrier_arrive(q_full + s)
        if before >= 0:
            self.load_value(value, vc, (before, h_before, b_before), v_full, v_free)

    @cute.jit
    def load_query(
        self,
        query: tuple,
        count: Int32,
        record: tuple,
        filled: cute.Pointer,
        free: tuple,
        info: cute.Tensor,
    ):
        """Load a tile of the query, once its place is free, and leave its record.

        Args:
            filled: the barrier of its place.
            free: a barrier and the parity of its phase, which is over when the place is free.
        """
        c = self.config
        tma, to, source = query
        tile, h, b = record[:3]
        s = self.query_stage(count)
        cute.arch.mbarrier_wait(*free)
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(len(record)):
                info[self.record(count) + i] = record[i]
            cute.arch.mbarrier_arrive_and_expect_tx(filled, 2 * c.block_q * c.width)
        for w in cutlass.range_constexpr(c.warpgroups):
            cute.copy(
                tma,
                source[None, tile * c.warpgroups + w, h, b],
                to[None, w + c.warpgroups * s],
                tma_bar_ptr=filled,
            )

    @cute.jit
    def load_value(
        self, value: tuple, count: Int32, at: tuple, v_full: cute.Pointer, v_free: cute.Pointer
    ):
        """Load a block of V, once its stage is free."""
        c = self.config
        tma, to, source = value
        n, h, b = at
        s = self.stage(count)
        cute.arch.mbarrier_wait(v_free + s, self.phase(count) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(v_full + s, 2 * c.block_kv * c.value_width)
        cute.copy(tma, source[None, n, h, b], to[None, s], tma_bar_ptr=v_full + s)

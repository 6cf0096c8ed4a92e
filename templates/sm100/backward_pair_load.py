"""The warp that loads in each CTA of a pair: pieces of work, their blocks, its share of operands.

What the next piece needs is loaded as soon as its memory is free: Q and dO when they were read, K
when the last product is done, V when dV, which leaves through its memory, has left.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from attnkit.templates.sm90.backward_math import MASKED, WHOLE
from attnkit.templates.sm90.copies import partition
from attnkit.templates.sm100.backward_pair_sums import HALF


class PairLoads:
    """The part of `PairBackward` that loads; it has `Loads` as well."""

    advance: Any
    config: Any
    enter: Any
    q_lap: Any
    q_stage: Any
    rank: Any
    record: Any

    @cute.jit
    def produce(
        self,
        atoms: tuple,
        tiles: tuple,
        smem: tuple,
        stats: tuple,
        bars: tuple,
        info: cute.Tensor,
        lists: tuple,
        numbers: tuple,
    ):
        """The producer warp of each CTA: both walk the same pieces."""
        c = self.config
        lse, delta, pieces, partial, full, _, _ = lists
        _, group, q_len, kv_len, heads, _, _, kv_batch = numbers
        k_full, v_full, kv_free = bars[:3]
        acc_full, rows_full, rows_free = bars[9:12]
        v_free = bars[21]
        rank = self.rank()
        width, deep, bm, bn = c.width, c.value_width, c.block_q, c.rows_kv
        whole = (None, None, None, None)
        shapes = (
            (HALF, width), (bm, HALF), (HALF, deep), (bm, HALF), (bn, width), (2 * bn, HALF),
            (bn, deep),
        )  # fmt: skip
        sides = [
            partition(atom, smem[i], tiles[i], shapes[i], whole) for i, atom in enumerate(atoms)
        ]
        loads = (atoms[:4], tuple(to for to, _ in sides[:4]), tuple(x for _, x in sides[:4]), bars)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        lse_tiles = cute.flat_divide(lse, (bm,))
        delta_tiles = cute.flat_divide(delta, (bm,))
        blocks = (q_len + bm - 1) // bm
        last_q, last_kv = q_len // bm, kv_len // c.block_kv  # ragged tiles, if there are any
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        total = pieces.shape[0]
        index, kc, tc = Int32(cta // 2), Int32(0), Int32(0)
        ac, last = Int32(0), Int32(0)  # pieces with blocks so far; blocks of the last piece
        while index < total:
            b, h, tile = pieces[index, 0], pieces[index, 1], pieces[index, 2]
            h_kv, b_kv = h // group, cutlass.min(b, kv_batch - 1)
            count = pieces[index, 6] + pieces[index, 9]
            some, rest = self.enter(partial, pieces, index, 4), self.enter(full, pieces, index, 7)
            at_some, end_some, run_some, left_some = some
            at_rest, end_rest, run_rest, left_rest = rest
            first_row = (b * heads + h) * blocks
            before = Int32(0)
            for j in cutlass.range(count, unroll=1):
                masked = at_some < at_rest
                m = cutlass.min(at_some, at_rest)
                if masked:
                    at_some, end_some, run_some, left_some = self.advance(
                        partial, at_some, end_some, run_some, left_some
                    )
                else:
                    at_rest, end_rest, run_rest, left_rest = self.advance(
                        full, at_rest, end_rest, run_rest, left_rest
                    )
                mark = 4 * m + cutlass.select_(masked, Int32(0), Int32(WHOLE))
                ragged = masked | (m == last_q) | (tile == last_kv)
                mark += cutlass.select_(ragged, Int32(MASKED), Int32(0))
                r = self.q_stage(kc)
                cute.arch.mbarrier_wait(rows_free + r, self.q_lap(kc) ^ 1)
                with cute.arch.elect_one():
                    info[r] = mark
                    cute.arch.mbarrier_arrive_and_expect_tx(rows_full + r, 8 * bm)
                    for source, to in ((lse_tiles, stats[0]), (delta_tiles, stats[1])):
                        cute.copy(
                            bulk, source[None, first_row + m], to[None, r], mbar_ptr=rows_full + r
                        )
                self.load_operand(loads, 0, kc, (m, h, b))
                if j > 0:
                    self.load_operand(loads, 1, kc - 1, (before, h, b))
                self.load_operand(loads, 2, kc, (m, h, b))
                self.load_operand(loads, 3, kc, (m, h, b))
                if j == 0:
                    # K was read when the piece before had its last product; V and dS may still
                    # hold its dV and dK
                    if last == 0:
                        cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
                    else:
                        cute.arch.mbarrier_wait(acc_full, (ac & 1) ^ 1)
                    with cute.arch.elect_one():
                        self.note(info, tc, (tile, h, b, count))
                        bytes_k = bn * width * 2 + 2 * bn * HALF * 2
                        cute.arch.mbarrier_arrive_and_expect_tx(k_full, bytes_k)
                    for i, at, column in ((4, 2 * tile + rank, 0), (5, tile, rank)):
                        to, source = sides[i]
                        source = source[None, at, column, h_kv, b_kv]
                        cute.copy(atoms[i], source, to[None, 0], tma_bar_ptr=k_full)
                    cute.arch.mbarrier_wait(v_free, (tc & 1) ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(v_full, bn * deep * 2)
                    to, source = sides[6]
                    source = source[None, 2 * tile + rank, 0, h_kv, b_kv]
                    cute.copy(atoms[6], source, to[None, 0], tma_bar_ptr=v_full)
                    cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)  # every phase, in order
                before = m
                kc += 1
            if count > 0:
                self.load_operand(loads, 1, kc - 1, (before, h, b))
                ac += 1
            else:  # nothing is kept: the record alone
                cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
                with cute.arch.elect_one():
                    self.note(info, tc, (tile, h, b, count))
                    cute.arch.mbarrier_arrive(v_full)
                    cute.arch.mbarrier_arrive(k_full)
            last = count
            tc += 1
            index += ctas // 2
        cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
        with cute.arch.elect_one():
            info[self.record(tc) + 4] = Int32(0)
            cute.arch.mbarrier_arrive(k_full)

    def note(self, info: Any, pieces: Any, what: Any) -> None:
        """Write a piece's record: tile, head, batch element, number of blocks."""
        at = self.record(pieces)
        for i, value in enumerate((*what, Int32(1))):
            info[at + i] = value

    @cute.jit
    def load_operand(self, loads: tuple, which: int, count: Int32, place: tuple):
        """Load half of Q or dO: its rows (0, 2) or its columns (1, 3)."""
        c = self.config
        atoms, targets, sources, bars = loads
        m, h, b = place
        full_bar, free_bar = self.operand_bars(bars)[which]
        cute.arch.mbarrier_wait(free_bar, (count & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full_bar, HALF * c.width * 2)
        rank = self.rank()
        at, column = (2 * m + rank, 0) if const_expr(which % 2 == 0) else (m, rank)
        cute.copy(
            atoms[which],
            sources[which][None, at, column, h, b],
            targets[which][None, 0],
            tma_bar_ptr=full_bar,
        )

    def operand_bars(self, bars: Any) -> tuple[Any, ...]:
        """(full, free) of rows and columns of Q, rows and columns of dO."""
        return bars[12:14], bars[14:16], bars[16:18], bars[18:20]

"""The warp that loads in each CTA of a pair: pieces of work, their blocks, its share of operands.

What the next piece needs is loaded as soon as its memory is free: Q and dO when they were read, K
when the last product is done, V when dV, which leaves through its memory, has left.

The first CTA takes pieces from a counter, from the first one on, and tells the second. So pieces are
begun in the order of the list by pairs that run, and turns wait for nothing that is not on its way:
no pair needs another one to be resident.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import cpasync

from attnkit.templates.common.lse_in_mma import ROW_WORDS
from attnkit.templates.common.semaphore import write_turn
from attnkit.templates.common.tma import partition
from attnkit.templates.common.work_tile import block_word, next_block
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_pair_sums import HALF

CLAIM = 24  # where the next piece stands in `info`, after the blocks' marks and two records
INFO = 28  # words of `info`
# Blocks before the end of a piece at which the next one is claimed: that takes some time, and pieces
# must begin in about the order of the list, or turns are waited for.
AHEAD = 2


class PairLoads:
    """The part of `PairBackward` that loads; it has `Loads` as well."""

    config: Any
    cursors: Any
    q_lap: Any
    q_stage: Any
    rank: Any
    record: Any
    signal: Any

    @cute.jit
    def produce(
        self,
        atoms: tuple,
        tiles: tuple,
        smem: tuple,
        stats: tuple,
        barriers: tuple,
        info: cute.Tensor,
        lists: tuple,
        numbers: tuple,
    ):
        """The producer warp of each CTA: both walk the same pieces."""
        c = self.config
        bars, claims = barriers
        lse, delta, pieces, partial, full, counter, turns = lists
        _, group, q_len, kv_len, heads, _, _, kv_batch = numbers
        k_full, v_full, kv_free = bars[:3]
        rows_full, rows_free = bars[10:12]
        v_free, columns_full = bars[21], bars[23]
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
        side = ((atoms[4], *sides[4]), (atoms[5], *sides[5]), bars, info, turns)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        own = HALF * ROW_WORDS
        lse_tiles = cute.flat_divide(lse, (own if const_expr(c.less_lse) else bm,))
        delta_tiles = cute.flat_divide(delta, (own,))
        loads = (
            atoms[:4],
            tuple(to for to, _ in sides[:4]),
            tuple(x for _, x in sides[:4]),
            bars,
            (bulk, (lse_tiles, delta_tiles), stats),
        )
        blocks = (q_len + bm - 1) // bm
        last_q, last_kv = q_len // bm, kv_len // c.block_kv  # ragged tiles, if there are any
        total = pieces.shape[0]
        kc, tc = Int32(0), Int32(0)
        self.claim(counter, total, tc, info, claims)
        index = self.claimed(tc, info, claims)
        ac, last = Int32(0), Int32(0)  # pieces with blocks so far; blocks of the last piece
        while index < total:
            b, h, tile = pieces[index, 0], pieces[index, 1], pieces[index, 2]
            h_kv, b_kv = h // group, cutlass.min(b, kv_batch - 1)
            count = pieces[index, 6] + pieces[index, 9]
            some, rest = self.cursors(partial, full, pieces, index)
            first_row = (b * heads + h) * blocks
            before = Int32(0)
            for j in cutlass.range(count, unroll=1):
                m, masked, some, rest = next_block(partial, full, some, rest)
                mark = block_word(m, masked, (m == last_q) | (tile == last_kv))
                r = self.q_stage(kc)
                cute.arch.mbarrier_wait(rows_free + r, self.q_lap(kc) ^ 1)
                with cute.arch.elect_one():
                    info[r] = mark
                    if const_expr(c.less_lse):
                        cute.arch.mbarrier_arrive(rows_full + r)
                    else:
                        cute.arch.mbarrier_arrive_and_expect_tx(rows_full + r, 4 * bm)
                        cute.copy(
                            bulk,
                            lse_tiles[None, first_row + m],
                            stats[0][None, r],
                            mbar_ptr=rows_full + r,
                        )
                place = (m, h, b, first_row)
                piece = ((tile, h, b, count), index)
                if j == 0:
                    self.load_key(side, 0, (tc, ac, kc, last), piece, (h_kv, b_kv))
                self.load_operand(loads, 0, kc, place)
                if j > 0:
                    self.load_operand(loads, 1, kc - 1, (before, h, b, first_row))
                self.load_operand(loads, 2, kc, place)
                if j == 0:
                    cute.arch.mbarrier_wait(v_free, (tc & 1) ^ 1)  # dV left through its memory
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(v_full, bn * deep * 2)
                    to, source = sides[6]
                    source = source[None, 2 * tile + rank, 0, h_kv, b_kv]
                    cute.copy(atoms[6], source, to[None, 0], tma_bar_ptr=v_full)
                self.load_operand(loads, 3, kc, place)
                if j == 0:
                    self.load_key(side, 1, (tc, ac, kc, last), piece, (h_kv, b_kv))
                if j == cutlass.max(count - AHEAD, 0):
                    self.claim(counter, total, tc + 1, info, claims)
                before = m
                kc += 1
            if count > 0:
                self.load_operand(loads, 1, kc - 1, (before, h, b, first_row))
                ac += 1
            else:  # nothing is kept: the record alone
                cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
                with cute.arch.elect_one():
                    self.note(info, tc, ((tile, h, b, count), index), turns)
                    for bar in (v_full, columns_full, k_full):
                        cute.arch.mbarrier_arrive(bar)
                self.claim(counter, total, tc + 1, info, claims)
            last = count
            tc += 1
            index = self.claimed(tc, info, claims)
        cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
        with cute.arch.elect_one():
            info[self.record(tc) + 4] = Int32(0)
            cute.arch.mbarrier_arrive(k_full)

    @cute.jit
    def load_key(self, key: tuple, which: int, counts: tuple, piece: tuple, heads: tuple):
        """Load a piece's K: its rows for S, with the record (0); its columns for dQ (1).

        The rows are free after the last S of the piece before, the columns after its last dQ.

        Args:
            counts: pieces, pieces with blocks and blocks before; blocks of the piece before.
            piece: tile, head, batch element and blocks; its number in the list.
            heads: head and batch element of K.
        """
        c = self.config
        *both, bars, info, turns = key
        atom, to, source = both[which]
        k_full, kv_free, s_full, acc_full = bars[0], bars[2], bars[3], bars[9]
        tc, ac, kc, last = counts
        tile, _, _, _ = piece[0]
        rank = self.rank()
        if const_expr(which == 1):
            # every phase, in order; and dK, which the first dS waits for, leaves first
            cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
        elif last == 0:
            cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
        elif last > 2:
            cute.arch.mbarrier_wait(s_full, (kc & 1) ^ 1)
        else:  # not so soon that a warp could still have to see the record before
            cute.arch.mbarrier_wait(acc_full, (ac & 1) ^ 1)
        if const_expr(which == 0):
            bar, at, column = k_full, 2 * tile + rank, 0
        else:
            bar, at, column = bars[23], tile, rank
        with cute.arch.elect_one():
            if const_expr(which == 0):
                self.note(info, tc, piece, turns)
            cute.arch.mbarrier_arrive_and_expect_tx(bar, c.rows_kv * c.width * 2)
        cute.copy(atom, source[None, at, column, *heads], to[None, 0], tma_bar_ptr=bar)

    def note(self, info: Any, pieces: Any, piece: Any, turns: Any) -> None:
        """Write a piece's record: tile, head, batch element, number of blocks, and its turns."""
        at, (what, index) = self.record(pieces), piece
        for i, value in enumerate((*what, Int32(1))):
            info[at + i] = value
        write_turn(self.config, info, at, turns, index)

    @cute.jit
    def claim(
        self, counter: cute.Tensor, total: Int32, pieces: Int32, info: cute.Tensor, bars: tuple
    ):
        """Take the pair's next piece, after so many, in the first CTA, and tell the second.

        Args:
            total: pieces of the list.
            bars: that the second CTA has been told, and in the first, that it has seen it.
        """
        told, seen = bars
        ctas, _, _ = cute.arch.grid_dim()
        if self.rank() == 0:
            cute.arch.mbarrier_wait(seen, (pieces & 1) ^ 1)
            if cute.arch.lane_idx() == 0:
                index = cute.arch.atomic_add(counter.iterator, Int32(1))
                if index == total + ctas // 2 - 1:  # the last of the launch leaves it at zero
                    counter[0] = Int32(0)
                info[CLAIM] = index
                place = device.remote((info.iterator + CLAIM).toint(), Int32(1))
                device.write_remote(place, [index] * 4)
                cute.arch.mbarrier_arrive(told, Int32(1), scope=MemScopeKind.CLUSTER)

    @cute.jit
    def claimed(self, pieces: Int32, info: cute.Tensor, bars: tuple):
        """The number in the list of the piece that was taken, after so many."""
        told, seen = bars
        if self.rank() == 1:
            cute.arch.mbarrier_wait(told, pieces & 1)
            cute.arch.fence_acq_rel_cluster()
        cute.arch.sync_warp()
        index = cute.arch.make_warp_uniform(info[CLAIM])
        cute.arch.sync_warp()
        if self.rank() == 1:
            self.signal(seen)
        return index

    @cute.jit
    def load_operand(self, loads: tuple, which: int, count: Int32, place: tuple):
        """Load half of Q or dO: its rows, and what their products need of them (0, 2); its columns.

        Args:
            place: tile of q, head, batch element; the first of the head's tiles among all rows.
        """
        c = self.config
        atoms, targets, sources, bars, (bulk, tiles, stats) = loads
        m, h, b, first = place
        full_bar, free_bar = self.operand_bars(bars)[which]
        cute.arch.mbarrier_wait(free_bar, (count & 1) ^ 1)
        rank = self.rank()
        with_rows = which == 2 or (which == 0 and c.less_lse)
        with cute.arch.elect_one():
            size = HALF * c.width * 2 + (4 * HALF * ROW_WORDS if const_expr(with_rows) else 0)
            cute.arch.mbarrier_arrive_and_expect_tx(full_bar, size)
            if const_expr(with_rows):
                cute.copy(
                    bulk,
                    tiles[which // 2][None, 2 * (first + m) + rank],
                    stats[which // 2][None, 0],
                    mbar_ptr=full_bar,
                )
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

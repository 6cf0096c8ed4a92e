"""Fetch work tiles and load their operands in chunks: the producer of `backward_streamed`.

One warp loads the chunks of S and dP of each q block in the order of the MMAs, and between them the
parts of Q and dO for dK and dV. Chunks of the next work tile are loaded while the compute warps
store dK and dV of the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import cpasync

from attnkit.templates.common.backward_producer import next_q_block
from attnkit.templates.common.backward_work import Lists, Problem
from attnkit.templates.common.tma import partition
from attnkit.templates.common.work_tile import WorkItem
from attnkit.templates.sm100.backward_barriers import BackwardStreamedBarriers
from attnkit.templates.sm100.backward_config import CHUNK, CHUNK_STAGES, BackwardConfig
from attnkit.templates.sm100.backward_producer import (
    begin_item,
    fetch,
    write_end,
    write_part_record,
)
from attnkit.templates.sm100.backward_shared import SmemRows, chunk_phase, q_phase, q_stage


@dataclass(frozen=True)
class StreamTargets:
    """Holds the tensors in shared memory that the producer writes.

    Attributes:
        q: chunks of Q or dO, dtype [block_q, 64, CHUNK_STAGES].
        kv: chunks of K or V, dtype [128, 64, CHUNK_STAGES].
        q_part, do_part: a part of the columns, dtype [block_q, 64, 2].
        k_part: dtype [128, 64, 2].
    """

    q: cute.Tensor
    kv: cute.Tensor
    q_part: cute.Tensor
    do_part: cute.Tensor
    k_part: cute.Tensor


@dataclass(frozen=True)
class Stream:
    """Loads chunks of one operand.

    Attributes:
        atom, tiles: TMA copy and coordinate tensor [S, D, H, B].
        rows: rows of a chunk.
    """

    atom: cute.CopyAtom
    tiles: cute.Tensor
    rows: int

    def load(
        self, smem: cute.Tensor, stage: Any, place: tuple[Any, ...], column: Any, full: Any
    ) -> None:
        """Issue the TMA load of a chunk, which arrives at `full`.

        Args:
            smem: dtype [rows, 64, stages].
            stage: index of the chunk in `smem`.
            place: (tile of rows, head, batch element).
            column: first column; a chunk beyond the tensor is filled with zeros.
            full: mbarrier.
        """
        # an offset, not the index of a tile: if the tensor has one, each index is that of tile 0
        shifted = cute.domain_offset((0, column, 0, 0), self.tiles)
        to, source = partition(self.atom, smem, shifted, (self.rows, CHUNK), (None, 0, None, None))
        cute.copy(self.atom, source[(None, *place)], to[None, stage], tma_bar_ptr=full)


class ProducerStreamed:
    """Fetches work tiles and loads their operands.

    Args:
        config: compile-time configuration.
    """

    def __init__(self, config: BackwardConfig) -> None:
        self.config = config

    @cute.jit
    def run(
        self,
        atoms: tuple,
        tiles: tuple,
        smem: StreamTargets,
        rows: SmemRows,
        bars: BackwardStreamedBarriers,
        lists: Lists,
        problem: Problem,
    ):
        """Fetch all work tiles of this CTA and load their operands.

        Args:
            atoms, tiles: TMA copies of Q, K, V and dO, and their coordinate tensors.
            smem: targets in shared memory.
            rows: statistics and words of q blocks in shared memory.
            bars: mbarriers.
            lists: tensors of the work list.
            problem: sizes of the launch.
        """
        c, p, info, items = self.config, problem, rows.info, lists.items
        bm, bn = c.block_q, c.rows_kv
        q, k, v, do = (
            Stream(atom, tile, size)
            for atom, tile, size in zip(atoms, tiles, (bm, bn, bn, bm), strict=True)
        )
        blocks = (p.q_len + bm - 1) // bm
        ragged = p.q_len // bm, p.kv_len // bn  # the ragged blocks, if any
        cta, _, _ = cute.arch.block_idx()
        total = items.shape[0] * c.column_parts
        index, q_count, kv_count = Int32(cta), Int32(0), Int32(0)
        while index < total:
            item, part = index // c.column_parts, index % c.column_parts
            b, h, kv_block = (
                items[item, i] for i in (WorkItem.BATCH, WorkItem.HEAD, WorkItem.KV_BLOCK)
            )
            h_kv, b_kv = h // p.group, cutlass.min(b, p.kv_batch - 1)
            count = items[item, WorkItem.NUM_PARTIAL] + items[item, WorkItem.NUM_FULL]
            in_partial, in_full = begin_item(lists, item)
            first_row = (b * p.heads + h) * blocks
            of_kv, column = (kv_block, h_kv, b_kv), part * c.grad_dims[0]
            words = (kv_block, h, b, count)
            for j in cutlass.range(count, unroll=1):
                block, q_word, in_partial, in_full = next_q_block(
                    lists, (in_partial, in_full), kv_block, ragged
                )
                of_q = (block, h, b)
                self._load_rows(lists, rows, first_row + block, q_word, q_count, bars)
                for chunk in cutlass.range_constexpr(c.chunks):
                    if const_expr(chunk == CHUNK_STAGES - 1):
                        # the ring has no room for all chunks before the MMAs know of the work tile
                        if j == 0:
                            self._begin(info, lists, item, words, part, kv_count, bars)
                            self._load_part(k, smem.k_part, of_kv, column, bars.k_full)
                    self._load_chunk((k, q), smem, (of_kv, of_q), chunk, q_count, bars)
                self._refill_part(do, smem.do_part, of_q, column, q_count, bars, "do_part")
                for chunk in cutlass.range_constexpr(c.chunks):
                    self._load_chunk((v, do), smem, (of_kv, of_q), c.chunks + chunk, q_count, bars)
                self._refill_part(q, smem.q_part, of_q, column, q_count, bars, "q_part")
                q_count += 1
            if count == 0:  # fully masked: only the record
                self._begin(info, lists, item, words, part, kv_count, bars)
                self._load_part(k, smem.k_part, of_kv, column, bars.k_full)
            index = fetch(lists, total)
            kv_count += 1
        write_end(info, bars, kv_count)

    def _load_rows(
        self, lists: Lists, rows: SmemRows, row: Int32, word: Int32, count: Int32, bars: Any
    ) -> None:
        """Write the word of a q block and load its LSE and delta, once their stage is empty.

        Args:
            lists: tensors of the work list.
            rows: statistics and words of q blocks in shared memory.
            row: index of the q block among those of all heads.
            word: word of the q block.
            count: index of the q block in the CTA.
            bars: mbarriers.
        """
        c, r = self.config, q_stage(self.config, count)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        full = bars.block_full + r
        cute.arch.mbarrier_wait(bars.block_empty + r, q_phase(c, count) ^ 1)
        with cute.arch.elect_one():
            # the lane that writes the word also arrives
            rows.info[r] = word
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * 4 * c.block_q)
            for source, target in ((lists.lse, rows.lse), (lists.delta, rows.delta)):
                parts = cute.flat_divide(source, (c.block_q,))  # f32 [block_q, blocks]
                cute.copy(bulk, parts[None, row], target[None, r], mbar_ptr=full)

    def _begin(
        self,
        info: Any,
        lists: Lists,
        item: Int32,
        words: tuple,
        part: Int32,
        count: Int32,
        bars: Any,
    ) -> None:
        """Write the record of a work tile once all roles have finished with the last one.

        By then the memory of the parts is free too: dK and dV of the last work tile were stored
        from it.

        Args:
            info: int32 words in shared memory.
            lists: tensors of the work list.
            item: row of the work list.
            words: kv block, head, batch element and number of q blocks.
            part: part of the gradients' columns.
            count: index of the work tile in the CTA.
            bars: mbarriers.
        """
        c = self.config
        cute.arch.mbarrier_wait(bars.kv_empty, (count & 1) ^ 1)
        with cute.arch.elect_one():
            write_part_record(c, info, lists, item, words, part)
            cute.arch.mbarrier_arrive_and_expect_tx(bars.k_full, c.rows_kv * c.grad_dims[0] * 2)

    def _load_chunk(
        self, operands: tuple, smem: StreamTargets, places: tuple, position: int, count: Int32,
        bars: Any,
    ) -> None:  # fmt: skip
        """Load a chunk of two operands into the ring, once its stage is empty.

        Args:
            operands: (K, Q) or (V, dO).
            smem: targets in shared memory.
            places: (tile of rows, head, batch element) of each.
            position: index among the chunks of the q block, those of S before those of dP.
            count: index of the q block in the CTA.
            bars: mbarriers.
        """
        c, stage = self.config, position % CHUNK_STAGES
        full = bars.chunk_full + stage
        cute.arch.mbarrier_wait(bars.chunk_empty + stage, chunk_phase(c, count, position) ^ 1)
        with cute.arch.elect_one():
            size = (c.rows_kv + c.block_q) * CHUNK * 2
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        for operand, target, place in zip(operands, (smem.kv, smem.q), places, strict=True):
            operand.load(target, stage, place, position % c.chunks * CHUNK, full)

    def _load_part(
        self, operand: Stream, target: cute.Tensor, place: tuple, column: Int32, full: Any
    ) -> None:
        """Load a part of the columns, which arrives at `full`.

        Args:
            operand: K, Q or dO.
            target: shared memory.
            place: (tile of rows, head, batch element).
            column: first column.
            full: mbarrier.
        """
        for i in range(self.config.grad_dims[0] // CHUNK):
            operand.load(target, i, place, column + i * CHUNK, full)

    def _refill_part(
        self, operand: Stream, target: cute.Tensor, place: tuple, column: Int32, count: Int32,
        bars: Any, name: str,
    ) -> None:  # fmt: skip
        """Load a part of Q or dO for a q block, once the MMAs have read that of the last block.

        Args:
            operand, target, place, column: see `_load_part`.
            count: index of the q block in the CTA.
            bars: mbarriers.
            name: "q_part" or "do_part", with which the names of its barriers begin.
        """
        c = self.config
        full, empty = getattr(bars, f"{name}_full"), getattr(bars, f"{name}_empty")
        cute.arch.mbarrier_wait(empty, (count & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, c.block_q * c.grad_dims[0] * 2)
        self._load_part(operand, target, place, column, full)

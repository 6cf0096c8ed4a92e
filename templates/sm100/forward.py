"""The forward kernel for Blackwell (sm_100a): FlashAttention-4's algorithm with hooks for any variant.

One CTA per SM, persistent. Two query tiles of 128 rows are worked on in ping-pong: while the tensor
cores multiply for one, a softmax warpgroup works on the other. S and O are in tensor memory, P takes
the place of S. The roles, a thread of the first three being a row:

    softmax      a warpgroup for each query tile: mod, mask, exponentials; P back to tensor memory
    correction   one warpgroup: rescales O where a maximum moved, rounds and writes O at the end
    products     one warp: S = Q K^T and O += P V for both tiles, in turns
    loads        one warp: pieces of work, TMA of Q, K and V
    stores       one warp: TMA of O

For each query tile the products are issued in the order P V of a block, then Q K of the next: both
overwrite what the one before has read, so that in the order of the tensor cores nothing more need be
waited for (Zadouri et al. 2026, FlashAttention-4).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
import cutlass.tensor_utils
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import (
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_A,
    make_tiled_tma_atom_B,
    tcgen05,
)
from cutlass.utils import blackwell_helpers

from attnkit.templates.common import device as common
from attnkit.templates.common.constants import NEG_INF
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.tma import ordered
from attnkit.templates.sm100 import device
from attnkit.templates.sm100.config import ROWS, TMEM_COLUMNS, ForwardConfig
from attnkit.templates.sm100.forward_common import NOTES, RECORD, RECORDS
from attnkit.templates.sm100.forward_load import ForwardLoads
from attnkit.templates.sm100.forward_products import ForwardProducts
from attnkit.templates.sm100.forward_store import ForwardStores
from attnkit.templates.sm100.softmax import Softmax, total_of

ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR


class Forward(Softmax, ForwardLoads, ForwardProducts, ForwardStores):
    """A forward kernel for one configuration and one variant.

    Args:
        config: what is fixed when the kernel is compiled.
        hooks: the variant.
    """

    def __init__(self, config: ForwardConfig, hooks: ForwardHooks) -> None:
        self.config = config
        self.hooks = hooks
        self.dtype = common.DTYPES[config.dtype]

    # ------------------------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        top: cute.Tensor,
        pieces: cute.Tensor,
        partial: cute.Tensor,
        full: cute.Tensor,
        counter: cute.Tensor,
        parts: cute.Tensor,
        part_lse: cute.Tensor,
        captured: list,
        scale: Float32,
        group: Int32,
        ctas: Int32,
        stream: Any,
    ):
        """Launch; the arguments are those of Hopper's `Forward`.

        Args:
            ctas: that share the work, or pairs of them.
        """
        c, dtype = self.config, self.dtype
        query, key, out = (ordered(t, (2, 3, 1, 0)) for t in (query, key, out))
        value = ordered(value, (3, 2, 1, 0))
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        ctas_of = tcgen05.CtaGroup.TWO if const_expr(c.pair) else tcgen05.CtaGroup.ONE
        shape_qk, shape_pv = (c.rows, c.block_kv, c.width), (c.rows, c.value_width, c.block_kv)
        columns = c.block_kv // 2 if const_expr(c.halves) else c.block_kv
        mma_qk = blackwell_helpers.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, ctas_of, (c.rows, columns)
        )
        mma_pv = blackwell_helpers.make_trivial_tiled_mma(
            dtype,
            dtype,
            k_major,
            mn_major,
            Float32,
            ctas_of,
            shape_pv[:2],
            tcgen05.OperandSource.TMEM,
        )
        q_layout = blackwell_helpers.make_smem_layout_a(mma_qk, shape_qk, dtype, c.q_tiles)
        k_layout = blackwell_helpers.make_smem_layout_b(mma_qk, shape_qk, dtype, 1)
        v_layout = blackwell_helpers.make_smem_layout_b(mma_pv, shape_pv, dtype, 1)
        o_layout = blackwell_helpers.make_smem_layout_epi(
            dtype, ROW, (ROWS, c.value_width), c.out_tiles
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(ctas_of), cpasync.CopyBulkTensorTileS2GOp()
        first = (None, None, None, 0)
        pairs = cute.tiled_divide(cute.make_layout((c.ctas, 1, 1)), (mma_qk.thr_id.shape,)).shape
        tma_q, q_tiles = make_tiled_tma_atom_A(
            load, query, cute.slice_(q_layout, first), shape_qk, mma_qk, pairs
        )
        tma_k, k_tiles = make_tiled_tma_atom_B(
            load, key, cute.slice_(k_layout, first), shape_qk, mma_qk, pairs
        )
        tma_v, v_tiles = make_tiled_tma_atom_B(
            load, value, cute.slice_(v_layout, first), shape_pv, mma_pv, pairs
        )
        tma_o, o_tiles = cpasync.make_tiled_tma_atom(
            store, out, cute.slice_(o_layout, (None, None, 0)), (ROWS, c.value_width)
        )
        out_size = 8 if const_expr(c.alias) else cute.cosize(o_layout)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[
                Int64, 7 * c.q_tiles + 7 + 2 * len(c.parts) + 2 * c.stages + 2 * RECORDS + NOTES + 1
            ]
            response: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
            memory: Int32  # where tensor memory was given
            records: cute.struct.MemRange[Int32, RECORD * RECORDS]
            blocks: cute.struct.MemRange[Int32, NOTES]
            scales: cute.struct.MemRange[Float32, ROWS * c.q_tiles]
            gaps: cute.struct.MemRange[Float32, ROWS * c.q_tiles]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], 1024]
            kv: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * c.slot], 1024]
            o: cute.struct.Align[cute.struct.MemRange[dtype, out_size], 1024]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0], key.shape[3])
        self.kernel(
            (mma_qk, mma_pv),
            (mma_qk, mma_qk, mma_pv, mma_pv),
            (tma_q, tma_k, tma_v, tma_o),
            (q_tiles, k_tiles, v_tiles, o_tiles),
            (q_layout, k_layout, v_layout, o_layout),
            lse,
            top,
            (pieces, partial, full, counter),
            (parts, part_lse),
            captured,
            (scale, group, *lengths),
        ).launch(
            grid=((pieces.shape[0] if const_expr(c.work == "clc") else ctas) * c.ctas, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(2, 1, 1) if const_expr(c.pair) else None,
            stream=stream,
            min_blocks_per_mp=1,
        )

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        shapes: tuple,
        mmas: tuple,
        atoms: tuple,
        tiles: tuple,
        layouts: tuple,
        lse: cute.Tensor,
        top: cute.Tensor,
        lists: tuple,
        partials: tuple,
        captured: list,
        numbers: tuple,
    ):
        """Roles: softmax, correction, then one warp each for products, loads and stores."""
        c = self.config
        tma_q, tma_k, tma_v, tma_o = atoms
        q_tiles, k_tiles, v_tiles, o_tiles = tiles
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        last = 4 * (c.q_tiles + 1)  # the first warp of the last warpgroup: products, loads, stores
        if warp == last + 1:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        q_layout, k_layout, v_layout, o_layout = layouts
        smem_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        smem_k = storage.kv.get_tensor(self.ring(k_layout.outer), swizzle=k_layout.inner)
        smem_v = storage.kv.get_tensor(self.ring(v_layout.outer), swizzle=v_layout.inner)
        if const_expr(c.alias):
            # each tile in the place of its own rows of Q, which may be wider
            one = cute.slice_(o_layout.outer, (None, None, 0))
            spread = cute.append(one, cute.make_layout(c.q_tiles, stride=ROWS * c.width))
            smem_o = storage.q.get_tensor(spread, swizzle=o_layout.inner)
        else:
            smem_o = storage.o.get_tensor(o_layout.outer, swizzle=o_layout.inner)
        records = storage.records.get_tensor(cute.make_layout(RECORD * RECORDS))
        blocks = storage.blocks.get_tensor(cute.make_layout(NOTES))
        scales = storage.scales.get_tensor(cute.make_layout(ROWS * c.q_tiles))
        gaps = storage.gaps.get_tensor(cute.make_layout(ROWS * c.q_tiles))
        base = storage.barriers.data_ptr()
        # one barrier for each place of S and P, and for each query tile
        s_half, s_full, s_free, *p_full = (base + 2 * i for i in range(3 + len(c.parts)))
        tiles_base = base + 6 + 2 * len(c.parts)
        q_full, q_free, o_full, scale_full = (tiles_base + c.q_tiles * i for i in range(4))
        scale_free, out_full, out_free = (tiles_base + c.q_tiles * i for i in range(4, 7))
        kv_full = tiles_base + 7 * c.q_tiles
        s_bars = (s_half, s_full, s_free)
        kv_free = kv_full + c.stages
        record_full = kv_free + c.stages
        record_free = record_full + RECORDS
        told = record_free + RECORDS
        granted = told + NOTES
        asked = granted + 1
        if const_expr(c.alias):
            out_free = q_free
        if warp == last + 1:
            with cute.arch.elect_one():
                for u in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(s_half + u, 1)
                    cute.arch.mbarrier_init(s_full + u, 1)
                    cute.arch.mbarrier_init(s_free + u, 4 * c.ctas)
                    # warps of the softmax; for the first part also of the correction: O is rescaled
                    for part, barrier in enumerate(p_full):
                        cute.arch.mbarrier_init(barrier + u, (4 if part else 8) * c.ctas)
                for t in cutlass.range_constexpr(c.q_tiles):
                    for barrier in (q_full, q_free, o_full):
                        cute.arch.mbarrier_init(barrier + t, 1)
                    for barrier in (scale_full, scale_free, out_full):
                        cute.arch.mbarrier_init(barrier + t, 4)
                    if const_expr(not c.alias):
                        cute.arch.mbarrier_init(out_free + t, 1)
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(kv_full + s, 1)
                    cute.arch.mbarrier_init(kv_free + s, 1)
                for r in cutlass.range_constexpr(RECORDS):
                    cute.arch.mbarrier_init(record_full + r, 1)
                    # one warp multiplies for a pair
                    readers = 4 * (c.q_tiles + 1) + 2 - self.rank()
                    cute.arch.mbarrier_init(record_free + r, readers)
                for s in cutlass.range_constexpr(NOTES):
                    cute.arch.mbarrier_init(told + s, 1)
                cute.arch.mbarrier_init(granted, 1)
                cute.arch.mbarrier_init(asked, 1)
        if warp == last:
            # all of it: it begins at column 0
            cute.arch.alloc_tmem(TMEM_COLUMNS, storage.memory.ptr, is_two_cta=c.pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=c.pair)
        cute.arch.mbarrier_init_fence()
        self.sync_all()

        record_bars = (record_full, record_free)
        if warp >= last:
            cute.arch.setmaxregister_decrease(c.registers[2])
            if warp == last and self.rank() == 0:
                self.multiply(
                    mmas,
                    (smem_q, smem_k, smem_v),
                    records,
                    (record_bars, q_full, q_free, kv_full, kv_free, s_bars, p_full, o_full),
                )
            if warp == last + 1:
                self.produce(
                    (tma_q, tma_k, tma_v),
                    shapes,
                    (q_tiles, k_tiles, v_tiles),
                    (smem_q, smem_k, smem_v),
                    (q_full, q_free, kv_full, kv_free, told, record_full, record_free),
                    (records, blocks),
                    (granted, asked, storage.response.data_ptr()),
                    lists,
                    numbers,
                )
            if warp == last + 2:
                self.store((tma_o, o_tiles), records, smem_o, (record_bars, out_full, out_free))
        elif warp >= last - 4:
            cute.arch.setmaxregister_decrease(c.registers[1])
            self.correct(
                smem_o,
                scales,
                records,
                partials[0],
                (record_bars, p_full[0], scale_full, scale_free, o_full, out_full, out_free),
            )
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self.soften(
                (scales, gaps),
                records,
                blocks,
                (record_bars, told, s_bars, p_full, scale_full, scale_free),
                (lse, top, partials[1]),
                captured,
                numbers,
            )
        self.sync_all()
        if warp == last:
            pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.memory.ptr)
            cute.arch.dealloc_tmem(pointer, TMEM_COLUMNS, is_two_cta=c.pair)

    def sync_all(self) -> None:
        """Until all threads of all CTAs that share products are here."""
        if self.config.pair:
            device.fence_before()
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            device.fence_after()
        else:
            cute.arch.sync_threads()

    def ring(self, tile: Any) -> Any:
        """The layout of a K or V tile, by slot of the ring that they share."""
        one = cute.slice_(tile, (None, None, None, 0))
        return cute.append(one, cute.make_layout(self.config.stages, stride=self.config.slot))

    # --------------------------------------------------------------------------------- softmax

    @cute.jit
    def soften(
        self,
        shared: tuple,
        records: cute.Tensor,
        blocks: cute.Tensor,
        bars: tuple,
        results: tuple,
        captured: list,
        numbers: tuple,
    ):
        """A softmax warpgroup: a thread a row.

        Args:
            shared: a number of each row for the correction; what roundings add to its sum, which
                would take a register too many.
        """
        c = self.config
        record_bars, told, s_bars, p_full, scale_full, scale_free = bars
        scale, _, q_len, kv_len, _ = numbers
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        t, row = warp // 4, thread % ROWS
        place = thread  # t * ROWS + row, and no register more
        stats = tuple(cute.make_rmem_tensor(1, Float32) for _ in range(3))
        row_max, row_sum, top = stats
        gaps = shared[1]
        block_bars = (told, s_bars, p_full, scale_full + t, scale_free + t)
        kc, tc = Int32(0), Int32(0)
        tile, h, b, masked, count, slot, valid = self.see_record(records, record_bars, tc)
        while valid != 0:
            where = (captured, b, h, q_len, kv_len, scale, tile * c.block_q)
            mine = self.tile_of(t) * ROWS + row
            known = self.begin(where, tile * c.block_q + mine)
            row_max[0], row_sum[0], top[0] = Float32(NEG_INF), Float32(0.0), Float32(NEG_INF)
            gaps[place] = Float32(0.0)
            for _ in cutlass.range(masked, unroll=1):
                self.block(True, kc, tc, known, row, stats, blocks, shared, block_bars, t, place)
                kc += 1
            show_mask = not c.skip_masks
            for _ in cutlass.range(count - masked, unroll=1):
                self.block(
                    show_mask, kc, tc, known, row, stats, blocks, shared, block_bars, t, place
                )
                kc += 1
            final, value, most = self.finish(known, stats, gaps[place])
            self.await_turn(kc + tc, block_bars)
            self.tell(final, shared[0], block_bars, place)
            # read again: not kept in registers through the loops
            tile, h, b, _, _, slot, _ = self.see_record(records, record_bars, tc)
            self.drop_record(record_bars, tc)
            mine = self.tile_of(t) * ROWS + device.anew(row, tc)
            self.write_row(results, value, most, (tile * c.block_q + mine, b, h, slot, mine))
            tc += 1
            tile, h, b, masked, count, slot, valid = self.see_record(records, record_bars, tc)
        self.drop_record(record_bars, tc)

    def await_turn(self, mc: Any, bars: Any) -> None:
        """Until the correction took the number before the mc-th: one a block, and one a tile."""
        cute.arch.mbarrier_wait(bars[4], (mc & 1) ^ 1)

    def tell(self, scale: Any, scales: Any, bars: Any, place: Any) -> None:
        """Give a number of this row to the correction."""
        scales[place] = scale
        device.arrive(bars[3])

    def block(
        self,
        masked: bool,
        kc: Any,
        tc: Any,
        known: Any,
        row: Any,
        stats: Any,
        blocks: Any,
        shared: Any,
        bars: Any,
        t: Any,
        place: Any,
    ) -> None:
        """Softmax of one block: S from tensor memory, P back to it."""
        c = self.config
        told, (s_half, s_full, s_free), p_full, _, _ = bars
        row_max, row_sum, _ = stats
        scales, gaps = shared
        wide, u = self.chunk(masked), self.buffer(t, kc)
        at, note = u * c.block_kv, kc & (NOTES - 1)
        cute.arch.mbarrier_wait(told + note, (kc >> (NOTES.bit_length() - 1)) & 1)
        mark = blocks[note]
        self.await_turn(kc + tc, bars)
        upper = None
        if c.halves:
            upper = s_full + u, self.turn(kc), s_free + u
        cute.arch.mbarrier_wait((s_half if c.halves else s_full) + u, self.turn(kc))
        chunks, bases, peak = self.scores(known, mark, masked, row, at, upper)
        factor = self.factor(known)
        scale = self.move_maximum(stats, peak, factor)
        self.tell(scale, scales, bars, place)
        gaps[place] = gaps[place] * scale + self.rounding(peak, row_max[0], factor)
        sums: list[Any] = [None] * self.sums
        step = min(wide, 16)
        # computed before what comes before it is stored: the exponential unit goes on meanwhile
        ahead = step if self.hooks.raw and not masked else 0
        ready: list[Any] = []
        for start in range(0, c.block_kv + ahead, step):
            if start < c.block_kv:
                i, low = divmod(start, wide)
                values = chunks[i][low : low + step]
                ready.append(self.powers(values, start, bases[i], row_max[0], factor))
            end = start + step - ahead
            if end > 0:
                place = at + (c.block_kv + end - step) // 2
                self.keep(ready.pop(0), row, place, sums)
            if end in c.parts:
                cute.arch.fence_view_async_tmem_store()
                self.signal(p_full[c.parts.index(end)] + u)
        row_sum[0] = row_sum[0] * scale + total_of(sums)

    @cute.jit
    def write_row(self, results: tuple, value: Float32, most: Float32, place: tuple):
        """Write a row's LSE, and its maximum if it is wanted."""
        lse, top, part_lse = results
        row, b, h, slot, within = place
        if slot >= 0:
            part_lse[slot, within] = value
        elif row < lse.shape[2]:
            lse[b, h, row] = value
            if const_expr(self.config.need_max):
                top[b, h, row] = most

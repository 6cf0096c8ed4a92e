"""The forward kernel for Hopper (sm_90a): FlashAttention-3's algorithm with hooks for any variant.

One CTA per SM, persistent. Warpgroup 0 loads: one warp takes pieces of work from a list, longest
first, and one walks their runs of kv blocks and loads Q, K and V by TMA; it tells the consumers
through shared memory which block each K stage holds, so that they never see the lists. Its other
two warps write the tiles that keep nothing. The other warpgroups are consumers of 64 query rows
each. A consumer computes S = Q K^T into registers, applies mod, mask and softmax there, and uses P
from registers as the A operand of O += P V. Q K of a block is issued before P V of the block
before, across the end of a tile where shared memory holds two query tiles, so that the tensor cores
work during the softmax; named barriers make the warpgroups take turns on the tensor cores, so that
one does its softmax while another multiplies (Shah et al. 2024, FlashAttention-3).

Masked blocks come first, those that are kept whole after them in a loop without mask
instructions. The next P is made in registers of its own while P V still reads the last one.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
import cutlass.tensor_utils
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device
from attnkit.templates.common.constants import NEG_INF
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.tma import ordered, partition
from attnkit.templates.sm90.config import ForwardConfig
from attnkit.templates.sm90.forward_load import RECORD, WORDS, ForwardLoads
from attnkit.templates.sm90.forward_store import ForwardStores
from attnkit.templates.sm90.softmax import Softmax

TURN = 1  # the first of the named barriers for the warpgroups' turns

ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
COLUMN = cutlass.tensor_utils.LayoutEnum.COL_MAJOR


class Forward(Softmax, ForwardLoads, ForwardStores):
    """A forward kernel for one configuration and one variant.

    Args:
        config: what is fixed when the kernel is compiled.
        hooks: the variant.
    """

    def __init__(self, config: ForwardConfig, hooks: ForwardHooks) -> None:
        self.config = config
        self.hooks = hooks
        self.dtype = device.DTYPES[config.dtype]

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
        """Launch.

        Args:
            query, key, value, out: [B, H, S, D] of the config's dtype, the last dimension
                contiguous, the others' strides and the address multiples of 16 bytes.
            lse, top: float32 [B, H, S]; `top` is written only if the config needs the maxima.
            pieces: int32 [pieces, 12], see `forward_load.PIECE`; cursors descend: a run, how many of its first
                blocks to take, blocks in all, going on with the whole runs before.
            partial, full: int32 [2, runs], starts and lengths of runs of kv blocks.
            counter: int32 [1], zero; left at zero.
            parts, part_lse: float32 [slots, rows of a tile, Dv] and [slots, rows]: output and LSE
                of pieces that are parts of a row, by their slot; `Combine` puts them together.
            captured: captured tensors.
            scale: softmax scale.
            group: query heads per kv head.
            ctas: at most the number of pieces.
        """
        c, dtype = self.config, self.dtype
        width, deep, bn = c.width, c.value_width, c.block_kv
        rows_out = out
        query, key, out = (ordered(t, (2, 3, 1, 0)) for t in (query, key, out))
        value = ordered(value, (3, 2, 1, 0))
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        # one warpgroup's view: 64 rows; the warpgroup is a stage of the tiles of Q and O
        mma_qk = hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, (1, 1, 1), (64, bn)
        )
        registers = warpgroup.OperandSource.RMEM
        mma_pv = hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), (64, deep), a_source=registers
        )
        layouts = (
            hopper_helpers.make_smem_layout_a(
                ROW, (64, bn, width), dtype, c.warpgroups * c.query_stages
            ),
            hopper_helpers.make_smem_layout_b(ROW, (64, bn, width), dtype, c.stages),
            hopper_helpers.make_smem_layout_b(COLUMN, (64, deep, bn), dtype, c.stages),
            hopper_helpers.make_smem_layout_epi(dtype, ROW, (64, deep), c.warpgroups),
        )
        q_layout, k_layout, v_layout, o_layout = layouts
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        first = (None, None, 0)
        tma_q, q_tiles = cpasync.make_tiled_tma_atom(
            load, query, cute.slice_(q_layout, first), (64, width)
        )
        tma_k, k_tiles = cpasync.make_tiled_tma_atom(
            load, key, cute.slice_(k_layout, first), (bn, width)
        )
        tma_v, v_tiles = cpasync.make_tiled_tma_atom(
            load, value, cute.slice_(v_layout, first), (deep, bn)
        )
        tma_o, o_tiles = cpasync.make_tiled_tma_atom(
            store, out, cute.slice_(o_layout, first), (64, deep)
        )
        out_size = 8 if const_expr(c.direct) else cute.cosize(o_layout)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 + 2 * c.query_stages + 4 * c.stages]
            info: cute.struct.MemRange[Int32, WORDS]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(v_layout)], 1024]
            o: cute.struct.Align[cute.struct.MemRange[dtype, out_size], 1024]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0], key.shape[3])
        self.kernel(
            (mma_qk, mma_qk, mma_pv),
            (tma_q, tma_k, tma_v, tma_o),
            (q_tiles, k_tiles, v_tiles, o_tiles),
            layouts,
            rows_out,
            lse,
            top,
            pieces,
            partial,
            full,
            counter,
            (parts, part_lse),
            captured,
            (scale, group, *lengths),
        ).launch(
            grid=(ctas, 1, 1),
            block=(128 * (c.warpgroups + 1), 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        mmas: tuple,
        atoms: tuple,
        tiles: tuple,
        layouts: tuple,
        out: cute.Tensor,
        lse: cute.Tensor,
        top: cute.Tensor,
        pieces: cute.Tensor,
        partial: cute.Tensor,
        full: cute.Tensor,
        counter: cute.Tensor,
        partials: tuple,
        captured: list,
        numbers: tuple,
    ):
        """Roles: warp 0 loads what warp 1 claims, 2 and 3 clear, warpgroups 1 and up compute."""
        c = self.config
        tma_q, tma_k, tma_v, tma_o = atoms
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        q_layout, k_layout, v_layout, o_layout = layouts
        smem_q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        smem_k = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        smem_v = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        smem_o = storage.o.get_tensor(o_layout.outer, swizzle=o_layout.inner)
        info = storage.info.get_tensor(cute.make_layout(WORDS))
        base = storage.barriers.data_ptr()
        work_full, work_free = base, base + 1
        q_full, q_free = base + 2, base + 2 + c.query_stages
        base = base + 2 + 2 * c.query_stages
        k_full, k_free, v_full, v_free = (base + c.stages * i for i in range(4))
        bars = (q_full, q_free, k_full, k_free, v_full, v_free)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(work_full, 1)
                cute.arch.mbarrier_init(work_free, 32)
                for s in cutlass.range_constexpr(c.query_stages):
                    cute.arch.mbarrier_init(q_full + s, 1)
                    cute.arch.mbarrier_init(q_free + s, 4 * c.warpgroups)
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(k_full + s, 1)
                    cute.arch.mbarrier_init(v_full + s, 1)
                    lanes = 1 if const_expr(c.chained) else 32  # see `give_back`
                    cute.arch.mbarrier_init(k_free + s, 4 * c.warpgroups * lanes)
                    cute.arch.mbarrier_init(v_free + s, 4 * c.warpgroups)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp == 0:
                self.produce(
                    (tma_q, tma_k, tma_v),
                    tiles,
                    (smem_q, smem_k, smem_v),
                    (work_full, work_free),
                    bars,
                    info,
                    partial,
                    full,
                    numbers,
                )
            elif warp == 1:
                self.claim(pieces, counter, info, (work_full, work_free))
            else:
                self.clear(pieces, out, lse, top, warp - 2)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self.consume(
                mmas,
                (smem_q, smem_k, smem_v, smem_o),
                (tma_o, tiles[3]),
                bars,
                info,
                (lse, top, *partials, out),
                captured,
                numbers,
            )

    @cute.jit
    def consume(
        self,
        mmas: tuple,
        smem: tuple,
        target: tuple,
        bars: tuple,
        info: cute.Tensor,
        results: tuple,
        captured: list,
        numbers: tuple,
    ):
        """A consumer warpgroup: products, softmax, output tile."""
        c, dtype = self.config, self.dtype
        mma_first, mma_qk, mma_pv = mmas
        smem_q, smem_k, smem_v, smem_o = smem
        tma_o, o_tiles = target
        scale, _, q_len, kv_len, _ = numbers
        q_full, q_free, k_full, k_free, v_full, v_free = bars
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        wg, ct = warp // 4 - 1, thread % 128
        row0 = (warp % 4) * 16 + lane // 4
        first_column = (lane % 4) * 2
        thr_qk, thr_pv = mma_qk.get_slice(ct), mma_pv.get_slice(ct)
        all_qk, all_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        frag_q = mma_qk.make_fragment_A(all_qk.partition_A(smem_q))
        frag_k = mma_qk.make_fragment_B(all_qk.partition_B(smem_k))
        frag_v = mma_pv.make_fragment_B(all_pv.partition_B(smem_v))
        scores = cute.make_rmem_tensor(thr_qk.partition_shape_C((64, c.block_kv)), Float32)
        acc = cute.make_rmem_tensor(thr_pv.partition_shape_C((64, c.value_width)), Float32)
        p_shape = thr_pv.partition_shape_A((64, c.block_kv))
        p = cute.make_rmem_tensor(p_shape, dtype)
        p_now = cute.make_tensor(p.iterator, scores.layout)  # P in the order of the scores
        p_next = cute.make_rmem_tensor(scores.layout, dtype) if const_expr(c.early) else p_now
        probabilities = (p, p_now, p_next)
        row_max, row_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        rescale, top = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        stats = (row_max, row_sum, rescale, top)
        # set once: the value behind a set() in a helper must not leave the helper's region
        mma_first.set(warpgroup.Field.ACCUMULATE, False)
        mma_qk.set(warpgroup.Field.ACCUMULATE, True)
        mma_pv.set(warpgroup.Field.ACCUMULATE, True)
        parts = (mma_first, mma_qk, mma_pv, scores, acc, frag_q, frag_k, frag_v)
        kv_bars = (k_full, k_free, v_full, v_free)

        store = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), dtype), mma_pv
        )
        thr_store = store.get_slice(ct)
        rounded = cute.make_rmem_tensor(acc.layout, dtype)
        output = (store, rounded, thr_store.retile(rounded), thr_store.partition_D(smem_o))
        o_from, o_to = partition(tma_o, smem_o, o_tiles, (64, c.value_width), (None, 0, None, None))

        if const_expr(c.pingpong):
            if wg == 0:
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=256)
        kc, tc, n = Int32(0), Int32(0), Int32(0)
        cute.arch.mbarrier_wait(q_full, 0)
        valid = cute.arch.make_warp_uniform(info[RECORD + 5])
        if const_expr(c.chained):
            if valid != 0:  # the first block of the first tile; later ones are begun with the last
                cute.arch.mbarrier_wait(k_full, 0)
                n = info[0]
                warpgroup.fence()
                self.issue_qk(parts, wg, 0)
                warpgroup.wait_group(0)
                device.arrive(k_free)
        while valid != 0:
            stage_q = self.query_stage(tc)
            record = self.record(tc)
            at, h, b = info[record], info[record + 1], info[record + 2]
            # uniform over a warp, as the products below need to know
            masked = cute.arch.make_warp_uniform(info[record + 3])
            whole = cute.arch.make_warp_uniform(info[record + 4])
            row = at * c.block_q + wg * 64 + row0
            where = (captured, b, h, q_len, kv_len, scale, at * c.block_q)
            tile = self.begin(where, first_column, row)
            rows_q = wg + c.warpgroups * stage_q
            acc.fill(0.0)
            for r in cutlass.range_constexpr(2):
                row_max[r], row_sum[r], top[r] = Float32(NEG_INF), Float32(0.0), Float32(NEG_INF)
            if const_expr(not c.chained):
                s = self.stage(kc)
                cute.arch.mbarrier_wait(k_full + s, self.phase(kc))
                n = info[s]
                warpgroup.fence()
                self.issue_qk(parts, rows_q, s)
                warpgroup.wait_group(0)
                self.give_back(k_free + s)
            known = self.ahead(tile, n, True, cute.size(scores))
            base = self.scores(tile, known, scores)
            if const_expr(c.skip_masks):
                if masked != 0:
                    self.hide(self.kept(tile, n, True), scores)
            else:
                self.hide(self.kept(tile, n, True), scores)
            self.first(tile, base, scores, p_now, stats)
            kc += 1
            for _ in cutlass.range(1, masked, unroll=1):
                self.block(True, kc, parts, probabilities, kv_bars, info, stats, tile, wg, rows_q)
                kc += 1
            rest = whole - cutlass.select_(masked == 0, Int32(1), Int32(0))
            show_mask = not c.skip_masks
            for _ in cutlass.range(rest, unroll=1):
                self.block(
                    show_mask, kc, parts, probabilities, kv_bars, info, stats, tile, wg, rows_q
                )
                kc += 1
            if const_expr(c.chained):
                device.arrive(q_free + stage_q)
            tc += 1
            sv = self.stage(kc - 1)
            if const_expr(c.chained):
                # Q K of the next tile's first block beside P V of this one's last; if there is no
                # next tile, of the last blocks again, for nothing
                following = self.query_stage(tc)
                cute.arch.mbarrier_wait(q_full + following, self.query_phase(tc))
                valid = cute.arch.make_warp_uniform(info[self.record(tc) + 5])
                again = cutlass.select_(valid == 0, Int32(1), Int32(0))
                s = self.stage(kc - again)
                cute.arch.mbarrier_wait(k_full + s, self.phase(kc - again))
                n = info[s]
                self.turn_wait(wg)
                warpgroup.fence()
                self.issue_qk(parts, wg + c.warpgroups * self.query_stage(tc - again), s)
            cute.arch.mbarrier_wait(v_full + sv, self.phase(kc - 1))
            if const_expr(not c.chained):
                warpgroup.fence()
            self.issue_pv(parts, p, sv)
            if const_expr(c.chained):
                self.turn_pass(wg)
            # read again: held all along, they would take registers from the loops
            record = self.record(tc - 1)
            at, h, b, slot = (info[record + i] for i in (0, 1, 2, 6))
            row = at * c.block_q + wg * 64 + row0
            where = (captured, b, h, q_len, kv_len, scale, at * c.block_q)
            place = (row, wg * 64 + row0, h, b, slot, lane)
            terms = self.lse_terms(where, row)
            self.conclude(tile, terms, stats, results, place)  # while the products run
            warpgroup.wait_group(0)
            if const_expr(c.chained):
                device.arrive(k_free + s)
            device.arrive(v_free + sv)
            self.normalise(acc, stats)
            if slot >= 0:  # a part of a row: float32, to be combined
                self.write_part(acc, thr_pv, results[2], slot, wg, ct)
            elif const_expr(c.direct):
                self.write_rows(acc, rounded, results[4], place)
            else:
                self.write_tile(acc, output, wg, warp)
                if warp % 4 == 0:
                    cute.copy(tma_o, o_from[None, wg], o_to[None, at * c.warpgroups + wg, h, b])
                    cute.arch.cp_async_bulk_commit_group()
            if const_expr(not c.chained):
                cute.arch.mbarrier_wait(q_full, tc & 1)
                valid = cute.arch.make_warp_uniform(info[self.record(tc) + 5])
        if const_expr(not c.direct):
            if warp % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=False)

    # ---------------------------------------------- pieces of the consumer, inlined while tracing

    def issue_qk(self, parts: Any, rows: Any, stage: Any) -> None:
        mma_first, mma_qk, _, scores, _, frag_q, frag_k, _ = parts
        for k in range(cute.size(frag_q, mode=[2])):
            mma = mma_first if k == 0 else mma_qk
            cute.gemm(
                mma, scores, frag_q[None, None, k, rows], frag_k[None, None, k, stage], scores
            )
        warpgroup.commit_group()

    def issue_pv(self, parts: Any, p: Any, stage: Any) -> None:
        _, _, mma_pv, _, acc, _, _, frag_v = parts
        for k in range(cute.size(p, mode=[2])):
            cute.gemm(mma_pv, acc, p[None, None, k], frag_v[None, None, k, stage], acc)
        warpgroup.commit_group()

    def give_back(self, barrier: Any) -> None:
        """Give back a place of K and its mark: where no turn has come since, every lane its reading."""
        if self.config.chained:
            device.arrive(barrier)
        else:
            cute.arch.mbarrier_arrive(barrier)

    def turn_wait(self, wg: Any) -> None:
        if self.config.pingpong:
            cute.arch.barrier(barrier_id=TURN + wg, number_of_threads=256)

    def turn_pass(self, wg: Any) -> None:
        if self.config.pingpong:
            following = (wg + 1) % self.config.warpgroups
            cute.arch.barrier_arrive(barrier_id=TURN + following, number_of_threads=256)

    def move(self, source: Any, target: Any) -> None:
        """Copy P; opaque, else the compiler merges the two sets and serialises the products."""
        pairs, to = cute.recast_tensor(source, Int32), cute.recast_tensor(target, Int32)
        for i in range(cute.size(pairs)):
            to[i] = cute.arch.inline_ptx(
                "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[pairs[i]]
            )

    def block(
        self,
        masked: bool,
        kc: Any,
        parts: Any,
        probabilities: Any,
        bars: Any,
        info: Any,
        stats: Any,
        tile: Any,
        wg: Any,
        rows: Any,
    ) -> None:
        """One step: Q K of block kc, P V of the block before it, the softmax between."""
        k_full, k_free, v_full, v_free = bars
        p, p_now, p_next = probabilities
        scores, acc, early = parts[3], parts[4], self.config.early
        s, sv = self.stage(kc), self.stage(kc - 1)
        cute.arch.mbarrier_wait(k_full + s, self.phase(kc))
        n = info[s]
        kept = self.kept(tile, n, masked)
        self.turn_wait(wg)
        warpgroup.fence()
        self.issue_qk(parts, rows, s)
        if not self.config.overlap:
            warpgroup.wait_group(0)
        if self.hooks.ahead:  # loads, whose latency hides behind the products
            known = self.ahead(tile, n, masked, cute.size(scores))
        cute.arch.mbarrier_wait(v_full + sv, self.phase(kc - 1))
        self.issue_pv(parts, p, sv)
        if not self.hooks.ahead:
            known = self.ahead(tile, n, masked, cute.size(scores))
        self.turn_pass(wg)
        warpgroup.wait_group(1 if self.config.overlap else 0)
        self.give_back(k_free + s)
        self.next(tile, known, kept, scores, p_next if early else None, stats)
        if self.config.hold:
            self.hold(stats)
        warpgroup.wait_group(0)
        device.arrive(v_free + sv)
        if early:
            self.move(p_next, p_now)
        else:
            self.pack(scores, p_now)
        self.rescale(acc, stats[2])

    def hold(self, stats: Any) -> None:
        """Keep the exponentials before the wait for P V, which the assembler hoists otherwise.

        A sum of exponentials is never negative, so this never runs, but it cannot know that.
        """
        row_sum = stats[1]
        cute.arch.inline_ptx("nanosleep.u32 1;", predicate=(row_sum[0] + row_sum[1]) < Float32(0.0))

"""The backward kernel for Hopper (sm_90a): one kv tile a piece of work, in a loop over its q tiles.

One CTA per SM, persistent. Warpgroup 0 holds a warp that loads by TMA and two that add dQ to
float32 sums; the other two warpgroups are consumers of 64 kv positions each. For every q tile a
consumer recomputes S^T = K Q^T and dP^T = V dO^T, makes P and dS in registers, and adds
dV += P^T dO and dK += dS^T Q from there. dS also goes through shared memory, transposed, where a
consumer reads both halves for its part of dQ = dS K: that of the tile before, so that no consumer
waits for the other, and the tensor cores have the products of one while the other computes. dQ
leaves through shared memory by bulk reductions.

Query and kv blocks come in ascending order, PARTIAL and FULL mixed; only blocks marked as masked
run mask instructions. Float32 sums are kept in units of 64 x 64 in the order of the accumulators'
registers, so that they are read and written in whole lines (`backward_edges` undoes it).
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

from attnkit.templates.sm90 import device
from attnkit.templates.sm90.backward_config import ROWS, BackwardConfig
from attnkit.templates.sm90.backward_load import RECORD, Loads
from attnkit.templates.sm90.backward_math import Weights, held
from attnkit.templates.sm90.backward_sums import NOTE, SUM_FREE, SUM_FULL, Sums
from attnkit.templates.sm90.copies import ordered, partition

PIECE = 12  # int32 words of a piece of work: see `Schedule.table`
OWN, BOTH = 5, 7  # named barriers after those of `backward_sums`; two of the first

ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
COLUMN = cutlass.tensor_utils.LayoutEnum.COL_MAJOR


class Backward(Loads, Weights, Sums):
    """A backward kernel for one configuration and one variant.

    Args:
        config: what is fixed when the kernel is compiled.
        hooks: the variant.
    """

    def __init__(self, config: BackwardConfig, hooks: Any) -> None:
        problem = config.problem()
        if problem:
            raise ValueError(problem)
        if config.rounded and (hooks.learned or hooks.sloped):
            raise ValueError(
                f"block_q={config.block_q} for a mod with a slope or gradients of captured tensors: "
                f"expected {ROWS}, as registers hold no more"
            )
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
        grad_out: cute.Tensor,
        grad_key: cute.Tensor,
        grad_value: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        sums: cute.Tensor,
        pieces: cute.Tensor,
        partial: cute.Tensor,
        full: cute.Tensor,
        counter: cute.Tensor,
        captured: list,
        totals: list,
        turns: list,
        scale: Float32,
        group: Int32,
        ctas: Int32,
        stream: Any,
    ):
        """Launch.

        Args:
            query, key, value, grad_out, grad_key, grad_value: [B, H, S, D] of the config's dtype,
                the last dimension contiguous, the others' strides and the address multiples of 16
                bytes. The last two are not written if the config accumulates.
            lse, delta: float32 [B * H * q blocks * block_q], of `backward_edges.Prepare`.
            sums: float32, zero; units of dQ, then, if the config accumulates, of dK and of dV.
            pieces: int32 [pieces, 12], see `Schedule.table`.
            partial, full: int32 [2, runs], starts and lengths of the transposed runs.
            counter: int32 [1], zero; left at zero.
            captured: captured tensors.
            totals: gradients of the wanted ones among them, float32, of their shapes; added to.
            turns: empty, or where the config has turns, all int32: semaphores, one a chunk of the
                sums, those of dQ holding the first kv tile of their row, the others 0, left as
                they are; of every (b, h, q block) the first and last + 1 of its kept runs (see
                `attnkit.turns`), [rows, 2]; starts and lengths of these; `group` there.
            scale: softmax scale.
            group: query heads per kv head.
            ctas: at most the number of pieces.
        """
        c, dtype = self.config, self.dtype
        width, deep, bm = c.width, c.value_width, c.block_q
        query, key, value, grad_out, grad_key, grad_value = (
            ordered(t, (2, 3, 1, 0)) for t in (query, key, value, grad_out, grad_key, grad_value)
        )
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        smem, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        def mma(a: Any, b: Any, n: int, source: Any = smem) -> Any:
            return hopper_helpers.make_trivial_tiled_mma(
                dtype, dtype, a, b, Float32, (1, 1, 1), (ROWS, n), a_source=source
            )

        mma_s = mma(k_major, k_major, bm)
        mma_dq = mma(k_major, mn_major, c.chunk // ROWS)
        mma_dv = mma(k_major, mn_major, deep, registers)
        mma_dk = mma(k_major, mn_major, width, registers)
        make_a, make_b = hopper_helpers.make_smem_layout_a, hopper_helpers.make_smem_layout_b
        halves = 2 * c.stages
        layouts = (
            make_a(ROW, (ROWS, bm, width), dtype, 2),  # K, a consumer's half a stage
            make_a(ROW, (ROWS, bm, deep), dtype, 2),  # V
            make_b(ROW, (ROWS, bm, width), dtype, c.stages),  # Q
            make_b(ROW, (ROWS, bm, deep), dtype, c.stages),  # dO
            make_a(COLUMN, (ROWS, ROWS, bm), dtype, halves),  # dS^T as written
            # the same memory as other operands: the last two in squares of 64
            make_b(COLUMN, (ROWS, width, bm), dtype, c.stages),  # Q^T
            make_b(COLUMN, (ROWS, deep, bm), dtype, c.stages),  # dO^T
            make_a(ROW, (ROWS, ROWS, ROWS), dtype, halves * (bm // ROWS)),  # dS
            make_b(COLUMN, (ROWS, ROWS, ROWS), dtype, 2 * (width // ROWS)),  # K^T
            hopper_helpers.make_smem_layout_epi(dtype, ROW, (ROWS, width), 2),  # dK
            hopper_helpers.make_smem_layout_epi(dtype, ROW, (ROWS, deep), 2),  # dV
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma = [
            cpasync.make_tiled_tma_atom(op, t, cute.slice_(layout, (None, None, 0)), shape)
            for op, t, layout, shape in (
                (load, query, layouts[2], (bm, width)),
                (load, key, layouts[0], (ROWS, width)),
                (load, value, layouts[1], (ROWS, deep)),
                (load, grad_out, layouts[3], (bm, deep)),
                (store, grad_key, layouts[9], (ROWS, width)),
                (store, grad_value, layouts[10], (ROWS, deep)),
            )
        ]

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 4 + 6 * c.stages]
            info: cute.struct.MemRange[Int32, 32]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.stages * bm], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.stages * bm], 128]
            k: cute.struct.Align[cute.struct.MemRange[dtype, 2 * ROWS * width], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, 2 * ROWS * deep], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * width], 1024]
            do: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * deep], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[dtype, halves * ROWS * bm], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, 2 * c.chunk], 128]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0])
        heads = (query.shape[2], key.shape[2], query.shape[3], key.shape[3])
        self.kernel(
            (mma_s, mma_dq),
            (mma_s, mma_dq, mma_dv, mma_dk),
            tuple(atom for atom, _ in tma),
            tuple(tiles for _, tiles in tma),
            layouts,
            lse,
            delta,
            sums,
            pieces,
            partial,
            full,
            counter,
            captured,
            totals,
            turns,
            (scale, group, *lengths, *heads),
        ).launch(grid=(ctas, 1, 1), block=(384, 1, 1), stream=stream, min_blocks_per_mp=1)

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        mmas_first: tuple,
        mmas: tuple,
        atoms: tuple,
        tiles: tuple,
        layouts: tuple,
        lse: cute.Tensor,
        delta: cute.Tensor,
        sums: cute.Tensor,
        pieces: cute.Tensor,
        partial: cute.Tensor,
        full: cute.Tensor,
        counter: cute.Tensor,
        captured: list,
        totals: list,
        turns: list,
        numbers: tuple,
    ):
        """Roles: warp 0 loads, warps 1 and 2 add up, warpgroups 1 and 2 compute."""
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(32))
        stats = (
            storage.lse.get_tensor(cute.make_layout((c.block_q, c.stages))),
            storage.delta.get_tensor(cute.make_layout((c.block_q, c.stages))),
        )
        parts = (storage.k, storage.v, storage.q, storage.do, storage.ds)
        views = tuple(
            parts[at].get_tensor(layouts[i].outer, swizzle=layouts[i].inner)
            for i, at in enumerate((0, 1, 2, 3, 4, 2, 3, 4, 0, 0, 1))
        )
        outgoing = storage.dq.data_ptr()
        base = storage.barriers.data_ptr()
        k_full, v_full, kv_free = base, base + 1, base + 2
        ends = base + 4 + 2 * c.stages
        rings = (base + 4, base + 4 + c.stages, *(ends + c.stages * i for i in range(4)))
        q_full, q_free, do_full, do_free, ds_full, ds_free = rings
        bars = (k_full, v_full, kv_free, *rings)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(k_full, 1)
                cute.arch.mbarrier_init(v_full, 1)
                cute.arch.mbarrier_init(kv_free, 2)
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(q_full + s, 1)
                    cute.arch.mbarrier_init(q_free + s, 8)
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(do_full + s, 1)
                    cute.arch.mbarrier_init(do_free + s, 8)
                    cute.arch.mbarrier_init(ds_full + s, 8)
                    cute.arch.mbarrier_init(ds_free + s, 8)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp == 0:
                self.produce(
                    atoms[:4],
                    tiles[:4],
                    views[:4],
                    stats,
                    bars,
                    info,
                    (lse, delta, pieces, partial, full, counter, turns),
                    numbers,
                )
            for wg in cutlass.range_constexpr(2):
                if warp == 1 + wg:
                    self.add_up(wg, outgoing, info, sums, turns)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self.consume(
                mmas_first, mmas, views, stats, outgoing, (atoms[4:], tiles[4:]), bars, info,
                captured, totals, numbers,
            )  # fmt: skip

    @cute.jit
    def consume(
        self,
        mmas_first: tuple,
        mmas: tuple,
        views: tuple,
        stats: tuple,
        outgoing: cute.Pointer,
        target: tuple,
        bars: tuple,
        info: cute.Tensor,
        captured: list,
        totals: list,
        numbers: tuple,
    ):
        """A consumer warpgroup: products, P, dS, and what leaves at the end of a piece."""
        c, dtype = self.config, self.dtype
        mma_s0, mma_dq0 = mmas_first
        mma_s, mma_dq, mma_dv, mma_dk = mmas
        scale, group, q_len, kv_len, heads, kv_heads, batch, kv_batch = numbers
        k_full, v_full, kv_free, *_, ds_full, ds_free = bars
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        wg, ct = warp // 4 - 1, thread % 128
        column0 = wg * ROWS + (warp % 4) * 16 + lane // 4
        row0 = (lane % 4) * 2
        bm = c.block_q

        def operand(make: Any, part: Any, at: int) -> Any:
            return make(part(views[at]))

        all_s, all_dq = mma_s.get_slice(0), mma_dq.get_slice(0)
        all_dv, all_dk = mma_dv.get_slice(0), mma_dk.get_slice(0)
        frags = (
            mma_s.make_fragment_A(all_s.partition_A(views[0])),
            mma_s.make_fragment_A(all_s.partition_A(views[1])),
            mma_s.make_fragment_B(all_s.partition_B(views[2])),
            mma_s.make_fragment_B(all_s.partition_B(views[3])),
            mma_dk.make_fragment_B(all_dk.partition_B(views[5])),
            mma_dv.make_fragment_B(all_dv.partition_B(views[6])),
            mma_dq.make_fragment_A(all_dq.partition_A(views[7])),
            mma_dq.make_fragment_B(all_dq.partition_B(views[8])),
        )
        scores = cute.make_rmem_tensor(mma_s.get_slice(ct).partition_shape_C((ROWS, bm)), Float32)
        dp = cute.make_rmem_tensor(scores.layout, Float32)
        # apart from dP though after it: parts of one accumulator for another serialise products
        dq = cute.make_rmem_tensor(_chunk_layout(c.chunk), Float32)
        thr_dk, thr_dv = mma_dk.get_slice(ct), mma_dv.get_slice(ct)
        dk = cute.make_rmem_tensor(thr_dk.partition_shape_C((ROWS, c.width)), Float32)
        dv = cute.make_rmem_tensor(thr_dv.partition_shape_C((ROWS, c.value_width)), Float32)
        p = cute.make_rmem_tensor(thr_dv.partition_shape_A((ROWS, bm)), dtype)
        ds = cute.make_rmem_tensor(p.layout, dtype)
        # set once: the value behind a set() in a helper must not leave the helper's region
        mma_s0.set(warpgroup.Field.ACCUMULATE, False)
        mma_dq0.set(warpgroup.Field.ACCUMULATE, False)
        for one in (mma_s, mma_dq, mma_dv, mma_dk):
            one.set(warpgroup.Field.ACCUMULATE, True)
        products = (mma_s0, mma_dq0, mma_s, mma_dq, mma_dv, mma_dk)
        parts = (*products, scores, dp, dk, dv, p, ds, dq, frags)

        write_ds = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(True, 4), dtype), mma_s
        )
        thr_ds = write_ds.get_slice(ct)
        ds_copy = (write_ds, thr_ds, thr_ds.partition_D(views[4]))
        blocks = (q_len + bm - 1) // bm
        kv_blocks = (kv_len + c.block_kv - 1) // c.block_kv
        q_chunks = blocks * 2  # of a head
        wide, deep = ROWS * c.width // c.chunk, ROWS * c.value_width // c.chunk  # of 64 rows
        k_chunks, v_chunks = kv_blocks * 2 * wide, kv_blocks * 2 * deep
        first_k = batch * heads * q_chunks
        first_v = first_k + kv_batch * kv_heads * k_chunks
        running = self.running()
        kc, tc = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(k_full, 0)
        valid = info[RECORD + 4]
        while valid != 0:
            at, h, b = info[RECORD], info[RECORD + 1], info[RECORD + 2]
            count = info[RECORD + 3]
            where = (captured, b, h, q_len, kv_len, scale, at * c.block_kv)
            tile = self.begin(where, column0)
            running.fill(0.0)
            values = (tile, row0, running, totals)
            place = ((b * heads + h) * q_chunks + wg, at)  # where dQ goes, and whose turn it is
            leaving = (place, outgoing, info, ct)
            for one in (dk, dv):
                for i in cutlass.range_constexpr(cute.size(one)):
                    one[i] = device.pinned(Float32(0.0))  # or it would be done after a fence
            cute.arch.mbarrier_wait(v_full, tc & 1)
            if count > 0:
                before = self.block(
                    True, parts, stats, values, bars, ds_copy, leaving, wg, kc, None
                )
                kc += 1
                for _ in cutlass.range(count - 1, unroll=1):
                    before = self.block(
                        False, parts, stats, values, bars, ds_copy, leaving, wg, kc, before
                    )
                    kc += 1
                self.issue_dq(parts, ds_full, wg, kc - 1)
                warpgroup.wait_group(0)
                self.send_block(dq, before, ds_free, kc - 1, leaving, wg)
                self.flush(tile, running, totals)
            if const_expr(c.accumulate):
                pair = cutlass.min(b, kv_batch - 1) * kv_heads + h // group
                turn, last = info[RECORD + 5], info[RECORD + 6]
                following = cutlass.select_(turn + 1 == last, Int32(0), turn + 1)
                for i in cutlass.range_constexpr(wide):
                    to = first_k + pair * k_chunks + (2 * at + wg) * wide + i
                    note = (to, turn, following)
                    self.send(_chunk(dk, i, c.chunk), note, leaving, wg)
                for i in cutlass.range_constexpr(deep):
                    to = first_v + pair * v_chunks + (2 * at + wg) * deep + i
                    note = (to, turn, following)
                    self.send(_chunk(dv, i, c.chunk), note, leaving, wg)
                cute.arch.barrier(barrier_id=OWN + wg, number_of_threads=128)
            else:
                self.store(
                    mma_dv, dv, views[10], target, 1, (2 * at + wg, h, b), wg, ct, Float32(1.0)
                )
                # K is read by both consumers, for dQ
                cute.arch.barrier(barrier_id=BOTH, number_of_threads=256)
                self.store(mma_dk, dk, views[9], target, 0, (2 * at + wg, h, b), wg, ct, scale)
                if warp % 4 == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            if warp % 4 == 0:
                device.arrive(kv_free)
            tc += 1
            cute.arch.mbarrier_wait(k_full, tc & 1)
            valid = info[RECORD + 4]
        cute.arch.barrier(barrier_id=SUM_FREE + wg, number_of_threads=160)
        if ct == 0:
            info[NOTE + 4 * wg] = Int32(-1)
        cute.arch.barrier_arrive(barrier_id=SUM_FULL + wg, number_of_threads=160)
        if warp % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    # ---------------------------------------------- pieces of the consumer, inlined while tracing

    def block(
        self, first: bool, parts: Any, stats: Any, values: Any, bars: Any, ds_copy: Any,
        leaving: Any, wg: Any, kc: Any, before: Any,
    ) -> Any:  # fmt: skip
        """One q tile, and dQ of the tile before, `before`, unless it is the first.

        Returns:
            The tile's mark.
        """
        _, _, _, q_full, q_free, do_full, do_free, ds_full, ds_free = bars
        tile, row0, running, totals = values
        scores, dp, dq = parts[6], parts[7], parts[12]
        p, ds = _as(parts[10], scores), _as(parts[11], scores)
        s, lap = self.q_stage(kc), self.q_lap(kc)
        statistic, delta = self.rows(stats[0], s, row0), self.rows(stats[1], s, row0)
        if not self.config.rounded:
            cute.arch.mbarrier_wait(do_full + s, lap)
            self.start_dp(dp, delta)
        cute.arch.mbarrier_wait(q_full + s, lap)
        mark = leaving[2][s]
        warpgroup.fence()
        self.issue_s(parts, wg, s)
        if self.config.rounded:
            cute.arch.mbarrier_wait(do_full + s, lap)
        self.issue_dp(parts, wg, s)
        if self.hooks.learned:
            warpgroup.wait_group(0)
            self.learn_either(mark, tile, row0, scores, p, statistic, dp, ds, running, totals)
        else:
            lse = held(statistic) if self.config.rounded else statistic
            warpgroup.wait_group(1)
            self.weigh_either(mark, tile, row0, scores, scores, p, lse)
            if self.config.rounded:
                delta = held(delta)
            warpgroup.wait_group(0)
            self.gradients(scores, p, dp, delta, ds)
        # both consumers have read dS of two tiles before
        cute.arch.mbarrier_wait(ds_free + s, lap ^ 1)
        copy, thr, to = ds_copy
        cute.copy(copy, thr.retile(ds), to[None, None, None, s * 2 + wg])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        device.arrive(ds_full + s)
        warpgroup.fence()
        self.issue_from_registers(parts[4], parts[9], parts[10], parts[-1][5], s)
        if not first:
            self.issue_dq(parts, ds_full, wg, kc - 1)
        self.issue_from_registers(parts[5], parts[8], parts[11], parts[-1][4], s)
        if not first:
            warpgroup.wait_group(1)
            self.send_block(dq, before, ds_free, kc - 1, leaving, wg)
        warpgroup.wait_group(0)
        device.arrive(q_free + s)
        device.arrive(do_free + s)
        return mark

    def issue_s(self, parts: Any, wg: Any, stage: Any) -> None:
        """S^T = K Q^T."""
        acc, a, b = parts[6], parts[-1][0], parts[-1][2]
        for k in range(cute.size(a, mode=[2])):
            mma = parts[0] if k == 0 else parts[2]
            cute.gemm(mma, acc, a[None, None, k, wg], b[None, None, k, stage], acc)
        warpgroup.commit_group()

    def issue_dp(self, parts: Any, wg: Any, stage: Any) -> None:
        """dP^T = V dO^T, less delta unless `rounded`."""
        acc, a, b = parts[7], parts[-1][1], parts[-1][3]
        for k in range(cute.size(a, mode=[2])):
            mma = parts[0] if k == 0 and self.config.rounded else parts[2]
            cute.gemm(mma, acc, a[None, None, k, wg], b[None, None, k, stage], acc)
        warpgroup.commit_group()

    def issue_from_registers(self, mma: Any, acc: Any, a: Any, b: Any, stage: Any) -> None:
        """dV += P^T dO, or dK += dS^T Q."""
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k, stage], acc)
        warpgroup.commit_group()

    def issue_dq(self, parts: Any, ds_full: Any, wg: Any, kc: Any) -> None:
        """A consumer's part of dQ = dS K: its columns, or its rows of a q tile of 128."""
        c = self.config
        a, b = parts[-1][6], parts[-1][7]
        high, wide = c.block_q // ROWS, c.width // ROWS
        acc, stage = parts[12], kc & 1
        cute.arch.mbarrier_wait(ds_full + stage, (kc >> 1) & 1)
        warpgroup.fence()
        for half in range(2):
            row = (stage * 2 + half) * high + (wg if high == 2 else 0)
            column = half * wide + (wg if wide == 2 else 0)
            n = wg if high * wide == 1 else 0  # which 32 of 64 columns
            for k in range(cute.size(a, mode=[2])):
                mma = parts[1] if half == 0 and k == 0 else parts[3]
                mine = b[None, n, k, column]
                mine = cute.make_tensor(
                    mine.iterator, cute.append(mine.layout, cute.make_layout(1))
                )
                cute.gemm(mma, acc, a[None, None, k, row], mine, acc)
        warpgroup.commit_group()

    def send_block(self, acc: Any, mark: Any, ds_free: Any, kc: Any, leaving: Any, wg: Any) -> None:
        """Hand over a tile's dQ."""
        device.arrive(ds_free + (kc & 1))
        chunk, turn = leaving[0]
        self.send(acc, (chunk + 2 * (mark >> 2), turn, Int32(-1)), leaving, wg)

    def send(self, chunk: Any, note: Any, leaving: Any, wg: Any) -> None:
        """Hand a chunk to the warp that adds it to the sums."""
        _, outgoing, info, ct = leaving
        count = self.config.chunk // 512
        cute.arch.barrier(barrier_id=SUM_FREE + wg, number_of_threads=160)
        self.note(info, note, wg, ct)
        start = outgoing + (wg * self.config.chunk + ct * 4)
        cute.autovec_copy(
            cute.make_tensor(chunk.iterator, cute.make_layout((4, count))),
            cute.make_tensor(start.align(16), cute.make_layout((4, count), stride=(1, 512))),
        )
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=SUM_FULL + wg, number_of_threads=160)

    @cute.jit
    def note(self, info: cute.Tensor, note: tuple, wg: Int32, ct: Int32):
        if ct == 0:
            info[NOTE + 4 * wg] = note[0]
            if const_expr(self.config.turns):
                for i in cutlass.range_constexpr(1, 3):
                    info[NOTE + 4 * wg + i] = note[i]

    def store(
        self, mma: Any, acc: Any, smem: Any, target: Any, kind: int, place: Any, wg: Any, ct: Any,
        factor: Any,
    ) -> None:  # fmt: skip
        """Round a consumer's dK or dV and store it by TMA."""
        copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), self.dtype), mma
        )
        thr = copy.get_slice(ct)
        rounded = cute.make_rmem_tensor(acc.layout, self.dtype)
        pairs = cute.recast_tensor(rounded, Int32)
        for i in range(cute.size(pairs)):
            pairs[i] = device.pack(acc[2 * i] * factor, acc[2 * i + 1] * factor, self.dtype)
        cute.copy(copy, thr.retile(rounded), thr.partition_D(smem)[None, None, None, wg])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=OWN + wg, number_of_threads=128)
        atoms, tiles = target
        shape = (ROWS, self.config.width if kind == 0 else self.config.value_width)
        source, to = partition(atoms[kind], smem, tiles[kind], shape, (None, 0, None, None))
        self.leave(atoms[kind], source, to, place, wg)

    @cute.jit
    def leave(
        self, atom: cute.CopyAtom, source: cute.Tensor, to: cute.Tensor, place: tuple, wg: Int32
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row, h, b = place
        if warp % 4 == 0:
            cute.copy(atom, source[None, wg], to[None, row, h, b])
            cute.arch.cp_async_bulk_commit_group()


def _as(tensor: Any, other: Any) -> Any:
    """The same registers in the order of another tensor."""
    return cute.make_tensor(tensor.iterator, other.layout)


def _chunk(acc: Any, i: int, size: int) -> Any:
    """Some of an accumulator's columns, as an accumulator."""
    return cute.make_tensor(acc.iterator + size // 128 * i, _chunk_layout(size))


def _chunk_layout(size: int) -> Any:
    return cute.make_layout(((2, 2, size // 512), 1, 1), stride=((1, 2, 4), 0, 0))

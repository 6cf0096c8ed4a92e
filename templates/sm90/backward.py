"""The backward kernel for Hopper (sm_90a): one kv tile a piece of work, in a loop over its q tiles.

One CTA per SM, persistent. Warpgroup 0 holds a warp that loads by TMA and two that add dQ to
float32 sums; the other two warpgroups are consumers of 64 kv positions each. For every q tile a
consumer recomputes S^T = K Q^T and dP^T = V dO^T, makes P and dS in registers, and adds
dV += P^T dO and dK += dS^T Q from there. What limits it is shared memory, so that four steps
of 16 columns of K come from registers as well, read once a kv tile, where the variant leaves room.
dS also goes through shared memory, transposed, where a consumer reads both halves for its part of
dQ = dS K: that of the tile before, so that no consumer waits for the other, and the tensor cores
have the products of one while the other computes. dQ leaves through shared memory by bulk reductions.

Kv tiles overlap: K has two places, so that the next tile's is there, and V one, free once dP of the
last q tile is done. dK and dV of a tile leave from registers while the first S and dP of the next
are computed, and dQ of its last q tile is the first that the next one issues.

Query and kv blocks come in ascending order, PARTIAL and FULL mixed; only blocks marked as masked
run mask instructions. Float32 sums are kept in units of 64 x 64 in the order of the accumulators'
registers, so that they are read and written in whole lines (`backward_edges` undoes it).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
import cutlass.tensor_utils
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp, StMatrix8x8x16bOp
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device
from attnkit.templates.common.lse_in_mma import CORE_WORDS
from attnkit.templates.common.site import Site
from attnkit.templates.common.tma import ordered
from attnkit.templates.common.work_tile import RECORD
from attnkit.templates.sm90.backward_config import ROWS, BackwardConfig
from attnkit.templates.sm90.backward_firsts import FirstParts
from attnkit.templates.sm90.backward_load import Loads
from attnkit.templates.sm90.backward_math import Weights
from attnkit.templates.sm90.backward_products import Parts, Products
from attnkit.templates.sm90.backward_rows import LessLse
from attnkit.templates.sm90.backward_store import Stores, chunk_layout
from attnkit.templates.sm90.backward_sums import NOTE, SUM_FREE, Sums
from attnkit.templates.sm90.backward_turns import OWED, InTurn

CONSUMERS = 256  # threads
PIECE = 12  # int32 words of a piece of work: see `Schedule.table`
HELD = 4  # steps of 16 columns of K in registers, for variants that leave room

ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
COLUMN = cutlass.tensor_utils.LayoutEnum.COL_MAJOR


class Backward(Loads, Products, Weights, LessLse, Sums, FirstParts, InTurn, Stores):
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
        self.late = not (hooks.sloped or hooks.learned or config.rounded)
        # a mask that is computed for every score wants registers beside a tile of 128 rows
        tight = hooks.gathers or (config.rounded and hooks.has_mask and hooks.intervals is None)
        self.held_steps = 0 if tight or hooks.sloped or hooks.learned else HELD
        self.inclined = config.less_lse and hooks.distant
        if self.inclined and self.held_steps:
            self.held_steps -= 1  # for the operand of `incline`

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
            lse, delta: float32 [B * H * q blocks * block_q], of `common.preprocess.Preprocess`.
            sums: float32, zero, but for those of dQ where the config has firsts; units of dQ, then,
                if the config accumulates, of dK and of dV; if it joins, dK and dV of every split kv
                tile.
            pieces: int32 [pieces, 12], see `Schedule.table`; where the config has firsts, the fourth
                is `Firsts.stop`.
            partial, full: int32 [2, runs], starts and lengths of the transposed runs.
            counter: int32 [1 + 8 * split kv tiles], zero; left at zero.
            captured: captured tensors.
            totals: gradients of the wanted ones among them, float32, of their shapes; added to. If the config has
                turns, int64 with a last dimension of bins, see `exact_sums`.
            turns: empty; where the config has firsts alone, int32 marks of the chunks of dQ, zero; where
                it has turns, all int32: semaphores, one a chunk of the sums, those of dQ holding
                the first kv tile of their row, the others 0, left as they are; of every (b, h, q block) the first and last + 1 of its kept runs, and the
                first and last turn (see `attnkit.schedule.deterministic_order`), [rows, 4]; starts and lengths of the
                runs; `group` there.
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

        def mma(a: Any, b: Any, n: int, source: Any = smem, of: Any = dtype) -> Any:
            return hopper_helpers.make_trivial_tiled_mma(
                of, of, a, b, Float32, (1, 1, 1), (ROWS, n), a_source=source
            )

        mma_s = mma(k_major, k_major, bm)
        mma_held = mma(k_major, k_major, bm, registers)
        mma_lse = mma(k_major, k_major, bm, registers if self.inclined else smem, BFloat16)
        mma_dq = mma(k_major, mn_major, c.chunk // ROWS)
        mma_dv = mma(k_major, mn_major, deep, registers)
        mma_dk = mma(k_major, mn_major, width, registers)
        make_a, make_b = hopper_helpers.make_smem_layout_a, hopper_helpers.make_smem_layout_b
        halves = 2 * c.stages
        layouts = (
            make_a(ROW, (ROWS, bm, width), dtype, 2 * c.k_stages),  # K, a consumer's half a stage
            make_a(ROW, (ROWS, bm, deep), dtype, 2),  # V
            make_b(ROW, (ROWS, bm, width), dtype, c.stages),  # Q
            make_b(ROW, (ROWS, bm, deep), dtype, c.stages),  # dO
            make_a(COLUMN, (ROWS, ROWS, bm), dtype, halves),  # dS^T as written
            # the same memory as other operands: the last two in squares of 64
            make_b(COLUMN, (ROWS, width, bm), dtype, c.stages),  # Q^T
            make_b(COLUMN, (ROWS, deep, bm), dtype, c.stages),  # dO^T
            make_a(ROW, (ROWS, ROWS, ROWS), dtype, halves * (bm // ROWS)),  # dS
            make_b(COLUMN, (ROWS, ROWS, ROWS), dtype, 2 * c.k_stages * (width // ROWS)),  # K^T
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma = [
            cpasync.make_tiled_tma_atom(load, t, cute.slice_(layout, (None, None, 0)), shape)
            for t, layout, shape in (
                (query, layouts[2], (bm, width)),
                (key, layouts[0], (ROWS, width)),
                (value, layouts[1], (ROWS, deep)),
                (grad_out, layouts[3], (bm, deep)),
            )
        ]

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 10 + 2 * c.k_stages + 6 * c.stages]
            info: cute.struct.MemRange[Int32, OWED + 8]
            factors: cute.struct.Align[cute.struct.MemRange[Int32, CORE_WORDS], 128]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.stages * bm * c.words[0]], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.stages * bm], 128]
            # Time depends on what lies below 128 KiB: at 128, K, Q and dO
            k: cute.struct.Align[cute.struct.MemRange[dtype, 2 * c.k_stages * ROWS * width], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * width], 1024]
            do: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * deep], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, 2 * ROWS * deep], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[dtype, halves * ROWS * bm], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, 2 * c.chunk], 128]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0])
        heads = (query.shape[2], key.shape[2], query.shape[3], key.shape[3])
        self.kernel(
            (mma_s, mma_dq, mma_dv, mma_dk, mma_held, mma_lse),
            (mma_s, mma_dq, mma_dv, mma_dk, mma_held, mma_lse),
            tuple(atom for atom, _ in tma),
            tuple(tiles for _, tiles in tma),
            layouts,
            (grad_key, grad_value),
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
        ).launch(
            grid=(ctas, 1, 1), block=(384, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        mmas_first: tuple,
        mmas: tuple,
        atoms: tuple,
        tiles: tuple,
        layouts: tuple,
        grads: tuple,
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
        """Roles: warp 0 loads, 1 and 2 add up, 3 writes zeros and gives turns, warpgroups 1 and 2 compute."""
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(32))
        stats = (
            storage.lse.get_tensor(cute.make_layout((c.block_q * c.words[0], c.stages))),
            storage.delta.get_tensor(cute.make_layout((c.block_q, c.stages))),
        )
        parts = (storage.k, storage.v, storage.q, storage.do, storage.ds)
        views = tuple(
            parts[at].get_tensor(layouts[i].outer, swizzle=layouts[i].inner)
            for i, at in enumerate((0, 1, 2, 3, 4, 2, 3, 4, 0))
        )
        outgoing = storage.dq.data_ptr()
        base = storage.barriers.data_ptr()
        v_full, v_free, k_full = base, base + 2, base + 4
        k_free, ends = k_full + c.k_stages, k_full + 2 * c.k_stages
        rings = tuple(ends + c.stages * i for i in range(6))
        q_full, q_free, do_full, do_free, ds_full, ds_free = rings
        bars = (k_full, v_full, k_free, v_free, *rings)
        # of each consumer: a chunk is there, to be added in turn; has arrived; that was noticed
        told, arrived, taken = (ends + 6 * c.stages + 2 * i for i in range(3))
        if warp == 0:
            with cute.arch.elect_one():
                for w in cutlass.range_constexpr(2):  # a consumer's half of V each
                    cute.arch.mbarrier_init(v_full + w, 1)
                    cute.arch.mbarrier_init(v_free + w, 4)
                    cute.arch.mbarrier_init(told + w, 4)
                    cute.arch.mbarrier_init(arrived + w, 1)
                    cute.arch.mbarrier_init(taken + w, 32)
                for s in cutlass.range_constexpr(c.k_stages):
                    cute.arch.mbarrier_init(k_full + s, 1)
                    cute.arch.mbarrier_init(k_free + s, CONSUMERS)
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(q_full + s, 1)
                    cute.arch.mbarrier_init(q_free + s, CONSUMERS)
                    cute.arch.mbarrier_init(do_full + s, 1)
                    cute.arch.mbarrier_init(do_free + s, CONSUMERS)
                    cute.arch.mbarrier_init(ds_full + s, 8)
                    cute.arch.mbarrier_init(ds_free + s, 8)
        factors = storage.factors.data_ptr()
        if const_expr(c.less_lse and not self.inclined):
            self.write_factors(factors, numbers[0], warp)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp == 0:
                self.produce(
                    atoms,
                    tiles,
                    views[:4],
                    stats,
                    bars,
                    info,
                    (lse, delta, pieces, partial, full, counter, turns),
                    numbers,
                )
            for wg in cutlass.range_constexpr(2):
                if warp == 1 + wg:
                    if const_expr(c.turns):
                        self.add_in_turn(wg, outgoing, info, (told, arrived, taken), sums, turns)
                    elif const_expr(c.firsts):
                        self.add_to_first(wg, outgoing, info, sums, turns[0])
                    else:
                        self.add_up(wg, outgoing, info, sums)
            if warp == 3:
                self.clear(pieces, *grads)
                if const_expr(c.turns):
                    self.give_turns(info, (told, arrived, taken), turns)
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self.consume(
                mmas_first, mmas, views, stats,
                (grads, numbers, outgoing, info, sums, counter, told), bars, factors, captured, totals,
            )  # fmt: skip

    @cute.jit
    def consume(
        self,
        mmas_first: tuple,
        mmas: tuple,
        views: tuple,
        stats: tuple,
        leaving: tuple,
        bars: tuple,
        factors: cute.Pointer,
        captured: list,
        totals: list,
    ):
        """A consumer warpgroup: products, P, dS, and what leaves at the end of a piece."""
        c, dtype = self.config, self.dtype
        _, numbers, _, info, _, _, told = leaving
        mma_s, mma_dq, mma_dv, mma_dk, mma_held, mma_lse = mmas
        scale, _, q_len, kv_len, heads, *_ = numbers
        k_full = bars[0]
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
        dq = cute.make_rmem_tensor(chunk_layout(c.chunk), Float32)
        thr_dk, thr_dv = mma_dk.get_slice(ct), mma_dv.get_slice(ct)
        dk = cute.make_rmem_tensor(thr_dk.partition_shape_C((ROWS, c.width)), Float32)
        dv = cute.make_rmem_tensor(thr_dv.partition_shape_C((ROWS, c.value_width)), Float32)
        p = cute.make_rmem_tensor(thr_dv.partition_shape_A((ROWS, bm)), dtype)
        ds = cute.make_rmem_tensor(p.layout, dtype)
        # set once: the value behind a set() in a helper must not leave the helper's region
        for first, further in zip(mmas_first, mmas, strict=True):
            first.set(warpgroup.Field.ACCUMULATE, False)
            further.set(warpgroup.Field.ACCUMULATE, True)
        k_held = cute.make_rmem_tensor(
            mma_held.get_slice(ct).partition_shape_A((ROWS, c.width)), dtype
        )
        load_k = cute.make_tiled_copy_A(
            cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), dtype), mma_held
        )
        thr_k = load_k.get_slice(ct)
        k_from, k_to = thr_k.partition_S(views[0]), thr_k.retile(k_held)
        of_lse = self.step_of_lse(mma_lse, factors, stats[0]) if c.less_lse else ()
        parts = Parts(mmas_first, mmas, scores, dp, dk, dv, p, ds, dq, k_held, frags, of_lse)

        write_ds = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(True, 4), dtype), mma_s
        )
        thr_ds = write_ds.get_slice(ct)
        ds_copy = (write_ds, thr_ds, thr_ds.partition_D(views[4]))
        q_chunks = (q_len + bm - 1) // bm * 2  # of a head
        running = self.running()
        kc, tc = Int32(0), Int32(0)
        before = (Int32(0), Int32(0))
        for one in (dk, dv):
            one.fill(0.0)
        cute.arch.mbarrier_wait(k_full, 0)
        valid = info[RECORD + 4]
        while valid != 0:
            for k in cutlass.range_constexpr(self.held_steps):
                cute.copy(load_k, k_from[None, None, k, 2 * (tc & 1) + wg], k_to[None, None, k])
            record = self.record(tc & 1)
            if const_expr(self.inclined):
                of = info[record + 2], info[record + 1], q_len, kv_len
                self.incline(of_lse, Site(captured, *of, self.score_scale(scale), Int32(0)))
            begun = self.start(True, parts, stats, bars, leaving, row0, wg, ct, kc, tc)
            at, h, b, count = (info[record + i] for i in range(4))
            turn = at if const_expr(c.turns) else Int32(0)
            place = ((b * heads + h) * q_chunks + wg, turn)  # where dQ goes, and whose turn it is
            where = (captured, b, h, q_len, kv_len, self.score_scale(scale), at * c.block_kv)
            tile = self.begin(where, column0)
            running.fill(0.0)
            values = (tile, row0, running, totals)
            before = self.finish(
                True, count == 1, parts, begun, values, bars, ds_copy, place, leaving, wg, ct, kc,
                tc, before,
            )  # fmt: skip
            kc += 1
            for j in cutlass.range(count - 1, unroll=1):
                begun = self.start(False, parts, stats, bars, leaving, row0, wg, ct, kc, tc)
                before = self.finish(
                    False, j == count - 2, parts, begun, values, bars, ds_copy, place, leaving, wg,
                    ct, kc, tc, before,
                )  # fmt: skip
                kc += 1
            self.flush(tile, running, totals)
            tc += 1
            cute.arch.mbarrier_wait(k_full + (tc & 1), self.k_lap(tc))
            valid = info[self.record(tc & 1) + 4]
        if tc > 0:
            self.issue_dq(parts, bars, wg, kc - 1, tc - 1)
            warpgroup.wait_group(0)
            self.conclude(dk, dv, leaving, wg, ct, tc)
            free = not c.accumulate
            self.send_block(dq, before, bars, kc - 1, leaving, wg, ct, free)
        cute.arch.barrier(barrier_id=SUM_FREE + wg, number_of_threads=160)
        if ct == 0:
            info[NOTE + 4 * wg] = Int32(-1)
        self.tell(told, wg)

    # ---------------------------------------------- pieces of the consumer, inlined while tracing

    def start(
        self, first: bool, parts: Any, stats: Any, bars: Any, leaving: Any, row0: Any, wg: Any,
        ct: Any, kc: Any, tc: Any,
    ) -> Any:  # fmt: skip
        """Issue S and dP of a q tile; if it is the first of a kv tile, the last one's dK and dV leave.

        Returns:
            Its mark, and the statistics of the thread's rows.
        """
        _, v_full, _, _, q_full, _, do_full, *_ = bars
        s, lap, rounded = self.q_stage(kc), self.q_lap(kc), self.config.rounded
        statistic = None if self.config.less_lse else self.rows(stats[0], s, row0)
        delta = self.rows(stats[1], s, row0)
        if not (first or rounded):
            cute.arch.mbarrier_wait(do_full + s, lap)
            self.start_dp(parts.dp, delta)
        cute.arch.mbarrier_wait(q_full + s, lap)
        mark = leaving[3][s]
        warpgroup.fence()
        self.issue_s(parts, wg, s, tc & 1)
        if first:  # of the waits, those that leave all in flight tell the assembler what is not
            warpgroup.wait_group(1)
            if rounded:  # dP as well would take registers
                self.conclude(parts.dk, parts.dv, leaving, wg, ct, tc)
        if first or rounded:
            cute.arch.mbarrier_wait(do_full + s, lap)
        if first:  # V comes last
            cute.arch.mbarrier_wait(v_full + wg, tc & 1)
            if not rounded:
                self.start_dp(parts.dp, delta)
                warpgroup.fence()
        self.issue_dp(parts, wg, s)
        if first and not rounded:
            warpgroup.wait_group(2)
            self.conclude(parts.dk, parts.dv, leaving, wg, ct, tc)
        return mark, statistic, delta

    def finish(
        self, first: bool, last: Any, parts: Any, begun: Any, values: Any, bars: Any,
        ds_copy: Any, place: Any, leaving: Any, wg: Any, ct: Any, kc: Any, tc: Any, before: Any,
    ) -> Any:  # fmt: skip
        """P and dS of a q tile and the products with them, and dQ of the tile before.

        Args:
            first, last: whether it is the first and the last of its kv tile.
            begun: see `start`.
            place: the first chunk of dQ of the kv tile, and its turn.
            before: where dQ of the tile before goes; that of the kv tile before, if it is the first.

        Returns:
            Where its own dQ goes.
        """
        _, _, _, v_free, _, q_free, _, do_free, ds_full, ds_free = bars
        tile, row0, running, totals = values
        mark, statistic, delta = begun
        scores, dp = parts.scores, parts.dp
        p, ds = _as(parts.p, scores), _as(parts.ds, scores)
        s, lap = self.q_stage(kc), self.q_lap(kc)
        if self.hooks.learned:
            warpgroup.wait_group(0)
            self.release(last, v_free + wg)
            self.learn_either(mark, tile, row0, scores, p, statistic, dp, ds, running, totals)
        else:
            warpgroup.wait_group(1)
            self.weigh_either(mark, tile, row0, scores, scores, p, statistic)
            warpgroup.wait_group(0)
            self.release(last, v_free + wg)
            self.gradients(scores, p, dp, delta, ds)
        # both consumers have read dS of two tiles before
        cute.arch.mbarrier_wait(ds_free + s, lap ^ 1)
        copy, thr, to = ds_copy
        cute.copy(copy, thr.retile(ds), to[None, None, None, s * 2 + wg])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        device.arrive(ds_full + s)
        warpgroup.fence()
        mmas = parts.first if first else parts.further
        self.issue_from_registers(mmas[2], parts.further[2], parts.dv, parts.p, parts.frags[5], s)
        # at the very beginning there is none before: a tile's own, which is not sent
        self.issue_dq(
            parts, bars, wg, *((_before(kc), _before(tc)) if first else (kc - 1, tc))
        )  # fmt: skip
        self.issue_from_registers(mmas[3], parts.further[3], parts.dk, parts.ds, parts.frags[4], s)
        warpgroup.wait_group(1)
        if first:
            self.send_before(parts.dq, before, bars, kc, tc, leaving, wg, ct)
        else:
            then = place[0] + 2 * (mark >> 2)
            self.send_block(parts.dq, before, bars, kc - 1, leaving, wg, ct, then=then)
        warpgroup.wait_group(0)
        cute.arch.mbarrier_arrive(q_free + s)  # every lane, as each has read the statistics
        cute.arch.mbarrier_arrive(do_free + s)
        return place[0] + 2 * (mark >> 2), place[1]

    @cute.jit
    def release(self, last: cutlass.Boolean, barrier: cute.Pointer):
        """Let the next tile come in, if this block was the last that read there."""
        if last:
            device.arrive(barrier)


def _as(tensor: Any, other: Any) -> Any:
    """The same registers in the order of another tensor."""
    return cute.make_tensor(tensor.iterator, other.layout)


def _before(count: Any) -> Any:
    return cutlass.max(count - 1, Int32(0))

"""The backward kernel for Hopper (sm_90a) and head dims above 128.

As in `backward`, a CTA takes a kv tile and loops over its q tiles. dK and dV of a whole tile do not
fit the registers of the warpgroup that computes their scores, so that the tile has 64 positions and
the two consumers divide its products otherwise: S^T = K Q^T and dP^T = V dO^T by the rows of the q
tile, dV += P^T dO, dK += dS^T Q and dQ = dS K by columns. P and dS pass through shared memory.

    tensor cores: S dP | dV dQ dK S dP | dV ...
    P is computed while dP is, dS while dV is; S and dP of the next q tile follow dQ and dK.

dQ is added to its float32 sums straight from registers, 512 contiguous bytes a warp instruction,
while dK and the next S, or the next dP and dV, run: a tile in shared memory on the way would take a
third of its bandwidth, which is what limits these products.
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
from attnkit.templates.common.tma import ordered, partition
from attnkit.templates.common.work_tile import RECORD
from attnkit.templates.sm90.backward_config import ROWS
from attnkit.templates.sm90.backward_load import Loads
from attnkit.templates.sm90.backward_math import Weights
from attnkit.templates.sm90.backward_wide_config import WideConfig
from attnkit.templates.sm90.backward_wide_turns import OWN, WideTurns

BOTH = 3  # a named barrier
GROUP = 512  # floats of 64 rows and 8 columns of a sum

ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
COLUMN = cutlass.tensor_utils.LayoutEnum.COL_MAJOR


class BackwardWide(Loads, Weights, WideTurns):
    """A backward kernel for one configuration and one variant.

    Args:
        config: what is fixed when the kernel is compiled.
        hooks: the variant.
    """

    def __init__(self, config: WideConfig, hooks: Any) -> None:
        problem = config.problem()
        if problem:
            raise ValueError(problem)
        self.config = config
        self.hooks = hooks
        self.dtype = device.DTYPES[config.dtype]
        # whether registers are short: dQ leaves them before P is computed
        self.tight = bool(hooks.learned)

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
        """Launch; the arguments are those of `backward.Backward`.

        Semaphores of `turns`: two a q block, of which one is used, then two a kv tile for dK, and
        two for dV.
        """
        c, dtype = self.config, self.dtype
        width, deep, bm = c.width, c.value_width, c.block_q
        query, key, value, grad_out, grad_key, grad_value = (
            ordered(t, (2, 3, 1, 0)) for t in (query, key, value, grad_out, grad_key, grad_value)
        )
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

        def mma(a: Any, b: Any, n: int) -> Any:
            return hopper_helpers.make_trivial_tiled_mma(
                dtype, dtype, a, b, Float32, (1, 1, 1), (ROWS, n)
            )

        def tiles(kind: Any, rows: int, columns: int, unit: int, stages: int) -> Any:
            # swizzled in units that divide what a consumer takes of the columns
            atom = warpgroup.make_smem_layout_atom(
                hopper_helpers.get_smem_layout_atom(kind, dtype, unit), dtype
            )
            shape = (rows, columns) if kind is ROW else (columns, rows)
            order = (0, 1, 2) if kind is ROW else (1, 0, 2)
            return cute.tile_to_shape(atom, (*shape, stages), order)

        mma_s = mma(k_major, k_major, bm // 2)
        mma_dq = mma(mn_major, mn_major, width // 2 // c.parts)
        mma_dv = mma(k_major, mn_major, deep // 2)
        mma_dk = mma(k_major, mn_major, width // 2)
        unit = width // 2 // c.parts
        layouts = (
            tiles(ROW, ROWS, width, unit, 1),  # K
            tiles(ROW, ROWS, deep, ROWS, 1),  # V
            tiles(ROW, bm, width, width // 2, c.q_stages),  # Q
            tiles(ROW, bm, deep, deep // 2, c.stages),  # dO
            tiles(ROW, ROWS, bm, bm, c.stages),  # P^T
            tiles(ROW, ROWS, bm, bm, 1),  # dS^T
            # the same memory as other operands
            tiles(COLUMN, bm, width, width // 2, c.q_stages),  # Q^T
            tiles(COLUMN, bm, deep, deep // 2, c.stages),  # dO^T
            tiles(COLUMN, ROWS, bm, bm, 1),  # dS
            tiles(COLUMN, ROWS, width, unit, 1),  # K^T
            tiles(ROW, ROWS, width // 2, width // 2, 2),  # dK, of each consumer
            tiles(ROW, ROWS, deep // 2, deep // 2, 2),  # dV
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma = [
            cpasync.make_tiled_tma_atom(op, t, cute.slice_(layout, (None, None, 0)), shape)
            for op, t, layout, shape in (
                (load, query, layouts[2], (bm, width)),
                (load, key, layouts[0], (ROWS, width)),
                (load, value, layouts[1], (ROWS, deep)),
                (load, grad_out, layouts[3], (bm, deep)),
                (store, grad_key, layouts[10], (ROWS, width // 2)),
                (store, grad_value, layouts[11], (ROWS, deep // 2)),
            )
        ]

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 7 + 2 * c.q_stages + 2 * c.stages]
            info: cute.struct.MemRange[Int32, 32]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.q_stages * bm], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.stages * bm], 128]
            # time depends on what lies below 128 KiB: at 256, all but dO and V
            k: cute.struct.Align[cute.struct.MemRange[dtype, ROWS * width], 1024]
            p: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * ROWS * bm], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[dtype, ROWS * bm], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, c.q_stages * bm * width], 1024]
            do: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * deep], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, ROWS * deep], 1024]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0])
        heads = (query.shape[2], key.shape[2], query.shape[3], key.shape[3])
        self.kernel(
            (mma_s, mma_dq),
            (mma_s, mma_dq, mma_dv, mma_dk),
            tuple(atom for atom, _ in tma),
            tuple(tiles for _, tiles in tma),
            layouts,
            (lse, delta, pieces, partial, full, counter, turns),
            sums,
            captured,
            totals,
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
        lists: tuple,
        sums: cute.Tensor,
        captured: list,
        totals: list,
        numbers: tuple,
    ):
        """Roles: warp 0 loads, warpgroups 1 and 2 compute."""
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(32))
        stats = (
            storage.lse.get_tensor(cute.make_layout((c.block_q, c.q_stages))),
            storage.delta.get_tensor(cute.make_layout((c.block_q, c.stages))),
        )
        parts = (storage.k, storage.v, storage.q, storage.do, storage.p, storage.ds)
        views = tuple(
            parts[at].get_tensor(layouts[i].outer, swizzle=layouts[i].inner)
            for i, at in enumerate((0, 1, 2, 3, 4, 5, 2, 3, 5, 0, 0, 1))
        )
        base = storage.barriers.data_ptr()
        k_full, v_full, kv_free = base, base + 1, base + 2
        q_full, q_free = base + 4, base + 4 + c.q_stages
        do_full = base + 4 + 2 * c.q_stages
        do_free = do_full + c.stages
        bars = (k_full, v_full, kv_free, q_full, q_free, do_full, do_free)
        order = tuple(do_free + c.stages + i for i in range(3))  # see `backward_wide_turns`
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(k_full, 1)
                cute.arch.mbarrier_init(v_full, 1)
                cute.arch.mbarrier_init(kv_free, 256)
                for s in cutlass.range_constexpr(c.q_stages):
                    cute.arch.mbarrier_init(q_full + s, 1)
                    cute.arch.mbarrier_init(q_free + s, 256)
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(do_full + s, 1)
                    cute.arch.mbarrier_init(do_free + s, 256)
                if const_expr(c.turns):
                    self.init_turns(order)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        if warp < 4:
            cute.arch.setmaxregister_decrease(c.registers[1])
            if warp == 0:
                own = (*bars[:3], kv_free, *bars[3:])  # K and V are freed together
                self.produce(atoms[:4], tiles[:4], views[:4], stats, own, info, lists, numbers)
            if const_expr(c.turns):
                if warp == 1:
                    self.await_turns(order, info, lists[6])
                if warp == 2:
                    self.give_turns(order, info, lists[6])
        else:
            cute.arch.setmaxregister_increase(c.registers[0])
            self.consume(
                mmas_first, mmas, views, stats, (atoms[4:], tiles[4:]), bars, order, info, sums,
                captured, totals, lists[6], numbers,
            )  # fmt: skip

    @cute.jit
    def consume(
        self,
        mmas_first: tuple,
        mmas: tuple,
        views: tuple,
        stats: tuple,
        target: tuple,
        bars: tuple,
        order: tuple,
        info: cute.Tensor,
        totals_q: cute.Tensor,
        captured: list,
        totals: list,
        turns: list,
        numbers: tuple,
    ):
        """A consumer warpgroup: products, P, dS, and what leaves at the end of a piece."""
        c, dtype = self.config, self.dtype
        mma_s0, mma_dq0 = mmas_first
        mma_s, mma_dq, mma_dv, mma_dk = mmas
        scale, group, q_len, kv_len, heads, kv_heads, batch, kv_batch = numbers
        k_full, v_full, kv_free, q_full, q_free, do_full, do_free = bars
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        wg, ct = warp // 4 - 1, thread % 128
        bm = c.block_q
        column0 = (warp % 4) * 16 + lane // 4
        row0 = wg * (bm // 2) + (lane % 4) * 2

        all_s, all_dq = mma_s.get_slice(0), mma_dq.get_slice(0)
        all_dv, all_dk = mma_dv.get_slice(0), mma_dk.get_slice(0)
        frags = (
            mma_s.make_fragment_A(all_s.partition_A(views[0])),
            mma_s.make_fragment_A(all_s.partition_A(views[1])),
            mma_s.make_fragment_B(all_s.partition_B(views[2])),
            mma_s.make_fragment_B(all_s.partition_B(views[3])),
            mma_dv.make_fragment_A(all_dv.partition_A(views[4])),
            mma_dv.make_fragment_B(all_dv.partition_B(views[7])),
            mma_dk.make_fragment_A(all_dk.partition_A(views[5])),
            mma_dk.make_fragment_B(all_dk.partition_B(views[6])),
            mma_dq.make_fragment_A(all_dq.partition_A(views[8])),
            mma_dq.make_fragment_B(all_dq.partition_B(views[9])),
        )

        def registers(mma: Any, columns: int) -> Any:
            return cute.make_rmem_tensor(
                mma.get_slice(ct).partition_shape_C((ROWS, columns)), Float32
            )

        scores, other = registers(mma_s, bm // 2), registers(mma_s, bm // 2)
        dk, dv = registers(mma_dk, c.width // 2), registers(mma_dv, c.value_width // 2)
        dq = registers(mma_dq, c.width // 2 // c.parts)
        p = cute.make_rmem_tensor(scores.layout, dtype)
        # set once: the value behind a set() in a helper must not leave the helper's region
        mma_s0.set(warpgroup.Field.ACCUMULATE, False)
        mma_dq0.set(warpgroup.Field.ACCUMULATE, False)
        for one in (mma_s, mma_dq, mma_dv, mma_dk):
            one.set(warpgroup.Field.ACCUMULATE, True)
        parts = (mma_s0, mma_dq0, mma_s, mma_dq, mma_dv, mma_dk, frags)

        copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(StMatrix8x8x16bOp(False, 4), dtype), mma_s
        )
        thr = copy.get_slice(ct)
        to_p, to_ds = (
            thr.partition_D(cute.local_tile(views[i], (ROWS, bm // 2), (0, wg, None)))
            for i in (4, 5)
        )
        writes = (copy, thr)
        blocks = (q_len + bm - 1) // bm
        kv_blocks = (kv_len + c.block_kv - 1) // c.block_kv
        # of the sums of dQ: their groups, and their semaphores; of dK, the same
        q_tiles, kv_tiles = batch * heads * blocks, kv_batch * kv_heads * kv_blocks
        running = self.running()
        kc = Int32(0)
        cute.arch.mbarrier_wait(k_full, 0)
        valid = info[RECORD + 4]
        while valid != 0:
            at, h, b = info[RECORD], info[RECORD + 1], info[RECORD + 2]
            count = info[RECORD + 3]
            where = (captured, b, h, q_len, kv_len, scale, at * c.block_kv)
            tile = self.begin(where, column0)
            running.fill(0.0)
            sums = (tile, row0, running, totals)
            place = (totals_q, (b * heads + h) * blocks, info, order)
            dk.fill(0.0)
            dv.fill(0.0)
            cute.arch.mbarrier_wait(v_full, valid - 1)
            if count > 0:
                r, s = kc & 1, kc & 1
                cute.arch.mbarrier_wait(q_full + r, (kc >> 1) & 1)
                self.issue_s(parts, scores, wg, r)
                warpgroup.wait_group(0)
                cute.arch.mbarrier_wait(do_full + s, (kc >> 1) & 1)
                self.issue_dp(parts, other, self.rows(stats[1], s, row0), wg, s)
                mark = info[r]
                self.tell_next(place, mark, kc, wg, ct)
                self.weigh_either(mark, tile, row0, scores, scores, p, self.rows(stats[0], r, row0))
                self.write(writes, p, to_p[None, None, None, s])
                for _ in cutlass.range(count - 1, unroll=1):
                    s, t = kc & 1, (kc + 1) & 1
                    self.begin_dv(parts, dv, wg, s)
                    self.make_ds(mark, scores, p, other, self.rows(stats[0], s, row0), sums,
                                 writes, to_ds)  # fmt: skip
                    self.issue_dq(parts, dq, wg, 0)
                    self.issue_dk(parts, dk, wg, s)
                    cute.arch.mbarrier_wait(q_full + t, ((kc + 1) >> 1) & 1)
                    fresh = self.next_scores(scores)
                    self.issue_s(parts, fresh, wg, t)
                    following = info[t]
                    warpgroup.wait_group(2)
                    cute.arch.mbarrier_arrive(do_free + s)
                    self.add_dq(place, dq, mark, kc, wg, ct, 0)
                    self.tell_next(place, following, kc + 1, wg, ct)
                    if const_expr(c.parts == 2):
                        self.issue_dq(parts, dq, wg, 1)
                    cute.arch.mbarrier_wait(do_full + t, ((kc + 1) >> 1) & 1)
                    self.issue_dp(parts, other, self.rows(stats[1], t, row0), wg, t)
                    warpgroup.wait_group(c.parts)
                    cute.arch.mbarrier_arrive(q_free + s)
                    if const_expr(c.parts == 2 and self.tight):
                        warpgroup.wait_group(1)
                        self.add_dq(place, dq, mark, kc, wg, ct, 1)
                    self.weigh_either(
                        following, tile, row0, fresh, scores, p, self.rows(stats[0], t, row0)
                    )
                    warpgroup.wait_group(1)  # both consumers are done with dS before the barrier
                    self.write(writes, p, to_p[None, None, None, t])
                    if const_expr(c.parts == 2 and not self.tight):
                        self.add_dq(place, dq, mark, kc, wg, ct, 1)
                    mark = following
                    kc += 1
                s = kc & 1
                self.begin_dv(parts, dv, wg, s)
                self.make_ds(mark, scores, p, other, self.rows(stats[0], s, row0), sums,
                             writes, to_ds)  # fmt: skip
                self.issue_dq(parts, dq, wg, 0)
                self.issue_dk(parts, dk, wg, s)
                warpgroup.wait_group(1)
                cute.arch.mbarrier_arrive(do_free + s)
                self.add_dq(place, dq, mark, kc, wg, ct, 0)
                for part in cutlass.range_constexpr(1, c.parts):
                    self.issue_dq(parts, dq, wg, part)
                    warpgroup.wait_group(0)
                    self.add_dq(place, dq, mark, kc, wg, ct, part)
                warpgroup.wait_group(0)
                cute.arch.mbarrier_arrive(q_free + s)
                kc += 1
                # here and below read again: through the loop they would take registers
                at, h, b = info[RECORD], info[RECORD + 1], info[RECORD + 2]
                where = (captured, b, h, q_len, kv_len, scale, at * c.block_kv)
                self.flush((where, *tile[1:]), running, totals)
            tile_kv, head, element = info[RECORD], info[RECORD + 1], info[RECORD + 2]
            if const_expr(c.accumulate):
                if count > 0:
                    pair = cutlass.min(element, kv_batch - 1) * kv_heads + head // group
                    pair = pair * kv_blocks + tile_kv
                    turn, last = info[RECORD + 5], info[RECORD + 6]
                    following = cutlass.select_(turn + 1 == last, Int32(0), turn + 1)
                    first = q_tiles * (c.width // 8)
                    to = first + pair * (c.width // 8) + wg * (c.width // 16)
                    note = (2 * (q_tiles + pair) + wg, turn, following, turns)
                    self.add_shared(totals_q, dk, to, note, wg, ct)
                    first = first + kv_tiles * (c.width // 8)
                    to = first + pair * (c.value_width // 8) + wg * (c.value_width // 16)
                    note = (2 * (q_tiles + kv_tiles + pair) + wg, turn, following, turns)
                    self.add_shared(totals_q, dv, to, note, wg, ct)
                    cute.arch.barrier(barrier_id=OWN + wg, number_of_threads=128)
            else:
                # K and V are read by both consumers
                cute.arch.barrier(barrier_id=BOTH, number_of_threads=256)
                self.store(
                    mma_dv, dv, views[11], target, 1, (tile_kv, head, element), wg, ct, Float32(1.0)
                )
                self.store(
                    mma_dk, dk, views[10], target, 0, (tile_kv, head, element), wg, ct, scale
                )
                if warp % 4 == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            parity = info[RECORD + 4] & 1  # of the next piece
            cute.arch.mbarrier_arrive(kv_free)  # every lane, as each has read the record
            cute.arch.mbarrier_wait(k_full, parity)
            valid = info[RECORD + 4]
        if const_expr(c.turns):
            self.tell(order, info, Int32(-1), kc, wg, ct)
            self.has_added(order)
        if warp % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    # ---------------------------------------------- pieces of the consumer, inlined while tracing

    def next_scores(self, scores: Any) -> Any:
        """Where S of the next q tile goes: the assembler is told which it takes without spills."""
        return scores if self.hooks.learned else cute.make_rmem_tensor(scores.layout, Float32)

    def issue_s(self, parts: Any, acc: Any, wg: Any, stage: Any) -> None:
        """S^T = K Q^T for the consumer's half of the rows."""
        a, b = parts[-1][0], parts[-1][2]
        warpgroup.fence()
        for k in range(cute.size(a, mode=[2])):
            mma = parts[0] if k == 0 else parts[2]
            cute.gemm(mma, acc, a[None, None, k, 0], _one(b, wg, k, stage), acc)
        warpgroup.commit_group()

    def issue_dp(self, parts: Any, acc: Any, rows: Any, wg: Any, stage: Any) -> None:
        """dP^T - delta = V dO^T - delta: the accumulator starts with -delta, `rows`."""
        a, b = parts[-1][1], parts[-1][3]
        for g in range(self.config.block_q // 16):
            pair = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(rows[None, g], pair)
            for i in range(2):  # both columns of the thread have the same rows
                acc[4 * g + i] = pair[i]
                # opaque: a plain copy would be made after the fence below
                acc[4 * g + 2 + i] = device.pinned(pair[i])
        warpgroup.fence()
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(parts[2], acc, a[None, None, k, 0], _one(b, wg, k, stage), acc)
        warpgroup.commit_group()

    def begin_dv(self, parts: Any, acc: Any, wg: Any, stage: Any) -> None:
        """Once P and dP are there, dV."""
        self.meet()
        # all, and before dV: counting groups across turns of the loop, the assembler serialises
        warpgroup.wait_group(0)
        self.issue_dv(parts, acc, wg, stage)

    def issue_dv(self, parts: Any, acc: Any, wg: Any, stage: Any) -> None:
        """dV += P^T dO, the consumer's columns."""
        a, b = parts[-1][4], parts[-1][5]
        warpgroup.fence()
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(parts[4], acc, a[None, None, k, stage], _one(b, wg, k, stage), acc)
        warpgroup.commit_group()

    def issue_dk(self, parts: Any, acc: Any, wg: Any, stage: Any) -> None:
        """dK += dS^T Q, the consumer's columns."""
        a, b = parts[-1][6], parts[-1][7]
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(parts[5], acc, a[None, None, k, 0], _one(b, wg, k, stage), acc)
        warpgroup.commit_group()

    def issue_dq(self, parts: Any, acc: Any, wg: Any, part: int) -> None:
        """A part of the consumer's columns of dQ = dS K."""
        a, b = parts[-1][8], parts[-1][9]
        warpgroup.fence()
        for k in range(cute.size(a, mode=[2])):
            mma = parts[1] if k == 0 else parts[3]
            column = wg * self.config.parts + part
            cute.gemm(mma, acc, a[None, None, k, 0], _one(b, column, k, 0), acc)
        warpgroup.commit_group()

    def make_ds(
        self, mark: Any, scores: Any, p: Any, other: Any, statistic: Any, sums: Any, writes: Any,
        to: Any,
    ) -> None:  # fmt: skip
        """dS in registers and in shared memory, while dV runs."""
        tile, row0, running, totals = sums
        ds = cute.make_rmem_tensor(scores.layout, self.dtype)
        if self.hooks.learned:
            self.learn(mark, None, tile, row0, scores, p, statistic, other, ds, running, totals)
        else:
            self.gradients(scores, p, other, None, ds)
        self.write(writes, ds, to[None, None, None, 0])
        self.meet()

    def write(self, writes: Any, values: Any, to: Any) -> None:
        """The consumer's half of P or dS to shared memory, for the products of both."""
        copy, thr = writes
        cute.copy(copy, thr.retile(values), to)
        cute.arch.fence_proxy("async.shared", space="cta")
        # The assembler waits for the fence here. Waiting only at the barrier, behind the loop's
        # branch, as it would, an H200 lets the other warps read what was there before.
        cute.arch.sync_warp()

    def meet(self) -> None:
        """Wait for the other consumer: its half of P or dS is there."""
        cute.arch.barrier(barrier_id=BOTH, number_of_threads=256)

    def rows(self, values: Any, stage: Any, row0: Any) -> Any:
        """The thread's rows of a statistic in shared memory, [2, pairs]."""
        start = values.iterator + (stage * self.config.block_q + row0)
        layout = cute.make_layout((2, self.config.block_q // 16), stride=(1, 8))
        return cute.make_tensor(start.align(8), layout)

    def add_dq(
        self, place: Any, acc: Any, mark: Any, count: Any, wg: Any, ct: Any, part: int
    ) -> None:
        """Add a part of the count-th block's dQ to its sums."""
        c = self.config
        sums, first, _, order = place
        row = first + (mark >> 2)
        to = row * (c.width // 8) + wg * (c.width // 16) + part * (c.width // 16 // c.parts)
        if c.turns and part == 0:
            self.may_add(order, count)
        self.add(sums, acc, to, ct)
        if c.turns and part == c.parts - 1:
            self.has_added(order)

    def add(self, sums: Any, acc: Any, to: Any, ct: Any) -> None:
        """Add an accumulator to sums in memory, from group `to` on."""
        start = (sums.iterator + (Int64(to) * GROUP + ct * 4)).toint()
        for i in range(cute.size(acc) // 4):
            cute.arch.inline_ptx(
                f"red.relaxed.gpu.global.add.v4.f32 [{{$r0}}+{4 * GROUP * i}], "
                "{{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[start, *(acc[4 * i + k] for k in range(4))],
            )

    def store(
        self, mma: Any, acc: Any, smem: Any, target: Any, kind: int, place: Any, wg: Any, ct: Any,
        factor: Any,
    ) -> None:  # fmt: skip
        """Round a consumer's columns of dK or dV and store them by TMA."""
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
        shape = (ROWS, (self.config.value_width if kind else self.config.width) // 2)
        source, to = partition(atoms[kind], smem, tiles[kind], shape, (None,) * 4)
        self.leave(atoms[kind], source, to, place, wg)

    @cute.jit
    def leave(
        self, atom: cute.CopyAtom, source: cute.Tensor, to: cute.Tensor, place: tuple, wg: Int32
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp % 4 == 0:
            cute.copy(atom, source[None, wg], to[None, place[0], wg, *place[1:]])
            cute.arch.cp_async_bulk_commit_group()


def _one(operand: Any, *at: Any) -> Any:
    """One product's B operand."""
    found = operand[None, *at]
    return cute.make_tensor(found.iterator, cute.append(found.layout, cute.make_layout(1)))

"""The backward kernel for Blackwell (sm_100a): one kv tile a piece of work, in a loop over its q tiles.

One CTA per SM, persistent, of 16 warps: a warpgroup that adds to float32 sums, two that compute, a
warp that issues products, one that loads. For every q tile the tensor cores recompute S^T = K Q^T
and dP^T = V dO^T into tensor memory; the computing warpgroups, a kv position a lane and half of the
rows q each, turn S^T into P^T and dP^T into dS^T where they are; dV += P^T dO and dK += dS^T Q take
them from there. dS^T also goes to shared memory, for dQ = dS K, which leaves through shared memory
by bulk reductions (FlashAttention-4's backward, one CTA).

Query and kv blocks come in ascending order, PARTIAL and FULL mixed; only blocks marked as masked
run mask instructions.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
import cutlass.tensor_utils
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device as sm90_device
from attnkit.templates.common.lse_in_mma import CORE_WORDS
from attnkit.templates.common.tma import ordered, partition
from attnkit.templates.common.work_tile import RECORD
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_config import SLICE, BackwardConfig
from attnkit.templates.sm100.backward_load import Loads
from attnkit.templates.sm100.backward_math import Weights
from attnkit.templates.sm100.backward_products import Products
from attnkit.templates.sm100.backward_rows import Rows
from attnkit.templates.sm100.backward_sums import Sums

COMPUTE, MULTIPLY, LOAD = 4, 12, 13  # the first warps of the roles; before them those of the sums
EPILOGUE = 2  # named barriers, one of each computing warpgroup

ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR


class Backward(Rows, Products, Loads, Weights, Sums):
    """A backward kernel for one configuration and one variant.

    Args:
        config: what is fixed when the kernel is compiled.
        hooks: the variant, see `templates.common.hooks.BackwardHooks`.

    Raises:
        ValueError: the configuration is not supported; the message says what is.
    """

    storage: Any  # shared memory of a CTA, laid out by `__call__`

    def __init__(self, config: BackwardConfig, hooks: Any) -> None:
        problem = config.problem()
        if problem:
            raise ValueError(problem)
        self.config = config
        self.hooks = hooks
        self.dtype = sm90_device.DTYPES[config.dtype]

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
        """Launch; the arguments are those of Hopper's `Backward`.

        Args:
            lse, delta: as there, or as columns, see `common.lse_in_mma`.
            sums: as there, in tiles, in the order of `backward_sums`.
            turns: as there, with one semaphore a tile of the sums.
        """
        c, dtype = self.config, self.dtype
        width, deep, bm, bn = c.width, c.value_width, c.block_q, c.rows_kv
        query, key, value, grad_out, grad_key, grad_value = (
            ordered(t, (2, 3, 1, 0)) for t in (query, key, value, grad_out, grad_key, grad_value)
        )

        def tile(rows: int, columns: int, stages: int) -> Any:
            return hopper_helpers.make_smem_layout_b(ROW, (64, rows, columns), dtype, stages)

        layouts = (
            tile(bm, width, c.q_stages),
            tile(bn, width, 1),
            tile(bn, deep, 1),
            tile(bm, deep, c.stages),
            tile(bn, 64, width // 64),  # dK, in the memory of K
            tile(bn, 64, deep // 64),
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma = [
            cpasync.make_tiled_tma_atom(op, t, cute.slice_(layout, (None, None, 0)), shape)
            for op, t, layout, shape in (
                (load, query, layouts[0], (bm, width)),
                (load, key, layouts[1], (bn, width)),
                (load, value, layouts[2], (bn, deep)),
                (load, grad_out, layouts[3], (bm, deep)),
                (store, grad_key, layouts[4], (bn, 64)),
                (store, grad_value, layouts[5], (bn, 64)),
            )
        ]

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 10 + 2 * c.q_stages + 2 * c.stages]
            base: Int32
            info: cute.struct.MemRange[Int32, 16]
            factors: cute.struct.Align[cute.struct.MemRange[Int32, 2 * CORE_WORDS], 128]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.rows_words[0]], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.rows_words[1]], 128]
            v: cute.struct.Align[cute.struct.MemRange[dtype, bn * deep], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, bn * width], 1024]  # after V
            q: cute.struct.Align[cute.struct.MemRange[dtype, c.q_stages * bm * width], 1024]
            do: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * deep], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[dtype, bn * bm], 1024]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, c.slices * SLICE * bn], 128]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0])
        heads = (query.shape[2], key.shape[2], query.shape[3], key.shape[3])
        self.kernel(
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
        ).launch(grid=(ctas, 1, 1), block=(c.threads, 1, 1), stream=stream, min_blocks_per_mp=1)

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
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
        """Roles: warps 0 to 3 add up, 4 to 11 compute, 12 multiplies, 13 loads."""
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(16))
        rows = self.rows_layouts()
        stats = (storage.lse.get_tensor(rows[0]), storage.delta.get_tensor(rows[1]))
        parts = (storage.q, storage.k, storage.v, storage.do, storage.k, storage.v)
        views = tuple(
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in zip(parts, layouts, strict=True)
        )
        starts = tuple(
            part.data_ptr().toint()
            for part in (
                storage.q, storage.k, storage.v, storage.do, storage.ds, storage.factors,
                storage.lse, storage.delta,
            )
        )  # fmt: skip
        outgoing, place = storage.sums.data_ptr(), storage.base.ptr
        factors = storage.factors.data_ptr()
        base = storage.barriers.data_ptr()
        k_full, v_full, kv_free, s_full, p_ready, dp_full, ds_ready, dq_full, dq_free, acc_full = (
            base + i for i in range(10)
        )
        q_full, q_free = base + 10, base + 10 + c.q_stages
        do_full, do_free = base + 10 + 2 * c.q_stages, base + 10 + 2 * c.q_stages + c.stages
        bars = (
            k_full, v_full, kv_free, s_full, p_ready, dp_full, ds_ready, dq_full, dq_free, acc_full,
            q_full, q_free, do_full, do_free,
        )  # fmt: skip
        adding, computing = COMPUTE, MULTIPLY - COMPUTE  # warps
        if warp == MULTIPLY:
            with cute.arch.elect_one():
                for bar in (k_full, v_full, s_full, dp_full, dq_full, acc_full):
                    cute.arch.mbarrier_init(bar, 1)
                cute.arch.mbarrier_init(kv_free, adding + computing + 1)
                cute.arch.mbarrier_init(p_ready, computing)
                cute.arch.mbarrier_init(ds_ready, computing)
                cute.arch.mbarrier_init(dq_free, adding)
                for s in cutlass.range_constexpr(c.q_stages):
                    cute.arch.mbarrier_init(q_full + s, 1)
                    cute.arch.mbarrier_init(q_free + s, 1 + adding)
                for s in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(do_full + s, 1)
                    cute.arch.mbarrier_init(do_free + s, 1)
            device.allocate(place)
            if const_expr(c.less_delta):
                self.write_factors(factors, numbers[0])
        cute.arch.mbarrier_init_fence()
        device.fence_before()
        cute.arch.sync_threads()
        device.fence_after()
        memory = device.allocated(place)

        if warp >= MULTIPLY:
            cute.arch.setmaxregister_decrease(c.registers[2])
            if warp == LOAD:
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
            if warp == MULTIPLY:
                self.multiply(starts, memory, bars, info)
        elif warp >= COMPUTE:
            cute.arch.setmaxregister_increase(c.registers[0])
            self.compute(
                views[4:], starts, stats, memory, (atoms[4:], tiles[4:]), bars, info, captured,
                totals, numbers,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(c.registers[1])
            self.add_up(outgoing, memory, bars, info, sums, turns, numbers)
        device.fence_before()
        cute.arch.sync_threads()
        if warp == MULTIPLY:
            device.fence_after()
            device.free(device.allocated(place))

    @cute.jit
    def compute(
        self,
        views: tuple,
        starts: tuple,
        stats: tuple,
        memory: Int32,
        target: tuple,
        bars: tuple,
        info: cute.Tensor,
        captured: list,
        totals: list,
        numbers: tuple,
    ):
        """A computing warpgroup: P, dS, and dK and dV at the end of a piece."""
        c = self.config
        scale, _, q_len, kv_len, _, _, _, _ = numbers
        k_full, _, _, s_full, p_ready, dp_full, ds_ready, dq_full, _, _, q_full = bars[:11]
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg, row = warp // 4 - 1, thread % 128
        half = c.block_q // 2
        row0 = wg * half  # the thread's first row of a q tile; its column of a kv tile is `row`
        lanes = memory + (warp % 4) * (device.LANES << 16)
        s_at, dp_at = lanes + c.s_column + row0, lanes + c.dp_column + row0
        slopes = cute.make_rmem_tensor(half, Float32)
        kept = cute.make_rmem_tensor(2, Int32)
        running = self.running()
        kc, tc, ac = Int32(0), Int32(0), Int32(0)

        def write(at: int, packed: Any) -> None:
            self.write_ds(starts[4], row, row0, at, packed)

        cute.arch.mbarrier_wait(k_full, 0)
        valid = info[RECORD + 4]
        while valid != 0:
            record = self.record(tc)
            at, h, b = info[record], info[record + 1], info[record + 2]
            count = info[record + 3]
            mine = self.own_tile(at)
            where = (captured, b, h, q_len, kv_len, self.score_scale(scale), mine * c.rows_kv)
            tile = self.begin(where, row)
            running.fill(0.0)
            for i in cutlass.range(count, unroll=1):
                r = self.q_stage(kc)
                cute.arch.mbarrier_wait(q_full + r, self.q_lap(kc))
                mark = info[r]
                statistics = self.statistics(stats, r, row0)
                cute.arch.mbarrier_wait(s_full, kc & 1)
                device.fence_after()
                self.weigh_either(mark, tile, row0, s_at, slopes, kept, statistics[0])
                self.hand_over(p_ready)
                if i == 0:
                    self.settle(bars, tc, False)
                cute.arch.mbarrier_wait(dp_full, kc & 1)
                # dQ of the last block has read dS from shared memory
                cute.arch.mbarrier_wait(dq_full, ((kc * c.parts) & 1) ^ 1)
                device.fence_after()
                self.gradients(
                    mark, tile, row0, slopes, kept, statistics, (dp_at, write), running, totals
                )
                space = "cluster" if c.pair else "cta"
                cute.arch.fence_proxy("async.shared", space=space)
                self.hand_over(ds_ready)
                self.leave_rows(bars, r)
                kc += 1
            if count > 0:
                self.flush(tile, running, totals)
            else:
                self.settle(bars, tc, True)
            if const_expr(not c.accumulate):
                leaving = (views, starts, lanes, target, (mine, h, b), (wg, row, count), scale)
                for ready, blocks in self.gradient_blocks(bars):
                    if count > 0:
                        cute.arch.mbarrier_wait(ready, ac & 1)
                        device.fence_after()
                    self.store(*leaving, blocks)
                    device.fence_before()
                    self.leave_value(bars, blocks)
                if count > 0:
                    ac += 1
            else:
                self.leave_value(bars, range(1))
            self.leave_computed(bars)
            tc += 1
            cute.arch.mbarrier_wait(k_full, tc & 1)
            valid = info[self.record(tc) + 4]
        if warp % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    # ---------------------------------------------- pieces of `compute`, inlined while tracing

    def record(self, pieces: Any) -> Any:
        """Where the record of a piece begins in `info`, after so many pieces."""
        return RECORD

    def own_tile(self, tile: Any) -> Any:
        """Which 128 kv positions are the CTA's, of a tile of the work list."""
        return tile

    def signal(self, barrier: Any) -> None:
        """One arrival a warp at a barrier that the products wait for."""
        sm90_device.arrive(barrier)

    def leave_rows(self, bars: Any, stage: Any) -> None:
        """Say that a warp needs a block's mark and statistics no more: the products say it for Q."""

    def gradient_blocks(self, bars: Any) -> tuple[tuple[Any, range], ...]:
        """What is stored of dV and dK, after which barrier: blocks of 64 columns, dV's first."""
        return ((bars[9], range((self.config.value_width + self.config.width) // 64)),)

    def leave_value(self, bars: Any, blocks: range) -> None:
        """Say that a warp needs V's memory no more, if these blocks are dV's: nobody waits for it."""

    def leave_piece(self, bars: Any) -> None:
        """Say that a warp needs nothing of a piece any more."""
        cute.arch.sync_warp()
        sm90_device.arrive(bars[2])

    def await_keys(self, blocks: range) -> None:
        """Wait until TMA has read what it stores of these blocks."""
        self.await_stores()

    def leave_computed(self, bars: Any) -> None:
        """`leave_piece` of a computing warp."""
        self.leave_piece(bars)

    def settle(self, bars: Any, pieces: Any, empty: bool) -> None:
        """Wait for what a piece before left to be read by TMA: nothing."""

    def write_ds(self, start: Any, row: Any, row0: Any, at: int, packed: Any) -> None:
        """Eight elements of dS^T to shared memory, from row0 + at of the q tile on."""
        vector = row0 + at  # rows of a q tile are columns of the tile in shared memory
        rows = self.config.rows_kv
        place = device.swizzled(start, rows, row, (vector >> 3) & 7, vector >> 6)
        device.write_shared(place, packed)

    def hand_over(self, barrier: Any) -> None:
        """Say that a warp has written what the products read."""
        device.wait_stores()
        device.fence_before()
        cute.arch.sync_warp()
        self.signal(barrier)

    def store(
        self, views: Any, starts: Any, lanes: Any, target: Any, place: Any, who: Any, scale: Any,
        blocks: range,
    ) -> None:  # fmt: skip
        """Round dV and dK and store them by TMA, 64 columns at a time, the warpgroups in turns."""
        c = self.config
        wg, row, count = who
        for first in blocks[::2]:
            block = first + wg  # dV's, then dK's: so they are in tensor and in shared memory
            factor = cutlass.select_(block < c.value_width // 64, Float32(1.0), scale)
            self.round(starts[2], lanes + c.dv_column + block * 64, (block, row, count), factor)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=EPILOGUE + wg, number_of_threads=128)
            self.leave(views, target, place, block)
        self.await_keys(blocks)

    @cute.jit
    def round(self, start: Int32, address: Int32, who: tuple, factor: Float32):
        """A row of 64 columns from tensor memory to shared memory in the dtype."""
        c = self.config
        block, row, count = who
        if block * 64 < c.value_width + c.width:
            for part in cutlass.range_constexpr(2):
                taken = self.fetch(address + part * SLICE, count)
                for v in cutlass.range_constexpr(SLICE // 8):
                    packed = [
                        sm90_device.pack(
                            taken[8 * v + k] * factor, taken[8 * v + k + 1] * factor, self.dtype
                        )
                        for k in range(0, 8, 2)
                    ]
                    vector = Int32(part * (SLICE // 8) + v)
                    device.write_shared(
                        device.swizzled(start, c.rows_kv, row, vector, block), packed
                    )

    @cute.jit
    def leave(self, views: tuple, target: tuple, place: tuple, block: Int32):
        """Store 64 columns from shared memory."""
        atoms, tiles = target
        at, h, b = place
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shape, whole = (self.config.rows_kv, 64), (None, None, None, None)
        dk_from, dk_to = partition(atoms[0], views[0], tiles[0], shape, whole)
        dv_from, dv_to = partition(atoms[1], views[1], tiles[1], shape, whole)
        before = self.config.value_width // 64
        last = before + self.config.width // 64
        if warp % 4 == 0:
            if block < before:
                cute.copy(atoms[1], dv_from[None, block], dv_to[None, at, block, h, b])
            elif block < last:
                mine = block - before
                cute.copy(atoms[0], dk_from[None, mine], dk_to[None, at, mine, h, b])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def await_stores(self):
        """Wait until TMA has read what it stores."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

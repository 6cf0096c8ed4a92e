"""The Blackwell backward for two CTAs that share their tensor cores' operands.

A piece of work is 256 kv positions, 128 a CTA. Products run on both CTAs at once: each brings its
rows of K, V, P and dS, and half of the other operand, so that Q and dO are read from shared memory
once for both: half their rows for S and dP, half their columns for dV and dK. dQ is a sum over all
256 positions: the CTAs exchange halves of dS through distributed shared memory, and each computes
and adds up half of the rows of dQ, which halves the traffic of its sums.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device as sm90_device
from attnkit.templates.common.lse_in_mma import CORE_WORDS
from attnkit.templates.common.tma import ordered
from attnkit.templates.common.work_tile import RECORD
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward import COMPUTE, EPILOGUE, LOAD, MULTIPLY, ROW, Backward
from attnkit.templates.sm100.backward_config import SLICE
from attnkit.templates.sm100.backward_pair_load import INFO, PairLoads
from attnkit.templates.sm100.backward_pair_products import PairProducts
from attnkit.templates.sm100.backward_pair_sums import HALF, PairSums


class PairBackward(PairLoads, PairProducts, PairSums, Backward):
    """`Backward` with pairs of CTAs. Its `__call__` takes the same arguments; `ctas` counts pairs."""

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
        """Launch, see `Backward`.

        Args:
            sums: as there, but tiles of dQ have 64 rows.
            pieces, partial, full: for tiles of 128 x 256.
            turns: as there, with semaphores for each CTA's rows of a tile of dQ, dK or dV.
            ctas: pairs of CTAs.
        """
        c, dtype = self.config, self.dtype
        width, deep, bm, bn = c.width, c.value_width, c.block_q, c.rows_kv
        query, key, value, grad_out, grad_key, grad_value = (
            ordered(t, (2, 3, 1, 0)) for t in (query, key, value, grad_out, grad_key, grad_value)
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        boxes = (
            (load, query, (HALF, width)),  # half the rows
            (load, query, (bm, HALF)),  # half the columns
            (load, grad_out, (HALF, deep)),
            (load, grad_out, (bm, HALF)),
            (load, key, (bn, width)),
            (load, key, (2 * bn, HALF)),
            (load, value, (bn, deep)),
            (store, grad_key, (bn, 64)),
            (store, grad_value, (bn, 64)),
        )
        stages = (1,) * 7 + (width // 64, deep // 64)
        layouts = tuple(
            hopper_helpers.make_smem_layout_b(ROW, (64, *shape), dtype, count)
            for (_, _, shape), count in zip(boxes, stages, strict=True)
        )
        tma = [
            cpasync.make_tiled_tma_atom(op, t, cute.slice_(layout, (None, None, 0)), shape)
            for (op, t, shape), layout in zip(boxes, layouts, strict=True)
        ]

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 28]
            base: Int32
            info: cute.struct.Align[cute.struct.MemRange[Int32, INFO], 16]
            factors: cute.struct.Align[cute.struct.MemRange[Int32, 2 * CORE_WORDS], 128]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.rows_words[0]], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.rows_words[1]], 128]
            v: cute.struct.Align[cute.struct.MemRange[dtype, bn * deep], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[dtype, 2 * bn * HALF], 1024]  # after V
            k: cute.struct.Align[cute.struct.MemRange[dtype, bn * width], 1024]
            k_columns: cute.struct.Align[cute.struct.MemRange[dtype, 2 * bn * HALF], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, HALF * width], 1024]
            q_columns: cute.struct.Align[cute.struct.MemRange[dtype, bm * HALF], 1024]
            do: cute.struct.Align[cute.struct.MemRange[dtype, HALF * deep], 1024]
            do_columns: cute.struct.Align[cute.struct.MemRange[dtype, bm * HALF], 1024]
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
        ).launch(
            grid=(2 * ctas, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(2, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

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
        """Roles as in `Backward`."""
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(INFO))
        rows = self.rows_layouts()
        stats = (storage.lse.get_tensor(rows[0]), storage.delta.get_tensor(rows[1]))
        parts = (
            storage.q, storage.q_columns, storage.do, storage.do_columns, storage.k,
            storage.k_columns, storage.v, storage.ds, storage.v,
        )  # fmt: skip
        views = tuple(
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in zip(parts, layouts, strict=True)
        )
        # as `Backward.compute` wants them: V third, dS fifth
        starts = tuple(
            part.data_ptr().toint()
            for part in (
                storage.q, storage.k, storage.v, storage.do, storage.ds, storage.q_columns,
                storage.do_columns, storage.k_columns, storage.factors, storage.lse, storage.delta,
            )
        )  # fmt: skip
        outgoing, place = storage.sums.data_ptr(), storage.base.ptr
        factors = storage.factors.data_ptr()
        base = storage.barriers.data_ptr()
        # those of `Backward`, the rings of Q being of the rows' marks and statistics; a pair of each
        # operand; and what lets the end of a piece and the begin of the next overlap
        single = tuple(base + i for i in range(10))
        ends = dv_full, v_free, left, columns_full = tuple(base + 22 + i for i in range(4))
        claims = claimed, seen = base + 26, base + 27
        bars = (*single, base + 10, base + 12, *(base + 14 + i for i in range(8)), *ends)
        adding, computing = COMPUTE, MULTIPLY - COMPUTE  # warps
        if warp == MULTIPLY:
            with cute.arch.elect_one():
                k_full, v_full, kv_free, s_full, p_ready, dp_full = single[:6]
                ds_ready, dq_full, dq_free, acc_full = single[6:]
                # the first CTA's count the second's loads too
                both = 2 - self.rank()
                for bar in (k_full, s_full, dp_full, dq_full, acc_full, dv_full, claimed, seen):
                    cute.arch.mbarrier_init(bar, 1)
                cute.arch.mbarrier_init(v_full, both)
                cute.arch.mbarrier_init(columns_full, both)
                cute.arch.mbarrier_init(kv_free, adding + computing + 1)
                cute.arch.mbarrier_init(p_ready, 2 * computing)
                cute.arch.mbarrier_init(ds_ready, 2 * computing)
                cute.arch.mbarrier_init(dq_free, 2 * adding)
                cute.arch.mbarrier_init(v_free, computing)
                cute.arch.mbarrier_init(left, 2 * (adding + computing))
                for s in cutlass.range_constexpr(c.q_stages):
                    cute.arch.mbarrier_init(base + 10 + s, 1)
                    cute.arch.mbarrier_init(base + 12 + s, adding + computing)
                for i in cutlass.range_constexpr(4):
                    cute.arch.mbarrier_init(base + 14 + 2 * i, both)
                    cute.arch.mbarrier_init(base + 15 + 2 * i, 1)
            device.allocate(place, 2)
            self.write_factors(factors, numbers[0])
        cute.arch.mbarrier_init_fence()
        device.fence_before()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        device.fence_after()

        if warp >= MULTIPLY:
            cute.arch.setmaxregister_decrease(c.registers[2])
            if warp == LOAD:
                self.produce(
                    atoms[:7],
                    tiles[:7],
                    views[:7],
                    stats,
                    (bars, claims),
                    info,
                    (lse, delta, pieces, partial, full, counter, turns),
                    numbers,
                )
            if warp == MULTIPLY:
                if self.rank() == 0:
                    self.multiply(starts, device.allocated(place), bars, info)
                else:
                    self.relay(bars, info)
        elif warp >= COMPUTE:
            cute.arch.setmaxregister_increase(c.registers[0])
            memory = device.allocated(place)
            self.compute(
                views[7:], starts, stats, memory, (atoms[7:], tiles[7:]), bars, info,
                captured, totals, numbers,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(c.registers[1])
            memory = device.allocated(place)
            self.add_up(outgoing, memory, bars, info, sums, turns, numbers)
        device.fence_before()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == MULTIPLY:
            device.fence_after()
            device.free(device.allocated(place), 2)

    # -------------------------------------------------------- what differs in the other roles

    def rank(self) -> Any:
        """Which CTA of the pair this is."""
        cta, _, _ = cute.arch.block_idx()
        return cta & 1

    def record(self, pieces: Any) -> Any:
        """Where a piece's record begins in `info`: there are two, as K of the next comes early."""
        return RECORD + 8 * (pieces & 1)

    def own_tile(self, tile: Any) -> Any:
        """Which 128 kv positions are the CTA's, of a tile of the work list."""
        return 2 * tile + self.rank()

    def gradient_blocks(self, bars: Any) -> tuple[tuple[Any, range], ...]:
        """dV is complete, and its memory, which is V's, free, before dQ and dK of the last block."""
        blocks = self.config.value_width // 64
        return ((bars[20], range(blocks)), (bars[9], range(blocks, 2 * blocks)))

    def leave_value(self, bars: Any, blocks: range) -> None:
        """Say that a warp needs V's memory no more, if these blocks are dV's."""
        if blocks[0] == 0:
            cute.arch.sync_warp()
            sm90_device.arrive(bars[21])

    def leave_piece(self, bars: Any) -> None:
        """Say that a warp needs nothing of a piece any more, to both CTAs."""
        cute.arch.sync_warp()
        sm90_device.arrive(bars[2])
        self.signal(bars[22])

    def await_keys(self, blocks: Any) -> None:
        """dK is waited for in the next piece, see `settle`."""
        if blocks[0] == 0:
            self.await_stores()

    def leave_computed(self, bars: Any) -> None:
        """Say that a computing warp needs nothing of a piece any more, its stores apart."""
        cute.arch.sync_warp()
        sm90_device.arrive(bars[2])

    @cute.jit
    def settle(self, bars: tuple, pieces: Int32, empty: cutlass.Constexpr):
        """Wait until dK of the piece before has left its memory, which is that of dS.

        Args:
            pieces: before this one.
            empty: the piece has no blocks, and its dK is written next.
        """
        if pieces > 0:
            self.await_stores()
            if const_expr(empty):
                warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
                cute.arch.barrier(barrier_id=EPILOGUE + warp // 4 - 1, number_of_threads=128)
            cute.arch.sync_warp()
            self.signal(bars[22])

    def signal(self, barrier: Any) -> None:
        """One arrival a warp at a barrier of the first CTA."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier, Int32(0), scope=MemScopeKind.CLUSTER)

    def leave_rows(self, bars: Any, stage: Any) -> None:
        """Say that a warp needs a block's mark and statistics no more."""
        cute.arch.sync_warp()
        sm90_device.arrive(bars[11] + stage)

    def write_ds(self, start: Any, row: Any, row0: Any, at: int, packed: Any) -> None:
        """Eight elements of dS^T to the CTA that computes dQ of their rows."""
        rows = 2 * self.config.rows_kv
        vector, own = Int32(at // 8), self.rank() * self.config.rows_kv + row
        place = device.swizzled(start, rows, own, vector, Int32(0))
        # each computing warpgroup has the rows of one CTA
        device.write_remote(device.remote(place, row0 // HALF), packed)

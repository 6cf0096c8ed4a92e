"""The Blackwell backward for two CTAs that share their tensor cores' operands.

A piece of work is 256 kv positions, 128 a CTA. Products run on both CTAs at once: each brings its
rows of K, V, P and dS, and half of the other operand, so that Q and dO are read from shared memory
once for both: half their rows for S and dP, half their columns for dV and dK. dQ is a sum over all
256 positions: the CTAs exchange halves of dS through distributed shared memory, and each computes
and adds up half of the rows of dQ, which halves the traffic of its sums.

Warp 12 of the first CTA issues all products; that of the second passes on when its loads are there.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers

from attnkit.templates.sm90 import device as sm90_device
from attnkit.templates.sm90.backward_load import RECORD
from attnkit.templates.sm90.backward_math import MASKED, WHOLE
from attnkit.templates.sm90.copies import ordered, partition
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward import COMPUTE, LOAD, MULTIPLY, ROW, Backward
from attnkit.templates.sm100.backward_config import SLICE
from attnkit.templates.sm100.backward_pair_sums import HALF, PairSums


class PairBackward(PairSums, Backward):
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
            turns: as there, with two semaphores a q tile.
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
            barriers: cute.struct.MemRange[Int64, 22]
            base: Int32
            info: cute.struct.MemRange[Int32, 16]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.q_stages * bm], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.q_stages * bm], 128]
            v: cute.struct.Align[cute.struct.MemRange[dtype, bn * deep], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, bn * width], 1024]  # after V
            k_columns: cute.struct.Align[cute.struct.MemRange[dtype, 2 * bn * HALF], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, HALF * width], 1024]
            q_columns: cute.struct.Align[cute.struct.MemRange[dtype, bm * HALF], 1024]
            do: cute.struct.Align[cute.struct.MemRange[dtype, HALF * deep], 1024]
            do_columns: cute.struct.Align[cute.struct.MemRange[dtype, bm * HALF], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[dtype, 2 * bn * HALF], 1024]
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
        rank = self.rank()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(16))
        rows = cute.make_layout((c.block_q, c.q_stages))
        stats = (storage.lse.get_tensor(rows), storage.delta.get_tensor(rows))
        parts = (
            storage.q, storage.q_columns, storage.do, storage.do_columns, storage.k,
            storage.k_columns, storage.v, storage.k, storage.v,
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
                storage.do_columns, storage.k_columns,
            )
        )  # fmt: skip
        outgoing, place = storage.sums.data_ptr(), storage.base.ptr
        base = storage.barriers.data_ptr()
        # those of `Backward`, the rings of Q being of the rows' marks and statistics, then a
        # pair of each operand
        single = tuple(base + i for i in range(10))
        bars = (*single, base + 10, base + 12, *(base + 14 + i for i in range(8)))
        adding, computing = COMPUTE, MULTIPLY - COMPUTE  # warps
        if warp == MULTIPLY:
            with cute.arch.elect_one():
                k_full, v_full, kv_free, s_full, p_ready, dp_full = single[:6]
                ds_ready, dq_full, dq_free, acc_full = single[6:]
                # the first CTA's count the second's loads too
                both = 2 - rank
                for bar in (k_full, s_full, dp_full, dq_full, acc_full):
                    cute.arch.mbarrier_init(bar, 1)
                cute.arch.mbarrier_init(v_full, both)
                cute.arch.mbarrier_init(kv_free, adding + computing + 1)
                cute.arch.mbarrier_init(p_ready, 2 * computing)
                cute.arch.mbarrier_init(ds_ready, 2 * computing)
                cute.arch.mbarrier_init(dq_free, 2 * adding)
                for s in cutlass.range_constexpr(c.q_stages):
                    cute.arch.mbarrier_init(base + 10 + s, 1)
                    cute.arch.mbarrier_init(base + 12 + s, adding + computing)
                for i in cutlass.range_constexpr(4):
                    cute.arch.mbarrier_init(base + 14 + 2 * i, both)
                    cute.arch.mbarrier_init(base + 15 + 2 * i, 1)
            device.allocate(place, 2)
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
                    bars,
                    info,
                    (lse, delta, pieces, partial, full, counter, turns),
                    numbers,
                )
            if warp == MULTIPLY:
                if rank == 0:
                    self.multiply(starts, device.allocated(place), bars, info)
                else:
                    self.relay(bars, info)
        elif warp >= COMPUTE:
            cute.arch.setmaxregister_increase(c.registers[0])
            memory = device.allocated(place)
            self.compute(
                views[7:], starts, stats, memory, (atoms[7:], tiles[7:]), bars[:14], info,
                captured, totals, numbers,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(c.registers[1])
            memory = device.allocated(place)
            self.add_up(outgoing, memory, bars[:14], info, sums, turns, numbers)
        device.fence_before()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == MULTIPLY:
            device.fence_after()
            device.free(device.allocated(place), 2)

    # --------------------------------------------------------------------------------- loads

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
        lse, delta, pieces, partial, full, _, turns = lists
        _, group, q_len, kv_len, heads, _, _, kv_batch = numbers
        k_full, v_full, kv_free = bars[:3]
        rows_full, rows_free = bars[10:12]
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
        while index < total:
            b, h, tile = pieces[index, 0], pieces[index, 1], pieces[index, 2]
            h_kv, b_kv = h // group, cutlass.min(b, kv_batch - 1)
            count = pieces[index, 6] + pieces[index, 9]
            some, rest = self.enter(partial, pieces, index, 4), self.enter(full, pieces, index, 7)
            at_some, end_some, run_some, left_some = some
            at_rest, end_rest, run_rest, left_rest = rest
            first_row = (b * heads + h) * blocks
            cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
            with cute.arch.elect_one():
                info[RECORD], info[RECORD + 1], info[RECORD + 2] = tile, h, b
                info[RECORD + 3], info[RECORD + 4] = count, Int32(1)
                self.note_group(info, turns, index)
            if count == 0:  # nothing is kept: the record alone
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(v_full)
                    cute.arch.mbarrier_arrive(k_full)
            else:
                with cute.arch.elect_one():
                    bytes_k = bn * width * 2 + 2 * bn * HALF * 2
                    cute.arch.mbarrier_arrive_and_expect_tx(k_full, bytes_k)
                    cute.arch.mbarrier_arrive_and_expect_tx(v_full, bn * deep * 2)
                for i, at, column, bar in (
                    (4, 2 * tile + rank, 0, k_full), (6, 2 * tile + rank, 0, v_full),
                    (5, tile, rank, k_full),
                ):  # fmt: skip
                    to, source = sides[i]
                    cute.copy(
                        atoms[i], source[None, at, column, h_kv, b_kv], to[None, 0], tma_bar_ptr=bar
                    )
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
                before = m
                kc += 1
            if count > 0:
                self.load_operand(loads, 1, kc - 1, (before, h, b))
            tc += 1
            index += ctas // 2
        cute.arch.mbarrier_wait(kv_free, (tc & 1) ^ 1)
        with cute.arch.elect_one():
            info[RECORD + 4] = Int32(0)
            cute.arch.mbarrier_arrive(k_full)

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

    # ------------------------------------------------------------------------------- products

    @cute.jit
    def relay(self, bars: tuple, info: cute.Tensor):
        """The second CTA tells the first when its loads are there, in the order of the products."""
        k_full, v_full, kv_free = bars[:3]
        q_full, q_columns_full, do_full, do_columns_full = (
            full for full, _ in self.operand_bars(bars)
        )
        kc, tc = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(k_full, 0)
        valid = info[RECORD + 4]
        while valid != 0:
            count = info[RECORD + 3]
            self.pass_on(v_full, tc)
            for i in cutlass.range(count, unroll=1):
                self.pass_on(q_full, kc)
                if i > 0:
                    self.pass_on(q_columns_full, kc - 1)
                self.pass_on(do_full, kc)
                self.pass_on(do_columns_full, kc)
                kc += 1
            if count > 0:
                self.pass_on(q_columns_full, kc - 1)
            sm90_device.arrive(kv_free)
            tc += 1
            cute.arch.mbarrier_wait(k_full, tc & 1)
            valid = info[RECORD + 4]

    @cute.jit
    def pass_on(self, barrier: cute.Pointer, count: Int32):
        """Wait for a load, and arrive for it in the first CTA."""
        cute.arch.mbarrier_wait(barrier, count & 1)
        self.signal(barrier)

    @cute.jit
    def multiply(self, starts: tuple, memory: Int32, bars: tuple, info: cute.Tensor):
        """The warp of products, in the first CTA, for both."""
        (
            k_full, v_full, kv_free, s_full, p_ready, dp_full, ds_ready, dq_full, dq_free, acc_full,
        ) = bars[:10]  # fmt: skip
        q, q_columns, do, do_columns = self.operand_bars(bars)
        places = (*starts, memory)
        kc, tc = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(k_full, 0)
        valid = info[RECORD + 4]
        while valid != 0:
            count = info[RECORD + 3]
            cute.arch.mbarrier_wait(v_full, tc & 1)
            if count > 0:
                self.scores(places, kc, q, s_full)
                self.slopes(places, kc, do, dq_free, dp_full)
                self.values_gradient(places, kc, p_ready, do_columns, Int32(0))
                for i in cutlass.range(count - 1, unroll=1):
                    self.scores(places, kc + 1, q, s_full)
                    self.query_gradient(places, kc, ds_ready, dq_full)
                    self.keys_gradient(places, kc, q_columns, i)
                    self.slopes(places, kc + 1, do, dq_free, dp_full)
                    self.values_gradient(places, kc + 1, p_ready, do_columns, Int32(1))
                    kc += 1
                self.query_gradient(places, kc, ds_ready, dq_full)
                self.keys_gradient(places, kc, q_columns, count - 1)
                with cute.arch.elect_one():
                    device.commit_pair(acc_full)
                kc += 1
            sm90_device.arrive(kv_free)
            tc += 1
            cute.arch.mbarrier_wait(k_full, tc & 1)
            valid = info[RECORD + 4]

    def scores(self, places: Any, kc: Any, q: Any, full: Any) -> None:
        """S^T = K Q^T."""
        at = self.fresh(places, kc)
        cute.arch.mbarrier_wait(q[0], kc & 1)
        device.fence_after()
        self.square(at[-1] + self.config.s_column, at[1], at[0], (full, q[1]))

    def slopes(self, places: Any, kc: Any, do: Any, dq_free: Any, full: Any) -> None:
        """dP^T = V dO^T, where dQ of the last block may still be."""
        at = self.fresh(places, kc)
        cute.arch.mbarrier_wait(do[0], kc & 1)
        cute.arch.mbarrier_wait(dq_free, (kc & 1) ^ 1)
        device.fence_after()
        self.square(at[-1] + self.config.dp_column, at[2], at[3], (full, do[1]))

    def square(self, out: Any, a: Any, b: Any, done: Any) -> None:
        """A product of rows of K or V with those of Q or dO."""
        c = self.config
        form = device.shape(2 * c.rows_kv, c.block_q, self.dtype)
        with cute.arch.elect_one():
            for step in range(c.width // device.STEP):
                device.multiply(
                    out,
                    device.along_columns(a, c.rows_kv, step),
                    device.along_columns(b, HALF, step),
                    form,
                    step > 0,
                    in_tensor=False,
                    ctas=2,
                )
            for bar in done:
                device.commit_pair(bar)

    def values_gradient(self, places: Any, kc: Any, p_ready: Any, do: Any, more: Any) -> None:
        """dV += P^T dO, or dV = P^T dO unless `more`."""
        c, at = self.config, self.fresh(places, kc)
        cute.arch.mbarrier_wait(p_ready, kc & 1)
        cute.arch.mbarrier_wait(do[0], kc & 1)
        device.fence_after()
        self.tall(at[-1] + c.dv_column, at[-1] + c.s_column, at[6], more, do[1])

    def keys_gradient(self, places: Any, kc: Any, q: Any, more: Any) -> None:
        """dK += dS^T Q, or dK = dS^T Q unless `more`."""
        c, at = self.config, self.fresh(places, kc)
        cute.arch.mbarrier_wait(q[0], kc & 1)
        device.fence_after()
        self.tall(at[-1] + c.dk_column, at[-1] + c.dp_column, at[5], more, q[1])

    def tall(self, out: Any, a: Any, b: Any, more: Any, done: Any) -> None:
        """A product of P^T or dS^T in tensor memory with columns of dO or Q."""
        c = self.config
        form = device.shape(2 * c.rows_kv, c.width, self.dtype, b_rows=True)
        with cute.arch.elect_one():
            for step in range(c.block_q // device.STEP):
                device.multiply(
                    out,
                    a + self.half_column(step),
                    device.along_rows(b, c.block_q, step),
                    form,
                    more if step == 0 else True,
                    in_tensor=True,
                    ctas=2,
                )
            device.commit_pair(done)

    def query_gradient(self, places: Any, kc: Any, ds_ready: Any, full: Any) -> None:
        """dQ = dS K, 64 rows in each CTA, in the columns that dS leaves free.

        The first 64 lanes hold columns 0 to 63 of dQ, the others 64 to 127: 32 of each a product.
        """
        c, at = self.config, self.fresh(places, kc)
        form = device.shape(c.block_q, HALF, self.dtype, a_rows=True, b_rows=True)
        cute.arch.mbarrier_wait(ds_ready, kc & 1)
        cute.arch.fence_acq_rel_cluster()
        device.fence_after()
        with cute.arch.elect_one():
            for part in range(2):
                for step in range(2 * c.rows_kv // device.STEP):
                    device.multiply(
                        at[-1] + self.dq_columns()[part],
                        device.along_rows(at[4], 2 * c.rows_kv, step),
                        # 32 of the 64 columns that the CTA has
                        device.along_rows(at[7] + part * 2 * SLICE, 2 * c.rows_kv, step),
                        form,
                        step > 0,
                        in_tensor=False,
                        ctas=2,
                    )
            device.commit_pair(full)

    # -------------------------------------------------------- what differs in the other roles

    def rank(self) -> Any:
        """Which CTA of the pair this is."""
        cta, _, _ = cute.arch.block_idx()
        return cta & 1

    def own_tile(self, tile: Any) -> Any:
        """Which 128 kv positions are the CTA's, of a tile of the work list."""
        return 2 * tile + self.rank()

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

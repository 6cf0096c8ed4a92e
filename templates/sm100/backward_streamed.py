"""Compute the Blackwell backward of head dims above 256, whose operands are loaded in chunks.

K, V, Q and dO of a block do not fit shared memory together. S and dP are sums over chunks of 64
columns, which arrive in a ring. `column_parts` work tiles share a kv block, as at head dim 256:
each computes 128 columns of dQ, dK and dV, for which it loads these columns of Q and dO for each q
block, and of K once. The roles of compute and reduce warps are those of `Backward`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers

from attnkit.templates.common.backward_work import Lists, Problem
from attnkit.templates.common.device import DTYPES
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.tma import ordered
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward import LOADS, ROW
from attnkit.templates.sm100.backward_barriers import BackwardStreamedBarriers
from attnkit.templates.sm100.backward_compute import ComputeWarpgroup, Parts
from attnkit.templates.sm100.backward_config import CHUNK, CHUNK_STAGES, SLICE, BackwardConfig
from attnkit.templates.sm100.backward_dq_reduce import DqReduce
from attnkit.templates.sm100.backward_epilogue import Epilogue
from attnkit.templates.sm100.backward_lse_in_mma import LseInMma
from attnkit.templates.sm100.backward_score_grads import ScoreGrads
from attnkit.templates.sm100.backward_shared import (
    COMPUTE_WARP,
    MMA_WARP,
    PRODUCER_WARP,
    Group,
    SmemRows,
    Word,
)
from attnkit.templates.sm100.backward_softmax import SoftmaxBackward
from attnkit.templates.sm100.backward_streamed_mma import MmaStreamed, OperandsStreamed
from attnkit.templates.sm100.backward_streamed_producer import ProducerStreamed, StreamTargets
from attnkit.templates.sm100.device import fence_after, fence_before


class BackwardStreamed:
    """Builds and launches the Blackwell backward kernel of head dims above 256.

    Its `__call__` takes the same arguments as that of `Backward`.

    Args:
        config: compile-time configuration, with `streamed`.
        hooks: hooks of the variant.

    Raises:
        ValueError: the configuration is not supported; the message says why.
    """

    storage: Any  # struct of a CTA's shared memory, created by `__call__`

    def __init__(self, config: BackwardConfig, hooks: BackwardHooks) -> None:
        problem = config.problem()
        if problem:
            raise ValueError(problem)
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.lse_in_mma = LseInMma(config)
        group = Group(config)
        softmax = SoftmaxBackward(config, hooks, self.dtype)
        epilogue = Epilogue(config, group, self.dtype)
        self.producer = ProducerStreamed(config)
        self.mma = MmaStreamed(config, group, self.dtype)
        self.compute = ComputeWarpgroup(
            config, Parts(group, self.lse_in_mma, softmax, ScoreGrads(softmax), epilogue)
        )
        self.dq_reduce = DqReduce(config, group)

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
        items: cute.Tensor,
        partial: cute.Tensor,
        full: cute.Tensor,
        counter: cute.Tensor,
        captured: list,
        totals: list,
        order: list,
        scale: Float32,
        group: Int32,
        ctas: Int32,
        stream: Any,
    ):
        """Launch the kernel; the arguments are those of `Backward`."""
        c, dtype = self.config, self.dtype
        bm, bn, blocks = c.block_q, c.rows_kv, c.grad_dims[0] // CHUNK
        query, key, value, grad_out, grad_key, grad_value = (  # [S, D, H, B]
            ordered(t, (2, 3, 1, 0)) for t in (query, key, value, grad_out, grad_key, grad_value)
        )

        def chunks(rows: int, count: int) -> Any:
            return hopper_helpers.make_smem_layout_b(ROW, (64, rows, CHUNK), dtype, count)

        # of Q and dO, of K and V: in the ring; a part of the columns
        layouts = (
            chunks(bm, CHUNK_STAGES), chunks(bn, CHUNK_STAGES), chunks(bm, blocks), chunks(bn, blocks),
        )  # fmt: skip
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma = [
            cpasync.make_tiled_tma_atom(op, t, cute.slice_(layout, (None, None, 0)), (rows, CHUNK))
            for op, t, layout, rows in (
                (load, query, layouts[0], bm),
                (load, key, layouts[1], bn),
                (load, value, layouts[1], bn),
                (load, grad_out, layouts[0], bm),
                (store, grad_key, layouts[3], bn),
                (store, grad_value, layouts[3], bn),
            )
        ]
        part = blocks * CHUNK  # columns of a part

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, BackwardStreamedBarriers.count(c)]
            base: Int32  # address of tensor memory
            info: cute.struct.MemRange[Int32, Word.COUNT]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.smem_row_words[0]], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.smem_row_words[1]], 128]
            kv: cute.struct.Align[cute.struct.MemRange[dtype, CHUNK_STAGES * bn * CHUNK], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, CHUNK_STAGES * bm * CHUNK], 1024]
            # these three one after another: dV is stored from the memory of the first two, dK from
            # that of the third
            do_part: cute.struct.Align[cute.struct.MemRange[dtype, bm * part], 1024]
            q_part: cute.struct.Align[cute.struct.MemRange[dtype, bm * part], 1024]
            k_part: cute.struct.Align[cute.struct.MemRange[dtype, bn * part], 1024]
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
            items,
            partial,
            full,
            counter,
            captured,
            totals,
            order,
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
        items: cute.Tensor,
        partial: cute.Tensor,
        full: cute.Tensor,
        counter: cute.Tensor,
        captured: list,
        totals: list,
        order: list,
        sizes: tuple,
    ):
        """Set up shared memory, tensor memory and barriers, then branch to the role of the warp."""
        c = self.config
        problem = Problem(*sizes)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == PRODUCER_WARP:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(Word.COUNT))  # int32 [words]
        lse_layout, delta_layout = self.lse_in_mma.layouts()
        rows = SmemRows(  # f32 [words of the rows, stages]
            storage.lse.get_tensor(lse_layout), storage.delta.get_tensor(delta_layout), info
        )
        staging, tmem_base = storage.sums.data_ptr(), storage.base.ptr
        targets = self._targets(storage, layouts)
        grads = storage.k_part, storage.do_part
        views = tuple(  # of dK and dV, dtype [128, 64, 2] each
            part.get_tensor(layouts[3].outer, swizzle=layouts[3].inner) for part in grads
        )
        kv, q, do_part, q_part, k_part, ds = (
            part.data_ptr().toint()
            for part in (
                storage.kv, storage.q, storage.do_part, storage.q_part, storage.k_part, storage.ds,
            )
        )  # fmt: skip
        bars = BackwardStreamedBarriers.at(storage.barriers.data_ptr(), c)
        if warp == MMA_WARP:
            with cute.arch.elect_one():
                bars.init(c)
            device.allocate(tmem_base)
        cute.arch.mbarrier_init_fence()
        # the address of tensor memory is read after the barrier
        fence_before()
        cute.arch.sync_threads()
        fence_after()
        tmem = device.allocated(tmem_base)

        if warp >= MMA_WARP:
            cute.arch.setmaxregister_decrease(c.registers.others)
            if warp == PRODUCER_WARP:
                lists = Lists(lse, delta, items, partial, full, counter, order)
                self.producer.run(atoms[:LOADS], tiles[:LOADS], targets, rows, bars, lists, problem)
            if warp == MMA_WARP:
                operands = OperandsStreamed(kv, q, do_part, q_part, k_part, ds, tmem)
                self.mma.run(operands, bars, info)
        elif warp >= COMPUTE_WARP:
            cute.arch.setmaxregister_increase(c.registers.compute)
            self.compute.run(
                (atoms[LOADS:], tiles[LOADS:], views), (do_part, ds), rows, tmem, bars, captured,
                totals, problem,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(c.registers.reduce)
            self.dq_reduce.run(staging, tmem, bars, info, sums, order, problem)
        fence_before()
        cute.arch.sync_threads()  # all roles have finished with tensor memory
        if warp == MMA_WARP:
            fence_after()
            device.free(device.allocated(tmem_base))

    def _targets(self, storage: Any, layouts: tuple) -> StreamTargets:
        """Return the tensors in shared memory that the producer writes."""
        q, kv, q_part, k_part = layouts
        return StreamTargets(*(
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in (
                (storage.q, q), (storage.kv, kv), (storage.q_part, q_part),
                (storage.do_part, q_part), (storage.k_part, k_part),
            )
        ))  # fmt: skip

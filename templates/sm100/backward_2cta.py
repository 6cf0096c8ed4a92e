"""Compute the Blackwell backward on CTA pairs with joint MMAs.

A work tile has 256 kv positions, 128 per CTA. An MMA runs on both CTAs at once: each provides its
rows of K, V, P or dS, and half of the other operand. Q and dO are thus read from shared memory once
for both: half of their rows in each CTA for S and dP, half of their columns for dV and dK. dQ is a
sum over all 256 positions. The CTAs exchange halves of dS through distributed shared memory, and
each computes and adds half of the rows of dQ, which halves the traffic of its sums.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers

from attnkit.templates.common.backward_work import Lists, Problem
from attnkit.templates.common.device import DTYPES
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.lse_in_mma import CORE_WORDS
from attnkit.templates.common.tma import ordered
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward import ROW
from attnkit.templates.sm100.backward_2cta_dq_reduce import DqReduce2Cta
from attnkit.templates.sm100.backward_2cta_mma import Mma2Cta, Operands2Cta
from attnkit.templates.sm100.backward_2cta_producer import Producer2Cta
from attnkit.templates.sm100.backward_barriers import Backward2CtaBarriers
from attnkit.templates.sm100.backward_compute import ComputeWarpgroup, Parts
from attnkit.templates.sm100.backward_config import SLICE, BackwardConfig
from attnkit.templates.sm100.backward_epilogue import Epilogue2Cta
from attnkit.templates.sm100.backward_lse_in_mma import LseInMma
from attnkit.templates.sm100.backward_score_grads import ScoreGrads
from attnkit.templates.sm100.backward_shared import (
    COMPUTE_WARP,
    HALF,
    MMA_WARP,
    PRODUCER_WARP,
    Group,
    SmemRows,
    Word,
)
from attnkit.templates.sm100.backward_softmax import SoftmaxBackward
from attnkit.templates.sm100.device import fence_after, fence_before

LOADS = 7  # number of TMA loads; two TMA stores follow them in the kernel's arguments


class Backward2Cta:
    """Builds and launches the Blackwell backward kernel for CTA pairs.

    Its `__call__` takes the same arguments as that of `Backward`; `ctas` counts pairs.

    Args:
        config: compile-time configuration, with `two_cta`.
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
        self.group = Group(config)
        softmax = SoftmaxBackward(config, hooks, self.dtype)
        epilogue = Epilogue2Cta(config, self.group, self.dtype)
        self.producer = Producer2Cta(config, self.group)
        self.mma = Mma2Cta(config, self.lse_in_mma, self.group, self.dtype)
        self.compute = ComputeWarpgroup(
            config, Parts(self.group, self.lse_in_mma, softmax, ScoreGrads(softmax), epilogue)
        )
        self.dq_reduce = DqReduce2Cta(config, self.group)

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
        """Launch the kernel; the arguments are those of `Backward`, except the following.

        Args:
            sums: tiles of dQ have 64 rows.
            items, partial, full: for blocks of 128 x 256.
            order: semaphores for each CTA's rows of a tile of dQ, dK or dV.
            ctas: number of CTA pairs to launch.
        """
        c, dtype = self.config, self.dtype
        head_dim, head_dim_v, bm, bn = c.head_dim, c.head_dim_v, c.block_q, c.rows_kv
        query, key, value, grad_out, grad_key, grad_value = (  # [S, D, H, B]
            ordered(t, (2, 3, 1, 0)) for t in (query, key, value, grad_out, grad_key, grad_value)
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        boxes = (  # loads in the order of `Load`, then stores
            (load, query, (HALF, head_dim)),  # half of the rows
            (load, query, (bm, HALF)),  # half of the columns
            (load, grad_out, (HALF, head_dim_v)),
            (load, grad_out, (bm, HALF)),
            (load, key, (bn, head_dim)),
            (load, key, (2 * bn, HALF)),
            (load, value, (bn, head_dim_v)),
            (store, grad_key, (bn, 64)),
            (store, grad_value, (bn, 64)),
        )
        stages = (1,) * 7 + (head_dim // 64, head_dim_v // 64)
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
            barriers: cute.struct.MemRange[Int64, Backward2CtaBarriers.count(c)]
            base: Int32  # address of tensor memory
            info: cute.struct.Align[cute.struct.MemRange[Int32, Word.COUNT_2CTA], 16]
            factors: cute.struct.Align[cute.struct.MemRange[Int32, 2 * CORE_WORDS], 128]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.smem_row_words[0]], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.smem_row_words[1]], 128]
            v: cute.struct.Align[cute.struct.MemRange[dtype, bn * head_dim_v], 1024]
            # directly after V: dV and dK are stored from the memory of V and dS as one tile, while
            # the next K is loaded
            ds: cute.struct.Align[cute.struct.MemRange[dtype, 2 * bn * HALF], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, bn * head_dim], 1024]
            k_columns: cute.struct.Align[cute.struct.MemRange[dtype, 2 * bn * HALF], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, HALF * head_dim], 1024]
            q_columns: cute.struct.Align[cute.struct.MemRange[dtype, bm * HALF], 1024]
            do: cute.struct.Align[cute.struct.MemRange[dtype, HALF * head_dim_v], 1024]
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
            items,
            partial,
            full,
            counter,
            captured,
            totals,
            order,
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
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        info = storage.info.get_tensor(cute.make_layout(Word.COUNT_2CTA))  # int32 [words]
        lse_layout, delta_layout = self.lse_in_mma.layouts()
        rows = SmemRows(  # f32 [words of the rows, stages]
            storage.lse.get_tensor(lse_layout), storage.delta.get_tensor(delta_layout), info
        )
        parts = (
            storage.q, storage.q_columns, storage.do, storage.do_columns, storage.k,
            storage.k_columns, storage.v, storage.ds, storage.v,
        )  # fmt: skip
        views = tuple(  # dtype, shapes in `Operands2Cta` and `GradTarget`
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in zip(parts, layouts, strict=True)
        )
        smem_q, smem_k, smem_v, smem_do, smem_ds = (
            part.data_ptr().toint()
            for part in (storage.q, storage.k, storage.v, storage.do, storage.ds)
        )
        smem_q_columns, smem_do_columns, smem_k_columns = (
            part.data_ptr().toint()
            for part in (storage.q_columns, storage.do_columns, storage.k_columns)
        )
        smem_factors, smem_lse, smem_delta = (
            part.data_ptr().toint() for part in (storage.factors, storage.lse, storage.delta)
        )
        staging, tmem_base = storage.sums.data_ptr(), storage.base.ptr
        factors = storage.factors.data_ptr()
        bars = Backward2CtaBarriers.at(storage.barriers.data_ptr(), c)
        if warp == MMA_WARP:
            with cute.arch.elect_one():
                bars.init(c, self.group.rank())
            device.allocate(tmem_base, 2)
            if const_expr(c.less_delta):
                self.lse_in_mma.write_factors(factors, problem.scale)
        cute.arch.mbarrier_init_fence()
        # each CTA arrives at barriers of the other, which must be initialised
        fence_before()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        fence_after()

        # each role reads the tensor memory address itself, so that it takes no register before
        if warp >= MMA_WARP:
            cute.arch.setmaxregister_decrease(c.registers.others)
            if warp == PRODUCER_WARP:
                lists = Lists(lse, delta, items, partial, full, counter, order)
                self.producer.run(
                    atoms[:LOADS], tiles[:LOADS], views[:LOADS], rows, bars, lists, problem
                )
            if warp == MMA_WARP:
                if self.group.rank() == 0:
                    operands = Operands2Cta(
                        smem_q, smem_k, smem_v, smem_do, smem_ds, smem_q_columns, smem_do_columns,
                        smem_k_columns, smem_factors, smem_lse, smem_delta,
                        device.allocated(tmem_base),
                    )  # fmt: skip
                    self.mma.run(operands, bars, info)
                else:
                    self.mma.relay(bars, info)
        elif warp >= COMPUTE_WARP:
            cute.arch.setmaxregister_increase(c.registers.compute)
            self.compute.run(
                (atoms[LOADS:], tiles[LOADS:], views[LOADS:]), (smem_v, smem_ds), rows,
                device.allocated(tmem_base), bars, captured, totals, problem,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(c.registers.reduce)
            self.dq_reduce.run(
                staging, device.allocated(tmem_base), bars, info, sums, order, problem
            )
        fence_before()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # both CTAs have finished with tensor memory and remote barriers
        if warp == MMA_WARP:
            fence_after()
            device.free(device.allocated(tmem_base), 2)

"""Compute the backward on Blackwell (sm_100a): a work tile is a kv block, looping over q blocks.

The kernel is persistent, with one CTA per SM of 16 warps: a reduce warpgroup that adds to float32
sums, two compute warpgroups, an MMA warp, and a producer. For every q block the tensor cores
recompute S^T = K Q^T and dP^T = V dO^T into tensor memory. A thread of a compute warpgroup has one
kv position and half of the block's q rows. It replaces S^T by P^T and dP^T by dS^T in tensor
memory, where dV += P^T dO and dK += dS^T Q read them. dS^T is also written to shared memory, for
dQ = dS K, which bulk reductions add to global memory (FlashAttention-4's backward with one CTA).

At head dim 256, tensor memory has no room for dK and dV. Two work tiles share a kv block there.
Both compute the same S and dP, and each computes half of the columns of dQ, dK and dV.

Query and kv blocks are visited in ascending order, with PARTIAL and FULL blocks mixed. Only blocks
that need the mask run mask instructions.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.memory
import cutlass.tensor_utils
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers

from attnkit.templates.common.backward_work import Lists, Problem
from attnkit.templates.common.device import DTYPES
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.lse_in_mma import CORE_WORDS
from attnkit.templates.common.tma import ordered
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_barriers import BackwardBarriers
from attnkit.templates.sm100.backward_compute import ComputeWarpgroup, Parts
from attnkit.templates.sm100.backward_config import SLICE, BackwardConfig
from attnkit.templates.sm100.backward_dq_reduce import DqReduce
from attnkit.templates.sm100.backward_epilogue import Epilogue
from attnkit.templates.sm100.backward_lse_in_mma import LseInMma
from attnkit.templates.sm100.backward_mma import Mma, Operands
from attnkit.templates.sm100.backward_producer import LoadTargets, Producer
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
from attnkit.templates.sm100.device import fence_after, fence_before

ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
LOADS = 4  # number of TMA loads; two TMA stores follow them in the kernel's arguments


class Backward:
    """Builds and launches the Blackwell backward kernel of one configuration and one variant.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant, see `templates.common.hooks.BackwardHooks`.

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
        self.producer = Producer(config)
        self.mma = Mma(config, group, self.lse_in_mma, self.dtype)
        self.compute = ComputeWarpgroup(
            config, Parts(group, self.lse_in_mma, softmax, ScoreGrads(softmax), epilogue)
        )
        self.dq_reduce = DqReduce(config, group)

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
        """Launch the kernel; the arguments are those of Hopper's `Backward`, except the following.

        Args:
            lse, delta: also allowed as extra columns of the MMAs, see `common.lse_in_mma`.
            sums: in tiles with the layout of `backward_dq_reduce`.
            captured: captured tensors, then with `with_entropy` the gradients of the rows' entropies,
                float32 [B, H, S], then with `with_dropout` the state of dropout, int64 [2].
            order: one semaphore per tile of the sums.
        """
        c, dtype = self.config, self.dtype
        head_dim, head_dim_v, bm, bn = c.head_dim, c.head_dim_v, c.block_q, c.rows_kv
        query, key, value, grad_out, grad_key, grad_value = (  # [S, D, H, B]
            ordered(t, (2, 3, 1, 0)) for t in (query, key, value, grad_out, grad_key, grad_value)
        )

        def tile(rows: int, columns: int, stages: int) -> Any:
            return hopper_helpers.make_smem_layout_b(ROW, (64, rows, columns), dtype, stages)

        layouts = (
            tile(bm, head_dim, c.q_stages),  # Q
            tile(bn, head_dim, 1),  # K
            tile(bn, head_dim_v, 1),  # V
            tile(bm, head_dim_v, c.stages),  # dO
            tile(bn, 64, c.grad_dims[0] // 64),  # dK, in the memory of K
            tile(bn, 64, c.grad_dims[1] // 64),  # dV, in the memory of V
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma = [
            cpasync.make_tiled_tma_atom(op, t, cute.slice_(layout, (None, None, 0)), shape)
            for op, t, layout, shape in (
                (load, query, layouts[0], (bm, head_dim)),
                (load, key, layouts[1], (bn, head_dim)),
                (load, value, layouts[2], (bn, head_dim_v)),
                (load, grad_out, layouts[3], (bm, head_dim_v)),
                (store, grad_key, layouts[4], (bn, 64)),
                (store, grad_value, layouts[5], (bn, 64)),
            )
        ]

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, BackwardBarriers.count(c)]
            base: Int32  # address of tensor memory
            info: cute.struct.MemRange[Int32, Word.COUNT]
            factors: cute.struct.Align[cute.struct.MemRange[Int32, 2 * CORE_WORDS], 128]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, c.smem_row_words[0]], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, c.smem_row_words[1]], 128]
            v: cute.struct.Align[cute.struct.MemRange[dtype, bn * head_dim_v], 1024]
            # directly after V: the epilogue addresses both from V on
            k: cute.struct.Align[cute.struct.MemRange[dtype, bn * head_dim], 1024]
            q: cute.struct.Align[cute.struct.MemRange[dtype, c.q_stages * bm * head_dim], 1024]
            do: cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * head_dim_v], 1024]
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
        parts = (storage.q, storage.k, storage.v, storage.do, storage.k, storage.v)
        views = tuple(  # dtype, shapes in `LoadTargets` and `GradTarget`
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in zip(parts, layouts, strict=True)
        )
        smem_q, smem_k, smem_v, smem_do, smem_ds, smem_factors, smem_lse, smem_delta = (
            part.data_ptr().toint()
            for part in (
                storage.q, storage.k, storage.v, storage.do, storage.ds, storage.factors,
                storage.lse, storage.delta,
            )
        )  # fmt: skip
        staging, tmem_base = storage.sums.data_ptr(), storage.base.ptr
        factors = storage.factors.data_ptr()
        bars = BackwardBarriers.at(storage.barriers.data_ptr(), c)
        if warp == MMA_WARP:
            with cute.arch.elect_one():
                bars.init(c)
            device.allocate(tmem_base)
            if const_expr(c.less_delta):
                self.lse_in_mma.write_factors(factors, problem.scale)
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
                self.producer.run(
                    atoms[:LOADS],
                    tiles[:LOADS],
                    LoadTargets(*views[:LOADS]),
                    rows,
                    bars,
                    lists,
                    problem,
                )
            if warp == MMA_WARP:
                operands = Operands(
                    smem_q, smem_k, smem_v, smem_do, smem_ds, smem_factors, smem_lse, smem_delta,
                    tmem,
                )  # fmt: skip
                self.mma.run(operands, bars, info)
        elif warp >= COMPUTE_WARP:
            cute.arch.setmaxregister_increase(c.registers.compute)
            self.compute.run(
                (atoms[LOADS:], tiles[LOADS:], views[LOADS:]), (smem_v, smem_ds), rows, tmem, bars, captured,
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

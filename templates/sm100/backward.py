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

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Memory:
    """Holds the views and addresses of a CTA's shared memory that its roles use.

    Attributes:
        targets: tensors that the producer writes.
        operands: addresses of the operands, the fields of `Operands` before `tmem`.
        grads: memory from which TMA stores dK and dV.
        dv, ds: addresses of dV, see `GradTarget.smem`, and of dS.
    """

    targets: Any
    operands: tuple[Int32, ...]
    grads: tuple[cute.Tensor, cute.Tensor]
    dv: Int32
    ds: Int32


class Backward:
    """Builds and launches the Blackwell backward kernel of one configuration and one variant.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant, see `templates.common.hooks.BackwardHooks`.

    Raises:
        ValueError: the configuration is not supported; the message says why.
    """

    storage: Any  # struct of a CTA's shared memory, created by `__call__`
    producer_of: Any = Producer
    mma_of: Any = Mma
    operands_of: Any = Operands
    barriers_of: Any = BackwardBarriers

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
        self.producer: Any = self.producer_of(config)
        self.mma = self.mma_of(config, group, self.lse_in_mma, self.dtype)
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
            order: one semaphore for each part of the columns of a tile of the sums.
        """
        c = self.config
        tensors = [  # [S, D, H, B]
            ordered(t, (2, 3, 1, 0)) for t in (query, key, value, grad_out, grad_key, grad_value)
        ]
        query, key = tensors[:2]
        layouts = self.layouts()
        tma = self.copies(layouts, tensors)
        self.storage = self.struct()
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

    def tile(self, rows: int, columns: int, stages: int) -> Any:
        """Return the layout of tiles in shared memory, with the 128-byte swizzle."""
        shape = 64, rows, columns
        return hopper_helpers.make_smem_layout_b(ROW, shape, self.dtype, stages)

    def layouts(self) -> tuple:
        """Return the layouts of Q, K, V, dO, dK and dV in shared memory."""
        c = self.config
        return (
            self.tile(c.block_q, c.head_dim, c.q_stages),
            self.tile(c.rows_kv, c.head_dim, 1),
            self.tile(c.rows_kv, c.head_dim_v, 1),
            self.tile(c.block_q, c.head_dim_v, c.stages),
            self.tile(c.rows_kv, 64, c.grad_dims[0] // 64),  # in the memory of K
            self.tile(c.rows_kv, 64, c.grad_dims[1] // 64),  # in the memory of V
        )

    def copies(self, layouts: tuple, tensors: list[Any]) -> list[tuple[Any, Any]]:
        """Return the TMA atom and the coordinate tensor of each load and store.

        `tensors` are Q, K, V, dO, dK and dV, each [S, D, H, B].
        """
        c, (q, k, v, do, dk, dv) = self.config, layouts
        bm, bn = c.block_q, c.rows_kv
        boxes = (
            (q, (bm, c.head_dim)), (k, (bn, c.head_dim)), (v, (bn, c.head_dim_v)),
            (do, (bm, c.head_dim_v)), (dk, (bn, 64)), (dv, (bn, 64)),
        )  # fmt: skip
        return [
            tma_copy(i < LOADS, tensor, layout, shape)
            for i, (tensor, (layout, shape)) in enumerate(zip(tensors, boxes, strict=True))
        ]

    def struct(self) -> Any:
        """Return the struct of a CTA's shared memory."""
        c, dtype = self.config, self.dtype
        head_dim, head_dim_v, bm, bn = c.head_dim, c.head_dim_v, c.block_q, c.rows_kv

        return struct_of(
            barriers=cute.struct.MemRange[Int64, BackwardBarriers.count(c)],
            base=Int32,  # address of tensor memory
            info=cute.struct.MemRange[Int32, Word.COUNT],
            factors=cute.struct.Align[cute.struct.MemRange[Int32, 2 * CORE_WORDS], 128],
            lse=cute.struct.Align[cute.struct.MemRange[Float32, c.smem_row_words[0]], 128],
            delta=cute.struct.Align[cute.struct.MemRange[Float32, c.smem_row_words[1]], 128],
            v=cute.struct.Align[cute.struct.MemRange[dtype, bn * head_dim_v], 1024],
            # directly after V: the epilogue addresses both from V on
            k=cute.struct.Align[cute.struct.MemRange[dtype, bn * head_dim], 1024],
            q=cute.struct.Align[cute.struct.MemRange[dtype, c.q_stages * bm * head_dim], 1024],
            do=cute.struct.Align[cute.struct.MemRange[dtype, c.stages * bm * head_dim_v], 1024],
            ds=cute.struct.Align[cute.struct.MemRange[dtype, bn * bm], 1024],
            sums=cute.struct.Align[cute.struct.MemRange[Float32, c.slices * SLICE * bn], 128],
        )

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
        memory = self.memory(storage, layouts)
        staging, tmem_base = storage.sums.data_ptr(), storage.base.ptr
        factors = storage.factors.data_ptr() if const_expr(c.less_delta) else None
        bars = self.barriers_of.at(storage.barriers.data_ptr(), c)
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
                    memory.targets,
                    rows,
                    bars,
                    lists,
                    problem,
                )
            if warp == MMA_WARP:
                self.mma.run(self.operands_of(*memory.operands, tmem), bars, info)
        elif warp >= COMPUTE_WARP:
            cute.arch.setmaxregister_increase(c.registers.compute)
            self.compute.run(
                (atoms[LOADS:], tiles[LOADS:], memory.grads), (memory.dv, memory.ds), rows, tmem,
                bars, captured, totals, problem,
            )  # fmt: skip
        else:
            cute.arch.setmaxregister_decrease(c.registers.reduce)
            self.dq_reduce.run(staging, tmem, bars, info, sums, order, problem)
        fence_before()
        cute.arch.sync_threads()  # all roles have finished with tensor memory
        if warp == MMA_WARP:
            fence_after()
            device.free(device.allocated(tmem_base))

    def memory(self, storage: Any, layouts: tuple) -> Memory:
        """Return the views and addresses of shared memory."""
        parts = (storage.q, storage.k, storage.v, storage.do, storage.k, storage.v)
        views = [view(part, layout) for part, layout in zip(parts, layouts, strict=True)]
        q, k, v, do, ds, factors, lse, delta = (
            part.data_ptr().toint()
            for part in (
                storage.q, storage.k, storage.v, storage.do, storage.ds, storage.factors,
                storage.lse, storage.delta,
            )
        )  # fmt: skip
        operands = q, k, v, do, ds, factors, lse, delta
        return Memory(LoadTargets(*views[:LOADS]), operands, (views[4], views[5]), v, ds)


def tma_copy(load: bool, tensor: Any, layout: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Return the TMA atom and the coordinate tensor of a load, or else of a store.

    Args:
        load: whether to load.
        tensor: in global memory, [S, D, H, B].
        layout: in shared memory, [rows, columns, stages].
        shape: rows and columns of a copy.
    """
    op = cpasync.CopyBulkTensorTileG2SOp() if load else cpasync.CopyBulkTensorTileS2GOp()
    one = cute.slice_(layout, (None, None, 0))
    pair: tuple[Any, Any] = cpasync.make_tiled_tma_atom(op, tensor, one, shape)
    return pair


def view(part: Any, layout: Any) -> cute.Tensor:
    """Return the tensor of a field of the struct of shared memory."""
    return part.get_tensor(layout.outer, swizzle=layout.inner)


def struct_of(**fields: Any) -> Any:
    """Return the struct of shared memory with these fields, in this order.

    A class statement would turn the types of the fields into text, as this module's annotations are.
    """
    return cute.struct(type("Storage", (), {"__annotations__": fields}))

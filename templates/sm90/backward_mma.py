"""Issue the five MMAs of the Hopper backward, and create their operands.

S and dP are transposed: their rows are keys. MMAs that overwrite their result and MMAs that add to
it are two instruction objects of the DSL, because the fields of one object must not change while
the kernel is traced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.tensor_utils
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device
from attnkit.templates.sm90.backward_config import CLASSES, ROWS, BackwardConfig
from attnkit.templates.sm90.backward_epilogue import chunk_layout
from attnkit.templates.sm90.backward_shared import Barriers

SMEM, RMEM = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
COLUMN = cutlass.tensor_utils.LayoutEnum.COL_MAJOR


class TiledMmas(NamedTuple):
    """Holds the wgmma instructions of the MMAs."""

    s: cute.TiledMma  # S^T = K Q^T and dP^T = V dO^T, both from shared memory
    dq: cute.TiledMma  # dQ = dS K
    dv: cute.TiledMma  # dV += P^T dO, P from registers
    dk: cute.TiledMma  # dK += dS^T Q, dS from registers
    s_held: cute.TiledMma  # S^T with K from registers
    lse: cute.TiledMma  # the extra k-step of `backward_lse_in_mma`
    one_hot: Any = None  # sums over columns of the same class, see `backward_one_hot`

    def without_none(self) -> tuple[cute.TiledMma, ...]:
        """Return the instructions that the kernel uses, in the order of the fields."""
        return tuple(self) if self.one_hot is not None else tuple(self)[:-1]


def tiled_mmas(c: BackwardConfig, dtype: Any, lse_from_registers: bool) -> TiledMmas:
    """Create the wgmma instructions, each for one warpgroup and 64 rows."""

    def mma(a: Any, b: Any, n: int, source: Any = SMEM, of: Any = dtype) -> Any:
        return hopper_helpers.make_trivial_tiled_mma(
            of, of, a, b, Float32, (1, 1, 1), (ROWS, n), a_source=source
        )

    s = mma(K_MAJOR, K_MAJOR, c.block_q)
    s_held = mma(K_MAJOR, K_MAJOR, c.block_q, RMEM)
    lse = mma(K_MAJOR, K_MAJOR, c.block_q, RMEM if lse_from_registers else SMEM, BFloat16)
    dq = mma(K_MAJOR, MN_MAJOR, c.chunk // ROWS)
    dv = mma(K_MAJOR, MN_MAJOR, c.head_dim_v, RMEM)
    dk = mma(K_MAJOR, MN_MAJOR, c.head_dim, RMEM)
    one_hot = mma(K_MAJOR, MN_MAJOR, CLASSES // 2) if c.one_hot else None
    return TiledMmas(s, dq, dv, dk, s_held, lse, one_hot)


class SmemLayouts(NamedTuple):
    """Holds the shared memory layouts of the operands; some are views of the same memory."""

    k: Any  # dtype [64, head_dim, 2 k_stages], one consumer's keys per stage
    v: Any  # dtype [64, head_dim_v, 2]
    q: Any  # dtype [block_q, head_dim, stages]
    do: Any  # dtype [block_q, head_dim_v, stages]
    ds_written: Any  # dtype [64, block_q, 2 stages], dS^T, one consumer's keys per stage
    q_t: Any  # view of q: dtype [head_dim, block_q, stages]
    do_t: Any  # view of do: dtype [head_dim_v, block_q, stages]
    ds: Any  # view of ds_written: dtype [64, 64, squares]
    k_t: Any  # view of k: dtype [64, 64, squares]


def smem_layouts(c: BackwardConfig, dtype: Any) -> SmemLayouts:
    """Create the shared memory layouts, swizzled for TMA and wgmma."""
    make_a, make_b = hopper_helpers.make_smem_layout_a, hopper_helpers.make_smem_layout_b
    bm, halves = c.block_q, 2 * c.stages
    return SmemLayouts(
        k=make_a(ROW, (ROWS, bm, c.head_dim), dtype, 2 * c.k_stages),
        v=make_a(ROW, (ROWS, bm, c.head_dim_v), dtype, 2),
        q=make_b(ROW, (ROWS, bm, c.head_dim), dtype, c.stages),
        do=make_b(ROW, (ROWS, bm, c.head_dim_v), dtype, c.stages),
        ds_written=make_a(COLUMN, (ROWS, ROWS, bm), dtype, halves),
        q_t=make_b(COLUMN, (ROWS, c.head_dim, bm), dtype, c.stages),
        do_t=make_b(COLUMN, (ROWS, c.head_dim_v, bm), dtype, c.stages),
        ds=make_a(ROW, (ROWS, ROWS, ROWS), dtype, halves * (bm // ROWS)),
        k_t=make_b(COLUMN, (ROWS, ROWS, ROWS), dtype, 2 * c.k_stages * (c.head_dim // ROWS)),
    )


@dataclass(frozen=True)
class ConsumerMma:
    """Issues the MMAs of a consumer warpgroup; each method `issue_*` commits one wgmma group.

    Shapes are those of a warpgroup, which has 64 keys.

    Attributes:
        config: compile-time configuration.
        held_steps: number of k-steps of 16 columns of K in registers.
        wg: index of the consumer.
        overwrite, accumulate: the same instructions; the first overwrite, the second accumulate.
        k, v: A operands in shared memory, [64, head_dim] and [64, head_dim_v], by consumer.
        q, do: B operands in shared memory, [block_q, head_dim] and [block_q, head_dim_v], by stage.
        q_t, do_t: the same memory transposed.
        ds_smem, k_t: operands of dQ in shared memory, in squares of 64 x 64.
        s, dp: accumulators of S^T and dP^T, f32 [64, block_q] / 128 threads.
        dk, dv: accumulators, f32 [64, head_dim] and [64, head_dim_v] / 128 threads.
        dq: accumulator of the consumer's half of dQ, f32 [chunk] / 128 threads.
        p, ds: P^T and dS^T as A operands in registers, dtype [64, block_q] / 128 threads.
        k_held: K as an A operand in registers, dtype [64, head_dim] / 128 threads.
        copy_k, k_from, k_to: copy of K from shared memory to `k_held`, its source and target.
        lse: operands of K and Q for the extra k-step of `backward_lse_in_mma`; None without it.
    """

    config: BackwardConfig
    held_steps: int
    wg: Int32
    overwrite: TiledMmas
    accumulate: TiledMmas
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    q_t: cute.Tensor
    do_t: cute.Tensor
    ds_smem: cute.Tensor
    k_t: cute.Tensor
    s: cute.Tensor
    dp: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    dq: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    k_held: cute.Tensor
    copy_k: Any
    k_from: cute.Tensor
    k_to: cute.Tensor
    lse: Any

    def load_k(self, step: int, k_stage: Int32) -> None:
        """Load 16 columns of K (k-step `step`) from a stage to registers."""
        source = self.k_from[None, None, step, 2 * k_stage + self.wg]
        cute.copy(self.copy_k, source, self.k_to[None, None, step])

    def issue_s(self, stage: Int32, k_stage: Int32) -> None:
        """Issue S^T = K Q^T.

        With `less_lse`, subtract LSE / scale. With `bias_first`, add the bias that S contains.
        """
        for k in range(cute.size(self.k, mode=[2])):
            mmas = self.overwrite if k == 0 and not self.config.bias_first else self.accumulate
            if k < self.held_steps:
                mma, a = mmas.s_held, self.k_held[None, None, k]
            else:
                mma, a = mmas.s, self.k[None, None, k, 2 * k_stage + self.wg]
            cute.gemm(mma, self.s, a, self.q[None, None, k, stage], self.s)
        if self.lse is not None:
            a, columns = self.lse
            cute.gemm(self.accumulate.lse, self.s, a, columns[None, None, stage], self.s)
        warpgroup.commit_group()

    def issue_dp(self, stage: Int32) -> None:
        """Issue dP^T = V dO^T; unless `rounded`, the accumulator was initialised to -delta."""
        a, b, acc = self.v, self.do, self.dp
        for k in range(cute.size(a, mode=[2])):
            first = k == 0 and self.config.rounded
            mma = (self.overwrite if first else self.accumulate).s
            cute.gemm(mma, acc, a[None, None, k, self.wg], b[None, None, k, stage], acc)
        warpgroup.commit_group()

    def issue_dv(self, stage: Int32, first: bool) -> None:
        """Issue dV += P^T dO, or dV = P^T dO if `first` is set."""
        overwrite = self.overwrite.dv if first else self.accumulate.dv
        _issue_rs(overwrite, self.accumulate.dv, self.dv, self.p, self.do_t, stage)

    def issue_dk(self, stage: Int32, first: bool) -> None:
        """Issue dK += dS^T Q, or dK = dS^T Q if `first` is set."""
        overwrite = self.overwrite.dk if first else self.accumulate.dk
        _issue_rs(overwrite, self.accumulate.dk, self.dk, self.ds, self.q_t, stage)

    def issue_dq(self, bars: Barriers, q_count: Int32, kv_count: Int32) -> None:
        """Issue the consumer's half of dQ = dS K: columns, or rows if block_q is 128.

        Args:
            bars: mbarriers.
            q_count, kv_count: indices of the q block and the work tile, for stages and phases.
        """
        c = self.config
        high, wide = c.block_q // ROWS, c.head_dim // ROWS
        stage, k_first = q_count & 1, (kv_count & 1) * 2 * wide
        cute.arch.mbarrier_wait(bars.ds_full + stage, (q_count >> 1) & 1)
        warpgroup.fence()
        for half in range(2):  # the keys of each consumer
            row = (stage * 2 + half) * high + (self.wg if high == 2 else 0)
            column = k_first + half * wide + (self.wg if wide == 2 else 0)
            n = self.wg if high * wide == 1 else 0  # which half of the 64 columns
            for k in range(cute.size(self.ds_smem, mode=[2])):
                mma = (self.overwrite if half == 0 and k == 0 else self.accumulate).dq
                b = self.k_t[None, n, k, column]
                b = cute.make_tensor(b.iterator, cute.append(b.layout, cute.make_layout(1)))
                cute.gemm(mma, self.dq, self.ds_smem[None, None, k, row], b, self.dq)
        warpgroup.commit_group()


def consumer_mma(
    c: BackwardConfig,
    overwrite: TiledMmas,
    accumulate: TiledMmas,
    views: SmemLayouts,
    held_steps: int,
    wg: Int32,
    thread: Int32,
) -> ConsumerMma:
    """Create the operands and accumulators of a consumer warpgroup.

    Args:
        c: compile-time configuration.
        overwrite, accumulate: MMA instructions.
        views: tensors in shared memory.
        held_steps, wg: see `ConsumerMma`; the `lse` of the result is None.
        thread: index of the thread in the warpgroup.
    """
    dtype = device.DTYPES[c.dtype]
    mma_s, mma_dq, mma_dv, mma_dk, mma_held, *_ = accumulate
    all_s, all_dq = mma_s.get_slice(0), mma_dq.get_slice(0)
    all_dv, all_dk = mma_dv.get_slice(0), mma_dk.get_slice(0)
    # shared memory descriptors, shapes as in `SmemLayouts`
    operands = {
        "k": mma_s.make_fragment_A(all_s.partition_A(views.k)),
        "v": mma_s.make_fragment_A(all_s.partition_A(views.v)),
        "q": mma_s.make_fragment_B(all_s.partition_B(views.q)),
        "do": mma_s.make_fragment_B(all_s.partition_B(views.do)),
        "q_t": mma_dk.make_fragment_B(all_dk.partition_B(views.q_t)),
        "do_t": mma_dv.make_fragment_B(all_dv.partition_B(views.do_t)),
        "ds_smem": mma_dq.make_fragment_A(all_dq.partition_A(views.ds)),
        "k_t": mma_dq.make_fragment_B(all_dq.partition_B(views.k_t)),
    }
    # The order of these allocations affects the assembler's register allocation.
    s = cute.make_rmem_tensor(  # f32 [64, block_q] / 128 threads
        mma_s.get_slice(thread).partition_shape_C((ROWS, c.block_q)), Float32
    )
    dp = cute.make_rmem_tensor(s.layout, Float32)  # f32 [64, block_q] / 128 threads
    # not in the registers of dP: reusing part of another accumulator serialises the MMAs
    dq = cute.make_rmem_tensor(chunk_layout(c.chunk), Float32)  # f32 [chunk] / 128 threads
    thr_dk, thr_dv = mma_dk.get_slice(thread), mma_dv.get_slice(thread)
    # f32 [64, head_dim] and [64, head_dim_v] / 128 threads
    dk = cute.make_rmem_tensor(thr_dk.partition_shape_C((ROWS, c.head_dim)), Float32)
    dv = cute.make_rmem_tensor(thr_dv.partition_shape_C((ROWS, c.head_dim_v)), Float32)
    # dtype [64, block_q] / 128 threads, both as A operands
    p = cute.make_rmem_tensor(thr_dv.partition_shape_A((ROWS, c.block_q)), dtype)
    ds = cute.make_rmem_tensor(p.layout, dtype)
    k_held = cute.make_rmem_tensor(  # dtype [64, head_dim] / 128 threads
        mma_held.get_slice(thread).partition_shape_A((ROWS, c.head_dim)), dtype
    )
    atom = cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), dtype)
    copy_k = cute.make_tiled_copy_A(atom, mma_held)
    thr_k = copy_k.get_slice(thread)
    return ConsumerMma(
        config=c,
        held_steps=held_steps,
        wg=wg,
        overwrite=overwrite,
        accumulate=accumulate,
        **operands,
        s=s,
        dp=dp,
        dk=dk,
        dv=dv,
        dq=dq,
        p=p,
        ds=ds,
        k_held=k_held,
        copy_k=copy_k,
        k_from=thr_k.partition_S(views.k),
        k_to=thr_k.retile(k_held),
        lse=None,
    )


def _issue_rs(
    first: cute.TiledMma, further: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor,
    stage: Int32,
) -> None:  # fmt: skip
    """Issue an MMA with its A operand in registers; its first k-step uses `first`."""
    for k in range(cute.size(a, mode=[2])):
        mma = first if k == 0 else further
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k, stage], acc)
    warpgroup.commit_group()


def in_layout_of(tensor: cute.Tensor, other: cute.Tensor) -> cute.Tensor:
    """Return a view of `tensor`'s registers in the layout of `other`."""
    return cute.make_tensor(tensor.iterator, other.layout)

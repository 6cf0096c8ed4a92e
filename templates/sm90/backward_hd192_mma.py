"""Issue the five MMAs of the Hopper backward for head dims (192, 128)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.tensor_utils
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device
from attnkit.templates.sm90.backward_config import ROWS
from attnkit.templates.sm90.backward_hd192_config import Hd192Config

ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
COLUMN = cutlass.tensor_utils.LayoutEnum.COL_MAJOR
HALVES = 2  # of a kv block: 64 keys for each consumer


class Hd192TiledMmas(NamedTuple):
    """Holds the wgmma instructions of the MMAs, each for one warpgroup and 64 rows."""

    s: cute.TiledMma  # S^T = K Q^T and dP^T = V dO^T, both from shared memory
    dq: cute.TiledMma  # dQ = dS K: a consumer's half of the columns, from shared memory
    dv: cute.TiledMma  # dV += P^T dO, P from registers
    dk: cute.TiledMma  # dK += dS^T Q, dS from registers


def hd192_tiled_mmas(c: Hd192Config, dtype: Any) -> Hd192TiledMmas:
    """Create the wgmma instructions."""
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    smem, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

    def mma(b: Any, n: int, source: Any) -> Any:
        return hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, k_major, b, Float32, (1, 1, 1), (ROWS, n), a_source=source
        )

    return Hd192TiledMmas(
        s=mma(k_major, c.block_q, smem),
        dq=mma(mn_major, c.head_dim // 2, smem),
        dv=mma(mn_major, c.head_dim_v, registers),
        dk=mma(mn_major, c.head_dim, registers),
    )


class Hd192SmemLayouts(NamedTuple):
    """Holds the shared memory layouts of the operands; some are views of the same memory."""

    k: Any  # dtype [64, head_dim, halves]
    v: Any  # dtype [64, head_dim_v, halves]
    q: Any  # dtype [block_q, head_dim, stages]
    do: Any  # dtype [block_q, head_dim_v, stages]
    ds_t: Any  # dtype [64, block_q, halves * stages], dS^T with contiguous keys
    q_t: Any  # view of q: dtype [head_dim, block_q, stages]
    do_t: Any  # view of do: dtype [head_dim_v, block_q, stages]
    ds: Any  # view of ds_t: dtype [block_q, 64, halves * stages]
    k_t: Any  # view of k: dtype [head_dim, 64, halves]
    dk: Any  # in the memory of k: dtype [64, head_dim, halves]
    dv: Any  # in the memory of v: dtype [64, head_dim_v, halves]


def hd192_smem_layouts(c: Hd192Config, dtype: Any) -> Hd192SmemLayouts:
    """Create the shared memory layouts, swizzled for TMA and wgmma.

    A consumer reads 96 columns of K for dQ. These are three swizzle atoms of 32 columns, but one
    and a half of the usual 64.
    """

    def tiles(kind: Any, rows: int, columns: int, unit: int, stages: int) -> Any:
        atom = warpgroup.make_smem_layout_atom(
            hopper_helpers.get_smem_layout_atom(kind, dtype, unit), dtype
        )
        shape = (rows, columns) if kind is ROW else (columns, rows)
        order = (0, 1, 2) if kind is ROW else (1, 0, 2)
        return cute.tile_to_shape(atom, (*shape, stages), order)

    head_dim, head_dim_v, bm, half = c.head_dim, c.head_dim_v, c.block_q, c.head_dim // 2
    return Hd192SmemLayouts(
        k=tiles(ROW, ROWS, head_dim, half, HALVES),
        v=tiles(ROW, ROWS, head_dim_v, ROWS, HALVES),
        q=tiles(ROW, bm, head_dim, ROWS, c.stages),
        do=tiles(ROW, bm, head_dim_v, ROWS, c.stages),
        ds_t=tiles(COLUMN, bm, ROWS, ROWS, HALVES * c.stages),
        q_t=tiles(COLUMN, bm, head_dim, ROWS, c.stages),
        do_t=tiles(COLUMN, bm, head_dim_v, ROWS, c.stages),
        ds=tiles(ROW, bm, ROWS, ROWS, HALVES * c.stages),
        k_t=tiles(COLUMN, ROWS, head_dim, half, HALVES),
        dk=tiles(ROW, ROWS, head_dim, ROWS, HALVES),
        dv=tiles(ROW, ROWS, head_dim_v, ROWS, HALVES),
    )


@dataclass(frozen=True)
class Hd192Mma:
    """Issues the MMAs of a consumer warpgroup; each method `issue_*` commits one wgmma group.

    Shapes are those of a warpgroup, which has 64 keys.

    Attributes:
        wg: index of the consumer, Int32.
        overwrite, accumulate: the same instructions; the first overwrite, the second accumulate.
        k, v, q, do, q_t, do_t, ds, k_t: operands in shared memory, see `Hd192SmemLayouts`.
        s, dp: accumulators of S^T and dP^T, f32 [64, block_q] / 128 threads.
        dk, dv: accumulators, f32 [64, head_dim] and [64, head_dim_v] / 128 threads.
        dq: accumulator of the consumer's columns of dQ, f32 [block_q, head_dim / 2] / 128 threads.
        p, ds_held: P^T and dS^T as A operands in registers, dtype [64, block_q] / 128 threads.
    """

    wg: Int32
    overwrite: Hd192TiledMmas
    accumulate: Hd192TiledMmas
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    q_t: cute.Tensor
    do_t: cute.Tensor
    ds: cute.Tensor
    k_t: cute.Tensor
    s: cute.Tensor
    dp: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    dq: cute.Tensor
    p: cute.Tensor
    ds_held: cute.Tensor

    def issue_s(self, stage: Int32) -> None:
        """Issue S^T = K Q^T."""
        warpgroup.fence()
        for k in range(cute.size(self.k, mode=[2])):
            mma = self.overwrite.s if k == 0 else self.accumulate.s
            a, b = self.k[None, None, k, self.wg], self.q[None, None, k, stage]
            cute.gemm(mma, self.s, a, b, self.s)
        warpgroup.commit_group()

    def issue_dp(self, stage: Int32) -> None:
        """Issue dP^T = V dO^T."""
        warpgroup.fence()
        for k in range(cute.size(self.v, mode=[2])):
            mma = self.overwrite.s if k == 0 else self.accumulate.s
            a, b = self.v[None, None, k, self.wg], self.do[None, None, k, stage]
            cute.gemm(mma, self.dp, a, b, self.dp)
        warpgroup.commit_group()

    def issue_dv(self, stage: Int32, first: bool) -> None:
        """Issue dV += P^T dO, or dV = P^T dO if `first` is set."""
        warpgroup.fence()  # P is an operand in registers
        further = self.accumulate.dv
        mma = self.overwrite.dv if first else further
        _issue_held(mma, further, self.dv, self.p, self.do_t, stage)

    def issue_dk(self, stage: Int32, first: bool) -> None:
        """Issue dK += dS^T Q, or dK = dS^T Q if `first` is set."""
        warpgroup.fence()  # dS is an operand in registers
        further = self.accumulate.dk
        mma = self.overwrite.dk if first else further
        _issue_held(mma, further, self.dk, self.ds_held, self.q_t, stage)

    def issue_dq(self, stage: Int32) -> None:
        """Issue the consumer's columns of dQ = dS K, over the keys of both consumers."""
        warpgroup.fence()
        for half in range(HALVES):
            for k in range(cute.size(self.ds, mode=[2])):
                mma = self.overwrite.dq if half == 0 and k == 0 else self.accumulate.dq
                b = self.k_t[None, self.wg, k, half]
                b = cute.make_tensor(b.iterator, cute.append(b.layout, cute.make_layout(1)))
                cute.gemm(mma, self.dq, self.ds[None, None, k, HALVES * stage + half], b, self.dq)
        warpgroup.commit_group()


def hd192_mma(
    c: Hd192Config,
    wg: Int32,
    thread: Int32,
    overwrite: Hd192TiledMmas,
    accumulate: Hd192TiledMmas,
    views: Hd192SmemLayouts,
) -> Hd192Mma:
    """Create the operands and accumulators of a consumer warpgroup.

    Args:
        c: compile-time configuration.
        wg, thread: index of the consumer, and of the thread in it.
        overwrite, accumulate: see `Hd192Mma`.
        views: tensors in shared memory.
    """
    dtype = device.DTYPES[c.dtype]
    s, dq, dv, dk = accumulate
    all_s, all_dq, all_dv, all_dk = (mma.get_slice(0) for mma in accumulate)

    def registers(mma: Any, columns: int) -> Any:
        return cute.make_rmem_tensor(  # f32 [64, columns] / 128 threads
            mma.get_slice(thread).partition_shape_C((ROWS, columns)), Float32
        )

    scores, dp = registers(s, c.block_q), registers(s, c.block_q)
    dq_columns = registers(dq, c.head_dim // 2)
    grad_key, grad_value = registers(dk, c.head_dim), registers(dv, c.head_dim_v)
    p = cute.make_rmem_tensor(  # dtype [64, block_q] / 128 threads
        dv.get_slice(thread).partition_shape_A((ROWS, c.block_q)), dtype
    )
    return Hd192Mma(
        wg=wg,
        overwrite=overwrite,
        accumulate=accumulate,
        # shared memory descriptors, shapes as in `Hd192SmemLayouts`
        k=s.make_fragment_A(all_s.partition_A(views.k)),
        v=s.make_fragment_A(all_s.partition_A(views.v)),
        q=s.make_fragment_B(all_s.partition_B(views.q)),
        do=s.make_fragment_B(all_s.partition_B(views.do)),
        q_t=dk.make_fragment_B(all_dk.partition_B(views.q_t)),
        do_t=dv.make_fragment_B(all_dv.partition_B(views.do_t)),
        ds=dq.make_fragment_A(all_dq.partition_A(views.ds)),
        k_t=dq.make_fragment_B(all_dq.partition_B(views.k_t)),
        s=scores,
        dp=dp,
        dk=grad_key,
        dv=grad_value,
        dq=dq_columns,
        p=p,
        ds_held=cute.make_rmem_tensor(p.layout, dtype),
    )


def _issue_held(
    first: cute.TiledMma, further: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor,
    stage: Int32,
) -> None:  # fmt: skip
    for k in range(cute.size(a, mode=[2])):
        cute.gemm(first if k == 0 else further, acc, a[None, None, k], b[None, None, k, stage], acc)
    warpgroup.commit_group()

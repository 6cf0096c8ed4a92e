"""Issue the five MMAs of the Hopper backward for head dims above 128."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.tensor_utils
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from attnkit.templates.sm90.backward_config import ROWS
from attnkit.templates.sm90.backward_hd256_config import Hd256Config
from attnkit.templates.sm90.backward_softmax import init_dp

ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
COLUMN = cutlass.tensor_utils.LayoutEnum.COL_MAJOR


class Hd256TiledMmas(NamedTuple):
    """Holds the wgmma instructions of the MMAs; all operands are in shared memory."""

    s: cute.TiledMma  # S^T = K Q^T and dP^T = V dO^T: a consumer's half of the rows of Q
    dq: cute.TiledMma  # dQ = dS K: a part of a consumer's half of the columns
    dv: cute.TiledMma  # dV += P^T dO: a consumer's half of the columns
    dk: cute.TiledMma  # dK += dS^T Q: a consumer's half of the columns


def hd256_tiled_mmas(c: Hd256Config, dtype: Any) -> Hd256TiledMmas:
    """Create the wgmma instructions, each for one warpgroup and 64 rows."""
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

    def mma(a: Any, b: Any, n: int) -> Any:
        return hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, a, b, Float32, (1, 1, 1), (ROWS, n)
        )

    return Hd256TiledMmas(
        s=mma(k_major, k_major, c.block_q // 2),
        dq=mma(mn_major, mn_major, c.head_dim // 2 // c.dq_parts),
        dv=mma(k_major, mn_major, c.head_dim_v // 2),
        dk=mma(k_major, mn_major, c.head_dim // 2),
    )


class Hd256SmemLayouts(NamedTuple):
    """Holds the shared memory layouts of the operands; some are views of the same memory."""

    k: Any  # dtype [64, head_dim, 1]
    v: Any  # dtype [64, head_dim_v, 1]
    q: Any  # dtype [block_q, head_dim, q_stages]
    do: Any  # dtype [block_q, head_dim_v, stages]
    p_t: Any  # dtype [64, block_q, p_stages]
    ds_t: Any  # dtype [64, block_q, 1]
    q_t: Any  # view of q: dtype [head_dim, block_q, q_stages]
    do_t: Any  # view of do: dtype [head_dim_v, block_q, stages]
    ds: Any  # view of ds_t: dtype [block_q, 64, 1]
    k_t: Any  # view of k: dtype [head_dim, 64, 1]
    dk: Any  # in the memory of k: dtype [64, head_dim / 2, 2], one stage per consumer
    dv: Any  # in the memory of v: dtype [64, head_dim_v / 2, 2], one stage per consumer


def hd256_smem_layouts(c: Hd256Config, dtype: Any) -> Hd256SmemLayouts:
    """Create the shared memory layouts; swizzle atoms divide a consumer's share of the columns."""

    def tiles(kind: Any, rows: int, columns: int, unit: int, stages: int) -> Any:
        atom = warpgroup.make_smem_layout_atom(
            hopper_helpers.get_smem_layout_atom(kind, dtype, unit), dtype
        )
        shape = (rows, columns) if kind is ROW else (columns, rows)
        order = (0, 1, 2) if kind is ROW else (1, 0, 2)
        return cute.tile_to_shape(atom, (*shape, stages), order)

    head_dim, head_dim_v, bm = c.head_dim, c.head_dim_v, c.block_q
    unit = head_dim // 2 // c.dq_parts
    return Hd256SmemLayouts(
        k=tiles(ROW, ROWS, head_dim, unit, 1),
        v=tiles(ROW, ROWS, head_dim_v, ROWS, 1),
        q=tiles(ROW, bm, head_dim, head_dim // 2, c.q_stages),
        do=tiles(ROW, bm, head_dim_v, head_dim_v // 2, c.stages),
        p_t=tiles(ROW, ROWS, bm, bm, c.p_stages),
        ds_t=tiles(ROW, ROWS, bm, bm, 1),
        q_t=tiles(COLUMN, bm, head_dim, head_dim // 2, c.q_stages),
        do_t=tiles(COLUMN, bm, head_dim_v, head_dim_v // 2, c.stages),
        ds=tiles(COLUMN, ROWS, bm, bm, 1),
        k_t=tiles(COLUMN, ROWS, head_dim, unit, 1),
        dk=tiles(ROW, ROWS, head_dim // 2, head_dim // 2, 2),
        dv=tiles(ROW, ROWS, head_dim_v // 2, head_dim_v // 2, 2),
    )


@dataclass(frozen=True)
class Hd256Mma:
    """Issues the MMAs of a consumer warpgroup; each method commits one wgmma group.

    Attributes:
        dq_parts: number of parts in which a consumer computes its columns of dQ.
        delta_share: part of delta that the accumulator of dP is initialised to.
        wg: index of the consumer, Int32.
        s_overwrite, dq_overwrite: instructions that overwrite their result.
        accumulate: instructions that add to their result.
        k, v, q, do, p_t, do_t, ds_t, q_t, ds, k_t: operands in shared memory, see
            `Hd256SmemLayouts`.
    """

    dq_parts: int
    delta_share: float
    wg: Int32
    s_overwrite: Any
    dq_overwrite: Any
    accumulate: Hd256TiledMmas
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    p_t: cute.Tensor
    do_t: cute.Tensor
    ds_t: cute.Tensor
    q_t: cute.Tensor
    ds: cute.Tensor
    k_t: cute.Tensor

    def issue_s(self, acc: cute.Tensor, stage: Int32) -> None:
        """Issue S^T = K Q^T, f32 [64, 32] / 128 threads."""
        warpgroup.fence()
        _issue(self.s_overwrite, self.accumulate.s, acc, self.k, 0, self.q, self.wg, stage)

    def issue_dp(self, acc: cute.Tensor, delta: cute.Tensor, stage: Int32) -> None:
        """Issue dP^T - delta = V dO^T - delta, with the accumulator initialised to -delta.

        Args:
            acc: f32 [64, 32] / 128 threads.
            delta: -delta of the thread's rows, f32 [2, pairs].
            stage: stage of dO.
        """
        init_dp(acc, delta, self.delta_share)
        warpgroup.fence()
        mma = self.accumulate.s
        _issue(mma, mma, acc, self.v, 0, self.do, self.wg, stage)

    def issue_dv(self, acc: cute.Tensor, p_stage: Int32, do_stage: Int32) -> None:
        """Issue dV += P^T dO, f32 [64, head_dim_v / 2] / 128 threads."""
        warpgroup.fence()
        mma = self.accumulate.dv
        _issue(mma, mma, acc, self.p_t, p_stage, self.do_t, self.wg, do_stage)

    def issue_dk(self, acc: cute.Tensor, stage: Int32) -> None:
        """Issue dK += dS^T Q, f32 [64, head_dim / 2] / 128 threads."""
        mma = self.accumulate.dk
        _issue(mma, mma, acc, self.ds_t, 0, self.q_t, self.wg, stage)

    def issue_dq(self, acc: cute.Tensor, part: int) -> None:
        """Issue one part of the consumer's columns of dQ = dS K, f32 [64, columns] / 128."""
        warpgroup.fence()
        column = self.wg * self.dq_parts + part
        _issue(self.dq_overwrite, self.accumulate.dq, acc, self.ds, 0, self.k_t, column, 0)


def hd256_mma(
    c: Hd256Config,
    wg: Int32,
    overwrite: tuple[Any, Any],
    accumulate: Hd256TiledMmas,
    views: Hd256SmemLayouts,
) -> Hd256Mma:
    """Create the operands of a consumer warpgroup.

    Args:
        c: compile-time configuration.
        wg: index of the consumer.
        overwrite: instructions of S and dQ that overwrite their result.
        accumulate: instructions that add to their result.
        views: tensors in shared memory.
    """
    s, dq, dv, dk = accumulate
    all_s, all_dq, all_dv, all_dk = (mma.get_slice(0) for mma in (s, dq, dv, dk))
    return Hd256Mma(
        dq_parts=c.dq_parts,
        delta_share=c.delta_share,
        wg=wg,
        s_overwrite=overwrite[0],
        dq_overwrite=overwrite[1],
        accumulate=accumulate,
        # shared memory descriptors, shapes as in `Hd256SmemLayouts`
        k=s.make_fragment_A(all_s.partition_A(views.k)),
        v=s.make_fragment_A(all_s.partition_A(views.v)),
        q=s.make_fragment_B(all_s.partition_B(views.q)),
        do=s.make_fragment_B(all_s.partition_B(views.do)),
        p_t=dv.make_fragment_A(all_dv.partition_A(views.p_t)),
        do_t=dv.make_fragment_B(all_dv.partition_B(views.do_t)),
        ds_t=dk.make_fragment_A(all_dk.partition_A(views.ds_t)),
        q_t=dk.make_fragment_B(all_dk.partition_B(views.q_t)),
        ds=dq.make_fragment_A(all_dq.partition_A(views.ds)),
        k_t=dq.make_fragment_B(all_dq.partition_B(views.k_t)),
    )


def _issue(
    first: cute.TiledMma, further: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, a_stage: Any,
    b: cute.Tensor, n: Any, b_stage: Any,
) -> None:  # fmt: skip
    for k in range(cute.size(a, mode=[2])):
        mma = first if k == 0 else further
        rows, columns = a[None, None, k, a_stage], b[None, n, k, b_stage]
        columns = cute.make_tensor(
            columns.iterator, cute.append(columns.layout, cute.make_layout(1))
        )
        cute.gemm(mma, acc, rows, columns, acc)
    warpgroup.commit_group()

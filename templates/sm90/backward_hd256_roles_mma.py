"""Issue the MMAs of `backward_hd256_roles`, the Hopper backward for head dim 256."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device
from attnkit.templates.sm90.backward_config import ROWS
from attnkit.templates.sm90.backward_hd256_roles_config import Hd256RolesConfig


class RolesTiledMmas(NamedTuple):
    """Holds the wgmma instructions of the MMAs, each for one warpgroup and 64 rows."""

    s: cute.TiledMma  # S^T = K Q^T or dP^T = V dO^T: all rows of a q block
    dq: cute.TiledMma  # dQ = dS K: a part of a consumer's half of the columns
    dv: cute.TiledMma  # dV += P^T dO: a consumer's half of the columns, P from registers
    dk: cute.TiledMma  # dK += dS^T Q: a consumer's half of the columns
    dk_held: cute.TiledMma  # the same with dS from registers


def roles_tiled_mmas(c: Hd256RolesConfig, dtype: Any) -> RolesTiledMmas:
    """Create the wgmma instructions."""
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    smem, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

    def mma(a: Any, b: Any, n: int, source: Any = smem) -> Any:
        return hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, a, b, Float32, (1, 1, 1), (ROWS, n), a_source=source
        )

    return RolesTiledMmas(
        s=mma(k_major, k_major, c.block_q),
        dq=mma(mn_major, mn_major, c.head_dim // 2 // c.dq_parts),
        dv=mma(k_major, mn_major, c.head_dim_v // 2, registers),
        dk=mma(k_major, mn_major, c.head_dim // 2),
        dk_held=mma(k_major, mn_major, c.head_dim // 2, registers),
    )


class RolesSmemLayouts(NamedTuple):
    """Holds the shared memory layouts of the operands, see `Hd256SmemLayouts`."""

    k: Any
    v: Any
    q: Any
    do: Any
    ds_t: Any
    q_t: Any
    do_t: Any
    ds: Any
    k_t: Any
    dk: Any
    dv: Any


@dataclass(frozen=True)
class RolesMma:
    """Issues the MMAs of a consumer warpgroup; each method `issue_*` commits one wgmma group.

    Attributes:
        wg: index of the consumer, 0 or 1.
        overwrite, accumulate: the same instructions; the first overwrite, the second accumulate.
        views: operands as shared memory descriptors, shapes as in `Hd256SmemLayouts`.
        s: accumulator of S^T in consumer 0 and of dP^T in consumer 1, f32 [64, block_q] / 128
            threads.
        dk, dv: accumulators, f32 [64, head_dim / 2] and [64, head_dim_v / 2] / 128 threads.
        dq: accumulator of a part of dQ, f32 [block_q, columns] / 128 threads.
        p, ds: P^T and dS^T as A operands in registers, dtype [64, block_q] / 128 threads; consumer
            0 does not use `ds`.
    """

    wg: int
    overwrite: RolesTiledMmas
    accumulate: RolesTiledMmas
    views: RolesSmemLayouts
    s: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    dq: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor

    def issue_s(self, stage: Int32) -> None:
        """Issue S^T = K Q^T."""
        self._issue_scores(self.views.k, self.views.q, stage)

    def issue_dp(self) -> None:
        """Issue dP^T = V dO^T."""
        self._issue_scores(self.views.v, self.views.do, 0)

    def _issue_scores(self, rows: cute.Tensor, columns: cute.Tensor, stage: Any) -> None:
        warpgroup.fence()
        for k in range(cute.size(rows, mode=[2])):
            mma = (self.overwrite if k == 0 else self.accumulate).s
            a, b = rows[None, None, k, 0], columns[None, None, k, stage]
            cute.gemm(mma, self.s, a, b, self.s)
        warpgroup.commit_group()

    def issue_dv(self) -> None:
        """Issue dV += P^T dO."""
        warpgroup.fence()  # P is an operand in registers
        mma, a = self.accumulate.dv, self.p
        for k in range(cute.size(a, mode=[2])):
            b = _columns(self.views.do_t, self.wg, k, 0)
            cute.gemm(mma, self.dv, a[None, None, k], b, self.dv)
        warpgroup.commit_group()

    def issue_dk(self, stage: Int32) -> None:
        """Issue dK += dS^T Q; consumer 1 has dS in registers."""
        warpgroup.fence()
        held = self.wg == 1
        mma = self.accumulate.dk_held if held else self.accumulate.dk
        for k in range(cute.size(self.views.ds_t, mode=[2])):
            a = self.ds[None, None, k] if held else self.views.ds_t[None, None, k, 0]
            cute.gemm(mma, self.dk, a, _columns(self.views.q_t, self.wg, k, stage), self.dk)
        warpgroup.commit_group()

    def issue_dq(self, part: int, parts: int) -> None:
        """Issue one of the `parts` of the consumer's columns of dQ = dS K."""
        warpgroup.fence()
        for k in range(cute.size(self.views.ds, mode=[2])):
            mma = (self.overwrite if k == 0 else self.accumulate).dq
            b = _columns(self.views.k_t, self.wg * parts + part, k, 0)
            cute.gemm(mma, self.dq, self.views.ds[None, None, k, 0], b, self.dq)
        warpgroup.commit_group()


def roles_mma(
    c: Hd256RolesConfig,
    wg: int,
    thread: Int32,
    overwrite: RolesTiledMmas,
    accumulate: RolesTiledMmas,
    views: RolesSmemLayouts,
) -> RolesMma:
    """Create the operands and accumulators of a consumer warpgroup.

    Args:
        c: compile-time configuration.
        wg, thread: index of the consumer, and of the thread in it.
        overwrite, accumulate: see `RolesMma`.
        views: tensors in shared memory.
    """
    s, dq, dv, dk, _ = accumulate
    all_s, all_dq, all_dv, all_dk = (mma.get_slice(0) for mma in (s, dq, dv, dk))

    def registers(mma: Any, columns: int) -> Any:
        return cute.make_rmem_tensor(  # f32 [64, columns] / 128 threads
            mma.get_slice(thread).partition_shape_C((ROWS, columns)), Float32
        )

    # the order of these allocations affects the assembler's register allocation
    scores = registers(s, c.block_q)
    grad_key, grad_value = registers(dk, c.head_dim // 2), registers(dv, c.head_dim_v // 2)
    dq_columns = registers(dq, c.head_dim // 2 // c.dq_parts)
    p = cute.make_rmem_tensor(  # dtype [64, block_q] / 128 threads
        dv.get_slice(thread).partition_shape_A((ROWS, c.block_q)), device.DTYPES[c.dtype]
    )
    return RolesMma(
        wg=wg,
        overwrite=overwrite,
        accumulate=accumulate,
        views=views._replace(
            k=s.make_fragment_A(all_s.partition_A(views.k)),
            v=s.make_fragment_A(all_s.partition_A(views.v)),
            q=s.make_fragment_B(all_s.partition_B(views.q)),
            do=s.make_fragment_B(all_s.partition_B(views.do)),
            do_t=dv.make_fragment_B(all_dv.partition_B(views.do_t)),
            ds_t=dk.make_fragment_A(all_dk.partition_A(views.ds_t)),
            q_t=dk.make_fragment_B(all_dk.partition_B(views.q_t)),
            ds=dq.make_fragment_A(all_dq.partition_A(views.ds)),
            k_t=dq.make_fragment_B(all_dq.partition_B(views.k_t)),
        ),
        s=scores,
        dk=grad_key,
        dv=grad_value,
        dq=dq_columns,
        p=p,
        ds=cute.make_rmem_tensor(p.layout, device.DTYPES[c.dtype]),
    )


def _columns(b: cute.Tensor, n: int, k: int, stage: Any) -> cute.Tensor:
    """Return k-step `k` of the `n`-th part of the columns of a B operand."""
    part = b[None, n, k, stage]
    return cute.make_tensor(part.iterator, cute.append(part.layout, cute.make_layout(1)))

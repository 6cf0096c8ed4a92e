"""Issue the MMAs of a Hopper forward consumer: S = Q K^T and O += P V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from attnkit.templates.common import device
from attnkit.templates.sm90.columns_in_mma import ColumnOperands
from attnkit.templates.sm90.config import WARPGROUP_ROWS, ForwardConfig
from attnkit.templates.sm90.forward_barriers import Pipeline
from attnkit.templates.sm90.slope_in_mma import SlopeOperands


@dataclass(frozen=True)
class ForwardMma:
    """Issues the two MMAs of a consumer warpgroup and holds their fragments.

    Attributes:
        config: compile-time configuration.
        qk_first, qk: S = Q K^T, which overwrites or accumulates.
        pv: O += P V, with P from registers.
        thr_pv: this thread's slice of `pv`.
        frag_q: descriptors of Q, (mma, m, k, warpgroup and stage).
        frag_k: descriptors of K, (mma, n, k, stage).
        frag_v: descriptors of V, (mma, n, k, stage).
        acc_s: f32 [64, block_kv] / 128 threads: 2 rows per thread.
        acc_o: f32 [64, head_dim_v] / 128 threads.
        p: 16 bits [64, block_kv] / 128 threads, as the A operand of `pv`.
        p_now: the registers of `p` in the layout of `acc_s`.
        p_next: P of the next block in the layout of `acc_s`: separate registers if the config has
            two P buffers, otherwise `p_now`.
        slope: the extra k-step of Q K that adds a slope times the column; None without it.
        columns: the extra k-step of Q K that adds a term of each column; None without it.
    """

    config: ForwardConfig
    qk_first: cute.TiledMma
    qk: cute.TiledMma
    pv: cute.TiledMma
    thr_pv: Any
    frag_q: cute.Tensor
    frag_k: cute.Tensor
    frag_v: cute.Tensor
    acc_s: cute.Tensor
    acc_o: cute.Tensor
    p: cute.Tensor
    p_now: cute.Tensor
    p_next: cute.Tensor
    slope: SlopeOperands | None
    columns: ColumnOperands | None

    @staticmethod
    def create(
        config: ForwardConfig, mmas: tuple, smem: Any, thread: Int32, words: Any = None
    ) -> ForwardMma:
        """Create the fragments of a thread of a consumer warpgroup.

        Args:
            config: compile-time configuration.
            mmas: (Q K^T, Q K^T, P V); the first is a copy for the MMAs that overwrite S. With
                `slope_in_mma` or `columns_in_mma`, the MMA of the extra k-step follows.
            smem: the tiles of Q, K and V in shared memory.
            thread: index of the thread in its warpgroup.
            words: int32 pointer to the extra columns, see `slope_in_mma` and `columns_in_mma`; None
                without them.
        """
        qk_first, qk, pv = mmas[:3]
        dtype, rows = device.DTYPES[config.dtype], WARPGROUP_ROWS
        thr_qk, thr_pv = qk.get_slice(thread), pv.get_slice(thread)
        # descriptors belong to the whole warpgroup and must not depend on the thread
        all_qk, all_pv = qk.get_slice(0), pv.get_slice(0)
        frag_q = qk.make_fragment_A(all_qk.partition_A(smem.q))  # (mma, m, k, warpgroup and stage)
        frag_k = qk.make_fragment_B(all_qk.partition_B(smem.k))  # (mma, n, k, stage)
        frag_v = pv.make_fragment_B(all_pv.partition_B(smem.v))  # (mma, n, k, stage)
        # f32 [64, block_kv] / 128 threads
        acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((rows, config.block_kv)), Float32)
        # f32 [64, head_dim_v] / 128 threads
        acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((rows, config.head_dim_v)), Float32)
        # 16 bits [64, block_kv] / 128 threads
        p = cute.make_rmem_tensor(thr_pv.partition_shape_A((rows, config.block_kv)), dtype)
        p_now = cute.make_tensor(p.iterator, acc_s.layout)  # the same registers
        p_next = p_now
        if config.double_buffer_p:
            p_next = cute.make_rmem_tensor(acc_s.layout, dtype)  # as `p_now`, other registers
        slope = columns = None
        if config.slope_in_mma:
            slope = SlopeOperands.create(mmas[3], words, config.block_kv)
        elif config.columns_in_mma:
            columns = ColumnOperands.create(mmas[3], words, config)
        return ForwardMma(
            config, qk_first, qk, pv, thr_pv,
            frag_q, frag_k, frag_v, acc_s, acc_o, p, p_now, p_next, slope, columns,
        )  # fmt: skip

    def set_accumulate(self) -> None:
        """Set the ACCUMULATE field of the MMAs; call this once, outside of all loops and branches.

        The DSL ties the value of a set() to the region of the call. A value that is set inside a
        loop or branch could not be used outside of it.
        """
        self.qk_first.set(warpgroup.Field.ACCUMULATE, False)
        self.qk.set(warpgroup.Field.ACCUMULATE, True)
        self.pv.set(warpgroup.Field.ACCUMULATE, True)
        if self.slope is not None:
            self.slope.mma.set(warpgroup.Field.ACCUMULATE, True)
        if self.columns is not None:
            self.columns.mma.set(warpgroup.Field.ACCUMULATE, True)

    def issue_qk(self, q_tile: Int32, k_stage: Int32) -> None:
        """Issue S = Q K^T asynchronously as one wgmma group; with `bias_first`, S += Q K^T.

        Args:
            q_tile: index of the 64 rows in shared memory: warpgroup + warpgroups * stage.
            k_stage: stage of K.
        """
        for k in range(cute.size(self.frag_q, mode=[2])):
            cute.gemm(
                self.qk_first if k == 0 and not self.config.bias_first else self.qk,
                self.acc_s,
                self.frag_q[None, None, k, q_tile],
                self.frag_k[None, None, k, k_stage],
                self.acc_s,
            )
        if self.slope is not None:
            # last, because the sum is rounded at the magnitude of the largest term so far
            self.slope.issue(self.acc_s)
        if self.columns is not None:
            self.columns.issue(self.acc_s, k_stage)
        warpgroup.commit_group()

    def issue_pv(self, v_stage: Int32) -> None:
        """Issue O += P V asynchronously and commit it as one wgmma group."""
        for k in range(cute.size(self.p, mode=[2])):
            cute.gemm(
                self.pv,
                self.acc_o,
                self.p[None, None, k],
                self.frag_v[None, None, k, v_stage],
                self.acc_o,
            )
        warpgroup.commit_group()

    def release_k(self, k: Pipeline, stage: Int32) -> None:
        """Release a K stage and the block number that the producer wrote for it.

        With chained work tiles the ping-pong barrier orders the lanes' reads of the block number,
        so that one lane per warp arrives. Otherwise nothing orders them, and every lane arrives.
        """
        if self.config.chained:
            device.arrive(k.empty + stage)
        else:
            cute.arch.mbarrier_arrive(k.empty + stage)

    def advance_p(self) -> None:
        """Copy the next P to the operand of P V through opaque moves.

        Without opaque moves, the compiler would merge the two register buffers and serialise the
        MMAs.
        """
        source = cute.recast_tensor(self.p_next, Int32)  # i32, pairs of P
        target = cute.recast_tensor(self.p_now, Int32)  # i32, pairs of P
        for i in range(cute.size(source)):
            target[i] = cute.arch.inline_ptx(
                "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[source[i]]
            )

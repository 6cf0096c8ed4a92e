"""Issue the MMAs of the Blackwell forward from one warp: S = Q K^T and O += P V.

In a CTA pair, a warp of the first CTA issues the MMAs of both CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute
from cutlass.cute.nvgpu import tcgen05

from attnkit.templates.common.device import DTYPES
from attnkit.templates.sm100 import device
from attnkit.templates.sm100.config import ForwardConfig
from attnkit.templates.sm100.cta_group import CtaGroup
from attnkit.templates.sm100.forward_barriers import ForwardBarriers
from attnkit.templates.sm100.forward_work import RingPosition, WorkRing

MMA_K = 16  # K of one MMA instruction: the columns of P that it reads
HALVES = (0, 1)  # halves of the columns of S


@dataclass(frozen=True)
class Products:
    """Holds the MMAs of a CTA or a CTA pair, with their operands and accumulators.

    Attributes:
        qk_first, qk: S = Q K^T, which overwrites or accumulates.
        pv: O += P V.
        frag_q: descriptors of Q, (mma, m, k, query tile).
        frag_k: descriptors of K, (mma, n, k, stage).
        frag_v: descriptors of V, (mma, n, k, stage).
        s_layout: layout of S in tensor memory, f32 (mma, m, n).
        p_layout: layout of P in tensor memory, 16 bits (mma, m, k).
        out: O of each query tile in tensor memory, f32 (mma, m, n).
    """

    qk_first: cute.TiledMma
    qk: cute.TiledMma
    pv: cute.TiledMma
    frag_q: cute.Tensor
    frag_k: cute.Tensor
    frag_v: cute.Tensor
    s_layout: Any
    p_layout: Any
    out: list[cute.Tensor]


@dataclass(frozen=True)
class VBlock:
    """Describes a block of V: its stage, its full barrier, and the parity of its lap."""

    stage: Int32
    full: cute.Pointer
    lap: Int32


class MmaWarp:
    """Issues the MMAs of a CTA or a CTA pair.

    For each query tile they are issued in the order P V of a block, then Q K of the next one. S of
    the next block overwrites P, which P V has read by then, because MMAs complete in the order of
    issue.

    Args:
        config: compile-time configuration.
        group: the CTAs that compute MMAs together.
    """

    def __init__(self, config: ForwardConfig, group: CtaGroup) -> None:
        self.config = config
        self.group = group
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def run(self, mmas: tuple, smem: Any, work_ring: WorkRing, bars: ForwardBarriers):
        """Issue the MMAs of all work tiles.

        Args:
            mmas: (Q K^T, Q K^T, P V, P V): the first of each overwrites, the second accumulates.
            smem: tiles of Q, K and V in shared memory.
            work_ring: records of the work tiles.
            bars: mbarriers.
        """
        c = self.config
        mma = self._products(mmas, smem)
        pv_first = mmas[2]  # first k-step of P V; it overwrites O only in the first block
        mma.qk_first.set(tcgen05.Field.ACCUMULATE, False)
        mma.qk.set(tcgen05.Field.ACCUMULATE, True)
        mma.pv.set(tcgen05.Field.ACCUMULATE, True)
        kv_idx, tile_idx = Int32(0), Int32(0)
        position = RingPosition.first()
        work = work_ring.read(tile_idx)
        while work.valid != 0:
            # S of the first block of each query tile
            for part in cutlass.range_constexpr(c.k_parts):
                cute.arch.mbarrier_wait(bars.kv_full + position.stage, position.lap)
                for t in cutlass.range_constexpr(c.q_tiles):
                    if const_expr(part == 0):
                        cute.arch.mbarrier_wait(bars.q_full + t, tile_idx & 1)
                    self.issue_qk(mma, t, kv_idx, position.stage, bars, HALVES, part)
                self.group.commit(bars.kv_empty + position.stage)
                position = position.next(c.stages)
            for j in cutlass.range(work.num_blocks, unroll=1):
                if const_expr(not c.v_late):
                    v = VBlock(position.stage, bars.kv_full + position.stage, position.lap)
                    position = position.next(c.stages)
                pv_first.set(tcgen05.Field.ACCUMULATE, j > 0)
                more = j + 1 < work.num_blocks
                if const_expr(c.q_tiles == 1):
                    # S of the next block to the other buffer, during the softmax of this block
                    if more:
                        for part in cutlass.range_constexpr(c.k_parts):
                            cute.arch.mbarrier_wait(bars.kv_full + position.stage, position.lap)
                            self.issue_qk(mma, 0, kv_idx + 1, position.stage, bars, HALVES, part)
                            self.group.commit(bars.kv_empty + position.stage)
                            if const_expr(c.v_late):
                                position = position.next(c.stages)
                    if const_expr(c.v_late):
                        v = VBlock(position.stage, bars.kv_full + position.stage, position.lap)
                        position = position.next(c.stages)
                    self.issue_pv(mma, pv_first, 0, kv_idx, v, bars)
                    self.group.commit(bars.kv_empty + v.stage)
                    if j + 1 == work.num_blocks:
                        if const_expr(not c.alias):  # otherwise the store of O releases Q
                            self.group.commit(bars.q_empty)
                    self.group.commit(bars.o_full)
                else:
                    for t in cutlass.range_constexpr(2):
                        if const_expr(c.halves):
                            # the lower half of S does not overlap P
                            if more:
                                if const_expr(t == 0):
                                    cute.arch.mbarrier_wait(
                                        bars.kv_full + position.stage, position.lap
                                    )
                                cute.arch.mbarrier_wait(bars.s_empty + t, kv_idx & 1)
                                self.issue_qk(mma, t, kv_idx + 1, position.stage, bars, (0,))
                        self.issue_pv(mma, pv_first, t, kv_idx, v, bars)
                        if const_expr(t == 1):
                            self.group.commit(bars.kv_empty + v.stage)
                        if more:
                            if const_expr(t == 0 and not c.halves):
                                cute.arch.mbarrier_wait(bars.kv_full + position.stage, position.lap)
                            rest = (1,) if const_expr(c.halves) else HALVES
                            self.issue_qk(mma, t, kv_idx + 1, position.stage, bars, rest)
                        else:
                            if const_expr(not c.alias):
                                self.group.commit(bars.q_empty + t)
                            self.group.commit(bars.o_full + t)
                    if more:
                        self.group.commit(bars.kv_empty + position.stage)
                if const_expr(not c.v_late):
                    if more:
                        position = position.next(c.stages)
                kv_idx += 1
            tile_idx += 1
            work = work_ring.read(tile_idx)

    def _products(self, mmas: tuple, smem: Any) -> Products:
        """Return the MMAs with operands in shared memory and accumulators in tensor memory."""
        c = self.config
        qk_first, qk, _, pv = mmas
        frag_q, frag_k = qk.make_fragment_A(smem.q), qk.make_fragment_B(smem.k)
        frag_v = pv.make_fragment_B(smem.v)
        shape_s = qk.partition_shape_C((c.mma_rows, c.block_kv))
        shape_o = pv.partition_shape_C((c.mma_rows, c.head_dim_v))
        shape_p = pv.partition_shape_A((c.mma_rows, c.block_kv))
        s_layout = qk.make_fragment_C(shape_s).layout
        o_layout = pv.make_fragment_C(shape_o).layout
        p_layout = pv.make_fragment_A(shape_p).layout
        out = [
            cute.make_tensor(device.column(c.out_column(t)), o_layout)  # f32 (mma, m, n)
            for t in range(c.q_tiles)
        ]
        return Products(qk_first, qk, pv, frag_q, frag_k, frag_v, s_layout, p_layout, out)

    def issue_qk(
        self,
        mma: Products,
        t: int,
        kv_idx: Int32,
        stage: Int32,
        bars: ForwardBarriers,
        halves: tuple[int, ...],
        part: int = 0,
    ) -> None:
        """Issue S = Q K^T of the `kv_idx`-th block of query tile `t`.

        Args:
            mma: the MMAs.
            t: query tile.
            kv_idx: index of the block in the CTA.
            stage: stage of K.
            bars: mbarriers.
            halves: which halves of the columns of S to compute, if the config has `halves`.
            part: part of the columns of Q and K over which to sum; S is full after the last.
        """
        c, u = self.config, self.config.s_stage(t, kv_idx)
        scores = cute.make_tensor(device.column(c.s_column(u)), mma.s_layout)  # f32 (mma, m, n)
        for half in halves if c.halves else (0,):
            steps = cute.size(mma.frag_k, mode=[2])
            for k in range(steps):
                cute.gemm(
                    mma.qk_first if part == k == 0 else mma.qk,
                    scores[None, 0, half],
                    mma.frag_q[None, 0, part * steps + k, t],
                    mma.frag_k[None, half, k, stage],
                    scores[None, 0, half],
                )
            whole = half == 1 or not c.halves
            if part == c.k_parts - 1:
                self.group.commit((bars.s_full if whole else bars.s_half) + u)

    def issue_pv(
        self,
        mma: Products,
        pv_first: cute.TiledMma,
        t: int,
        kv_idx: Int32,
        v: VBlock,
        bars: ForwardBarriers,
    ) -> None:
        """Issue O += P V of the `kv_idx`-th block of query tile `t`, waiting for each part of P."""
        c, u = self.config, self.config.s_stage(t, kv_idx)
        place = device.column(c.p_column(u))
        # 16 bits (mma, m, k)
        p = cute.make_tensor(cute.recast_ptr(place, dtype=self.dtype), mma.p_layout)
        if t == 0:
            cute.arch.mbarrier_wait(v.full, v.lap)
        starts = [end // MMA_K for end in (0, *c.p_parts[:-1])]
        for k in range(c.block_kv // MMA_K):
            if k in starts:
                cute.arch.mbarrier_wait(bars.p_full[starts.index(k)] + u, c.s_phase(kv_idx))
                if c.two_cta:  # P of the other CTA: that arrival is from another SM
                    device.fence_after()
            cute.gemm(
                pv_first if k == 0 else mma.pv,
                mma.out[t],
                p[None, None, k],
                mma.frag_v[None, None, k, v.stage],
                mma.out[t],
            )

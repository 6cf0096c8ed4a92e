"""The products of a consumer of the Hopper backward.

S and dP are transposed, keys by rows. Products that overwrite their result and products that add to
it are two instructions of the DSL: what is set on one must not change while the kernel is traced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from attnkit.templates.sm90.backward_config import ROWS


class Parts(NamedTuple):
    """Products of a consumer, and what they are computed from and to.

    Attributes:
        first: those that overwrite their result: S or dP, dQ, dV, dK, S from registers, LSE.
        further: the same, but they add to it.
        scores, dp, dk, dv, p, ds, dq, k_held: in registers.
        frags: in shared memory: K, V, Q, dO, Q^T, dO^T, dS, K^T.
        lse: the step of `backward_rows`: K's columns, and Q's by stage; empty for none.
    """

    first: tuple
    further: tuple
    scores: Any
    dp: Any
    dk: Any
    dv: Any
    p: Any
    ds: Any
    dq: Any
    k_held: Any
    frags: tuple
    lse: tuple


class Products:
    """The part of a backward kernel that issues products."""

    config: Any
    held_steps: int  # steps of 16 columns of K that are in registers

    def issue_s(self, parts: Any, wg: Any, stage: Any, place: Any) -> None:
        """S^T = K Q^T, with `less_lse` what `backward_rows` adds; K lies in one of two places."""
        a, b = parts.frags[0], parts.frags[2]
        for k in range(cute.size(a, mode=[2])):
            mmas = parts.first if k == 0 else parts.further
            if k < self.held_steps:
                mma, rows = mmas[4], parts.k_held[None, None, k]
            else:
                mma, rows = mmas[0], a[None, None, k, 2 * place + wg]
            cute.gemm(mma, parts.scores, rows, b[None, None, k, stage], parts.scores)
        if self.config.less_lse:
            own, columns = parts.lse
            cute.gemm(parts.further[5], parts.scores, own, columns[None, None, stage], parts.scores)
        warpgroup.commit_group()

    def issue_dp(self, parts: Any, wg: Any, stage: Any) -> None:
        """dP^T = V dO^T, less delta unless `rounded`."""
        a, b = parts.frags[1], parts.frags[3]
        for k in range(cute.size(a, mode=[2])):
            mma = (parts.first if k == 0 and self.config.rounded else parts.further)[0]
            cute.gemm(mma, parts.dp, a[None, None, k, wg], b[None, None, k, stage], parts.dp)
        warpgroup.commit_group()

    def issue_from_registers(
        self, first: Any, mma: Any, acc: Any, a: Any, b: Any, stage: Any
    ) -> None:
        """dV += P^T dO, or dK += dS^T Q."""
        for k in range(cute.size(a, mode=[2])):
            one = first if k == 0 else mma
            cute.gemm(one, acc, a[None, None, k], b[None, None, k, stage], acc)
        warpgroup.commit_group()

    def issue_dq(self, parts: Any, bars: Any, wg: Any, kc: Any, tc: Any) -> None:
        """A consumer's part of dQ = dS K: its columns, or its rows of a q tile of 128."""
        c = self.config
        a, b = parts.frags[6], parts.frags[7]
        high, wide = c.block_q // ROWS, c.width // ROWS
        stage, place = kc & 1, (tc & 1) * 2 * wide
        cute.arch.mbarrier_wait(bars[8] + stage, (kc >> 1) & 1)
        warpgroup.fence()
        for half in range(2):
            row = (stage * 2 + half) * high + (wg if high == 2 else 0)
            column = place + half * wide + (wg if wide == 2 else 0)
            n = wg if high * wide == 1 else 0  # which 32 of 64 columns
            for k in range(cute.size(a, mode=[2])):
                mma = (parts.first if half == 0 and k == 0 else parts.further)[1]
                mine = b[None, n, k, column]
                mine = cute.make_tensor(
                    mine.iterator, cute.append(mine.layout, cute.make_layout(1))
                )
                cute.gemm(mma, parts.dq, a[None, None, k, row], mine, parts.dq)
        warpgroup.commit_group()

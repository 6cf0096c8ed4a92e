"""From scores to P and dS in registers: mod, mask, exponentials, the mod's slope.

The backward computes transposed scores: a thread of a consumer warpgroup holds two columns kv of
the attention matrix, 8 apart, and of each the rows q = 8 g and 8 g + 1 from its first. Element i
of the accumulator belongs to column (i >> 1) & 1 and to the thread's row 2 (i // 4) + (i & 1).

The gradient of the raw scores is dS = P J (dP - delta), where J is the slope of the mod: its
derivative by the raw score. P J replaces the scores in their registers as soon as they are known,
so that a mod costs no registers and what the mod and its slope share is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from attnkit.templates.sm90 import device
from attnkit.templates.sm90.backward_learned import Learned

LOG2_E = 1.4426950408889634
MASKED, WHOLE = 1, 2  # bits of a block's mark, below its number


@dataclass(frozen=True)
class Site:
    """Where a tile is; see `hooks.Site`."""

    tensors: Any
    b: Any
    h: Any
    q_len: Any
    kv_len: Any
    scale: Any
    origin: Any
    steps: Any = None


def column_of(i: int) -> int:
    """Which of the thread's two columns holds element i of the accumulator."""
    return (i >> 1) & 1


def row_of(i: int) -> int:
    """Which of the thread's rows holds element i of the accumulator."""
    return 2 * (i // 4) + (i & 1)


class Weights(Learned):
    """The part of a backward kernel between the products."""

    hooks: Any
    config: Any
    dtype: Any

    def site(self, tile: Any) -> Site:
        """Where a tile is."""
        return Site(*tile[0])

    def begin(self, where: Any, offset: Any) -> Any:
        """What is known once a kv tile.

        Args:
            where: the fields of `Site`; the origin is the tile's first column.
            offset: the thread's first column within the tile; the second is 8 beyond.
        """
        site, hooks = Site(*where), self.hooks
        head = hooks.head(site)
        offsets = [offset, offset + 8]
        kv = [site.origin + o for o in offsets]
        inside = [cutlass.min(at, site.kv_len - 1) for at in kv]
        held = hooks.held(site, head, offsets)
        values = hooks.columns(site, head, inside, hooks.has_mask)
        columns = tuple(zip(inside, held, values, strict=True))
        valid = tuple(at < site.kv_len for at in kv)
        return tuple(where), head, columns, valid

    def weigh(
        self,
        mark: Any,
        masked: bool,
        tile: Any,
        row0: Any,
        scores: Any,
        slopes: Any,
        weights: Any,
        statistic: Any,
    ) -> None:
        """From scores, P J to `slopes` and P to `weights` in the dtype.

        Where captured tensors have gradients, `slopes` receives the scores as they are.

        Args:
            mark: the block's number and bits.
            masked: compute the mask, and the ends of the tensors.
            row0: the thread's first row within the tile.
            statistic: LSE of the thread's rows in log2 units, inf for dead rows, [2, pairs] in
                shared memory.
        """
        where, head, columns, valid = tile
        site, hooks = Site(*where), self.hooks
        first = (mark >> 2) * self.config.block_q + row0
        out = cute.recast_tensor(weights, Int32)
        pairs = [(row_of(i), column_of(i)) for i in range(4)]
        for g in range(cute.size(scores) // 4):
            # two rows of both columns at a time: more would take registers
            positions = [first + 8 * g + k for k in range(2)]
            inside = [cutlass.min(at, site.q_len - 1) for at in positions] if masked else positions
            rows = [(at, hooks.row(site, head, at)) for at in inside]
            places = [(j, c, scores[4 * g + i]) for i, (j, c) in enumerate(pairs)]
            exact, slope = self.exponentials(site, head, rows, columns, places, statistic[None, g])
            kept = [None] * 4
            if masked:
                kept = self._kept(mark, site, head, rows, columns, pairs)
                kept = [
                    k & valid[c] & (positions[j] < site.q_len)
                    for k, (j, c) in zip(kept, pairs, strict=True)
                ]
            ps = []
            for i in range(4):
                p = exact[i]
                w = p if slope is None else p * slope[i]
                if masked:
                    p = cutlass.select_(kept[i], p, Float32(0.0))
                    w = p if slope is None else cutlass.select_(kept[i], w, Float32(0.0))
                ps.append(p)
                slopes[4 * g + i] = scores[4 * g + i] if hooks.learned else w
            for k in range(2):
                out[2 * g + k] = device.pack(ps[2 * k], ps[2 * k + 1], self.dtype)

    def exponentials(
        self, site: Any, head: Any, rows: Any, columns: Any, places: Any, statistic: Any
    ) -> tuple[list[Any], list[Any] | None]:
        """P of some elements, the mask left aside, and the slopes of the mod."""
        x, slope = self.hooks.both(site, head, rows, columns, places)
        factor = self.hooks.factor(site, head)
        lse = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(statistic, lse)
        bounds = [self._bound(site, head, rows[k], lse[k]) for k in range(2)]
        scaled = x if factor is None else [one * factor for one in x]
        ps = [device.exp2(s - bounds[j]) for s, (j, *_) in zip(scaled, places, strict=True)]
        return ps, slope

    def _kept(
        self, mark: Any, site: Any, head: Any, rows: Any, columns: Any, pairs: Any
    ) -> list[Any]:
        """Whether the mask keeps elements."""
        hooks = self.hooks
        if not hooks.has_mask:
            return [cutlass.Boolean(True)] * len(pairs)
        if hooks.intervals is None:
            kept = hooks.keep(site, head, rows, columns, pairs)
        else:
            ends = [hooks.ends(site, head, q) for q, _ in rows]
            kept = [_inside(columns[c][0], ends[j]) for j, c in pairs]
        if hooks.listed:
            whole = (mark & WHOLE) != 0
            kept = [k | whole for k in kept]
        return kept

    def _bound(self, site: Any, head: Any, row: Any, lse: Any) -> Any:
        """What the exponents of a row are reduced by."""
        term = self.hooks.lse(site, head, row[1])
        return lse if term is None else lse - term * LOG2_E

    @cute.jit
    def weigh_either(
        self,
        mark: Int32,
        tile: tuple,
        row0: Int32,
        scores: cute.Tensor,
        slopes: cute.Tensor,
        weights: cute.Tensor,
        statistic: cute.Tensor,
    ):
        """`weigh`, with the mask where this block needs it."""
        if (mark & MASKED) != 0:
            self.weigh(mark, True, tile, row0, scores, slopes, weights, statistic)
        else:
            self.weigh(mark, False, tile, row0, scores, slopes, weights, statistic)

    def gradients(
        self, mark: Any, tile: Any, row0: Any, slopes: Any, weights: Any, statistic: Any, dp: Any,
        out: Any, running: Any, totals: Any,
    ) -> None:  # fmt: skip
        """dS = P J (dP - delta) to `out` in the dtype, from P J and dP - delta."""
        if self.hooks.learned:
            first = (mark >> 2) * self.config.block_q + row0
            self.gradients_learned(
                tile, first, slopes, weights, statistic, dp, out, running, totals
            )
            return
        pairs = cute.recast_tensor(out, Int32)
        for i in range(0, cute.size(slopes), 2):
            low, high = slopes[i] * dp[i], slopes[i + 1] * dp[i + 1]
            pairs[i // 2] = device.pack(low, high, self.dtype)


def _inside(kv: Any, ends: Any) -> Any:
    """Whether a column lies in one of some intervals."""
    found = None
    for low, high in ends:
        one = (kv >= low) & (kv < high)
        found = one if found is None else found | one
    return cutlass.Boolean(False) if found is None else found

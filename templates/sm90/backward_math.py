"""From scores to P and dS in registers: mod, mask, exponentials, the mod's slope.

The backward computes transposed scores: a thread of a consumer warpgroup holds two columns kv of
the attention matrix, 8 apart, and of each the rows q = 8 g and 8 g + 1 from its first. Element i
of the accumulator belongs to column (i >> 1) & 1 and to the thread's row 2 (i // 4) + (i & 1).

The gradient of the raw scores is dS = P J (dP - delta), where J is the slope of the mod: its
derivative by the raw score. P J replaces the scores in their registers as soon as they are known,
so that a mod costs no registers and what the mod and its slope share is computed once.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import LOG2_E
from attnkit.templates.common.site import Site
from attnkit.templates.common.work_tile import APPLY_MASK, FULL_BLOCK
from attnkit.templates.sm90.backward_distance import Distances
from attnkit.templates.sm90.backward_learned import Learned, unpack


def column_of(i: int) -> int:
    """Which of the thread's two columns holds element i of the accumulator."""
    return (i >> 1) & 1


def row_of(i: int) -> int:
    """Which of the thread's rows holds element i of the accumulator."""
    return 2 * (i // 4) + (i & 1)


class Weights(Learned, Distances):
    """The part of a backward kernel between the products."""

    hooks: Any
    config: Any
    dtype: Any
    late = False  # round P beside dS, not before all of dP is in registers as well

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
        return tuple(where), head, columns, valid, kv[0]

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

        Where captured tensors have gradients, `slopes` receives the scores as they are; if
        `rounded`, nothing: the slope is 1. If `late`, P is rounded in `gradients`.

        Args:
            mark: the block's number and bits.
            masked: compute the mask, and the ends of the tensors.
            row0: the thread's first row within the tile.
            statistic: LSE of the thread's rows in log2 units, inf for dead rows, [2, pairs]; None
                if the scores are less LSE.
        """
        hooks = self.hooks
        first = (mark >> 2) * self.config.block_q + row0
        out = cute.recast_tensor(weights, Int32)
        bits = self.kept(mark, tile, first) if masked else []
        shared: dict[Any, Any] = {}
        far = self.far(mark, tile, row0)
        for g in range(cute.size(scores) // 4):
            # two rows of both columns at a time: more would take registers
            rows, places = self.group(masked, tile, first, g, scores)
            ps, slope = self.exponentials(
                self.site(tile), tile[1], rows, tile[2], places, self.pair(statistic, g), g, shared,
                far,
            )  # fmt: skip
            ws = ps if slope is None else [p * j for p, j in zip(ps, slope, strict=True)]
            if masked:
                kept = self.kept_of(mark, tile, rows, bits, g)
                ps, ws = (
                    [cutlass.select_(k, x, Float32(0.0)) for k, x in zip(kept, xs, strict=True)]
                    for xs in (ps, ws)
                )
            if not self.late:
                for k in range(2):
                    out[2 * g + k] = device.pack(ps[2 * k], ps[2 * k + 1], self.dtype)
            if not self.config.rounded:
                for i, w in enumerate(ws):
                    slopes[4 * g + i] = scores[4 * g + i] if hooks.learned else w

    def group(
        self, masked: bool, tile: Any, first: Any, g: int, scores: Any
    ) -> tuple[list[Any], list[Any]]:
        """(q, values) of the rows of group g, and (row, column, score) of its elements."""
        site = self.site(tile)
        inside = [first + 8 * g + k for k in range(2)]
        if masked:
            inside = [cutlass.min(at, site.q_len - 1) for at in inside]
        rows = [(at, self.hooks.row(site, tile[1], at)) for at in inside]
        return rows, [(row_of(i), column_of(i), scores[4 * g + i]) for i in range(4)]

    def exponentials(
        self, site: Any, head: Any, rows: Any, columns: Any, places: Any, statistic: Any,
        g: int, shared: dict[Any, Any], far: Any,
    ) -> tuple[list[Any], list[Any] | None]:  # fmt: skip
        """P of the elements of group g, the mask left aside, and the slopes of the mod.

        Args:
            shared: values of the groups before by q - kv: that of a column 8 beyond, and rows 8
                beyond, is the same.
            far: see `Distances.far`.
        """
        steps = [8 * (g - c) + j for j, c, _ in places]
        x, slope = self.hooks.both(site, head, rows, columns, places, steps, shared)
        factor = self.hooks.factor(site, head)
        bounds = self.bounds(site, head, rows, statistic)
        terms = [far and far(at, c) for at, (_, c, _) in zip(steps, places, strict=True)]
        scaled = [device.shifted(one, factor, term) for one, term in zip(x, terms, strict=True)]
        if bounds is not None:
            scaled = [s - bounds[j] for s, (j, *_) in zip(scaled, places, strict=True)]
        return [device.exp2(s) for s in scaled], slope

    def kept(self, mark: Any, tile: Any, first: Any) -> list[Any]:
        """For each of the thread's columns, which of its rows lie inside: bit 2 g + k for 8 g + k.

        Inside the tensors, and inside one of the column's intervals if the mask has them.
        """
        site, hooks, words = self.site(tile), self.hooks, []
        below = device.bits_below(site.q_len - first, 1)[0]
        for (kv, *_), inside in zip(tile[2], tile[3], strict=True):
            word = below
            if hooks.has_mask and hooks.intervals is not None:
                found = Int32(0)
                for low, high in hooks.ends(site, tile[1], kv):
                    above, under = (device.bits_below(x - first, 1)[0] for x in (low, high))
                    found = found | (under & ~above)
                if hooks.listed:
                    found = cutlass.select_((mark & FULL_BLOCK) != 0, Int32(-1), found)
                word = word & found
            words.append(cutlass.select_(inside, word, Int32(0)))
        return words

    def kept_of(self, mark: Any, tile: Any, rows: Any, bits: Any, g: int) -> list[Any]:
        """Whether the mask keeps the elements of group g; `bits` as of `kept`."""
        hooks, pairs = self.hooks, [(row_of(i), column_of(i)) for i in range(4)]
        kept = [device.bit(bits[c], 2 * g + j) for j, c in pairs]
        if hooks.has_mask and hooks.intervals is None:
            found = hooks.keep(self.site(tile), tile[1], rows, tile[2], pairs)
            if hooks.listed:
                found = [one | ((mark & FULL_BLOCK) != 0) for one in found]
            kept = [one & other for one, other in zip(kept, found, strict=True)]
        return kept

    def bounds(self, site: Any, head: Any, rows: Any, statistic: Any) -> list[Any] | None:
        """What the exponents of two rows are reduced by; None for nothing."""
        terms = [self.hooks.lse(site, head, row[1]) for row in rows]
        if statistic is None:
            return None if terms[0] is None else [-term * LOG2_E for term in terms]
        return [
            statistic[k] if term is None else statistic[k] - term * LOG2_E
            for k, term in enumerate(terms)
        ]

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
        if (mark & APPLY_MASK) != 0:
            self.weigh(mark, True, tile, row0, scores, slopes, weights, statistic)
        else:
            self.weigh(mark, False, tile, row0, scores, slopes, weights, statistic)

    @cute.jit
    def learn_either(
        self,
        mark: Int32,
        tile: tuple,
        row0: Int32,
        scores: cute.Tensor,
        weights: cute.Tensor,
        statistic: cute.Tensor,
        dp: cute.Tensor,
        out: cute.Tensor,
        running: cute.Tensor,
        totals: list,
    ):
        """`learn`, with the mask where this block needs it."""
        if (mark & APPLY_MASK) != 0:
            self.learn(mark, True, tile, row0, scores, weights, statistic, dp, out, running, totals)
        else:
            self.learn(
                mark, False, tile, row0, scores, weights, statistic, dp, out, running, totals
            )

    def gradients(self, slopes: Any, weights: Any, dp: Any, delta: Any, out: Any) -> None:
        """dS = P J (dP - delta) to `out` in the dtype.

        Args:
            slopes: P J; not read if `rounded`, where J is 1.
            weights: P in the dtype, written here if `late`.
            dp: dP; less delta unless `rounded`.
            delta: -delta of the thread's rows, [2, pairs].
        """
        pairs, rounded = cute.recast_tensor(out, Int32), cute.recast_tensor(weights, Int32)
        for i in range(0, cute.size(dp), 2):  # two rows of a column
            low, high = dp[i], dp[i + 1]
            if self.config.rounded:
                pair = self.pair(delta, i // 4)
                low, high = low + pair[0], high + pair[1]
                p = unpack(rounded[i // 2], self.dtype)
            else:
                p = slopes[i], slopes[i + 1]
                if self.late:
                    rounded[i // 2] = device.pack(*p, self.dtype)
            pairs[i // 2] = device.pack(p[0] * low, p[1] * high, self.dtype)

    def start_dp(self, acc: Any, delta: Any) -> None:
        """Begin dP with -delta."""
        for g in range(self.config.block_q // 8):
            pair = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(delta[None, g], pair)
            for i in range(2):  # both columns of the thread have the same rows
                acc[4 * g + i] = pair[i]
                # opaque: a plain copy would be made after the fence
                acc[4 * g + 2 + i] = device.pinned(pair[i])

    def pair(self, rows: Any, g: int) -> Any:
        """A statistic of the thread's rows of group g, loaded where it is used: all take 32 registers. None of none."""
        if rows is None:
            return None
        pair = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(rows[None, g], pair)
        return pair

    def rows(self, values: Any, stage: Any, row0: Any) -> Any:
        """The thread's rows of a statistic in shared memory, [2, pairs]."""
        start = values.iterator + (stage * self.config.block_q + row0)
        layout = cute.make_layout((2, self.config.block_q // 8), stride=(1, 8))
        return cute.make_tensor(start.align(8), layout)

"""Compute dS from raw scores in the Blackwell backward, and sum gradients of captured tensors.

Captured tensors that need a gradient, and gradients of the rows' entropies, need P in float32 when
dP is known. P is then computed again, from raw scores.

The gradient of a load is reduced before it is added in memory. The reduction depends on the level
at which the load's index is known: in a register over a whole work tile for "head" and "column",
over the columns of a warp for "row". Gradients of other loads are added element by element; where
several elements read the same entry, a thread sums them first (`common.place_runs`). All sums are
float32; in deterministic mode the sums in memory are exact (`common.exact_sums`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.place_runs import CapturedSums, PlaceRuns
from attnkit.templates.common.softmax import at_least
from attnkit.templates.sm100.backward_softmax import (
    EntropyGrads,
    KvBlock,
    Scratch,
    SoftmaxBackward,
    bit_of,
)

# number of sums that a thread keeps over a work tile, by the level of the load's index
RUNNING = {"head": 1, "column": 1, "row": 0, "relative": 0, "element": 0}


class ScoreGrads(PlaceRuns):
    """Computes dS from raw scores, and accumulates the gradients of captured tensors.

    Args:
        softmax: recomputes P.
    """

    def __init__(self, softmax: SoftmaxBackward) -> None:
        self.config = softmax.config
        self.hooks = softmax.hooks
        self.softmax = softmax

    def begin(self, totals: Any) -> CapturedSums:
        """Allocate registers for the running sums of a work tile."""
        count = sum(RUNNING[level] for level in self.hooks.gradient_levels)
        running = cute.make_rmem_tensor(max(count, 1), Float32)  # f32 [values]
        return CapturedSums(running, self.make_runs(), totals)

    def reset(self, sums: CapturedSums) -> None:
        """Set the sums of the previous work tile, which are in memory, to 0."""
        sums.running.fill(0.0)
        self.begin_runs(sums.runs)

    def compute_ds(
        self, tile: KvBlock, first: Int32, scratch: Scratch, lse: Any, dp: Any, at: int,
        sums: CapturedSums,
    ) -> list[Any]:  # fmt: skip
        """Return dS of some rows, and accumulate the gradients of captured tensors.

        P is recomputed, because raw scores are in its registers, and P in the dtype is not exact
        enough.

        Args:
            tile: values of the kv block.
            first: query position of the first row.
            scratch: raw scores of all rows of the thread, and which of them the mask keeps.
            lse: as for `SoftmaxBackward.exponentials`.
            dp: dP - delta of these rows.
            at: index of the first row among the thread's rows.
            sums: sums of the gradients of captured tensors.
        """
        columns, count = tile.columns, len(dp)
        rows = self.softmax.rows_of(tile, first, count, True)
        places = [(k, 0, scratch.slopes[at + k]) for k in range(count)]
        if self.config.weights:
            dfs = [self._if_kept(scratch, at + k, dp[k]) for k in range(count)]
        else:
            powers, slope = self.softmax.exponents(tile, rows, places, lse)
            ps = [
                self._if_kept(scratch, at + k, device.exp2(power)) for k, power in enumerate(powers)
            ]
            if tile.entropy is not None:
                # where the mask keeps nothing, a power may be inf and its product with P NaN
                logs = [self._if_kept(scratch, at + k, power) for k, power in enumerate(powers)]
                dp = with_entropy(tile.entropy, tile.site, rows, logs, dp)
            if not self.hooks.gradient_levels:
                return self._scaled(scratch, at, ps, slope, dp)
            dfs = [ps[k] * dp[k] for k in range(count)]
        grads = [(k, 0, s, dfs[k]) for k, _, s in places]
        ds, values, known = self.hooks.dscore(tile.site, tile.head, rows, columns, grads)
        if tile.sums_captured is not True:
            zero = Float32(0.0)
            values = [[cutlass.select_(tile.sums_captured, x, zero) for x in own] for own in values]
        place = 0
        for i, level in enumerate(self.hooks.gradient_levels):
            self._add(i, level, place, tile, rows, values[i], known[i], sums)
            place += RUNNING[level]
        return ds

    def _scaled(
        self, scratch: Scratch, at: int, ps: list[Any], slope: list[Any] | None, dp: Any
    ) -> list[Any]:
        """Return P J dP, where `dp` is dP - delta; the row numbers begin at `at`."""
        if slope is not None:  # a slope may be inf where p is 0
            products = zip(ps, slope, strict=True)
            ps = [self._if_kept(scratch, at + k, p * j) for k, (p, j) in enumerate(products)]
        return [p * x for p, x in zip(ps, dp, strict=True)]

    def _if_kept(self, scratch: Scratch, row: int, value: Any) -> Any:
        kept = (scratch.keep[row // 32] & bit_of(row)) != 0
        return cutlass.select_(kept, value, Float32(0.0))

    def _add(
        self, i: int, level: str, at: int, tile: KvBlock, rows: Any, values: Any,
        known: list[Any], sums: CapturedSums,
    ) -> None:  # fmt: skip
        """Add the gradients of load `i` for some rows to its sums.

        `known` is the index at each score, from `hooks.dscore`; empty if it is not computed yet.
        """
        site, total, running = tile.site, sums.totals[self.hooks.gradient_slots[i]], sums.running
        if level in ("head", "column"):
            for value in values:
                running[at] = running[at] + value
        elif level == "row":
            lane, own = cute.arch.lane_idx(), self._summed([*values])
            each = 32 // len(values)  # lanes that hold the same sum
            q = rows[0][0]
            for k in range(1, len(rows)):
                q = cutlass.select_(lane // each == k, rows[k][0], q)
            place = self.place_of(i, site, total, q, None)
            adds = lane % each == 0
            if tile.sums_captured is not True:
                adds = adds & tile.sums_captured
            self.add_where(adds, place, own)
        else:
            kv, indices = tile.columns[0][0], known or [None] * len(values)
            places = [
                self.place_of(i, site, total, q, kv, index)
                for (q, _), index in zip(rows, indices, strict=True)
            ]
            self.add_each(i, total, sums.runs, places, values)

    def _summed(self, values: list[Any]) -> Any:
        """Return, in the k-th of equal groups of lanes, the sum of `values[k]` over the warp.

        In each step, a lane keeps half of its values and exchanges the other half with its partner.
        """
        lane = cute.arch.lane_idx()
        for step in (16, 8, 4, 2, 1):
            if len(values) == 1:
                values = [values[0] + cute.arch.shuffle_sync_bfly(values[0], step)]
                continue
            upper, half = (lane & step) != 0, len(values) // 2
            mine = [cutlass.select_(upper, values[k + half], values[k]) for k in range(half)]
            others = [cutlass.select_(upper, values[k], values[k + half]) for k in range(half)]
            values = [
                a + cute.arch.shuffle_sync_bfly(b, step) for a, b in zip(mine, others, strict=True)
            ]
        return values[0]

    def flush(self, tile: KvBlock, sums: CapturedSums) -> None:
        """Add the running sums of a work tile to the gradients in memory."""
        if not self.hooks.gradient_levels:
            return
        site, running, at = tile.site, sums.running, 0
        for i, level in enumerate(self.hooks.gradient_levels):
            total = sums.totals[self.hooks.gradient_slots[i]]
            if level == "head":
                self.add_of_warp(i, site, total, running[at])
            elif level == "column":
                place = self.place_of(i, site, total, None, tile.columns[0][0])
                self.add_where(tile.inside, place, running[at])
            at += RUNNING[level]
        self.end_runs(sums.runs, sums.totals)


def with_entropy(
    entropy: EntropyGrads, site: Any, rows: Any, logs: list[Any], dp: Sequence[Any]
) -> list[Any]:
    """Return dP - delta - g log(P) of some rows.

    Args:
        entropy: gradients g of the entropies.
        site: position of the kv block.
        rows: what `SoftmaxBackward.rows_of` returns.
        logs: log2(P) of these rows; with dropout, of P times the survivors' scale.
        dp: dP - delta of these rows.
    """
    found = []
    for (q, _), log, x in zip(rows, logs, dp, strict=True):
        factor = entropy.grads[site.b, site.h, q] * entropy.factor
        log = log if entropy.shift is None else log - entropy.shift
        found.append(cute.math.fma(factor, at_least(log), x))
    return found

"""Gradients of captured tensors, in the Blackwell backward.

A load whose index is known per head or per column is summed in a register over a whole piece of
work, one whose index is known per row over the columns of a warp, before anything is added to the
gradient in memory; any other is added element by element. All sums are float32.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, cute

from attnkit.templates.common.exact_sums import ExactSums
from attnkit.templates.common.site import Site

# values a thread sums over a piece
KEPT = {"head": 1, "column": 1, "row": 0, "relative": 0, "element": 0}


class Learned(ExactSums):
    """The part of a backward kernel that adds up the gradients of captured tensors."""

    hooks: Any
    exponentials: Any
    rows_of: Any

    def running(self) -> Any:
        """Registers for the sums of a piece."""
        count = sum(KEPT[level] for level in self.hooks.learned)
        return cute.make_rmem_tensor(max(count, 1), Float32)

    def gradients_learned(
        self, tile: Any, first: Any, scores: Any, kept: Any, lse: Any, dp: Any, at: int,
        running: Any, totals: Any,
    ) -> list[Any]:  # fmt: skip
        """dS of some rows; the gradients of captured tensors are added up.

        P is computed anew: the scores take its registers, and in the dtype it is not exact enough.

        Args:
            first: position of the first row.
            scores: q . k of all rows of the thread.
            kept: bits of the rows that the mask keeps.
            lse: as for `Weights.exponentials`.
            dp: dP - delta of these rows.
            at: which of the thread's rows is the first.
            running: see `running`.
            totals: as for the Hopper kernel.
        """
        where, head, columns, _ = tile
        site = Site(*where)
        count = len(dp)
        rows = self.rows_of(site, head, first, count, True)
        places = [(k, 0, scores[at + k]) for k in range(count)]
        exact = self.exponentials(site, head, rows, columns, places, lse)[0]
        ps = [self._if_kept(kept, at + k, exact[k]) for k in range(count)]
        grads = [(k, 0, s, ps[k] * dp[k]) for k, _, s in places]
        ds, values = self.hooks.adjoint(site, head, rows, columns, grads)
        place = 0
        for i, level in enumerate(self.hooks.learned):
            self.add(i, level, place, site, rows, columns, values[i], running, totals)
            place += KEPT[level]
        return ds

    def _if_kept(self, kept: Any, row: int, value: Any) -> Any:
        bit = (1 << row % 32) - (1 << 32) * (row % 32 == 31)
        return cutlass.select_((kept[row // 32] & bit) != 0, value, Float32(0.0))

    def add(
        self, i: int, level: str, at: int, site: Any, rows: Any, columns: Any, values: Any,
        running: Any, totals: Any,
    ) -> None:  # fmt: skip
        """Add the gradients of some rows of load i."""
        total = totals[self.hooks.slots[i]]
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
            self.add_where(lane % each == 0, total, place, own)
        else:
            for (q, _), value in zip(rows, values, strict=True):
                place = self.place_of(i, site, total, q, columns[0][0])
                self.add_where(value != Float32(0.0), total, place, value)

    def _summed(self, values: list[Any]) -> Any:
        """Sums of values over a warp's lanes, the first to the first lanes and so on.

        As long as there are several, a lane keeps half of them and gives the others away.
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

    def flush(self, tile: Any, running: Any, totals: Any) -> None:
        """Add what was summed over a piece."""
        if not self.hooks.learned:
            return
        where, _, columns, valid = tile
        site, at = Site(*where), 0
        for i, level in enumerate(self.hooks.learned):
            total = totals[self.hooks.slots[i]]
            if level == "head":
                self.add_of_warp(i, site, total, running[at])
            elif level == "column":
                place = self.place_of(i, site, total, None, columns[0][0])
                self.add_where(valid[0], total, place, running[at])
            at += KEPT[level]

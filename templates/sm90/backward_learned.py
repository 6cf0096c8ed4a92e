"""Gradients of captured tensors, in the Hopper backward.

A load whose index is known per head or per column is summed in registers over a whole piece of
work, one whose index is known per row over the columns of a warp, before anything is added to the
gradient in memory; any other is added element by element. All sums are float32.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from attnkit.templates.sm90 import device

KEPT = {"head": 1, "column": 2, "row": 0, "element": 0}  # values a thread sums over a piece


class Learned:
    """The part of a backward kernel that adds up the gradients of captured tensors."""

    hooks: Any
    config: Any
    dtype: Any
    site: Any  # of `Weights`, like the next
    exponentials: Any

    def running(self) -> Any:
        """Registers for the sums of a piece, or None."""
        count = sum(KEPT[level] for level in self.hooks.learned)
        return cute.make_rmem_tensor(max(count, 1), Float32)

    def gradients_learned(
        self, tile: Any, first: Any, scores: Any, weights: Any, statistic: Any, dp: Any, out: Any,
        running: Any, totals: Any,
    ) -> None:  # fmt: skip
        """dS to `out` in the dtype, and the gradients of captured tensors.

        P is computed anew: the scores take its registers, and in the dtype it is not exact enough.

        Args:
            first: the thread's first row.
            scores: q . k.
            weights: P as pairs of the dtype: 0 where masked.
            statistic: as for `Weights.weigh`.
            dp: dP - delta.
            running: see `running`.
            totals: the gradients, float32.
        """
        _, head, columns, _ = tile
        site = self.site(tile)
        pairs, results = cute.recast_tensor(weights, Int32), cute.recast_tensor(out, Int32)
        order = [(0, 0), (1, 0), (0, 1), (1, 1)]  # (row, column) of four elements
        for g in range(cute.size(scores) // 4):
            inside = [cutlass.min(first + 8 * g + k, site.q_len - 1) for k in range(2)]
            rows = [(at, self.hooks.row(site, head, at)) for at in inside]
            rough = [p for k in range(2) for p in unpack(pairs[2 * g + k], self.dtype)]
            places = [(j, c, scores[4 * g + i]) for i, (j, c) in enumerate(order)]
            exact = self.exponentials(site, head, rows, columns, places, statistic[None, g])[0]
            grads = [
                (j, c, s, self.nonzero(rough[i], exact[i]) * dp[4 * g + i])
                for i, (j, c, s) in enumerate(places)
            ]
            ds, values = self.hooks.adjoint(site, head, rows, columns, grads)
            for k in range(2):
                results[2 * g + k] = device.pack(ds[2 * k], ds[2 * k + 1], self.dtype)
            at = 0
            for i, level in enumerate(self.hooks.learned):
                self._add(i, level, at, site, rows, columns, values[i], running, totals)
                at += KEPT[level]

    def nonzero(self, rough: Any, exact: Any) -> Any:
        """An exact P, 0 where it is 0 in the dtype."""
        return cutlass.select_(rough == Float32(0.0), Float32(0.0), exact)

    def _add(
        self, i: int, level: str, at: int, site: Any, rows: Any, columns: Any, values: Any,
        running: Any, totals: Any,
    ) -> None:  # fmt: skip
        """Add the gradients of four elements of load i."""
        total = totals[self.hooks.slots[i]]
        if level == "head":
            running[at] = running[at] + ((values[0] + values[1]) + (values[2] + values[3]))
        elif level == "column":
            running[at] = running[at] + (values[0] + values[1])
            running[at + 1] = running[at + 1] + (values[2] + values[3])
        elif level == "row":
            low, high = values[0] + values[2], values[1] + values[3]
            lane = cute.arch.lane_idx()
            upper = (lane & 16) != 0
            # lanes that differ in bits 2 to 4 have the same rows: half of them take each
            own, other = cutlass.select_(upper, high, low), cutlass.select_(upper, low, high)
            own = own + cute.arch.shuffle_sync_bfly(other, 16)
            own = own + cute.arch.shuffle_sync_bfly(own, 8)
            own = own + cute.arch.shuffle_sync_bfly(own, 4)
            q = cutlass.select_(upper, rows[1][0], rows[0][0])
            place = self.hooks.place(i, site, total.shape, q, None)
            self.add_where((lane & 12) == 0, total, place, own)
        else:
            for k, value in enumerate(values):
                q, kv = rows[k % 2][0], columns[k // 2][0]
                place = self.hooks.place(i, site, total.shape, q, kv)
                self.add_where(value != Float32(0.0), total, place, value)

    def flush(self, tile: Any, running: Any, totals: Any) -> None:
        """Add what was summed over a piece."""
        if not self.hooks.learned:
            return
        site, columns, at = self.site(tile), tile[2], 0
        lane = cute.arch.lane_idx()
        for i, level in enumerate(self.hooks.learned):
            total = totals[self.hooks.slots[i]]
            if level == "head":
                value = running[at]
                for step in (16, 8, 4, 2, 1):
                    value = value + cute.arch.shuffle_sync_bfly(value, step)
                place = self.hooks.place(i, site, total.shape, None, None)
                self.add_where(lane == 0, total, place, value)
            elif level == "column":
                for c in range(2):
                    value = device.quad_sum(running[at + c])
                    place = self.hooks.place(i, site, total.shape, None, columns[c][0])
                    self.add_where((lane & 3) == 0, total, place, value)
            at += KEPT[level]

    def add_where(self, condition: Any, total: Any, place: Any, value: Any) -> None:
        """Add a value to a gradient in memory."""
        self.add_at(condition, cute.domain_offset(place, total).iterator, value)

    @cute.jit
    def add_at(self, condition: cutlass.Boolean, target: cute.Pointer, value: Float32):
        if condition:
            cute.arch.red(target, value, op="add", dtype="f32", sem="relaxed", scope="gpu")


def unpack(pair: Any, dtype: Any) -> tuple[Any, Any]:
    """Two 16-bit floats as float32."""
    if dtype is BFloat16:  # the upper half of a float32
        text = "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;"
    else:
        text = (
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
            "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
        )
    return cute.arch.inline_ptx(text, write_only_types=[Float32, Float32], read_only_args=[pair])

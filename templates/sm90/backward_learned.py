"""Gradients of captured tensors, in the Hopper backward.

A load whose index is known per head or per column is summed in registers over a whole piece of
work, one whose index is known per row over the columns of a warp, and one that depends on q - kv
along the diagonals of a warp (`Diagonals`), before anything is added to the gradient in memory; any
other is added element by element. All sums are float32, or exact in memory where sums have an order
(`exact_sums`).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.exact_sums import ExactSums

# values a thread sums over a piece
KEPT = {"head": 1, "column": 2, "row": 0, "relative": 0, "element": 0}


class Learned(ExactSums):
    """The part of a backward kernel that adds up the gradients of captured tensors."""

    hooks: Any
    config: Any
    dtype: Any
    site: Any  # of `Weights`, like the next
    exponentials: Any
    far: Any
    group: Any
    kept: Any
    kept_of: Any
    pair: Any  # of `Weights`

    def running(self) -> Any:
        """Registers for the sums of a piece, or None."""
        count = sum(KEPT[level] for level in self.hooks.learned)
        return cute.make_rmem_tensor(max(count, 1), Float32)

    def learn(
        self, mark: Any, masked: bool | None, tile: Any, row0: Any, scores: Any, weights: Any,
        statistic: Any, dp: Any, out: Any, running: Any, totals: Any,
    ) -> None:  # fmt: skip
        """P to `weights` and dS to `out` in the dtype, and the gradients of captured tensors.

        Args:
            mark: the block's number and bits.
            masked: compute the mask, and the ends of the tensors; None: `weights` are there, 0 where
                masked, and stay.
            row0: the thread's first row within the tile.
            scores: q . k.
            statistic: as for `Weights.weigh`.
            dp: dP - delta.
            running: see `running`.
            totals: see `Backward.__call__`.
        """
        site, head, columns = self.site(tile), tile[1], tile[2]
        first = (mark >> 2) * self.config.block_q + row0
        pairs, results = cute.recast_tensor(weights, Int32), cute.recast_tensor(out, Int32)
        bits = self.kept(mark, tile, first) if masked else []
        along: list[Any] = [
            Diagonals() if level == "relative" else None for level in self.hooks.learned
        ]
        d0 = first - tile[4]  # of columns beyond the end too: the warp's lanes count from it
        shared: dict[Any, Any] = {}
        far = self.far(mark, tile, row0)
        for g in range(cute.size(scores) // 4):
            rows, places = self.group(masked is not False, tile, first, g, scores)
            ps, _ = self.exponentials(
                site, head, rows, columns, places, self.pair(statistic, g), g, shared, far
            )
            kept = self.kept_of(mark, tile, rows, bits, g) if masked else None
            if masked is None:
                rough = (p for k in range(2) for p in unpack(pairs[2 * g + k], self.dtype))
                kept = [p != Float32(0.0) for p in rough]
            ps = _kept(kept, ps)
            grads = [(j, c, s, ps[i] * dp[4 * g + i]) for i, (j, c, s) in enumerate(places)]
            ds, values = self.hooks.adjoint(site, head, rows, columns, grads)
            if masked is None:
                kept = None  # P alone was masked: more selections would take registers
            ds = _kept(kept, ds)
            for k in range(2):
                if masked is not None:
                    pairs[2 * g + k] = device.pack(ps[2 * k], ps[2 * k + 1], self.dtype)
                results[2 * g + k] = device.pack(ds[2 * k], ds[2 * k + 1], self.dtype)
            at = 0
            for i, level in enumerate(self.hooks.learned):
                mine = _kept(kept, values[i])
                if level == "relative":
                    self._add_along(i, along[i].take(mine), d0, site, totals)
                else:
                    self._add(i, level, at, site, rows, columns, mine, running, totals)
                at += KEPT[level]
        for i, one in enumerate(along):
            if one is not None:
                self._add_along(i, one.rest(), d0, site, totals)

    def _add_along(self, i: int, sums: Any, d0: Any, site: Any, totals: Any) -> None:
        """Add what `Diagonals` has summed.

        Args:
            d0: q - kv of the thread's first element.
        """
        total = totals[self.hooks.slots[i]]
        lane = cute.arch.lane_idx()
        start = d0 - 2 * (lane % 4) + lane // 4  # of the warp's first row and column
        for offset, value in sums:
            d = start + offset
            q = cutlass.min(cutlass.max(d, Int32(0)), site.q_len - 1)
            kv = cutlass.min(cutlass.max(-d, Int32(0)), site.kv_len - 1)
            place = self.place_of(i, site, total, q, kv)
            self.add_where(value != Float32(0.0), total, place, value)

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
            place = self.place_of(i, site, total, q, None)
            self.add_where((lane & 12) == 0, total, place, own)
        else:
            for k, value in enumerate(values):
                q, kv = rows[k % 2][0], columns[k // 2][0]
                place = self.place_of(i, site, total, q, kv)
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
                self.add_of_warp(i, site, total, running[at])
            elif level == "column":
                for c in range(2):
                    value = device.quad_sum(running[at + c])
                    place = self.place_of(i, site, total, None, columns[c][0])
                    self.add_where((lane & 3) == 0, total, place, value)
            at += KEPT[level]


def _kept(kept: Any, values: list[Any]) -> list[Any]:
    """The values that are kept, 0 for the others."""
    if kept is None:
        return values
    return [cutlass.select_(k, x, Float32(0.0)) for k, x in zip(kept, values, strict=True)]


class Diagonals:
    """Sums along the diagonals of a warp's scores: 16 columns, rows eight at a time.

    A group of eight rows and eight columns is turned, its column r by r rows, so that each lane
    gets two values of the same diagonals whatever its column; those that came round belong to the
    group before. The eight lanes of equal rows then sum them, each keeping one of eight groups.
    """

    def __init__(self) -> None:
        lane = cute.arch.lane_idx()
        r, u = lane // 4, 2 * (lane % 4)
        self.lane, self.odd = lane, (r & 1) != 0
        quad = lane & 28
        self.sources = [quad | ((lane + (r + k) // 2) & 3) for k in range(2)]
        self.round = [u + k + r >= 8 for k in range(2)]
        zero = Float32(0.0)
        self.carry, self.last = [zero, zero], [zero, zero]
        self.waiting: dict[int, Any] = {}
        self.group = -2  # of the next result: its first diagonal is 8 times that

    def take(self, values: Any) -> list[Any]:
        """The next eight rows: values of (row, column) (0, 0), (1, 0), (0, 1), (1, 1).

        Returns:
            What is known now: (diagonal from the warp's first element, sum) of this lane.
        """
        low = [self.carry[k] + values[2 + k] for k in range(2)]
        self.carry = [values[0], values[1]]
        return self._turn(low)

    def rest(self) -> list[Any]:
        """What is left after the last rows."""
        found = self._turn(self.carry) + self._turn([Float32(0.0)] * 2)
        bit = 1
        while self.waiting:
            if bit in self.waiting:
                found += self._merge([Float32(0.0)] * 2, bit, self.group + bit - 1)
                self.group += bit
            bit *= 2
        return found

    def _turn(self, pair: list[Any]) -> list[Any]:
        sent = [cutlass.select_(self.odd, pair[1 - k], pair[k]) for k in range(2)]
        now = [cute.arch.shuffle_sync(x, at) for x, at in zip(sent, self.sources, strict=True)]
        both = zip(self.round, now, self.last, strict=True)
        done = [cutlass.select_(turned, x, before) for turned, x, before in both]
        self.last = now
        self.group += 1
        return self._merge(done, 1, self.group - 1)

    def _merge(self, pair: list[Any], bit: int, group: int) -> list[Any]:
        """Sum over the lanes, as in a binary counter: results of two groups make one."""
        if bit == 8:
            lane = self.lane
            mine = (lane >> 4 & 1) | (lane >> 2 & 2) | (lane & 4)
            first = 8 * (group - 7 + mine) + 2 * (lane % 4)
            return [(first + k, x) for k, x in enumerate(pair)]
        if bit not in self.waiting:
            self.waiting[bit] = pair
            return []
        other, step = self.waiting.pop(bit), 16 // bit
        upper = (self.lane & step) != 0
        merged = []
        for before, x in zip(other, pair, strict=True):
            own, rest = cutlass.select_(upper, x, before), cutlass.select_(upper, before, x)
            merged.append(own + cute.arch.shuffle_sync_bfly(rest, step))
        return self._merge(merged, 2 * bit, group)


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

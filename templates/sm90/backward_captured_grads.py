"""Compute gradients of captured tensors in the Hopper backward.

The gradient of a load is reduced in registers before it is added in memory. The reduction depends
on the level at which the load's index is known: over a whole work tile for "head" and "column",
over the columns of a warp for "row", along the diagonals of a warp (`Diagonals`) for "relative"
(q - kv). Gradients of other loads are added element by element. Where several diagonals or elements
read the same entry, a thread sums them first (`common.place_runs`). All sums are float32, or exact
in memory if sums have an order (`common.exact_sums`). The gradient of a full bias that has an
element of its own for each score of the call is stored, not added; one that the batch shares is
stored by one batch element (`backward_leaders`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.place_runs import CapturedSums, PlaceRuns
from attnkit.templates.common.work_tile import APPLY_MASK
from attnkit.templates.sm90.backward_bias_first import recompute_addresses
from attnkit.templates.sm90.backward_config import BackwardConfig
from attnkit.templates.sm90.backward_leaders import LEADER
from attnkit.templates.sm90.backward_shared import load_pair
from attnkit.templates.sm90.backward_softmax import KvBlock, QBlock, SoftmaxBackward

# Levels of loads whose index needs no value of the score's stages.
POSITIONS = frozenset({"head", "column", "row", "relative"})
# number of values that a thread sums over a work tile, by the level of the load
RUNNING = {"head": 1, "column": 2, "row": 0, "relative": 0, "element": 0}


def follows_p(config: BackwardConfig, hooks: BackwardHooks) -> bool:
    """Return whether gradients of captured tensors need dS alone, so that P need not wait for dP.

    Otherwise they need the scores beside dP, and a thread has no registers for P as well.
    """
    fits = not (config.weights or config.with_entropy or config.with_dropout or config.rounded)
    pairs = zip(hooks.gradient_levels, hooks.gradient_repeats, strict=True)
    known = all(
        level in POSITIONS or (config.bias_first and not repeats) for level, repeats in pairs
    )
    return bool(hooks.gradient_levels) and fits and hooks.gradient_is_dscore and known


class CapturedGrads(PlaceRuns):
    """Accumulates the gradients of captured tensors.

    Args:
        config: compile-time configuration.
        softmax: recomputes P, with mod and mask.
    """

    def __init__(self, config: BackwardConfig, softmax: SoftmaxBackward) -> None:
        self.config = config
        self.softmax = softmax
        self.hooks = softmax.hooks
        stored = any((*self.hooks.gradient_is_stored, *self.hooks.gradient_is_led))
        if stored and (config.sum_order or not follows_p(config, self.hooks)):
            raise ValueError("only `compute_ds` stores gradients, and only of float32")
        self.dtype = softmax.dtype

    def begin(self, totals: Any) -> CapturedSums:
        """Allocate registers for the sums of a work tile."""
        count = sum(RUNNING[level] for level in self.hooks.gradient_levels)
        running = cute.make_rmem_tensor(max(count, 1), Float32)  # f32 [values]
        return CapturedSums(running, self.make_runs(), totals)

    def reset(self, sums: CapturedSums) -> None:
        """Set the sums of the previous work tile, which are in memory, to 0."""
        sums.running.fill(0.0)
        self.begin_runs(sums.runs)

    def compute_ds(
        self, block: QBlock, tile: KvBlock, probs: cute.Tensor, p: cute.Tensor, dp: cute.Tensor,
        ds: cute.Tensor, sums: CapturedSums,
    ) -> None:  # fmt: skip
        """Compute dS, and add sums of it to the gradients of captured tensors.

        Use this if `follows_p`. Masked scores have P = 0, so the mask is not needed again.

        Args:
            block: the q block.
            tile: values of the kv block.
            probs: f32 P.
            p: P in the dtype, written.
            dp: f32 dP - delta.
            ds: dS in the dtype, written.
            sums: sums of the gradients of captured tensors.
        """
        site, columns = tile.site, tile.columns
        first = self.softmax.first_row(block)
        pairs, results = cute.recast_tensor(p, Int32), cute.recast_tensor(ds, Int32)
        learned = self.hooks.gradient_levels
        diagonals: list[Any] = [Diagonals() if level == "relative" else None for level in learned]
        d0 = first - tile.first_column  # not clamped to the tensors: lanes are offset from it
        local = recompute_addresses(tile, block.word) if "element" in learned else tile
        for g in range(cute.size(probs) // 4):
            ps = [probs[4 * g + i] for i in range(4)]
            grads = [x * dp[4 * g + i] for i, x in enumerate(ps)]
            for k in range(2):
                pairs[2 * g + k] = device.pack(ps[2 * k], ps[2 * k + 1], self.dtype)
                results[2 * g + k] = device.pack(grads[2 * k], grads[2 * k + 1], self.dtype)
            rows = [(cutlass.min(first + 8 * g + k, site.q_len - 1),) for k in range(2)]
            at = 0
            for i, level in enumerate(learned):
                if level == "relative":
                    self._add_along(i, diagonals[i].take(grads), d0, site, sums)
                elif level == "element":
                    self._add_elements(i, first + 8 * g, local, grads, sums)
                else:
                    self._add(i, level, at, site, rows, columns, grads, [], sums)
                at += RUNNING[level]
        for i, one in enumerate(diagonals):
            if one is not None:
                self._add_along(i, one.rest(), d0, site, sums)

    def _add_elements(
        self, i: int, first: Any, tile: KvBlock, grads: Sequence[Any], sums: CapturedSums
    ) -> None:
        """Add four gradients of load `i`, whose level is "element", in memory, or store them.

        Args:
            i: index of the load, a full bias.
            first: the first of the two rows, not clamped to the tensors.
            tile: values of the kv block.
            grads: at (row, column) (0, 0), (1, 0), (0, 1), (1, 1).
            sums: sums of the gradients of captured tensors.
        """
        site, total = tile.site, sums.totals[self.hooks.gradient_slots[i]]
        for k, value in enumerate(grads):
            # Not clamped, so that both columns share the address of a row: the index of a full bias
            # reads no tensor at q or kv.
            q, kv, inside = first + k % 2, tile.first_column + 8 * (k // 2), tile.inside[k // 2]
            place = self.place_of(i, site, total, q, kv)
            # outside of the tensors P is 0, but not dP, which may be NaN
            if self.hooks.gradient_is_stored[i]:  # zeros too: the memory holds anything
                self.store_at((q < site.q_len) & inside, place, value)
            elif self.hooks.gradient_is_led[i]:
                inside, leads = (q < site.q_len) & inside, site.b == LEADER
                self.store_at(inside & leads, place, value, again=True)
                follows = inside & (site.b != LEADER)
                self.add_at(follows & (value != Float32(0.0)), place, value, again=False)
            else:
                self.add_where((value != Float32(0.0)) & (q < site.q_len) & inside, place, value)

    @cute.jit
    def compute_p_ds(
        self,
        block: QBlock,
        tile: KvBlock,
        scores: cute.Tensor,
        p: cute.Tensor,
        dp: cute.Tensor,
        ds: cute.Tensor,
        sums: CapturedSums,
        first: cutlass.Constexpr,
    ):
        """Call `compute`, with the mask if the block needs it.

        A work tile's `first` block is masked in any case, which changes nothing in a FULL block and
        saves a copy of the code. A mask that is computed for each score is not applied to those.
        """
        known = not self.hooks.has_mask or self.hooks.intervals is not None
        if cutlass.const_expr(any(self.hooks.gradient_by_block)):
            self._compute_by_block(block, tile, scores, p, dp, ds, sums)
        elif cutlass.const_expr(first and known):
            self.compute(block, True, tile, scores, p, dp, ds, sums)
        elif (block.word & APPLY_MASK) != 0:
            self.compute(block, True, tile, scores, p, dp, ds, sums)
        else:
            self.compute(block, False, tile, scores, p, dp, ds, sums)

    @cute.jit
    def _compute_by_block(
        self,
        block: QBlock,
        tile: KvBlock,
        scores: cute.Tensor,
        p: cute.Tensor,
        dp: cute.Tensor,
        ds: cute.Tensor,
        sums: CapturedSums,
    ):
        """Call `compute` with `by_block` for a FULL block whose rows have the same `row_values`.

        Other FULL blocks are masked too, which changes nothing, so that there are two copies of the
        code and not three. A mask that is computed for each score is not applied to them.
        """
        masked = (block.word & APPLY_MASK) != 0
        equal = Boolean(False)
        if not masked:
            equal = self._rows_are_equal(block, tile)
        if equal:
            self.compute(block, False, tile, scores, p, dp, ds, sums, by_block=True)
        elif cutlass.const_expr(not self.hooks.has_mask or self.hooks.intervals is not None):
            self.compute(block, True, tile, scores, p, dp, ds, sums)
        elif masked:
            self.compute(block, True, tile, scores, p, dp, ds, sums)
        else:
            self.compute(block, False, tile, scores, p, dp, ds, sums)

    def _rows_are_equal(self, block: QBlock, tile: KvBlock) -> Any:
        """Return whether all rows of an unmasked block have the same `row_values`, per warp."""
        first = (block.word >> 2) * self.config.block_q
        expected = self.hooks.row_values(tile.site, first)
        equal = Boolean(True)
        for rows in range(0, self.config.block_q, 32):
            at = cutlass.min(rows + cute.arch.lane_idx(), Int32(self.config.block_q - 1))
            for value, other in zip(
                self.hooks.row_values(tile.site, first + at), expected, strict=True
            ):
                equal = equal & (value == other)
        return cute.arch.vote_all_sync(equal)

    def compute(
        self,
        block: QBlock,
        masked: bool | None,
        tile: KvBlock,
        scores: cute.Tensor,
        p: cute.Tensor,
        dp: cute.Tensor,
        ds: cute.Tensor,
        sums: CapturedSums,
        by_block: bool = False,
        words: cute.Tensor | None = None,
    ) -> None:
        """Write P to `p` and dS to `ds` in the dtype, and add the gradients of captured tensors.

        Args:
            block: the q block.
            masked: whether to apply the mask and the ends of the tensors. None if `p` already
                contains masked P, without dropout; it is then not written.
            tile: values of the kv block.
            scores: f32 S, raw scores.
            p: P in the dtype.
            dp: f32 dP - delta.
            ds: dS in the dtype, written.
            sums: sums of the gradients of captured tensors.
            by_block: whether all rows of the block have the same `BackwardHooks.row_values`.
            words: the random bits of dropout, if they are known, see `BackwardDropout`.
        """
        softmax, learned = self.softmax, self.hooks.gradient_levels
        dropout = softmax.dropout(block, tile, cute.size(scores) // 4, words)
        site, head, columns = tile.site, tile.head, tile.columns
        first = (block.word >> 2) * self.config.block_q + block.row0
        pairs, results = cute.recast_tensor(p, Int32), cute.recast_tensor(ds, Int32)
        bits = softmax.mask_bits(block, tile, first) if masked else []
        diagonals: list[Any] = [Diagonals() if level == "relative" else None for level in learned]
        d0 = first - tile.first_column  # not clamped to the tensors: lanes are offset from it
        shared: dict[Any, Any] = {}
        terms = softmax.alibi.terms(block, tile)
        known = self.hooks.block_values(site, first, columns) if by_block else None
        in_block = [
            ColumnSums() if by_block and one else None for one in self.hooks.gradient_by_block
        ]
        for g in range(cute.size(scores) // 4):
            rows, places = softmax.group(masked is not False, tile, first, g, scores)
            lse = load_pair(block.lse, g)
            ps, _ = softmax.exponentials(tile, rows, places, lse, g, shared, terms, known)
            keep = softmax.keep(block, tile, rows, bits, g) if masked else None
            if masked is None:
                rough = (w for k in range(2) for w in device.unpack(pairs[2 * g + k], self.dtype))
                keep = [w != Float32(0.0) for w in rough]
            ps = _select(keep, ps)
            dps = [dp[4 * g + i] for i in range(4)]
            if dropout is not None:
                dps = [x for i in (0, 2) for x in dropout.dp(4 * g + i, dps[i], dps[i + 1])]
            dfs = softmax.score_gradients(ps, dps)
            grads = [(j, c, s, dfs[i]) for i, (j, c, s) in enumerate(places)]
            dscores, values, indices = self.hooks.dscore(site, head, rows, columns, grads, known)
            if masked is None:
                keep = None  # mask only P: more selections would need more registers
            dscores = _select(keep, dscores)
            for k in range(2):
                if masked is not None:
                    packed = device.pack(ps[2 * k], ps[2 * k + 1], self.dtype)
                    if dropout is not None:
                        packed = dropout.p(4 * g + 2 * k, packed)
                    pairs[2 * g + k] = packed
                results[2 * g + k] = device.pack(dscores[2 * k], dscores[2 * k + 1], self.dtype)
            at = 0
            for i, level in enumerate(learned):
                kept = _select(keep, values[i])
                if level == "relative":
                    self._add_along(i, diagonals[i].take(kept), d0, site, sums)
                elif (block_sums := in_block[i]) is not None:
                    block_sums.take(kept, indices[i])
                else:
                    self._add(i, level, at, site, rows, columns, kept, indices[i], sums)
                at += RUNNING[level]
        for i, one in enumerate(diagonals):
            if one is not None:
                self._add_along(i, one.rest(), d0, site, sums)
        for i, block_sums in enumerate(in_block):
            if block_sums is not None:
                self._add_block(i, block_sums, site, first, columns, sums)

    def _add_block(
        self, i: int, block_sums: Any, site: Any, q: Any, columns: Any, sums: CapturedSums
    ) -> None:
        """Add the sums of a q block to the gradient of load `i`, which reads one place per column.

        `q` is the position of one of the rows.
        """
        total = sums.totals[self.hooks.gradient_slots[i]]
        places = [
            self.place_of(i, site, total, q, kv, index)
            for (kv, *_), index in zip(columns, block_sums.indices, strict=True)
        ]
        self.add_of_block(i, total, sums.runs, places, block_sums.totals)

    def _add_along(self, i: int, diagonals: Any, d0: Any, site: Any, sums: CapturedSums) -> None:
        """Add sums along diagonals to the gradient of load `i` in memory.

        Args:
            i: index of the load.
            diagonals: (diagonal, sum) of this lane, as `Diagonals.take` returns them.
            d0: q - kv of the thread's first element.
            site: position of the tile.
            sums: sums of the gradients of captured tensors.
        """
        total = sums.totals[self.hooks.gradient_slots[i]]
        lane = cute.arch.lane_idx()
        start = d0 - 2 * (lane % 4) + lane // 4  # of the warp's first row and column
        for offset, value in diagonals:
            # The index depends on q - kv alone. Beyond the ends of the tensors, the sum is 0.
            d = cutlass.min(cutlass.max(start + offset, 1 - site.kv_len), site.q_len - 1)
            place = self.place_of(i, site, total, d, Int32(0))
            self.add_each(i, total, sums.runs, [place], [value])

    def _add(
        self, i: int, level: str, at: int, site: Any, rows: Any, columns: Any, values: Any,
        known: list[Any], sums: CapturedSums,
    ) -> None:  # fmt: skip
        """Add the gradients of load `i` at four scores, in registers or in memory.

        `known` is the index at each score, from `hooks.dscore`; empty if it is not computed yet.
        """
        total, running = sums.totals[self.hooks.gradient_slots[i]], sums.running
        if level == "head":
            running[at] = running[at] + ((values[0] + values[1]) + (values[2] + values[3]))
        elif level == "column":
            running[at] = running[at] + (values[0] + values[1])
            running[at + 1] = running[at + 1] + (values[2] + values[3])
        elif level == "row":
            low, high = values[0] + values[2], values[1] + values[3]
            lane = cute.arch.lane_idx()
            upper = (lane & 16) != 0
            # lanes that differ in bits 2 to 4 have the same two rows: each half reduces one row
            own, other = cutlass.select_(upper, high, low), cutlass.select_(upper, low, high)
            own = own + cute.arch.shuffle_sync_bfly(other, 16)
            own = own + cute.arch.shuffle_sync_bfly(own, 8)
            own = own + cute.arch.shuffle_sync_bfly(own, 4)
            q = cutlass.select_(upper, rows[1][0], rows[0][0])
            place = self.place_of(i, site, total, q, None)
            self.add_where((lane & 12) == 0, place, own)
        else:
            at_score = [(rows[k % 2][0], columns[k // 2][0]) for k in range(len(values))]
            indices = known or [None] * len(values)
            places = [
                self.place_of(i, site, total, q, kv, index)
                for (q, kv), index in zip(at_score, indices, strict=True)
            ]
            self.add_each(i, total, sums.runs, places, values)

    def flush(self, tile: KvBlock, sums: CapturedSums) -> None:
        """Add the register sums of a work tile to the gradients in memory."""
        if not self.hooks.gradient_levels:
            return
        site, columns, running, at = tile.site, tile.columns, sums.running, 0
        lane = cute.arch.lane_idx()
        for i, level in enumerate(self.hooks.gradient_levels):
            total = sums.totals[self.hooks.gradient_slots[i]]
            if level == "head":
                self.add_of_warp(i, site, total, running[at])
            elif level == "column":
                for c in range(2):
                    value = device.quad_sum(running[at + c])
                    place = self.place_of(i, site, total, None, columns[c][0])
                    self.add_where((lane & 3) == 0, place, value)
            at += RUNNING[level]
        self.end_runs(sums.runs, sums.totals)


def _select(keep: Any, values: list[Any]) -> list[Any]:
    """Return `values` with 0 where `keep` is False; unchanged if `keep` is None."""
    if keep is None:
        return values
    return [cutlass.select_(k, x, Float32(0.0)) for k, x in zip(keep, values, strict=True)]


class ColumnSums:
    """Sums the values of a thread's two columns over the rows of a q block.

    Attributes:
        totals: the sum of each column.
        indices: the index of each column, from `hooks.dscore`.
    """

    def __init__(self) -> None:
        self.totals = [Float32(0.0), Float32(0.0)]
        self.indices: list[Any] = []

    def take(self, values: Any, indices: Any) -> None:
        """Add four values, at (row, column) (0, 0), (1, 0), (0, 1), (1, 1)."""
        self.totals = [self.totals[c] + (values[2 * c] + values[2 * c + 1]) for c in range(2)]
        self.indices = [indices[0], indices[2]]


class Diagonals:
    """Sums values along the diagonals of a warp's scores: 16 columns, eight rows at a time.

    A group of eight rows and eight columns is rotated: column r by r rows. The eight lanes that
    held the same two rows then hold values of the same two diagonals. Values that wrap around
    belong to the previous group. These lanes sum their values, and each lane keeps the sums of one
    group in eight.
    """

    def __init__(self) -> None:
        lane = cute.arch.lane_idx()
        r, u = lane // 4, 2 * (lane % 4)
        self.lane, self.odd = lane, (r & 1) != 0
        quad = lane & 28
        self.sources = [quad | ((lane + (r + k) // 2) & 3) for k in range(2)]
        self.wraps = [u + k + r >= 8 for k in range(2)]
        zero = Float32(0.0)
        self.carry, self.last = [zero, zero], [zero, zero]
        self.waiting: dict[int, Any] = {}
        self.group = -2  # group of the next result; its first diagonal is 8 times this

    def take(self, values: Any) -> list[Any]:
        """Add the thread's four values in the next eight rows.

        Args:
            values: at (row, column) (0, 0), (1, 0), (0, 1), (1, 1).

        Returns:
            The complete sums of this lane as (diagonal, sum); the diagonal is relative to that of
            the warp's first element.
        """
        low = [self.carry[k] + values[2 + k] for k in range(2)]
        self.carry = [values[0], values[1]]
        return self._rotate(low)

    def rest(self) -> list[Any]:
        """Return the remaining sums after the last rows, in the form of `take`."""
        done = self._rotate(self.carry) + self._rotate([Float32(0.0)] * 2)
        bit = 1
        while self.waiting:
            if bit in self.waiting:
                done += self._merge([Float32(0.0)] * 2, bit, self.group + bit - 1)
                self.group += bit
            bit *= 2
        return done

    def _rotate(self, pair: list[Any]) -> list[Any]:
        """Rotate a group of eight rows, merge the previous group, and return complete sums."""
        sent = [cutlass.select_(self.odd, pair[1 - k], pair[k]) for k in range(2)]
        now = [cute.arch.shuffle_sync(x, at) for x, at in zip(sent, self.sources, strict=True)]
        both = zip(self.wraps, now, self.last, strict=True)
        done = [cutlass.select_(turned, x, before) for turned, x, before in both]
        self.last = now
        self.group += 1
        return self._merge(done, 1, self.group - 1)

    def _merge(self, pair: list[Any], bit: int, group: int) -> list[Any]:
        """Sum `pair` over the lanes like a binary counter: results of two groups make one."""
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

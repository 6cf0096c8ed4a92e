"""Compute the softmax of a Hopper consumer warpgroup: maxima, exponentials and sums.

`scores` says which elements of a tile a thread holds.

The online softmax is that of Milakov and Gimelshein (2018). Rescaling only where a maximum grew by
more than 8 in log2 units is from FlashAttention-4. "delayed-max" computes P against the maximum of
the previous blocks, and recomputes P from the scores if the sums are too large. Most blocks then
need no maximum.

The methods are traced inside the kernel. Those with a dynamic branch are `cute.jit`. The others are
plain Python, so that they can pass records and the hooks' tuples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import NEG_INF, RESCALE_THRESHOLD
from attnkit.templates.common.dropout import survivor_scale
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.common.softmax import at_least, largest, own_sink, rescaled_moment
from attnkit.templates.sm90.columns_in_mma import largest_term
from attnkit.templates.sm90.config import ForwardConfig
from attnkit.templates.sm90.scores import (
    ROWS,
    BlockValues,
    Scores,
    TileValues,
    column_of,
    row_of,
)
from attnkit.templates.sm90.weights import write_scores, write_sigmoids

# The delayed maximum is kept while a thread's sum of P over a row of a block does not exceed this.
# No P is larger than the sum, so that P in float16 (at most 65504) cannot overflow.
SUM_CEILING = 2.0**12
CHAINS = 4  # independent dependency chains of maxima and sums, to hide latency


@dataclass(frozen=True)
class RowState:
    """Holds the running softmax state of a thread's two rows.

    Attributes:
        max: f32 [2], the maximum that is subtracted in P and in `sum`.
        sum: f32 [2], sum of P over the thread's columns.
        scale: f32 [2], factor that rescales O and the sums of previous blocks; in the epilogue, the
            factor of the output.
        highest: f32 [2], the largest score, if the kernel writes the maxima.
        moment: f32 [2], sum of P log2(P) over the thread's columns, if the kernel writes entropies;
            otherwise `highest`.
    """

    max: cute.Tensor
    sum: cute.Tensor
    scale: cute.Tensor
    highest: cute.Tensor
    moment: cute.Tensor

    @staticmethod
    def create(need_entropy: bool) -> RowState:
        """Allocate the state in registers."""
        row_max = cute.make_rmem_tensor(ROWS, Float32)  # f32 [2]
        row_sum = cute.make_rmem_tensor(ROWS, Float32)  # f32 [2]
        scale = cute.make_rmem_tensor(ROWS, Float32)  # f32 [2]
        highest = cute.make_rmem_tensor(ROWS, Float32)  # f32 [2]
        moment = highest
        if need_entropy:
            moment = cute.make_rmem_tensor(ROWS, Float32)  # f32 [2]
        return RowState(row_max, row_sum, scale, highest, moment)

    def reset(self) -> None:
        """Reset maxima and sums for a new work tile."""
        for r in range(ROWS):
            self.max[r], self.sum[r] = Float32(NEG_INF), Float32(0.0)
            self.highest[r] = Float32(NEG_INF)


class Softmax:
    """Computes P from the scores of a block in a consumer warpgroup.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
        scores: the scores to which the softmax applies mod and mask.
    """

    def __init__(self, config: ForwardConfig, hooks: ForwardHooks, scores: Scores) -> None:
        self.config = config
        self.hooks = hooks
        self.scores = scores
        self.dtype = device.DTYPES[config.dtype]

    def sink(self, site: Site, split_slot: Int32) -> Float32 | None:
        """Return the sink that the epilogue of this work tile adds to its rows; None for none."""
        return own_sink(self.hooks.sink(site.tensors, site.h), split_slot)

    def scale_survivors(self, captured: list, state: RowState) -> None:
        """Multiply the factor of the output by the scale of the elements that dropout keeps."""
        if self.hooks.has_dropout:
            scale = survivor_scale(self.hooks.dropout(captured))
            for r in range(ROWS):
                state.scale[r] = state.scale[r] * scale

    def compute_p(
        self,
        acc_s: cute.Tensor,
        p: cute.Tensor | None,
        r: int,
        reference: Float32 | None,
        factor: Float32 | None,
        visit: Any = None,
        small: bool = True,
        moment: cute.Tensor | None = None,
        finite: bool = False,
    ) -> Any:
        """Compute P of row `r` from its scores, and return the thread's sum over the row.

        Args:
            acc_s: scores; overwritten only if `p` is None.
            p: registers for packed pairs of P; None writes P unpacked over the scores.
            r: the row, 0 or 1.
            reference: subtracted from the scores times the factor, in log2 units; None for 0.
            factor: factor of the scores; None for 1.
            visit: called with each pair of elements, to interleave other instructions.
            small: whether an exponent may be below -126.
            moment: f32 [2], in which row `r` is set to the thread's sum of P log2(P) if the kernel
                writes entropies.
            finite: whether `moment` may become NaN if a score is -inf; that saves instructions.
        """
        mine = [i for i in range(cute.size(acc_s)) if row_of(i) == r]
        sums: list[Any] = [None] * CHAINS
        product_sum: Any = None  # a single chain: it waits for exponentials anyway
        pairs = None if p is None else cute.recast_tensor(p, Int32)  # i32, two of P each
        poly, minus = self.config.poly, None if reference is None else -reference
        for t in range(0, len(mine), 2):
            values, exponents = [], []
            for k, i in enumerate(mine[t : t + 2]):
                x = device.shifted(acc_s[i], factor, minus)
                exponents.append(x)
                on_fma = poly and not small and (t + k) % poly == poly - 1
                values.append(device.exp2_on_fma(x) if on_fma else device.exp2(x))
            for k, value in enumerate(values):
                c = (t + k) % CHAINS
                sums[c] = value if sums[c] is None else sums[c] + value
                if self.config.need_entropy:
                    exponent = exponents[k] if finite else at_least(exponents[k])
                    product_sum = device.shifted(value, exponent, product_sum)
            if pairs is None:
                acc_s[mine[t]], acc_s[mine[t + 1]] = values
            else:
                pairs[mine[t] // 2] = device.pack(values[0], values[1], self.dtype)
            if visit is not None:
                visit(mine[t], mine[t + 1])
        if moment is not None and self.config.need_entropy:
            moment[r] = product_sum
        return _added(sums)

    def bases(
        self, tile: TileValues, block: BlockValues, base: Any, acc_s: cute.Tensor, state: RowState
    ) -> Any:
        """Return the term to add to the scores of each row of a block, after the mask.

        It is `base`, what `Scores.apply_score_mod` returned, unless a block with `columns_in_mma` is
        odd, or a row with `bias_first` has a very large maximum. Scores of such rows are counted from
        their maximum: the product of a score with the factor, which is exact, would otherwise differ
        from the product of the maximum with the factor, which is rounded.
        """
        odd = block.odd
        if odd is None and not self.config.bias_first:
            return base
        factor = self.scores.factor(tile)
        limit = largest_term(Float32(1.0) if factor is None else factor)
        if self.config.bias_first:
            large = Boolean(False)
            for r in range(ROWS):  # rows that have kept nothing yet, too
                large = large | (state.max[r] <= -limit) | (state.max[r] >= limit)
            odd = cute.arch.vote_any_sync(large)
        bases = cute.make_rmem_tensor(ROWS, Float32)  # f32 [2]
        bases.fill(0.0 if base is None else base)
        self._count_from_maxima(odd, limit, acc_s, bases)
        return tuple(bases[r] for r in range(ROWS))

    @cute.jit
    def _count_from_maxima(
        self, odd: Boolean, limit: Float32, acc_s: cute.Tensor, bases: cute.Tensor
    ):
        """Subtract a very large maximum from the scores of its row, and write it to `bases`."""
        if odd:
            for r in cutlass.range_constexpr(ROWS):
                top = device.quad_max(_row_peak(acc_s, r, None, False), False)
                size = cutlass.max(top, -top)
                large = (size >= limit) & (size < Float32(math.inf))
                bases[r] = cutlass.select_(large, top, Float32(0.0))
                for i in cutlass.range_constexpr(cute.size(acc_s)):
                    if const_expr(row_of(i) == r):
                        acc_s[i] = acc_s[i] - bases[r]

    def first_block(
        self,
        tile: TileValues,
        base: Any,
        acc_s: cute.Tensor,
        p: cute.Tensor,
        state: RowState,
        left_only: bool = False,
    ) -> None:
        """Compute the softmax of a tile's first block: the row maxima, then P.

        Args:
            tile: values of the work tile.
            base: term to add to all scores of the block, or a tuple of those of each row, or None.
            acc_s: scores.
            p: registers for packed P.
            state: state of the thread's rows, written.
            left_only: whether all scores in the right half of the block are masked, so that P is 0
                there. They are not read.
        """
        nan = self.config.need_max  # torch's maximum propagates NaN
        factor = self.scores.factor(tile)
        if self.config.weights:
            self._write_weights(None, acc_s, p, factor)
            return
        if left_only:
            half = cute.size(p) // 2
            pairs = cute.recast_tensor(p, Int32)  # i32, two of P each
            for i in range(half // 2, half):
                pairs[i] = Int32(0)
            acc_s = cute.make_tensor(acc_s.iterator, cute.make_layout(half))  # the left columns
        for r in range(ROWS):
            reference = None
            if self.config.softmax != "no-max":
                own = _of_row(base, r)
                state.max[r] = device.quad_max(_row_peak(acc_s, r, own, nan), nan)
                reference = _reference(state.max[r], own, factor)
                if const_expr(self.config.need_max):
                    state.highest[r] = state.max[r]
            state.sum[r] = self.compute_p(acc_s, p, r, reference, factor, moment=state.moment)

    def next_block(
        self,
        tile: TileValues,
        block: BlockValues,
        bits: list[list[Int32]] | None,
        acc_s: cute.Tensor,
        p: cute.Tensor | None,
        state: RowState,
        masked: tuple[Boolean, Int32] | None = None,
    ) -> None:
        """Compute the softmax of a later block, and set `state.scale` to the rescale factor of O.

        Args:
            tile: values of the work tile.
            block: values of the kv block.
            bits: see `Scores.mask_bits`; None for a block without a mask, and with `masked`.
            acc_s: scores.
            p: registers for P; None writes P unpacked over the scores.
            state: state of the thread's rows, updated.
            masked: with `Scores.one_loop`, whether the block needs the mask, and its number in shared
                memory; otherwise None.
        """
        base, factor = self.scores.apply_score_mod(tile, block, acc_s), self.scores.factor(tile)
        kind = self.config.softmax
        if masked is not None:
            self.scores.mask_if(*masked, tile, acc_s)
        if kind != "sigmoid":
            self.scores.apply_mask(bits, acc_s)
        base = self.bases(tile, block, base, acc_s, state)
        if self.config.weights:
            self._write_weights(bits, acc_s, p, factor)
        elif kind == "no-max":
            row_sum, moment, small = state.sum, self._block_moment(), bits is not None
            for r in range(ROWS):
                total = self.compute_p(acc_s, p, r, None, factor, small=small, moment=moment)
                row_sum[r] = row_sum[r] + total
            self._add_moment(state, moment)
        elif kind == "delayed-max":
            self._delayed_max(acc_s, p, state, base, factor, bits is None and masked is None)
        else:
            self._online(acc_s, p, state, base, factor)

    def _write_weights(
        self,
        bits: list[list[Int32]] | None,
        acc_s: cute.Tensor,
        p: cute.Tensor | None,
        factor: Float32 | None,
    ) -> None:
        """Write P of a block without a softmax over the scores; if `p` is given, pack it there.

        `bits` is the mask of a sigmoid that the scores do not have yet.
        """
        if self.config.softmax == "sigmoid":
            factor = Float32(1.0) if factor is None else factor
            write_sigmoids(acc_s, factor, not self.hooks.only_scales)
            self.scores.apply_mask(bits, acc_s, 0.0)
        else:
            write_scores(acc_s, factor)
        if p is not None:
            pairs = cute.recast_tensor(p, Int32)  # i32, two of P each
            for i in range(0, cute.size(acc_s), 2):
                pairs[i // 2] = device.pack(acc_s[i], acc_s[i + 1], self.dtype)

    def _block_moment(self) -> cute.Tensor | None:
        """Allocate registers for a block's sums of P log2(P); None without entropies."""
        if not self.config.need_entropy:
            return None
        return cute.make_rmem_tensor(ROWS, Float32)  # f32 [2]

    def _add_moment(self, state: RowState, moment: cute.Tensor | None) -> None:
        """Add a block's sums of P log2(P) to those of the work tile."""
        if moment is not None:
            for r in range(ROWS):
                state.moment[r] = state.moment[r] + moment[r]

    def _delayed_max(
        self,
        acc_s: cute.Tensor,
        p: cute.Tensor | None,
        state: RowState,
        base: Any,
        factor: Float32 | None,
        finite: bool,
    ) -> None:
        """Compute P against the maximum of the previous blocks, and recompute it if that is unsafe.

        The row sums show whether it is safe, because no P is larger than the sum of its row. With
        entropies, P is also recomputed if the block was assumed to be `finite` and is not.
        """
        exact = self.config.need_max
        peak = cute.make_rmem_tensor(ROWS, Float32)  # f32 [2], the block's maxima
        total = cute.make_rmem_tensor(ROWS, Float32)  # f32 [2], the block's sums
        moment = self._block_moment()
        grown = Boolean(False)
        for r in range(ROWS):
            highest = _Highest(acc_s, True)
            own = _of_row(base, r)
            reference = _reference(state.max[r], own, factor)
            visit = highest.take if exact else None
            total[r] = self.compute_p(
                acc_s, p, r, reference, factor, visit, moment=moment, finite=finite
            )
            state.scale[r] = Float32(1.0)
            # a row that is fully masked so far has no maximum yet
            unset = state.max[r] == Float32(NEG_INF)
            grown = grown | (total[r] > Float32(SUM_CEILING)) | unset
            if const_expr(exact):
                most = highest.value()
                peak[r] = device.quad_max(most if own is None else most + own, True)
                state.highest[r] = cute.arch.fmax(state.highest[r], peak[r], nan=True)
        if moment is not None and finite:
            both = moment[0] + moment[1]
            grown = grown | (both != both)  # NaN
        shift = Float32(0.0) if base is None else base
        unit = Float32(1.0) if factor is None else factor
        sums = total, total if moment is None else moment
        self._recompute(acc_s, p, state, peak, sums, unit, shift, grown)
        for r in range(ROWS):
            state.sum[r] = state.sum[r] + total[r]
        self._add_moment(state, moment)

    @cute.jit
    def _recompute(
        self,
        acc_s: cute.Tensor,
        p: cute.Tensor,
        state: RowState,
        peak: cute.Tensor,
        sums: tuple,
        factor: Float32,
        base: Any,
        grown: Boolean,
    ):
        """Recompute P from the scores with new maxima if `grown` is set in any lane.

        `sums` are the block's sums of P and of P log2(P), f32 [2] each.
        """
        row_max, row_sum, scale = state.max, state.sum, state.scale
        total, moment = sums
        moments = state.moment
        if cute.arch.vote_any_sync(grown):
            for r in cutlass.range_constexpr(ROWS):
                if const_expr(not self.config.need_max):
                    peak[r] = device.quad_max(_row_peak(acc_s, r, _of_row(base, r), False), False)
                old = row_max[r]
                row_max[r] = cute.arch.fmax(old, peak[r])
                change = (old - device.finite_or_zero(row_max[r])) * factor
                scale[r] = device.exp2(change)
                reference = _reference(row_max[r], _of_row(base, r), factor)
                total[r] = self.compute_p(acc_s, p, r, reference, factor, moment=moment)
                if const_expr(self.config.need_entropy):
                    moments[r] = rescaled_moment(moments[r], row_sum[r], change, scale[r])
                row_sum[r] = row_sum[r] * scale[r]

    def _online(
        self,
        acc_s: cute.Tensor,
        p: cute.Tensor | None,
        state: RowState,
        base: Any,
        factor: Float32 | None,
    ) -> None:
        """Update the row maxima if they grew too much, then compute P."""
        exact = self.config.need_max
        grown = Boolean(False)
        for r in range(ROWS):
            state.scale[r] = Float32(1.0)
            if const_expr(exact):
                grown = Boolean(True)
            else:
                highest = _Highest(acc_s, False)
                mine = [i for i in range(cute.size(acc_s)) if row_of(i) == r]
                for t in range(0, len(mine), 2):
                    highest.take(*mine[t : t + 2])
                grown = grown | (
                    highest.value() >= _limit_bits(state.max[r], _of_row(base, r), factor)
                )
        shift = Float32(0.0) if base is None else base
        unit = Float32(1.0) if factor is None else factor
        self._raise_max(acc_s, state, unit, shift, grown)
        moment = self._block_moment()
        for r in range(ROWS):
            reference = _reference(state.max[r], _of_row(base, r), factor)
            total = self.compute_p(acc_s, p, r, reference, factor, moment=moment)
            state.sum[r] = state.sum[r] + total
        self._add_moment(state, moment)

    @cute.jit
    def _raise_max(
        self,
        acc_s: cute.Tensor,
        state: RowState,
        factor: Float32,
        base: Any,
        grown: Boolean,
    ):
        """Compute the exact row maxima if `grown` is set in any lane of the warp."""
        row_max, row_sum, scale, highest = state.max, state.sum, state.scale, state.highest
        moments = state.moment
        nan = self.config.need_max  # torch's maximum propagates NaN
        if cute.arch.vote_any_sync(grown):
            for r in cutlass.range_constexpr(ROWS):
                old = row_max[r]
                own = _of_row(base, r)
                peak = cute.arch.fmax(_row_peak(acc_s, r, own, nan), old, nan=nan)
                new = device.quad_max(peak, nan)
                if const_expr(self.config.need_max):
                    highest[r] = cute.arch.fmax(highest[r], new, nan=nan)
                # small growth: keep the old maximum, with nothing to rescale
                new = cutlass.select_((new - old) * factor <= Float32(RESCALE_THRESHOLD), old, new)
                row_max[r] = new
                change = (old - device.finite_or_zero(new)) * factor
                scale[r] = device.exp2(change)
                if const_expr(self.config.need_entropy):
                    moments[r] = rescaled_moment(moments[r], row_sum[r], change, scale[r])
                row_sum[r] = row_sum[r] * scale[r]

    @cute.jit
    def rescale(self, acc_o: cute.Tensor, scale: cute.Tensor):
        """Multiply the output accumulator by `scale`, unless it is 1 in the whole warp."""
        if const_expr(not (self.config.softmax == "no-max" or self.config.weights)):
            if cute.arch.vote_any_sync((scale[0] != Float32(1.0)) | (scale[1] != Float32(1.0))):
                for i in cutlass.range_constexpr(cute.size(acc_o)):
                    acc_o[i] = acc_o[i] * scale[row_of(i)]


def _added(values: list[Any]) -> Any:
    total = values[0]
    for x in values[1:]:
        total = total + x
    return total


def _of_row(base: Any, r: int) -> Any:
    """Return the term to add to the scores of row `r`; `base` is that of all rows or a tuple."""
    return base[r] if isinstance(base, tuple) else base


def _row_peak(acc_s: cute.Tensor, r: int, base: Float32 | None, nan: bool) -> Any:
    """Return the largest of this thread's scores in row `r` plus `base`, by independent chains."""
    mine = [i for i in range(cute.size(acc_s)) if row_of(i) == r]
    chains = [acc_s[i] for i in mine[:CHAINS]]
    for t in range(CHAINS, len(mine)):
        chains[t % CHAINS] = cute.arch.fmax(chains[t % CHAINS], acc_s[mine[t]], nan=nan)
    most = largest(chains, nan)
    return most if base is None else most + base


def _limit_bits(row_max: Float32, base: Float32 | None, factor: Float32 | None) -> Any:
    """Return the bits, as an integer, of the smallest score that raises the maximum too much.

    Floats of 0 and above have the order of their bits as integers, and are above all negative
    floats. For a negative limit, return the smallest integer: any score may then be too large.
    """
    room = Float32(RESCALE_THRESHOLD)
    room = room if factor is None else room * cute.arch.rcp_approx(factor)
    limit = row_max + room if base is None else row_max + room - base
    return cutlass.select_(limit >= Float32(0.0), device.bits(limit), Int32(-(1 << 31)))


class _Highest:
    """Finds the largest of a thread's scores, taken in pairs.

    The exact maximum includes NaN. The fast one compares bits as integers, three per instruction:
    it is right if some score is not negative, and otherwise returns some negative number.
    """

    def __init__(self, acc_s: cute.Tensor, exact: bool) -> None:
        self.exact = exact
        self.values = acc_s if exact else cute.recast_tensor(acc_s, Int32)  # same elements
        self.chains: list[Any] = [None] * CHAINS

    def take(self, *pair: int) -> None:
        """Include two more elements."""
        if self.exact:
            for i in pair:
                c = column_of(i) % CHAINS
                self.chains[c] = self._larger(self.chains[c], self.values[i])
        else:
            c = column_of(pair[0]) // 2 % CHAINS
            for i in pair:
                self.chains[c] = self._larger(self.chains[c], self.values[i])

    def value(self) -> Any:
        """Return the largest of the elements taken so far."""
        most = self.chains[0]
        for x in self.chains[1:]:
            most = self._larger(most, x)
        return most

    def _larger(self, x: Any, y: Any) -> Any:
        if x is None or y is None:
            return y if x is None else x
        return cute.arch.fmax(x, y, nan=True) if self.exact else cutlass.max(x, y)


def _reference(row_max: Float32, base: Float32 | None, factor: Float32 | None) -> Any:
    """Return the value to subtract from scores times `factor`; 0 while all scores are masked."""
    safe = device.finite_or_zero(row_max)
    safe = safe if base is None else safe - base
    return safe if factor is None else safe * factor

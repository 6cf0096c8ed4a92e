"""The softmax of a tile's scores in registers: mod, mask, maximum, exponentials, row sums.

A thread of a consumer warpgroup holds two rows of a tile, 8 apart, and of each the columns
8 g and 8 g + 1 from its first. Element i of the accumulator belongs to row (i >> 1) & 1 and to
the thread's column 2 (i // 4) + (i & 1).

Online softmax after Milakov and Gimelshein (2018). Rescaling only where a maximum grew by more
than 2**8 is from FlashAttention-4; taking the exponentials against the maximum of the blocks
before, with an exact redo from the scores where their sums are too large, needs no maximum at all
in most blocks.

The methods are traced inside the kernel. Those with a dynamic branch are `cute.jit`; the others
are plain Python, so that they may pass hooks' tuples around.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import NEG_INF, RESCALE_THRESHOLD
from attnkit.templates.common.site import Site

CEILING = 2.0**12  # sum of a thread's exponentials of a row, up to which the reference stays
CHAINS = 4  # independent chains of maxima and sums
FEW = 8  # columns of a thread for which a mask without intervals is computed at once


def row_of(i: int) -> int:
    """Which of the thread's two rows holds element i of the accumulator."""
    return (i >> 1) & 1


def column_of(i: int) -> int:
    """Which of the thread's columns holds element i of the accumulator."""
    return 2 * (i // 4) + (i & 1)


class Softmax:
    """The part of a forward kernel between Q K and P V."""

    hooks: Any
    config: Any
    dtype: Any

    def columns_of_thread(self) -> list[int]:
        """Offsets of a thread's columns from its first."""
        return [8 * g + c for g in range(self.config.block_kv // 8) for c in (0, 1)]

    def site(self, where: Any) -> Site:
        """Where a tile is, as the hooks want it."""
        tensors, b, h, q_len, kv_len, scale, origin = where
        steps = (0, 8), self.columns_of_thread()
        return Site(tensors, b, h, q_len, kv_len, scale, origin, steps)

    # ------------------------------------------------------------------ values known once a tile

    def begin(self, where: Any, first: Any, q: Any) -> Any:
        """What is known once a tile.

        Args:
            where: the fields of `Site` but the last.
            first: the thread's first column within a block.
            q: the thread's first row; the second is 8 below.
        """
        site, hooks = self.site(where), self.hooks
        inside = [cutlass.min(q + 8 * r, site.q_len - 1) for r in range(2)]
        head = hooks.head(site)
        rows = tuple((at, hooks.row(site, head, at)) for at in inside)
        held = hooks.held(site, head, [first + o for o in self.columns_of_thread()])
        held = tuple(x if x is None or self._tight else device.pinned(x) for x in held)
        if not hooks.has_mask:
            ends: Any = (((Int32(0), site.kv_len),),) * 2
        elif hooks.intervals is None:
            ends = None
        else:
            ends = tuple(
                tuple(
                    (cutlass.max(low, Int32(0)), cutlass.min(high, site.kv_len))
                    for low, high in hooks.ends(site, head, at)
                )
                for at in inside
            )
        return tuple(where), head, rows, held, ends, first

    @property
    def _tight(self) -> bool:
        """Whether there are no registers to hold what every block adds in a column.

        So it is with a mask without intervals beside the widest output.
        """
        hooks = self.hooks
        return self.config.value_width > 192 and hooks.has_mask and hooks.intervals is None

    def factor(self, tile: Any) -> Any:
        """What scores are multiplied by to be in log2 units."""
        where, head, *_ = tile
        return self.hooks.factor(self.site(where), head)

    def lse_terms(self, where: Any, q: Any) -> list[Any]:
        """What the LSE of each row has beyond the softmax, or None; arguments as of `begin`."""
        site, hooks = self.site(where), self.hooks
        head = hooks.head(site)
        inside = [cutlass.min(q + 8 * r, site.q_len - 1) for r in range(2)]
        return [hooks.lse(site, head, hooks.row(site, head, at)) for at in inside]

    # -------------------------------------------------------------------------- scores of a block

    def ahead(self, tile: Any, n: Any, masked: bool, count: int) -> Any:
        """What a block's scores need beside themselves; n is the number of the kv block."""
        where, head, rows, held, *_ = tile
        site, hooks = self.site(where), self.hooks
        if self._tight and held[0] is not None:
            # from a number that is made in each block: else the compiler holds them and spills others
            first = device.pinned(Float32(tile[5]))
            held = hooks.held(site, head, [first + Float32(o) for o in self.columns_of_thread()])
        start, _, positions = self._positions(tile, n)
        if masked:  # what a mod or a mask loads must lie inside its tensors
            positions = [cutlass.min(at, site.kv_len - 1) for at in positions]
        values = hooks.columns(site, head, positions, False)
        columns = list(zip(positions, held, values, strict=True))
        places = [(row_of(i), column_of(i)) for i in range(count)]
        relatives = None if hooks.raw else hooks.relatives(site, head, rows, columns, places)
        return start, columns, places, relatives

    def _positions(self, tile: Any, n: Any) -> Any:
        """First column of a block, whether block lists keep all of it, the thread's columns.

        Where block lists overrule the mask, ~n stands for a block that they keep whole: nothing but
        the end of the tensor is masked there.
        """
        everything = Boolean(False)
        if self.hooks.listed:
            everything = n < 0
            n = cutlass.select_(everything, ~n, n)
        start = n * self.config.block_kv
        return start, everything, [start + tile[5] + o for o in self.columns_of_thread()]

    def kept(self, tile: Any, n: Any, masked: bool) -> Any:
        """Which columns of block n each row keeps: bit masks of the rows, None for all.

        Needs no scores: it is found while their registers are free.
        """
        if not masked:
            return None
        start, everything, positions = self._positions(tile, n)
        kv_len, left = self.site(tile[0]).kv_len, start + tile[5]
        if tile[4] is not None:
            return self._inside(tile[4], left, everything, kv_len)
        valid = device.bits_below(kv_len - left, self._words())
        masks = [list(valid) for _ in range(2)]
        for word in range(len(valid)):
            for r, bits in enumerate(self._chosen(tile, positions, word)):
                if self.hooks.listed:
                    bits = cutlass.select_(everything, Int32(-1), bits)
                masks[r][word] = masks[r][word] & bits
        return masks

    def _chosen(self, tile: Any, positions: Any, word: int) -> list[Any]:
        """A word of the bit masks of a mask without intervals.

        A few columns at a time, each beginning when the ones before are done: what a mask loads
        and computes for all of them would not fit the registers.
        """
        where, head, rows, *_ = tile
        site, found = self.site(where), [Int32(0), Int32(0)]
        for low in range(32 * word, min(32 * word + 32, len(positions)), FEW):
            # none, but the compiler does not know that a length is not negative
            ready = (found[0] | found[1]) & (site.kv_len >> 31)
            some = [cutlass.min(at, site.kv_len - 1) | ready for at in positions[low : low + FEW]]
            values = self.hooks.columns(site, head, some, True)
            columns = [(at, None, own) for at, own in zip(some, values, strict=True)]
            places = [(r, j) for r in range(2) for j in range(len(some))]
            keep = self.hooks.keep(site, head, rows, columns, places)
            for (r, j), yes in zip(places, keep, strict=True):
                bit = Int32(device.one(low + j))
                found[r] = found[r] | cutlass.select_(yes, bit, Int32(0))
        return found

    def scores(self, tile: Any, known: Any, scores: Any) -> Any:
        """Apply the mod in place; the block's own term or None."""
        where, head, rows, *_ = tile
        site, hooks = self.site(where), self.hooks
        start, columns, places, relatives = known
        if not hooks.raw:
            full = [(r, j, scores[i]) for i, (r, j) in enumerate(places)]
            found = hooks.element(site, head, rows, columns, full, relatives)
            if hooks.blind:
                # nothing reads the product: its registers would be taken while it is in flight
                found = device.after(found, [s for _, _, s in full])
            for i, x in enumerate(found):
                scores[i] = x
        return hooks.block(site, head, start)

    def hide(self, kept: Any, scores: Any) -> None:
        """Give the scores that the mask does not keep the value of minus infinity, in place."""
        if kept is not None:
            for i in range(cute.size(scores)):
                j = column_of(i)
                keep = device.bit(kept[row_of(i)][j // 32], j)
                scores[i] = cutlass.select_(keep, scores[i], Float32(NEG_INF))

    def _words(self) -> int:
        return (self.config.block_kv // 4 + 31) // 32

    def _inside(self, ends: Any, left: Any, everything: Any, kv_len: Any) -> Any:
        """Bit masks of the columns that lie in one of their row's intervals."""
        words, masks = self._words(), []
        for pairs in ends:
            total = [Int32(0)] * words
            for low, high in pairs:
                below, above = (device.bits_below(end - left, words) for end in (high, low))
                total = [t | (x & ~y) for t, x, y in zip(total, below, above, strict=True)]
            if self.hooks.listed:
                valid = device.bits_below(kv_len - left, words)
                total = [
                    cutlass.select_(everything, v, t) for v, t in zip(valid, total, strict=True)
                ]
            masks.append(total)
        return masks

    # ------------------------------------------------------------------------------- exponentials

    def exponentials(
        self,
        scores: Any,
        packed: Any,
        r: int,
        less: Any,
        factor: Any,
        more: Any = None,
        small: bool = True,
    ) -> Any:
        """P of row r, packed into pairs, scores kept; the sum of the row.

        Args:
            packed: where to; None leaves P unpacked in place of the scores.
            less: what is subtracted in log2 units, or None.
            more: called with each pair of elements, to interleave other work.
            small: whether an exponent may be below -126.
        """
        mine = [i for i in range(cute.size(scores)) if row_of(i) == r]
        sums: list[Any] = [None] * CHAINS
        pairs = None if packed is None else cute.recast_tensor(packed, Int32)
        poly, minus = self.config.poly, None if less is None else -less
        for t in range(0, len(mine), 2):
            values = []
            for k, i in enumerate(mine[t : t + 2]):
                x = device.shifted(scores[i], factor, minus)
                on_fma = poly and not small and (t + k) % poly == poly - 1
                values.append(device.exp2_on_fma(x) if on_fma else device.exp2(x))
            for k, p in enumerate(values):
                c = (t + k) % CHAINS
                sums[c] = p if sums[c] is None else sums[c] + p
            if pairs is None:
                scores[mine[t]], scores[mine[t + 1]] = values
            else:
                pairs[mine[t] // 2] = device.pack(values[0], values[1], self.dtype)
            if more is not None:
                more(mine[t], mine[t + 1])
        return _added(sums)

    def first(self, tile: Any, base: Any, scores: Any, packed: Any, stats: Any) -> None:
        """Softmax of a tile's first block: maximum, then exponentials against it.

        Args:
            base: the block's own term, or None.
        """
        row_max, row_sum, _, top = stats
        nan = self.config.need_max  # torch's maximum passes NaN on
        factor = self.factor(tile)
        for r in range(2):
            less = None
            if self.config.softmax != "bounded":
                row_max[r] = device.quad_max(_peak(scores, r, base, nan), nan)
                less = _reference(row_max[r], base, factor)
                if const_expr(self.config.need_max):
                    top[r] = row_max[r]
            row_sum[r] = self.exponentials(scores, packed, r, less, factor)

    def next(self, tile: Any, known: Any, kept: Any, scores: Any, packed: Any, stats: Any) -> None:
        """Softmax of a further block; `scale` says what O and the sums before are worth now."""
        base, factor = self.scores(tile, known, scores), self.factor(tile)
        self.hide(kept, scores)
        kind = self.config.softmax
        if kind == "bounded":
            row_sum = stats[1]
            for r in range(2):
                total = self.exponentials(scores, packed, r, None, factor, small=kept is not None)
                row_sum[r] = row_sum[r] + total
        elif kind == "stale":
            self._stale(scores, packed, stats, base, factor)
        else:
            self._online(scores, packed, stats, base, factor)

    def _stale(self, scores: Any, packed: Any, stats: Any, base: Any, factor: Any) -> None:
        """Exponentials against the maximum of the blocks before.

        Whether that will do is seen from their sums: none is larger than the sum of its row.
        """
        row_max, row_sum, scale, top = stats
        exact = self.config.need_max
        peak, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        grown = Boolean(False)
        for r in range(2):
            highest = _Highest(scores, True)
            less = _reference(row_max[r], base, factor)
            more = highest.take if exact else None
            total[r] = self.exponentials(scores, packed, r, less, factor, more)
            scale[r] = Float32(1.0)
            # a row that has kept nothing yet has no reference
            grown = grown | (total[r] > Float32(CEILING)) | (row_max[r] == Float32(NEG_INF))
            if const_expr(exact):
                most = highest.found()
                peak[r] = device.quad_max(most if base is None else most + base, True)
                top[r] = cute.arch.fmax(top[r], peak[r], nan=True)
        shift = Float32(0.0) if base is None else base
        unit = Float32(1.0) if factor is None else factor
        self._redo(scores, packed, row_max, row_sum, scale, peak, total, unit, shift, grown)
        for r in range(2):
            row_sum[r] = row_sum[r] + total[r]

    @cute.jit
    def _redo(
        self,
        scores: cute.Tensor,
        packed: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        scale: cute.Tensor,
        peak: cute.Tensor,
        total: cute.Tensor,
        factor: Float32,
        base: Float32,
        grown: Boolean,
    ):
        """Where a maximum of the warp grew too far: the exponentials again, from the scores."""
        if cute.arch.vote_any_sync(grown):
            for r in cutlass.range_constexpr(2):
                if const_expr(not self.config.need_max):
                    peak[r] = device.quad_max(_peak(scores, r, base, False), False)
                old = row_max[r]
                row_max[r] = cute.arch.fmax(old, peak[r])
                scale[r] = device.exp2((old - device.finite_or_zero(row_max[r])) * factor)
                less = _reference(row_max[r], base, factor)
                total[r] = self.exponentials(scores, packed, r, less, factor)
                row_sum[r] = row_sum[r] * scale[r]

    def _online(self, scores: Any, packed: Any, stats: Any, base: Any, factor: Any) -> None:
        """Maximum first, then exponentials against it."""
        row_max, row_sum, scale, top = stats
        exact = self.config.need_max
        grown = Boolean(False)
        for r in range(2):
            scale[r] = Float32(1.0)
            if const_expr(exact):
                grown = Boolean(True)
            else:
                highest = _Highest(scores, False)
                mine = [i for i in range(cute.size(scores)) if row_of(i) == r]
                for t in range(0, len(mine), 2):
                    highest.take(*mine[t : t + 2])
                grown = grown | (highest.found() >= _limit(row_max[r], base, factor))
        shift = Float32(0.0) if base is None else base
        unit = Float32(1.0) if factor is None else factor
        self._raise(scores, row_max, row_sum, scale, top, unit, shift, grown)
        for r in range(2):
            less = _reference(row_max[r], base, factor)
            row_sum[r] = row_sum[r] + self.exponentials(scores, packed, r, less, factor)

    @cute.jit
    def _raise(
        self,
        scores: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        scale: cute.Tensor,
        top: cute.Tensor,
        factor: Float32,
        base: Float32,
        grown: Boolean,
    ):
        """Where a maximum of the warp may have grown too far: find it."""
        nan = self.config.need_max  # torch's maximum passes NaN on
        if cute.arch.vote_any_sync(grown):
            for r in cutlass.range_constexpr(2):
                old = row_max[r]
                peak = cute.arch.fmax(_peak(scores, r, base, nan), old, nan=nan)
                new = device.quad_max(peak, nan)
                if const_expr(self.config.need_max):
                    top[r] = cute.arch.fmax(top[r], new, nan=nan)
                # a small growth is left in P: nothing to rescale
                new = cutlass.select_((new - old) * factor <= Float32(RESCALE_THRESHOLD), old, new)
                row_max[r] = new
                scale[r] = device.exp2((old - device.finite_or_zero(new)) * factor)
                row_sum[r] = row_sum[r] * scale[r]

    @cute.jit
    def rescale(self, out: cute.Tensor, scale: cute.Tensor):
        """Bring the output accumulated so far to the new maximum."""
        if const_expr(self.config.softmax != "bounded"):
            if cute.arch.vote_any_sync((scale[0] != Float32(1.0)) | (scale[1] != Float32(1.0))):
                for i in cutlass.range_constexpr(cute.size(out)):
                    out[i] = out[i] * scale[row_of(i)]


def _added(values: list[Any]) -> Any:
    total = values[0]
    for x in values[1:]:
        total = total + x
    return total


def _largest(values: list[Any], nan: bool) -> Any:
    most = values[0]
    for x in values[1:]:
        most = cute.arch.fmax(most, x, nan=nan)
    return most


def _peak(scores: Any, r: int, base: Any, nan: bool) -> Any:
    """Largest score of row r that this thread holds, in chains."""
    mine = [i for i in range(cute.size(scores)) if row_of(i) == r]
    chains = [scores[i] for i in mine[:CHAINS]]
    for t in range(CHAINS, len(mine)):
        chains[t % CHAINS] = cute.arch.fmax(chains[t % CHAINS], scores[mine[t]], nan=nan)
    most = _largest(chains, nan)
    return most if base is None else most + base


def _limit(row_max: Any, base: Any, factor: Any) -> Any:
    """Bits of the score from which on a maximum has grown too far, as an integer.

    Scores of 0 and above are ordered as their bits are, and above all negative ones. Where the limit
    is negative, it is the least integer: any score may be too large.
    """
    room = (
        Float32(RESCALE_THRESHOLD)
        if factor is None
        else Float32(RESCALE_THRESHOLD) * cute.arch.rcp_approx(factor)
    )
    limit = row_max + room if base is None else row_max + room - base
    return cutlass.select_(limit >= Float32(0.0), device.bits(limit), Int32(-(1 << 31)))


class _Highest:
    """The largest of a thread's scores, taken up in pairs.

    Either exact, NaN included, or in integers, whose maxima the machine finds three at a time: their
    maximum is that of the scores if one is not negative, and else some negative number.
    """

    def __init__(self, scores: Any, exact: bool) -> None:
        self.exact = exact
        self.values = scores if exact else cute.recast_tensor(scores, Int32)
        self.chains: list[Any] = [None] * CHAINS

    def take(self, *pair: int) -> None:
        """Two elements more."""
        if self.exact:
            for i in pair:
                c = column_of(i) % CHAINS
                self.chains[c] = self._larger(self.chains[c], self.values[i])
        else:
            c = column_of(pair[0]) // 2 % CHAINS
            for i in pair:
                self.chains[c] = self._larger(self.chains[c], self.values[i])

    def found(self) -> Any:
        """The largest of them."""
        most = self.chains[0]
        for x in self.chains[1:]:
            most = self._larger(most, x)
        return most

    def _larger(self, x: Any, y: Any) -> Any:
        if x is None or y is None:
            return y if x is None else x
        return cute.arch.fmax(x, y, nan=True) if self.exact else cutlass.max(x, y)


def _reference(row_max: Any, base: Any, factor: Any) -> Any:
    """What to subtract from scores times factor."""
    safe = device.finite_or_zero(row_max)
    safe = safe if base is None else safe - base
    return safe if factor is None else safe * factor

"""The softmax of a tile's scores: mod, mask, maximum, exponentials, row sums.

A thread holds one row, the lane of tensor memory of its number. The row is treated in chunks of 32
or 16 columns: of each the hooks are asked for what a block of that width needs, and one 32-bit word
says which of its columns are kept.

Online softmax after Milakov and Gimelshein (2018). The maximum that exponentials are taken against
only moves when it grew by more than 2**8, as in FlashAttention-4: output and sums are rescaled then.
So a row's largest weight need not be 1, and is rounded as the others are. Where it is nearly all of the
row, that would move the output by as much of its value; the output is therefore divided by a sum in
which the largest weight of each block is rounded too. The LSE has the sum of the exact ones.

The methods are traced inside the kernel. Those with a dynamic branch are `cute.jit`; the others
are plain Python, so that they may pass hooks' tuples around.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

from attnkit.templates.sm90 import device as common
from attnkit.templates.sm90.device import LN2, NEG_INF
from attnkit.templates.sm90.site import Site
from attnkit.templates.sm90.softmax import GROWTH
from attnkit.templates.sm100 import device
from attnkit.templates.sm100.exp2 import DEGREES, exp2_pair
from attnkit.templates.sm100.forward_common import ForwardCommon

CHAINS = 4  # independent chains of maxima and of pairs of sums


class Softmax(ForwardCommon):
    """The part of a forward kernel between Q K and P V."""

    hooks: Any

    def chunk(self, masked: bool) -> int:
        """Columns that are computed together: few where each takes registers of its own."""
        if masked and self.by_element:
            return 8
        hooks = self.hooks
        return 16 if hooks.ahead or hooks.selects or hooks.row_factor else 32

    @property
    def by_element(self) -> bool:
        """Whether the mask has to be asked for every element."""
        return self.hooks.has_mask and self.hooks.intervals is None

    def site(self, where: Any) -> Site:
        """Where a tile is, as the hooks want it."""
        tensors, b, h, q_len, kv_len, scale, origin = where
        return Site(tensors, b, h, q_len, kv_len, scale, origin, ((0,), range(32)))

    # ------------------------------------------------------------------ values known once a tile

    def begin(self, where: Any, q: Any) -> Any:
        """What is known once a tile of this thread's row.

        Args:
            where: the fields of `Site` but the last.
            q: the row.
        """
        site, hooks = self.site(where), self.hooks
        inside = cutlass.min(q, site.q_len - 1)
        head = hooks.head(site)
        row = (inside, hooks.row(site, head, inside))
        held = hooks.held(site, head, list(range(32)))
        held = tuple(x if x is None or hooks.ahead else common.pinned(x) for x in held)
        if not hooks.has_mask:
            ends: Any = ((Int32(0), site.kv_len),)
        elif self.by_element:
            ends = None
        else:
            ends = tuple(
                (low, cutlass.min(high, site.kv_len))
                for low, high in hooks.ends(site, head, inside)
            )
        return tuple(where), head, row, held, ends

    def factor(self, tile: Any) -> Any:
        """What scores are multiplied by to be in log2 units."""
        where, head, *_ = tile
        return self.hooks.factor(self.site(where), head)

    # -------------------------------------------------------------------------- scores of a block

    def scores(
        self,
        tile: Any,
        mark: Any,
        masked: bool,
        values: list[Any],
        row: Any,
        at: Any,
        upper: Any,
    ) -> tuple[list[Any], Any]:
        """The scores of a block, mod and mask (if `masked`) applied.

        Args:
            tile: what `begin` gave.
            mark: number of the kv block. Where block lists overrule the mask, ~mark stands for a
                block that they keep whole: nothing but the end of the tensor is masked there.
            values: chunks of scores, to be filled.
            row: of the thread, whose scores begin at column `at` of tensor memory.
            upper: (barrier, parity, barrier): where the upper half of the columns comes later, what
                announces it, and what to tell that all are read; else None.

        Returns:
            What each chunk adds to its scores, or None, and the largest score of the row.
        """
        everything, n, site = Boolean(False), mark, self.site(tile[0])
        if self.hooks.listed:
            everything = mark < 0
            n = cutlass.select_(everything, ~mark, mark)
        start = n * self.config.block_kv
        wide, bases = self.chunk(masked), []
        half = len(values) // 2
        chains: list[Any] = [None] * CHAINS
        reached: list[Any] = []  # by chunk: maxima that all its elements went into
        found = None
        for c, chunk in enumerate(values):
            if upper is not None and c == half:
                cute.arch.mbarrier_wait(*upper[:2])
            if not self.hooks.raw:  # one by one: a mod has values of its own in registers
                loading = [c]
            else:  # by halves: the maximum of one is found while the other comes
                loading = list(range(c, c + half)) if c % half == 0 else []
            for k in loading:
                device.load_row(row, at + wide * k, values[k])
            if loading:
                cute.arch.fence_view_async_tmem_load()
                if upper is not None and loading[-1] == len(values) - 1:
                    self.signal(upper[2])
            first = start + wide * c
            if c >= 2 and masked and self.by_element and not self.hooks.ahead:
                # two chunks in hand: a mask does not need the scores, and would be computed for all
                # chunks before the first of them. Loads of a mod (`ahead`) are not held up.
                first = device.after(first, reached[c - 2], site.kv_len >> 31)
            base = self._chunk(tile, first, everything, masked, chunk)
            found, chains = self._peak(chunk, base, found, chains)
            reached.append(chains if base is None else [found])
            bases.append(base)
        return bases, found if chains[0] is None else _largest(chains, self.config.need_max)

    def _chunk(self, tile: Any, start: Any, everything: Any, masked: bool, chunk: Any) -> Any:
        where, head, row, held, ends = tile
        site, hooks = self.site(where), self.hooks
        wide = cute.size(chunk)
        rows, places = [row], [(0, j) for j in range(wide)]
        positions = [start + j for j in range(wide)]
        if masked:  # what a mod or a mask loads must lie inside its tensors
            positions = [cutlass.min(at, site.kv_len - 1) for at in positions]
        values = hooks.columns(site, head, positions, masked)
        columns = list(zip(positions, held[:wide], values, strict=True))
        if not hooks.raw:
            relatives = hooks.relatives(site, head, rows, columns, places)
            full = [(r, j, chunk[j]) for r, j in places]
            for j, x in enumerate(hooks.element(site, head, rows, columns, full, relatives)):
                chunk[j] = x
        if masked:
            valid = device.bits_below(site.kv_len - start)
            if ends is not None:
                word = self._inside(ends, start)
                if hooks.listed:
                    word = cutlass.select_(everything, valid, word)
                kept = [common.bit(word, j) for j in range(wide)]
            else:
                kept = hooks.keep(site, head, rows, columns, places)
                kept = [
                    (k | everything if hooks.listed else k) & common.bit(valid, j)
                    for j, k in enumerate(kept)
                ]
            for j, keep in enumerate(kept):
                chunk[j] = cutlass.select_(keep, chunk[j], Float32(NEG_INF))
        return hooks.block(site, head, start)

    def _inside(self, ends: Any, start: Any) -> Any:
        """The columns of a chunk that lie in one of the row's intervals, as bits."""
        total = Int32(0)
        for low, high in ends:
            total = total | (device.bits_below(high - start) & ~device.bits_below(low - start))
        return total

    # ------------------------------------------------------------------------------- exponentials

    def _peak(self, chunk: Any, base: Any, found: Any, chains: list[Any]) -> Any:
        """The largest score so far: of earlier chunks, and chains of maxima that lack their base."""
        nan, chains = self.config.need_max, list(chains)  # torch's maximum passes NaN on
        for j in range(0, cute.size(chunk), 2):
            c, x, y = j // 2 % CHAINS, chunk[j], chunk[j + 1]
            if chains[c] is None:
                chains[c] = cute.arch.fmax(x, y, nan=nan)
            else:
                chains[c] = device.fmax3(chains[c], x, y, nan)
        if base is None:
            return found, chains
        return _larger(found, _largest(chains, nan) + base, nan), [None] * CHAINS

    def move_maximum(self, stats: Any, peak: Any, factor: Any) -> Any:
        """Take a block's maximum into account; what output and sums so far are worth now."""
        row_max, _, top = stats
        nan = self.config.need_max
        old = row_max[0]
        new = cute.arch.fmax(old, peak, nan=nan)
        if const_expr(self.config.need_max):
            top[0] = cute.arch.fmax(top[0], peak, nan=nan)
        growth = new - old if factor is None else (new - old) * factor
        # a small growth is left in P: nothing to rescale
        new = cutlass.select_(growth <= Float32(GROWTH), old, new)
        row_max[0] = new
        drop = old - common.finite_or_zero(new)
        return common.exp2(drop if factor is None else drop * factor)

    def powers(
        self, values: list[Any], first: int, base: Any, row_max: Any, factor: Any
    ) -> list[Any]:
        """P of neighbouring columns from the `first` of a block on, float32, in pairs."""
        less = self.shift(base, row_max, factor)
        found = []
        for j in range(0, len(values), 2):
            pair = values[j], values[j + 1]
            if factor is None:
                pair = cute.arch.add_packed_f32x2(pair, (less, less))
            else:
                pair = cute.arch.fma_packed_f32x2(pair, (factor, factor), (less, less))
            poly = self.config.poly
            if poly and (first + j) // 2 % poly == poly - 1:
                pair = exp2_pair(pair[0], pair[1], DEGREES[self.config.dtype])
            else:
                pair = common.exp2(pair[0]), common.exp2(pair[1])
            found.append(pair)
        return found

    def shift(self, base: Any, row_max: Any, factor: Any) -> Any:
        """What is added to scores, once multiplied by the factor, for the exponents of P."""
        less = common.finite_or_zero(row_max)
        less = less if base is None else less - base
        return -less if factor is None else -(less * factor)

    def rounding(self, peak: Any, row_max: Any, factor: Any) -> Any:
        """What rounding adds to the largest P of a block, that of the score `peak`."""
        less = self.shift(None, row_max, factor)
        if factor is None:
            power = peak + less
        else:  # as in `powers`, to the bit
            power = device.pure("fma.rn.f32", Float32, peak, factor, less)
        largest = common.exp2(power)
        return device.rounded(largest, self.dtype) - largest

    def keep(self, pairs: list[Any], row: Any, at: Any, sums: list[Any]) -> None:
        """Add pairs of P to the sums of the row, and begin to store them from column `at` on."""
        packed = cute.make_rmem_tensor(len(pairs), Int32)
        for j, pair in enumerate(pairs):
            c = j % CHAINS
            sums[c] = pair if sums[c] is None else cute.arch.add_packed_f32x2(sums[c], pair)
            packed[j] = device.pack(pair[0], pair[1], self.dtype)
        device.store_row(row, at, cute.recast_tensor(packed, Float32))

    # ------------------------------------------------------------------------------ end of a tile

    def finish(self, tile: Any, stats: Any, gap: Any) -> tuple[Any, Any, Any]:
        """What the output is multiplied by, the LSE, and the largest score, of the row.

        Args:
            tile: what `begin` gave.
            stats: of the row: reference, sum, maximum.
            gap: what roundings of largest weights add to the sum.
        """
        where, head, row, *_ = tile
        factor = self.factor(tile)
        row_max, row_sum, top = (x[0] for x in stats)
        term = self.hooks.lse(self.site(where), head, row[1])
        dead = row_sum == Float32(0.0)
        scale = cutlass.select_(dead, Float32(0.0), cute.arch.rcp_approx(row_sum + gap))
        unit = Float32(1.0) if factor is None else factor
        # once a row: exact, as an LSE may be the result
        value = cute.math.log(row_sum) + row_max * (unit * LN2)
        if term is not None:
            # the term was left out of the scores: an infinite one shows here
            wiped = term == Float32(NEG_INF)
            value = value + cutlass.select_(wiped, term, term + (term - term))
            odd = cutlass.select_(wiped, Float32(0.0), scale + (term - term))
            scale = cutlass.select_(dead | wiped, Float32(0.0), odd)
        value = cutlass.select_(dead, Float32(NEG_INF), value)
        most = top * unit * LN2
        if term is not None:
            most = cutlass.select_(most == Float32(NEG_INF), most, most + term)
        return scale, value, most


def total_of(sums: Any) -> Any:
    """The sum of pairs of sums."""
    pair = sums[0]
    for other in sums[1:]:
        pair = cute.arch.add_packed_f32x2(pair, other)
    return pair[0] + pair[1]


def _largest(values: list[Any], nan: bool) -> Any:
    most = values[0]
    for x in values[1:]:
        most = cute.arch.fmax(most, x, nan=nan)
    return most


def _larger(a: Any, b: Any, nan: bool) -> Any:
    return b if a is None else cute.arch.fmax(a, b, nan=nan)

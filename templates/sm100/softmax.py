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

from attnkit.templates.common import device as common
from attnkit.templates.common.constants import LN2, NEG_INF, RESCALE_THRESHOLD
from attnkit.templates.common.site import Site
from attnkit.templates.sm100 import device
from attnkit.templates.sm100.config import HEAVIEST
from attnkit.templates.sm100.exp2 import DEGREES, exp2_pair
from attnkit.templates.sm100.forward_common import ForwardCommon

# Instructions of a score from which on a loop goes over a row's columns; in a pair of CTAs, whose
# threads have fewer registers to spare.
HEAVY, HEAVY_IN_PAIRS = 10, 8
CHAINS = 4  # independent chains of maxima, and of pairs of sums


class Softmax(ForwardCommon):
    """The part of a forward kernel between Q K and P V."""

    hooks: Any

    def chunk(self, masked: bool) -> int:
        """Columns that are computed together: few where each takes registers of its own."""
        hooks = self.hooks
        if self.rolled(masked):
            return 16 if hooks.effort >= HEAVIEST else 32
        return 16 if hooks.ahead or hooks.selects or hooks.row_factor else 32

    def rolled(self, masked: bool) -> bool:
        """Whether chunks are computed in a loop, and scores put back into tensor memory meanwhile.

        Where many instructions go into a score, code for each column is more than the caches of
        instructions hold, takes long to compile, and is computed for all chunks at once, with more
        registers than there are.
        """
        heavy = HEAVY_IN_PAIRS if self.config.pair else HEAVY
        return self.hooks.effort >= heavy or (masked and self.by_element)

    @property
    def by_element(self) -> bool:
        """Whether the mask has to be asked for every element."""
        return self.hooks.has_mask and self.hooks.intervals is None

    @property
    def sums(self) -> int:
        """Independent chains of pairs of sums: few where exponentials leave few registers.

        Those of float16 are of a higher degree, and a mod that reads the score multiplies each.
        """
        crowded = self.config.pair and self.config.dtype == "float16" and not self.hooks.blind
        return CHAINS // 2 if crowded else CHAINS

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
        row: Any,
        at: Any,
        upper: Any,
    ) -> tuple[list[list[Any]], list[Any], Any]:
        """The scores of a block, mod and mask (if `masked`) applied.

        Args:
            tile: what `begin` gave.
            mark: number of the kv block. Where block lists overrule the mask, ~mark stands for a
                block that they keep whole: nothing but the end of the tensor is masked there.
            row: of the thread, whose scores begin at column `at` of tensor memory.
            upper: (barrier, parity, barrier): where the upper half of the columns comes later, what
                announces it, and what to tell that all are read; else None.

        Returns:
            The scores by chunk, what each chunk adds to its scores, or None, and the largest score of
            the row.
        """
        everything, n = Boolean(False), mark
        if self.hooks.listed:
            everything = mark < 0
            n = cutlass.select_(everything, ~mark, mark)
        start, rolled = n * self.config.block_kv, self.rolled(masked)
        wide = self.chunk(masked)
        count = self.config.block_kv // wide
        half = count // 2
        chains: list[Any] = [None] * CHAINS
        found = None
        if rolled:
            found = self._rolled(tile, start, everything, masked, row, at, upper)
        loaded: list[Any] = []
        values: list[list[Any]] = []
        bases: list[Any] = []
        for c in range(count):
            if upper is not None and c == half and not rolled:
                cute.arch.mbarrier_wait(*upper[:2])
            if not self.hooks.raw and not rolled:
                loading = [c]  # one by one: a mod has values of its own in registers
            else:  # by halves: the maximum of one is found while the other comes
                loading = list(range(c, c + half)) if c % half == 0 else []
            loaded += [device.load_row(row, at + wide * k, wide) for k in loading]
            if loading:
                cute.arch.fence_view_async_tmem_load()
                if upper is not None and loading[-1] == count - 1:
                    self.signal(upper[2])
            chunk, base = loaded[c], None
            if not rolled:
                chunk, base = self._chunk(tile, start + wide * c, everything, masked, chunk)
                found, chains = self._peak(chunk, base, found, chains)
            values.append(chunk)
            bases.append(base)
        if chains[0] is not None:
            found = _largest(chains, self.config.need_max)
        return values, bases, found

    def _rolled(
        self,
        tile: Any,
        start: Any,
        everything: Any,
        masked: bool,
        row: Any,
        at: Any,
        upper: Any,
    ) -> Any:
        """Replace the scores of a block in tensor memory; the arguments are those of `scores`.

        Returns:
            The largest score of the row.
        """
        wide, nan = self.chunk(masked), self.config.need_max

        def compute(c: Any, found: Any) -> Any:
            place = at + wide * c
            chunk = device.load_row(row, place, wide)
            cute.arch.fence_view_async_tmem_load()
            chunk, base = self._chunk(tile, start + wide * c, everything, masked, chunk)
            if base is not None:
                chunk = [x + base for x in chunk]
            device.store_row(row, place, chunk)
            _, chains = self._peak(chunk, None, None, [None] * CHAINS)
            return _larger(found, _largest(chains, nan), nan)

        count, found = self.config.block_kv // wide, Float32(NEG_INF)
        if upper is None:
            found = _repeated(compute, 0, count, found)
        else:
            found = _repeated(compute, 0, count // 2, found)
            cute.arch.mbarrier_wait(*upper[:2])
            found = _repeated(compute, count // 2, count, found)
        cute.arch.fence_view_async_tmem_store()
        return found

    def _chunk(
        self, tile: Any, start: Any, everything: Any, masked: bool, chunk: list[Any]
    ) -> tuple[list[Any], Any]:
        """Scores of a chunk with mod and mask applied, and what it adds to all of them, or None."""
        where, head, row, held, ends = tile
        site, hooks = self.site(where), self.hooks
        wide = len(chunk)
        rows, places = [row], [(0, j) for j in range(wide)]
        positions = [start + j for j in range(wide)]
        if masked:  # what a mod or a mask loads must lie inside its tensors
            positions = [cutlass.min(at, site.kv_len - 1) for at in positions]
        values = hooks.columns(site, head, positions, masked)
        columns = list(zip(positions, held[:wide], values, strict=True))
        if not hooks.raw:
            relatives = hooks.relatives(site, head, rows, columns, places)
            full = [(r, j, chunk[j]) for r, j in places]
            chunk = list(hooks.element(site, head, rows, columns, full, relatives))
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
            out = Float32(NEG_INF)
            chunk = [cutlass.select_(yes, x, out) for yes, x in zip(kept, chunk, strict=True)]
        return [Float32(x) for x in chunk], hooks.block(site, head, start)

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
        for j in range(0, len(chunk), 2):
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
        new = cutlass.select_(growth <= Float32(RESCALE_THRESHOLD), old, new)
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
        for j, pair in enumerate(pairs):
            c = j % len(sums)
            sums[c] = pair if sums[c] is None else cute.arch.add_packed_f32x2(sums[c], pair)
        device.store_row(row, at, [device.pack(x, y, self.dtype) for x, y in pairs])

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


@cute.jit
def _repeated(
    compute: cutlass.Constexpr, first: cutlass.Constexpr, end: cutlass.Constexpr, found: Float32
):
    """What `compute` made of `found`, for each number from `first` to `end` in a loop."""
    for c in cutlass.range(first, end, unroll=1):
        found = compute(c, found)
    return found


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

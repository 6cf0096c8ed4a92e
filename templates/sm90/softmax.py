"""The softmax of a tile's scores in registers: mod, mask, maximum, exponentials, row sums.

A thread of a consumer warpgroup holds two rows of a tile, 8 apart, and of each the columns
8 g and 8 g + 1 from its first. Element i of the accumulator belongs to row (i >> 1) & 1 and to
the thread's column 2 (i // 4) + (i & 1).

Online softmax after Milakov and Gimelshein (2018). Rescaling only where a maximum grew by more
than 2**8 is from FlashAttention-4; taking the exponentials against the maximum of the blocks
before, with an exact redo from the scores, takes the maximum off the critical path.

The methods are traced inside the kernel. Those with a dynamic branch are `cute.jit`; the others
are plain Python, so that they may pass hooks' tuples around.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

from attnkit.templates.sm90 import device
from attnkit.templates.sm90.device import NEG_INF

GROWTH = 8.0  # how far, in log2, a row's maximum may grow before sums and output are rescaled
CHAINS = 4  # independent chains of maxima and sums


@dataclass(frozen=True)
class Site:
    """Where a tile is; see `hooks.Site`."""

    tensors: Any
    b: Any
    h: Any
    q_len: Any
    kv_len: Any
    scale: Any
    origin: Any
    steps: Any


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
        held = tuple(None if x is None else device.pinned(x) for x in held)
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

    def factor(self, tile: Any) -> Any:
        """What scores are multiplied by to be in log2 units."""
        where, head, *_ = tile
        return self.hooks.factor(self.site(where), head)

    def lse_term(self, tile: Any, r: int) -> Any:
        """What the LSE of row r has beyond the softmax, or None."""
        where, head, rows, *_ = tile
        return self.hooks.lse(self.site(where), head, rows[r][1])

    # -------------------------------------------------------------------------- scores of a block

    def ahead(self, tile: Any, n: Any, masked: bool, count: int) -> Any:
        """What a block's scores need beside themselves.

        n is the number of the kv block. Where block lists overrule the mask, ~n stands for a block
        that they keep whole: nothing but the end of the tensor is masked there.
        """
        where, head, rows, held, _, first = tile
        site, hooks = self.site(where), self.hooks
        everything = Boolean(False)
        if hooks.listed:
            everything = n < 0
            n = cutlass.select_(everything, ~n, n)
        start = n * self.config.block_kv
        positions = [start + first + o for o in self.columns_of_thread()]
        if masked:  # what a mod or a mask loads must lie inside its tensors
            positions = [cutlass.min(at, site.kv_len - 1) for at in positions]
        values = hooks.columns(site, head, positions, masked)
        columns = list(zip(positions, held, values, strict=True))
        places = [(row_of(i), column_of(i)) for i in range(count)]
        relatives = None if hooks.raw else hooks.relatives(site, head, rows, columns, places)
        return start, everything, columns, places, relatives

    def scores(self, tile: Any, known: Any, masked: bool, scores: Any) -> Any:
        """Apply the mod, and the mask if `masked`, in place; the block's own term or None."""
        where, head, rows, _, ends, first = tile
        site, hooks = self.site(where), self.hooks
        start, everything, columns, places, relatives = known
        if not hooks.raw:
            full = [(r, j, scores[i]) for i, (r, j) in enumerate(places)]
            found = hooks.element(site, head, rows, columns, full, relatives)
            if hooks.blind:
                # nothing reads the product: its registers would be taken while it is in flight
                found = device.after(found, [s for _, _, s in full])
            for i, x in enumerate(found):
                scores[i] = x
        if masked:
            left = start + first
            if ends is not None:
                kept = self._inside(ends, left, everything, site.kv_len, places)
            else:
                kept = hooks.keep(site, head, rows, columns, places)
                valid = device.bits_below(site.kv_len - left, self._words())
                kept = [
                    (keep | everything if hooks.listed else keep) & device.bit(valid[j // 32], j)
                    for keep, (_, j) in zip(kept, places, strict=True)
                ]
            for i, keep in enumerate(kept):
                scores[i] = cutlass.select_(keep, scores[i], Float32(NEG_INF))
        return hooks.block(site, head, start)

    def _words(self) -> int:
        return (self.config.block_kv // 4 + 31) // 32

    def _inside(self, ends: Any, left: Any, everything: Any, kv_len: Any, places: Any) -> Any:
        """Whether each element lies in one of its row's intervals."""
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
        return [device.bit(masks[r][j // 32], j) for r, j in places]

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
        poly = self.config.poly
        for t in range(0, len(mine), 2):
            values = []
            for k, i in enumerate(mine[t : t + 2]):
                x = device.shifted(scores[i], factor, less)
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

    def first(self, tile: Any, known: Any, scores: Any, packed: Any, stats: Any) -> None:
        """Softmax of a tile's first block: maximum, then exponentials against it."""
        row_max, row_sum, _, top = stats
        nan = self.config.need_max  # torch's maximum passes NaN on
        base, factor = self.scores(tile, known, True, scores), self.factor(tile)
        for r in range(2):
            less = None
            if self.config.softmax != "bounded":
                row_max[r] = device.quad_max(_peak(scores, r, base, nan), nan)
                less = _reference(row_max[r], base, factor)
                if const_expr(self.config.need_max):
                    top[r] = row_max[r]
            row_sum[r] = self.exponentials(scores, packed, r, less, factor)

    def next(
        self, tile: Any, known: Any, masked: bool, scores: Any, packed: Any, stats: Any
    ) -> None:
        """Softmax of a further block; `scale` says what O and the sums before are worth now."""
        base, factor = self.scores(tile, known, masked, scores), self.factor(tile)
        kind = self.config.softmax
        if kind == "bounded":
            row_sum = stats[1]
            for r in range(2):
                total = self.exponentials(scores, packed, r, None, factor, small=masked)
                row_sum[r] = row_sum[r] + total
        elif kind == "stale":
            self._stale(scores, packed, stats, base, factor)
        else:
            self._online(scores, packed, stats, base, factor)

    def _stale(self, scores: Any, packed: Any, stats: Any, base: Any, factor: Any) -> None:
        """Exponentials against the maximum of the blocks before, this block's found beside them."""
        row_max, row_sum, scale, top = stats
        nan = self.config.need_max  # torch's maximum passes NaN on
        peak, total = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in range(2):
            chains: list[Any] = [None] * CHAINS

            def more(*pair: int, chains: list[Any] = chains) -> None:
                for i in pair:
                    c = column_of(i) % CHAINS
                    chains[c] = (
                        scores[i]
                        if chains[c] is None
                        else cute.arch.fmax(chains[c], scores[i], nan=nan)
                    )

            less = _reference(row_max[r], base, factor)
            total[r] = self.exponentials(scores, packed, r, less, factor, more)
            most = _largest(chains, nan)
            peak[r] = device.quad_max(most if base is None else most + base, nan)
            scale[r] = Float32(1.0)
            if const_expr(self.config.need_max):
                top[r] = cute.arch.fmax(top[r], peak[r], nan=nan)
        shift = Float32(0.0) if base is None else base
        unit = Float32(1.0) if factor is None else factor
        self._redo(scores, packed, row_max, row_sum, scale, peak, total, unit, shift)

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
    ):
        """Where a maximum of the warp grew too far: the exponentials again, from the scores."""
        if cute.arch.vote_any_sync(
            ((peak[0] - row_max[0]) * factor > Float32(GROWTH))
            | ((peak[1] - row_max[1]) * factor > Float32(GROWTH))
        ):
            for r in cutlass.range_constexpr(2):
                old = row_max[r]
                row_max[r] = cute.arch.fmax(old, peak[r])
                scale[r] = device.exp2((old - device.finite_or_zero(row_max[r])) * factor)
                less = _reference(row_max[r], base, factor)
                total[r] = self.exponentials(scores, packed, r, less, factor)
                row_sum[r] = row_sum[r] * scale[r]
        row_sum[0] = row_sum[0] + total[0]
        row_sum[1] = row_sum[1] + total[1]

    def _online(self, scores: Any, packed: Any, stats: Any, base: Any, factor: Any) -> None:
        """Maximum first, then exponentials against it."""
        row_max, row_sum, scale, top = stats
        nan = self.config.need_max  # torch's maximum passes NaN on
        for r in range(2):
            old = row_max[r]
            new = device.quad_max(cute.arch.fmax(_peak(scores, r, base, nan), old, nan=nan), nan)
            if const_expr(self.config.need_max):
                top[r] = cute.arch.fmax(top[r], new, nan=nan)
            growth = new - old if factor is None else (new - old) * factor
            # a small growth is left in P: nothing to rescale
            new = cutlass.select_(growth <= Float32(GROWTH), old, new)
            row_max[r] = new
            drop = old - device.finite_or_zero(new)
            scale[r] = device.exp2(drop if factor is None else drop * factor)
            less = _reference(new, base, factor)
            total = self.exponentials(scores, packed, r, less, factor)
            row_sum[r] = row_sum[r] * scale[r] + total

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


def _reference(row_max: Any, base: Any, factor: Any) -> Any:
    """What to subtract from scores times factor."""
    safe = device.finite_or_zero(row_max)
    safe = safe if base is None else safe - base
    return safe if factor is None else safe * factor

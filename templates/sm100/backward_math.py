"""From scores to P and dS in registers: mod, mask, exponentials, the mod's slope.

The backward computes transposed scores: a thread of a computing warpgroup holds one column kv of
the attention matrix, its lane of tensor memory, and half the rows q of the tile, the first or the
second, one after another. It reads them in chunks and writes P^T and dS^T, two elements a column of
tensor memory, over columns that it has read.

The gradient of the raw scores is dS = P J (dP - delta), where J is the slope of the mod: its
derivative by the raw score. P J stays in registers until dP is there.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from attnkit.templates.common import device as sm90_device
from attnkit.templates.common.constants import LOG2_E
from attnkit.templates.common.site import Site
from attnkit.templates.common.work_tile import APPLY_MASK, FULL_BLOCK
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_learned import Learned
from attnkit.templates.sm100.config import HEAVIEST
from attnkit.templates.sm100.device import after, bits_below

CHUNK, GROUP = 32, 8  # rows read from tensor memory at a time; rows that the hooks are asked for
LEARNED_CHUNK, LEARNED_GROUP = 16, 4  # the same where captured tensors have gradients


class Weights(Learned):
    """The part of a backward kernel between the products."""

    hooks: Any
    config: Any
    dtype: Any

    def begin(self, where: Any, offset: Any) -> Any:
        """What is known once a kv tile.

        Args:
            where: the fields of `Site`; the origin is the tile's first column.
            offset: the thread's column within the tile.
        """
        site, hooks = Site(*where), self.hooks
        head = hooks.head(site)
        kv = site.origin + offset
        inside = cutlass.min(kv, site.kv_len - 1)
        held = hooks.held(site, head, [offset])
        values = hooks.columns(site, head, [inside], hooks.has_mask)
        return tuple(where), head, ((inside, held[0], values[0]),), (kv < site.kv_len,)

    @cute.jit
    def weigh_either(
        self,
        mark: Int32,
        tile: tuple,
        row0: Int32,
        address: Int32,
        slopes: cute.Tensor,
        kept: cute.Tensor,
        lse: cute.Tensor | None,
    ):
        """`weigh`, with the mask where this block needs it; where code for both is too long, always."""
        hooks = self.hooks
        if const_expr(hooks.effort >= HEAVIEST and not (hooks.listed or self.by_element)):
            self.weigh(mark, True, tile, row0, address, slopes, kept, lse)
        elif (mark & APPLY_MASK) != 0:
            self.weigh(mark, True, tile, row0, address, slopes, kept, lse)
        else:
            self.weigh(mark, False, tile, row0, address, slopes, kept, lse)

    def sizes(self, masked: bool = False) -> tuple[int, int]:
        """Rows that are read at a time, and of a group: few where each takes registers of its own."""
        if self.hooks.learned:
            # exact sums in a fixed order take registers; so do the longer rings of a width of 64
            heavy = self.hooks.effort >= HEAVIEST and self.config.width == 64
            return LEARNED_CHUNK // (2 if self.config.turns or heavy else 1), LEARNED_GROUP
        own = self.hooks.selects or (masked and self.by_element)
        return (CHUNK // 2 if own else CHUNK), GROUP

    def row_after(self, first: Any, mark: Any, before: list[Any]) -> Any:
        """The first row of a group, that the compiler takes to depend on the group before.

        Otherwise it loads what depends on rows for all groups at once; learned tensors leave it no
        registers for that.
        """
        if not before or not self.hooks.learned:
            return first
        return after(first, before[-1:], mark >> 31)  # 0, as marks are positive

    def weigh(
        self,
        mark: Any,
        masked: bool,
        tile: Any,
        row0: Any,
        address: Any,
        slopes: Any,
        kept: Any,
        lse: Any,
    ) -> None:
        """From scores in tensor memory, P J to `slopes` and P to tensor memory in the dtype.

        Where captured tensors have gradients, `slopes` receives the scores as they are.

        Args:
            mark: the block's number and bits.
            masked: compute the mask, and the ends of the tensors.
            row0: the thread's first row within the tile.
            address: of the thread's scores.
            kept: receives which rows the mask keeps, a bit each, where gradients need it.
            lse: LSE of the thread's rows in log2 units, inf for dead rows, in shared memory; None
                where the scores are less LSE already.
        """
        hooks = self.hooks
        first = (mark >> 2) * self.config.block_q + row0
        rows = cute.size(slopes)
        words = self.kept_words(mark, tile, first, rows) if masked else []
        if hooks.learned:
            for i in range(cute.size(kept)):
                kept[i] = words[i] if i < len(words) else Int32(-1)
        size, group = self.sizes(masked)
        ps: list[Any] = []
        for chunk in range(0, rows, size):
            scores = device.load(address + chunk, size)
            packed: list[Any] = []
            for at in range(chunk, chunk + size, group):
                some = scores[at - chunk : at - chunk + group]
                begin = self.row_after(first + at, mark, ps)
                ps, ws, keep = self._group(mark, words, tile, begin, some, lse, at)
                for k in range(group):
                    slopes[at + k] = some[k] if hooks.learned else ws[k]
                    if hooks.learned and masked and self.by_element:
                        word, others = (at + k) // 32, Int32(~bit_of(at + k))
                        kept[word] = cutlass.select_(keep[k], kept[word], kept[word] & others)
                packed += [
                    sm90_device.pack(ps[k], ps[k + 1], self.dtype) for k in range(0, group, 2)
                ]
            device.store(address + chunk // 2, packed)

    def _group(
        self, mark: Any, words: list[Any], tile: Any, first: Any, scores: Any, lse: Any, at: int
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """P, P J and what is kept, of some rows from position `first` on, `at` in the thread's.

        Args:
            words: of `kept_words`; empty if everything is kept.
        """
        where, head, columns, _ = tile
        site, hooks, masked = Site(*where), self.hooks, bool(words)
        rows = self.rows_of(site, head, first, len(scores), masked)
        count = len(scores)
        places = [(k, 0, scores[k]) for k in range(count)]
        ps, slope = self.exponentials(
            site, head, rows, columns, places, self.values(lse, at, count)
        )
        keep: list[Any] = []
        if masked:
            keep = [(words[(at + k) // 32] & bit_of(at + k)) != 0 for k in range(count)]
            if self.by_element:
                found = hooks.keep(site, head, rows, columns, [(k, 0) for k in range(count)])
                if hooks.listed:
                    found = [one | ((mark & FULL_BLOCK) != 0) for one in found]
                keep = [one & other for one, other in zip(keep, found, strict=True)]
            ps = [cutlass.select_(k, p, Float32(0.0)) for k, p in zip(keep, ps, strict=True)]
        ws = ps
        if slope is not None and not hooks.learned:
            ws = device.times(ps, slope)
            if masked:  # a slope may be inf where p is 0
                ws = [cutlass.select_(k, w, Float32(0.0)) for k, w in zip(keep, ws, strict=True)]
        return ps, ws, keep

    def rows_of(self, site: Any, head: Any, first: Any, count: int, masked: bool) -> list[Any]:
        """(q, values of `row`) of some rows, q inside the tensor."""
        inside = [first + k for k in range(count)]
        if masked:
            inside = [cutlass.min(q, site.q_len - 1) for q in inside]
        return [(q, self.hooks.row(site, head, q)) for q in inside]

    @property
    def by_element(self) -> bool:
        """Whether the mask has to be asked for every element."""
        return self.hooks.has_mask and self.hooks.intervals is None

    def kept_words(self, mark: Any, tile: Any, first: Any, rows: int) -> list[Any]:
        """Which of the thread's rows lie inside, a bit each.

        Inside the tensors, and inside one of the column's intervals if the mask has them.
        """
        where, head, columns, valid = tile
        site, hooks, ends = Site(*where), self.hooks, []
        if hooks.has_mask and not self.by_element:
            ends = hooks.ends(site, head, columns[0][0])
        words = []
        for start in (first + i for i in range(0, rows, 32)):
            word = bits_below(site.q_len - start)
            if hooks.has_mask and not self.by_element:
                found = Int32(0)
                for low, high in ends:
                    found = found | (bits_below(high - start) & ~bits_below(low - start))
                if hooks.listed:
                    found = cutlass.select_((mark & FULL_BLOCK) != 0, Int32(-1), found)
                word = word & found
            words.append(cutlass.select_(valid[0], word, Int32(0)))
        return words

    def values(self, statistic: Any, at: int, count: int) -> Any:
        """A statistic of some rows from the thread's row `at` on; None if the products have it."""
        if statistic is None:
            return None
        found = cute.make_rmem_tensor(count, Float32)
        start = (statistic.iterator + at).align(16)
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(count)), found)
        return [found[k] for k in range(count)]

    def exponentials(
        self, site: Any, head: Any, rows: Any, columns: Any, places: Any, statistic: Any
    ) -> tuple[list[Any], list[Any] | None]:
        """P of some elements, the mask left aside, and the slopes of the mod."""
        x, slope = self.hooks.both(site, head, rows, columns, places)
        factor = self.hooks.factor(site, head)
        less = self.reductions(site, head, rows, statistic)
        far = self.far(site, head, rows, columns)
        if far is not None:
            less = far if less is None else device.plus(far, less)
        if less is not None:
            x = device.scaled(x, factor, less)
        elif factor is not None:
            x = device.times(x, [factor] * len(x))
        return [sm90_device.exp2(e) for e in x], slope

    def far(self, site: Any, head: Any, rows: Any, columns: Any) -> list[Any] | None:
        """What the exponents of some rows have for their distances, None for nothing."""
        slope = self.hooks.distance(site, head)
        if slope is None:
            return None
        first = slope * Float32(columns[0][0] - rows[0][0])
        return [cute.math.fma(slope, Float32(float(-k)), first) for k in range(len(rows))]

    def reductions(self, site: Any, head: Any, rows: Any, statistic: Any) -> list[Any] | None:
        """What is added to the exponents of some rows, None for nothing."""
        if statistic is not None:
            pairs = zip(rows, statistic, strict=True)
            return [-self.bound(site, head, row, value) for row, value in pairs]
        terms = [self.hooks.lse(site, head, row[1]) for row in rows]
        return None if terms[0] is None else [term * LOG2_E for term in terms]

    def bound(self, site: Any, head: Any, row: Any, lse: Any) -> Any:
        """What the exponents of a row are reduced by."""
        term = self.hooks.lse(site, head, row[1])
        return lse if term is None else lse - term * LOG2_E

    def gradients(
        self, mark: Any, tile: Any, row0: Any, slopes: Any, kept: Any, statistics: Any,
        addresses: Any, running: Any, totals: Any,
    ) -> None:  # fmt: skip
        """dS = P J (dP - delta) to tensor memory and to shared memory, in the dtype.

        Args:
            slopes: P J; raw scores where captured tensors have gradients.
            kept: see `weigh`.
            statistics: LSE and -delta of the thread's rows, in shared memory; None for what the
                products have.
            addresses: of the thread's dP in tensor memory; and a function of (first row, four
                pairs of elements) that writes them to shared memory.
        """
        address, write = addresses
        lse, delta = statistics
        size, group = self.sizes()
        ds: list[Any] = []
        late: list[Any] = []
        for chunk in range(0, cute.size(slopes), size):
            dp = device.load(address + chunk, size)
            packed: list[Any] = []
            for at in range(chunk, chunk + size, group):
                some = dp[at - chunk : at - chunk + group]
                if delta is not None:
                    some = device.plus(some, self.values(delta, at, group))
                if self.hooks.learned:
                    first = (mark >> 2) * self.config.block_q + row0 + at
                    first = self.row_after(first, mark, ds)
                    ds = self.gradients_learned(
                        tile,
                        first,
                        slopes,
                        kept,
                        self.values(lse, at, group),
                        some,
                        at,
                        running,
                        totals,
                    )
                else:
                    ds = device.times([slopes[at + k] for k in range(group)], some)
                packed += [
                    sm90_device.pack(ds[k], ds[k + 1], self.dtype) for k in range(0, group, 2)
                ]
                if len(packed) % 4 == 0:
                    write(at + group - 8, packed[-4:])
            if self.config.pair:
                late += packed
            elif self.config.ds_in_tensor:
                device.store(address + chunk // 2, packed)
        if late:  # at the outer ends of dP, so that dQ has one piece between them
            device.store(address + row0 // 2, late)


def bit_of(row: int) -> int:
    """The bit of a row in its word, as a signed number."""
    return (1 << row % 32) - (1 << 32) * (row % 32 == 31)

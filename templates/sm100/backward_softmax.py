"""Compute P and dS of the Blackwell backward from S and dP, with mod and mask.

The backward computes transposed scores. A thread of a compute warpgroup has one kv column of the
attention matrix, its lane of tensor memory, and the first or the second half of the block's q rows.
It reads them in chunks, and writes P^T and dS^T over columns that it has read, two elements per
column of tensor memory.

The gradient of the raw scores is dS = P J (dP - delta), where J, the slope of the mod, is its
derivative with respect to the raw score. P J stays in registers until dP is computed. Without a
softmax P is the modified score itself, and dS = J dP: there is no delta.

The gradient g of a row's entropy E adds -g P J (log(P) + E) to dS. Delta includes g E. `ScoreGrads`
then computes dS from the raw scores, which stay in registers instead of P J.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from attnkit.templates.common import device as common_device
from attnkit.templates.common.constants import LN2, LOG2_E
from attnkit.templates.common.dropout import DropoutState, log_survivor_scale, survivor_scale
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.common.work_tile import APPLY_MASK, FULL_BLOCK
from attnkit.templates.sm100 import backward_device as device
from attnkit.templates.sm100.backward_config import BackwardConfig
from attnkit.templates.sm100.backward_dropout import BackwardDropout
from attnkit.templates.sm100.config import HEAVIEST
from attnkit.templates.sm100.device import after, bits_below

if TYPE_CHECKING:
    from attnkit.templates.common.place_runs import CapturedSums
    from attnkit.templates.sm100.backward_score_grads import ScoreGrads

CHUNK, GROUP = 32, 8  # rows per load from tensor memory; rows per call of the hooks
LEARNED_CHUNK, LEARNED_GROUP = 16, 4  # the same if raw scores stay in registers


@dataclass(frozen=True)
class EntropyGrads:
    """Holds what the gradient of the rows' entropies needs.

    Attributes:
        grads: f32 [B, H, S], the gradients g.
        factor: what multiplies g log2(P): -ln(2), divided by the survivors' scale of dropout.
        shift: log2 of that scale, by which exponents are too large; None without dropout.
    """

    grads: cute.Tensor
    factor: Any
    shift: Any


@dataclass(frozen=True)
class KvBlock:
    """Holds the values that a thread computes once per kv block.

    Attributes:
        site: position of the block; the origin is its first column.
        head: values of the hook `head`.
        columns: (kv, value of `fixed_columns`, values of `columns`) of the thread's column.
        inside: whether that column is inside the tensors.
        position: the column, also if it is outside of the tensors.
        dropout: state of dropout; None without dropout.
        entropy: gradients of the entropies; None without them.
        sums_captured: whether this work tile sums gradients of captured tensors: the first of those
            that share a kv block does. True if none share one.
    """

    site: Site
    head: Any
    columns: tuple[Any, ...]
    inside: Any
    position: Int32
    dropout: DropoutState | None
    entropy: EntropyGrads | None
    sums_captured: Any


@dataclass(frozen=True)
class QBlock:
    """Describes a q block for one thread: the block's word and the statistics of the thread's rows.

    Attributes:
        word: index and bits of the block, see `common.work_tile`.
        row0: the thread's first row within the block.
        lse: LSE of the thread's rows in log2 units, inf for fully masked rows, f32 [block_q / 2] in
            shared memory; None if the MMAs subtract it.
        delta: -delta of these rows, in the same form.
        dropout: random bits of these rows; None without dropout.
    """

    word: Int32
    row0: Int32
    lse: cute.Tensor | None
    delta: cute.Tensor | None
    dropout: BackwardDropout | None


@dataclass(frozen=True)
class Scratch:
    """Holds registers that `compute_p` writes for `compute_ds`.

    Attributes:
        slopes: f32 [block_q / 2], P J, or raw scores if `SoftmaxBackward.keeps_scores`.
        keep: int32 [2], a bit for each row that the mask keeps, written only then.
    """

    slopes: cute.Tensor
    keep: cute.Tensor


class SoftmaxBackward:
    """Computes P and dS of a q block.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
        dtype: dtype of P and dS.
    """

    def __init__(self, config: BackwardConfig, hooks: BackwardHooks, dtype: Any) -> None:
        self.config = config
        self.hooks = hooks
        self.dtype = dtype

    @property
    def keeps_scores(self) -> bool:
        """Return whether raw scores stay in registers, for `ScoreGrads`, instead of P J."""
        return bool(self.hooks.gradient_levels) or self.config.with_entropy

    def begin(
        self, site: Site, offset: Int32, extras: list[Any], heads: Int32, part: Any
    ) -> KvBlock:
        """Compute the values that a thread uses for a whole kv block.

        Args:
            site: position of the block; its origin is the block's first column.
            offset: the thread's column within the block.
            extras: gradients of the entropies, and state of dropout, as far as the config says.
            heads: number of query heads.
            part: which part of the gradients' columns the work tile computes.
        """
        hooks = self.hooks
        head = hooks.head(site)
        kv = site.origin + offset
        clamped = cutlass.min(kv, site.kv_len - 1)
        constants = hooks.fixed_columns(site, head, [offset])
        values = hooks.columns(site, head, [clamped], hooks.has_mask)
        dropout, entropy = None, None
        if self.config.with_dropout:
            dropout = DropoutState.read(extras[-1], site.b * heads + site.h)
        if self.config.with_entropy:
            factor, shift = Float32(-LN2), None
            if self.config.with_dropout:
                factor = factor / survivor_scale(extras[-1])
                shift = log_survivor_scale(extras[-1]) * Float32(LOG2_E)
            entropy = EntropyGrads(extras[0], factor, shift)
        columns = ((clamped, constants[0], values[0]),)
        return KvBlock(site, head, columns, kv < site.kv_len, kv, dropout, entropy, part == 0)

    def draw(self, word: Int32, row0: Int32, tile: KvBlock) -> BackwardDropout | None:
        """Draw the random bits of the thread's rows of a q block; None without dropout.

        Args:
            word: the block's word.
            row0: the thread's first row within the block.
            tile: values of the kv block.
        """
        if tile.dropout is None:
            return None
        first, rows = (word >> 2) * self.config.block_q + row0, self.config.block_q // 2
        return BackwardDropout.draw(tile.dropout, first, tile.position, rows)

    @cute.jit
    def compute_p(self, block: QBlock, tile: KvBlock, address: Int32, scratch: Scratch):
        """Compute P J into `scratch` and P into tensor memory, from scores in tensor memory.

        Without a softmax, `scratch` receives J. With dropout P in tensor memory lacks the elements
        that are dropped, and P J does not.

        Args:
            block: the q block.
            tile: values of the kv block.
            address: tensor-memory address of the thread's scores.
            scratch: registers for P J.
        """
        hooks = self.hooks
        # two copies of the code, so that a FULL block runs no mask instructions; only one copy if
        # two would be too long
        if const_expr(
            hooks.instruction_estimate >= HEAVIEST
            and not (hooks.lists_override_mask or self.by_element)
        ):
            self._compute_p(block, True, tile, address, scratch)
        elif (block.word & APPLY_MASK) != 0:
            self._compute_p(block, True, tile, address, scratch)
        else:
            self._compute_p(block, False, tile, address, scratch)

    def sizes(self, masked: bool = False) -> tuple[int, int]:
        """Return (rows per load from tensor memory, rows per call of the hooks).

        They are small if each row needs registers of its own.
        """
        if self.keeps_scores:
            # exact sums need registers, and so do the longer rings for head dim 64
            heavy = self.hooks.instruction_estimate >= HEAVIEST and self.config.head_dim == 64
            return LEARNED_CHUNK // (2 if self.config.sum_order or heavy else 1), LEARNED_GROUP
        per_row = self.hooks.branches_on_score or (masked and self.by_element)
        return (CHUNK // 2 if per_row else CHUNK), GROUP

    def row_after(self, first: Int32, word: Int32, before: list[Any]) -> Any:
        """Return `first` with a false dependency on the previous group of rows.

        Otherwise the compiler would load the row values of all groups at once, for which
        `ScoreGrads` leaves no registers.
        """
        if not before or not self.keeps_scores:
            return first
        return after(first, before[-1:], word >> 31)  # 0, because words are positive

    def _compute_p(
        self, block: QBlock, masked: bool, tile: KvBlock, address: Int32, scratch: Scratch
    ) -> None:
        slopes, keep_words = scratch.slopes, scratch.keep
        first = (block.word >> 2) * self.config.block_q + block.row0
        rows = cute.size(slopes)
        words = self.mask_words(block, tile, first, rows) if masked else []
        if self.keeps_scores:
            for i in range(cute.size(keep_words)):
                keep_words[i] = words[i] if i < len(words) else Int32(-1)
        size, group = self.sizes(masked)
        ps: list[Any] = []
        for chunk in range(0, rows, size):
            scores = device.load(address + chunk, size)  # f32 [size], one per row
            packed: list[Any] = []
            for at in range(chunk, chunk + size, group):
                raw = scores[at - chunk : at - chunk + group]
                begin = self.row_after(first + at, block.word, ps)
                ps, ws, keep = self._group(block, words, tile, begin, raw, at)
                for k in range(group):
                    slopes[at + k] = raw[k] if self.keeps_scores else ws[k]
                    if self.keeps_scores and masked and self.by_element:
                        i, others = (at + k) // 32, Int32(~bit_of(at + k))
                        keep_words[i] = cutlass.select_(
                            keep[k], keep_words[i], keep_words[i] & others
                        )
                pairs = [
                    common_device.pack(ps[k], ps[k + 1], self.dtype) for k in range(0, group, 2)
                ]
                if block.dropout is not None:
                    pairs = [p & block.dropout.pair_mask(at + 2 * k) for k, p in enumerate(pairs)]
                packed += pairs
            # overwrites columns that this thread has read
            device.store(address + chunk // 2, packed)

    def _group(
        self, block: QBlock, words: list[Any], tile: KvBlock, first: Int32, scores: Any, at: int
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Return P, P J, and whether the mask keeps each element, for some rows.

        Args:
            block: the q block.
            words: mask words from `mask_words`; empty if everything is kept.
            tile: values of the kv block.
            first: query position of the first row.
            scores: raw scores of the rows.
            at: index of the first row among the thread's rows.
        """
        site, hooks, masked = tile.site, self.hooks, bool(words)
        count = len(scores)
        rows = self.rows_of(tile, first, count, masked)
        places = [(k, 0, scores[k]) for k in range(count)]
        ps, slope = self.exponentials(tile, rows, places, self.values(block.lse, at, count))
        keep: list[Any] = []
        if masked:
            keep = [(words[(at + k) // 32] & bit_of(at + k)) != 0 for k in range(count)]
            if self.by_element:
                pairs = [(k, 0) for k in range(count)]
                unmasked = hooks.keep(site, tile.head, rows, tile.columns, pairs)
                if hooks.lists_override_mask:
                    unmasked = [one | ((block.word & FULL_BLOCK) != 0) for one in unmasked]
                keep = [one & other for one, other in zip(keep, unmasked, strict=True)]
            ps = [cutlass.select_(k, p, Float32(0.0)) for k, p in zip(keep, ps, strict=True)]
        ws = ps
        if self.config.weights:
            ws = [Float32(1.0)] * count if slope is None else slope
        elif slope is not None and not self.keeps_scores:
            ws = device.times(ps, slope)
        if ws is not ps and not self.keeps_scores:
            if masked:  # a slope may be inf where p is 0
                ws = [cutlass.select_(k, w, Float32(0.0)) for k, w in zip(keep, ws, strict=True)]
        return ps, ws, keep

    def rows_of(self, tile: KvBlock, first: Int32, count: int, masked: bool) -> list[Any]:
        """Return (q, values of `row`) of `count` rows; `masked` clamps q to the tensor."""
        inside = [first + k for k in range(count)]
        if masked:
            inside = [cutlass.min(q, tile.site.q_len - 1) for q in inside]
        return [(q, self.hooks.row(tile.site, tile.head, q)) for q in inside]

    @property
    def by_element(self) -> bool:
        """Return whether the mask has to be evaluated for every score."""
        return self.hooks.has_mask and self.hooks.intervals is None

    def mask_words(self, block: QBlock, tile: KvBlock, first: Int32, rows: int) -> list[Any]:
        """Return bit masks of the thread's rows that are kept, 32 rows per Int32.

        Kept rows are inside the tensors and, for a mask with intervals, in one of the column's
        intervals.

        Args:
            block: the q block.
            tile: values of the kv block.
            first: position of the first row.
            rows: number of rows.
        """
        site, hooks = tile.site, self.hooks
        with_ends = hooks.has_mask and not self.by_element
        ends = hooks.kept_intervals(site, tile.head, tile.columns[0][0]) if with_ends else []
        words = []
        for start in (first + i for i in range(0, rows, 32)):
            word = bits_below(site.q_len - start)
            if with_ends:
                unmasked = Int32(0)
                for low, high in ends:
                    unmasked = unmasked | (bits_below(high - start) & ~bits_below(low - start))
                if hooks.lists_override_mask:
                    is_full = (block.word & FULL_BLOCK) != 0
                    unmasked = cutlass.select_(is_full, Int32(-1), unmasked)
                word = word & unmasked
            words.append(cutlass.select_(tile.inside, word, Int32(0)))
        return words

    def values(self, statistic: cute.Tensor | None, at: int, count: int) -> Any:
        """Return a statistic of `count` rows from the thread's row `at` on.

        Returns None if `statistic` is None.
        """
        if statistic is None:
            return None
        values = cute.make_rmem_tensor(count, Float32)  # f32 [count]
        start = (statistic.iterator + at).align(16)
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(count)), values)
        return [values[k] for k in range(count)]

    def exponentials(
        self, tile: KvBlock, rows: Any, places: Any, lse: Any
    ) -> tuple[list[Any], list[Any] | None]:
        """Return unmasked P of some elements, and the slopes of the mod (None if all are 1).

        The arguments are those of `exponents`.
        """
        x, slope = self.exponents(tile, rows, places, lse)
        return x if self.config.weights else [common_device.exp2(e) for e in x], slope

    def exponents(
        self, tile: KvBlock, rows: Any, places: Any, lse: Any
    ) -> tuple[list[Any], list[Any] | None]:
        """Return log2 of unmasked P of some elements, and the slopes of the mod (None if all are 1).

        Without a softmax the first are P itself.

        Args:
            tile: values of the kv block.
            rows: what `rows_of` returns.
            places: (row, column, score) of the elements.
            lse: LSE of these rows; None if the MMAs subtract it.
        """
        site, head = tile.site, tile.head
        x, slope = self.hooks.score_and_derivative(site, head, rows, tile.columns, places)
        factor = self.hooks.factor(site, head)
        if self.config.weights:
            return (x if factor is None else device.times(x, [factor] * len(x))), slope
        addends = self._row_terms(tile, rows, lse)
        distances = self._alibi(tile, rows)
        if distances is not None:
            addends = distances if addends is None else device.plus(distances, addends)
        if addends is not None:
            x = device.scaled(x, factor, addends)
        elif factor is not None:
            x = device.times(x, [factor] * len(x))
        return x, slope

    def _alibi(self, tile: KvBlock, rows: Any) -> list[Any] | None:
        """Return the distance terms of some rows' exponents, or None if there are none."""
        slope = self.hooks.distance_term(tile.site, tile.head)
        if slope is None:
            return None
        first = slope * Float32(tile.columns[0][0] - rows[0][0])
        return [cute.math.fma(slope, Float32(float(-k)), first) for k in range(len(rows))]

    def _row_terms(self, tile: KvBlock, rows: Any, lse: Any) -> list[Any] | None:
        """Return the row terms to add to the exponents of some rows, or None if all are 0."""
        if lse is not None:
            pairs = zip(rows, lse, strict=True)
            return [-self._bound(tile, row, value) for row, value in pairs]
        terms = [self.hooks.lse_offset(tile.site, tile.head, row[1]) for row in rows]
        return None if terms[0] is None else [term * LOG2_E for term in terms]

    def _bound(self, tile: KvBlock, row: Any, lse: Any) -> Any:
        """Return the value to subtract from a row's exponents: LSE minus the mod's term in it."""
        term = self.hooks.lse_offset(tile.site, tile.head, row[1])
        return lse if term is None else lse - term * LOG2_E

    def compute_ds(
        self, block: QBlock, tile: KvBlock, scratch: Scratch, address: Int32,
        write: Callable[[int, list[Any]], None],
        by_score: ScoreGrads, sums: CapturedSums,
    ) -> None:  # fmt: skip
        """Write dS = P J (dP - delta) to tensor memory and to shared memory, in the dtype.

        With dropout, dP of an element that is dropped is 0.

        Args:
            block: the q block.
            tile: values of the kv block.
            scratch: registers that `compute_p` has written.
            address: tensor-memory address of the thread's dP.
            write: function of (first row, four pairs of elements) that writes to shared memory.
            by_score, sums: compute dS from raw scores, and sum the gradients of captured tensors.
        """
        c, slopes = self.config, scratch.slopes
        size, group = self.sizes()
        ds: list[Any] = []
        late: list[Any] = []
        for chunk in range(0, cute.size(slopes), size):
            dp = device.load(address + chunk, size)  # f32 [size], one per row
            packed: list[Any] = []
            for at in range(chunk, chunk + size, group):
                grads = dp[at - chunk : at - chunk + group]
                if block.dropout is not None:
                    kept = [block.dropout.is_kept(at + k) for k in range(group)]
                    pairs = zip(kept, grads, strict=True)
                    grads = [cutlass.select_(k, x, Float32(0.0)) for k, x in pairs]
                if block.delta is not None:
                    grads = device.plus(grads, self.values(block.delta, at, group))
                if self.keeps_scores:
                    first = (block.word >> 2) * c.block_q + block.row0 + at
                    first = self.row_after(first, block.word, ds)
                    lse = self.values(block.lse, at, group)
                    ds = by_score.compute_ds(tile, first, scratch, lse, grads, at, sums)
                else:
                    ds = device.times([slopes[at + k] for k in range(group)], grads)
                packed += [
                    common_device.pack(ds[k], ds[k + 1], self.dtype) for k in range(0, group, 2)
                ]
                if len(packed) % 4 == 0:
                    write(at + group - 8, packed[-4:])
            if c.two_cta:
                late += packed
            elif c.ds_in_tensor:
                device.store(address + chunk // 2, packed)
        if late:  # to the two ends of dP's columns, so that dQ fits between them
            device.store(address + block.row0 // 2, late)


def bit_of(row: int) -> int:
    """Return the mask bit of a row, 1 << (row mod 32), as a signed 32-bit integer."""
    return (1 << row % 32) - (1 << 32) * (row % 32 == 31)

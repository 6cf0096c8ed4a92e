"""Compute the scores of a block in a Hopper consumer warpgroup: the mod, the mask and dropout's bits.

A thread of a consumer warpgroup holds two rows of a tile, 8 rows apart. It holds the columns 8 g
and 8 g + 1 of each row, counted from the thread's first column. Element i of the accumulator
belongs to row (i >> 1) & 1 and to the thread's column 2 (i // 4) + (i & 1).

The methods are traced inside the kernel. Those with a dynamic branch are `cute.jit`. The others are
plain Python, so that they can pass records and the hooks' tuples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import NEG_INF
from attnkit.templates.common.dropout import DropoutState
from attnkit.templates.common.forward_work import Scalars
from attnkit.templates.common.hooks import ForwardHooks, Values
from attnkit.templates.common.site import Site
from attnkit.templates.sm90.config import LONG_MOD, ForwardConfig
from attnkit.templates.sm90.dropout import forward_words
from attnkit.templates.sm90.slope_in_mma import middle

MASK_COLUMNS = 8  # columns per evaluation of a mask without intervals
TERM_COLUMNS = 8  # columns whose terms are loaded at a time, see `columns_in_mma`
ROWS = 2  # rows per thread
ROW_STEP = 8  # from a thread's first row to its second


def row_of(i: int) -> int:
    """Return which of the thread's two rows contains element `i` of the accumulator."""
    return (i >> 1) & 1


def column_of(i: int) -> int:
    """Return which of the thread's columns contains element `i` of the accumulator."""
    return 2 * (i // 4) + (i & 1)


@dataclass(frozen=True)
class TileValues:
    """Holds the values that a thread computes once per work tile.

    Attributes:
        site: position of the tile.
        head: values of the hook `head`.
        rows: (q, values of the hook `row`) of the thread's two rows; q is clamped to the tensor.
        column_constants: the value of the hook `fixed_columns` for each of the thread's columns.
        intervals: for each row, the intervals [low, high) of kv that it keeps; None if the mask has
            no such form.
        first_column: the thread's first column within a block.
        first_row: the thread's first row, not clamped to the tensor.
        dropout: state of dropout; None without dropout.
    """

    site: Site
    head: Values
    rows: tuple[tuple[Any, Values], ...]
    column_constants: tuple[Any, ...]
    intervals: tuple[tuple[tuple[Any, Any], ...], ...] | None
    first_column: Int32
    first_row: Int32
    dropout: DropoutState | None


@dataclass(frozen=True)
class BlockValues:
    """Holds the values that convert the accumulator of a kv block to scores.

    Attributes:
        start: first column of the block.
        columns: (kv, column constant, values of the hook `columns`) of the thread's columns.
        places: (row, column) of each element of the accumulator.
        relatives: result of the hook `relatives`.
        one_class: whether all columns have one index in the table of pairs, in a whole warp; None
            if that is not known.
        shift: shift of the terms that the MMA has added, see `columns_in_mma`; None without it.
        odd: whether the shift is NaN in a warp: the MMA has not added the terms.
    """

    start: Int32
    columns: list[tuple[Any, Any, Any]]
    places: list[tuple[int, int]]
    relatives: Any
    one_class: Any = None
    shift: Any = None
    odd: Any = None


class Scores:
    """Applies mod and mask to S = Q K^T in a consumer warpgroup.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
    """

    def __init__(self, config: ForwardConfig, hooks: ForwardHooks) -> None:
        self.config = config
        self.hooks = hooks

    @property
    def one_loop(self) -> bool:
        """Whether one loop visits the blocks with and without the mask, so that code is not long.

        A mask that is evaluated for each score has to be known before the scores, because both
        would not fit in the registers. Other settings than these have exponentials of their own for
        blocks without a mask.
        """
        hooks, kind = self.hooks, self.config.softmax
        known = not hooks.has_mask or hooks.intervals is not None
        long = hooks.instruction_estimate >= LONG_MOD
        return long and known and kind in ("delayed-max", "online")

    def columns_of_thread(self) -> list[int]:
        """Return the offsets of a thread's columns from its first column."""
        return [8 * g + c for g in range(self.config.block_kv // 8) for c in (0, 1)]

    def site(
        self, captured: list, batch: Int32, head: Int32, scalars: Scalars, first_row: Int32
    ) -> Site:
        """Return the position of a work tile, whose first row is `first_row`, for the hooks."""
        steps = (0, ROW_STEP), self.columns_of_thread()
        q_len, kv_len, scale = scalars.q_len, scalars.kv_len, scalars.scale
        group = math.gcd(self.config.block_kv, 64)
        origin = first_row
        if self.config.slope_in_mma:  # distances from the middle round to half the error
            origin += self.config.block_q // 2
        return Site(captured, batch, head, q_len, kv_len, scale, origin, steps, group)

    # ------------------------------------------------------------------ values known once a tile

    def begin_tile(self, site: Site, first_column: Int32, row: Int32, heads: Int32) -> TileValues:
        """Compute the values that a thread uses for a whole work tile.

        Args:
            site: position of the tile.
            first_column: the thread's first column within a block.
            row: the thread's first row; the second is 8 rows below.
            heads: number of query heads.
        """
        hooks = self.hooks
        inside = [cutlass.min(row + ROW_STEP * r, site.q_len - 1) for r in range(ROWS)]
        head = hooks.head(site)
        rows = tuple((q, hooks.row(site, head, q)) for q in inside)
        constants = hooks.fixed_columns(
            site, head, [first_column + o for o in self.columns_of_thread()]
        )
        # pinned, because the compiler would recompute them in each block
        constants = tuple(x if x is None or self._tight else device.pinned(x) for x in constants)
        if not hooks.has_mask:
            intervals: Any = (((Int32(0), site.kv_len),),) * ROWS
        elif hooks.intervals is None:
            intervals = None
        else:
            intervals = tuple(
                tuple(
                    (cutlass.max(low, Int32(0)), cutlass.min(high, site.kv_len))
                    for low, high in hooks.kept_intervals(site, head, q)
                )
                for q in inside
            )
        dropout = None
        if hooks.has_dropout:
            dropout = DropoutState.read(hooks.dropout(site.tensors), site.b * heads + site.h)
        return TileValues(site, head, rows, constants, intervals, first_column, row, dropout)

    @property
    def _tight(self) -> bool:
        """Whether registers are too few to keep the column constants across blocks.

        This is the case for a mask without intervals at head_dim_v above 192.
        """
        hooks = self.hooks
        return self.config.head_dim_v > 192 and hooks.has_mask and hooks.intervals is None

    def factor(self, tile: TileValues) -> Float32 | None:
        """Return the factor that converts scores to log2 units, or None for 1."""
        return self.hooks.factor(tile.site, tile.head)

    def lse_terms(self, site: Site, row: Int32) -> list[Any]:
        """Return the term that the hook `lse_offset` adds to the LSE of each of the thread's rows.

        `row` is the thread's first row, as in `begin_tile`.
        """
        hooks = self.hooks
        head = hooks.head(site)
        inside = [cutlass.min(row + ROW_STEP * r, site.q_len - 1) for r in range(ROWS)]
        return [hooks.lse_offset(site, head, hooks.row(site, head, q)) for q in inside]

    def dropout_words(self, tile: TileValues, start: Int32) -> tuple[Any, Any] | None:
        """Draw the random bits of a kv block, see `forward_words`; None without dropout.

        `start` is the first column of the block.
        """
        if tile.dropout is None:
            return None
        row, column = tile.first_row, start + tile.first_column
        return forward_words(tile.dropout, row, column, self.config.block_kv // 16)

    # -------------------------------------------------------------------------- scores of a block

    def block_values(
        self, tile: TileValues, kv_block: Int32, masked: bool, count: int, shift: Any = None
    ) -> BlockValues:
        """Compute the values that the `count` scores of a thread in a kv block need.

        `shift` is that of the block's terms, see `columns_in_mma`; None without it.
        """
        site, head, constants, hooks = tile.site, tile.head, tile.column_constants, self.hooks
        if self._tight and constants[0] is not None:
            # Recompute from an opaque number in each block. Otherwise the compiler keeps the
            # constants in registers through the loop and spills others.
            first = device.pinned(Float32(tile.first_column))
            constants = hooks.fixed_columns(
                site, head, [first + Float32(o) for o in self.columns_of_thread()]
            )
        start, _, positions = self._positions(tile, kv_block)
        if masked:  # loads of a mod or a mask must stay inside their tensors
            positions = [cutlass.min(kv, site.kv_len - 1) for kv in positions]
        values: Any = [()] * len(positions)
        if shift is None:  # else the MMA has added what depends on columns
            values = hooks.columns(site, head, positions, False)
        columns = list(zip(positions, constants, values, strict=True))
        places = [(row_of(i), column_of(i)) for i in range(count)]
        relatives = (
            None if hooks.only_scales else hooks.relatives(site, head, tile.rows, columns, places)
        )
        one_class = None
        classes = hooks.pair_classes(columns) if self.config.pair_table else None
        if classes is not None:
            one_class = classes[0] == cute.arch.shuffle_sync(classes[0], 0)
            for other in classes[1:]:
                one_class = one_class & (other == classes[0])
        odd = None if shift is None else cute.arch.vote_any_sync(shift != shift)
        return BlockValues(start, columns, places, relatives, one_class, shift, odd)

    def load_bias(
        self, tile: TileValues, kv_block: Int32, masked: bool, acc_s: cute.Tensor
    ) -> None:
        """Load the bias of a kv block, divided by the factor of the scores, to the accumulator of S.

        Call `device.settle` before the MMAs that add to it. Two neighbouring columns are loaded at
        once if they are aligned and the block is inside the tensors, because the first-level cache
        limits the kernel.
        """
        # addresses that the mainloop keeps would take registers
        b, h = (device.recomputed(x, kv_block) for x in (tile.site.b, tile.site.h))
        tile = replace(tile, site=replace(tile.site, b=b, h=h))
        if self.hooks.bias_is_along_rows(tile.site):
            start = self.first_column(tile, kv_block)
            whole = start + self.config.block_kv <= tile.site.kv_len
            paired = whole & self.hooks.pairs_are_aligned(tile.site)
            self._load_bias_in_pairs(paired, tile, kv_block, acc_s)
        else:
            self._load_bias(tile, kv_block, masked, False, acc_s)

    @cute.jit
    def _load_bias_in_pairs(
        self, paired: Boolean, tile: TileValues, kv_block: Int32, acc_s: cute.Tensor
    ):
        """Load two columns at once if `paired` is set; no column may then be outside the tensors."""
        if paired:
            self._load_bias(tile, kv_block, False, True, acc_s)
        else:
            self._load_bias(tile, kv_block, True, False, acc_s)

    def _load_bias(
        self, tile: TileValues, kv_block: Int32, masked: bool, paired: bool, acc_s: cute.Tensor
    ) -> None:
        block, hooks = self.block_values(tile, kv_block, masked, cute.size(acc_s)), self.hooks
        known = None
        if paired:
            left, offsets = block.start + tile.first_column, self.columns_of_thread()
            rows = [hooks.bias_row(tile.site, q, left, offsets, True) for q, _ in tile.rows]
            known = [rows[r][j] for r, j in block.places]
        values = hooks.initial_scores(
            tile.site, tile.head, tile.rows, block.columns, block.places, known
        )
        for i, x in enumerate(values):
            acc_s[i] = x

    def begin_with_bias(
        self,
        tile: TileValues,
        kv_block: Int32,
        masked: bool,
        biases: list[Float32],
        acc_s: cute.Tensor,
    ) -> None:
        """Initialise the accumulator of S to biases that are already loaded, see `load_bias`.

        They are in the order of the accumulator.
        """
        block = self.block_values(tile, kv_block, masked, cute.size(acc_s))
        values = self.hooks.scores_of_biases(
            tile.site, tile.head, tile.rows, block.columns, block.places, biases
        )
        for i, x in enumerate(values):
            acc_s[i] = x

    def first_column(self, tile: TileValues, kv_block: Int32) -> Int32:
        """Return the first column of a kv block from its number in shared memory."""
        start: Int32 = self._positions(tile, kv_block)[0]
        return start

    def _positions(self, tile: TileValues, kv_block: Int32) -> tuple[Any, Any, list[Any]]:
        """Return a block's first column, whether it is FULL, and the thread's column positions.

        If block lists take precedence over the mask, `kv_block` is ~n for a FULL block n, in which
        only columns beyond the end of the tensor are masked. Otherwise the Boolean is always False.
        """
        full = Boolean(False)
        if self.hooks.lists_override_mask:
            full = kv_block < 0
            kv_block = cutlass.select_(full, ~kv_block, kv_block)
        start = kv_block * self.config.block_kv
        return start, full, [start + tile.first_column + o for o in self.columns_of_thread()]

    def mask_bits(
        self, tile: TileValues, kv_block: Int32, masked: bool
    ) -> list[list[Int32]] | None:
        """Compute bit masks of the columns that each row keeps; None if all are kept.

        This needs no scores. It runs while the tensor cores compute S.
        """
        if not masked:
            return None
        start, full, positions = self._positions(tile, kv_block)
        kv_len, left = tile.site.kv_len, start + tile.first_column
        if tile.intervals is not None:
            return self._inside(tile.intervals, left, full, kv_len)
        valid = device.bits_below(kv_len - left, self._words())
        masks = [list(valid) for _ in range(ROWS)]
        for word in range(len(valid)):
            for r, bits in enumerate(self._evaluated(tile, positions, word)):
                if self.hooks.lists_override_mask:
                    bits = cutlass.select_(full, Int32(-1), bits)
                masks[r][word] = masks[r][word] & bits
        return masks

    def right_half_is_empty(self, bits: list[list[Int32]] | None) -> Boolean:
        """Return whether no row of the warp keeps a column in the right half of a block.

        `bits` are those of `mask_bits` for a block that needs the mask.
        """
        assert bits is not None
        kept, half = Int32(0), self.config.block_kv // 8
        for word in range(half // 32, self._words()):
            left = (1 << max(half - 32 * word, 0)) - 1  # bits of columns in the left half
            for row in bits:
                kept = kept | (row[word] & Int32(~left))
        return cute.arch.vote_all_sync(kept == 0)

    def _evaluated(self, tile: TileValues, positions: list[Any], word: int) -> list[Any]:
        """Evaluate one word of each row's bit mask, for a mask without intervals.

        The columns are evaluated in groups, one after the other: the values of all columns at once
        would not fit in the registers.
        """
        site, bits = tile.site, [Int32(0), Int32(0)]
        for low in range(32 * word, min(32 * word + 32, len(positions)), MASK_COLUMNS):
            # always 0, but the compiler does not know that kv_len >= 0: a false dependency on the
            # previous group
            ready = (bits[0] | bits[1]) & (site.kv_len >> 31)
            group = positions[low : low + MASK_COLUMNS]
            group = [cutlass.min(kv, site.kv_len - 1) | ready for kv in group]
            values = self.hooks.columns(site, tile.head, group, True)
            columns = [(kv, None, value) for kv, value in zip(group, values, strict=True)]
            places = [(r, j) for r in range(ROWS) for j in range(len(group))]
            keep = self.hooks.keep(site, tile.head, tile.rows, columns, places)
            for (r, j), yes in zip(places, keep, strict=True):
                bit = Int32(device.one(low + j))
                bits[r] = bits[r] | cutlass.select_(yes, bit, Int32(0))
        return bits

    def apply_score_mod(self, tile: TileValues, block: BlockValues, acc_s: cute.Tensor) -> Any:
        """Apply the mod in place, and return the term to add to the block's scores, or None."""
        if block.one_class is not None:
            self._apply_pairs(tile, block, acc_s)
        elif not self.hooks.only_scales:
            self._write_scores(tile, block, acc_s)
        if block.shift is not None:
            self._add_terms(tile, block, acc_s)
            return block.shift
        start = block.start
        if self.config.slope_in_mma:
            start += middle(self.config.block_kv)
        return self.hooks.block(tile.site, tile.head, start)

    @cute.jit
    def _add_terms(self, tile: TileValues, block: BlockValues, acc_s: cute.Tensor):
        """Add the terms of columns that the MMA has not added.

        A few columns are loaded at a time: the terms of all would not fit in the registers.
        """
        if block.odd:
            self._add_terms_in_groups(tile, block, acc_s)

    def _add_terms_in_groups(
        self, tile: TileValues, block: BlockValues, acc_s: cute.Tensor
    ) -> None:
        # addresses that the mainloop keeps would take registers
        b, h = (device.recomputed(x, block.start) for x in (tile.site.b, tile.site.h))
        site, ready = replace(tile.site, b=b, h=h), Int32(0)
        for low in range(0, len(block.columns), TERM_COLUMNS):
            group = range(low, low + TERM_COLUMNS)
            columns = [cutlass.min(block.columns[j][0], site.kv_len - 1) | ready for j in group]
            terms = self.hooks.column_terms(site, tile.head, columns)
            for i, (_, j) in enumerate(block.places):
                if j in group:
                    acc_s[i] = acc_s[i] + terms[j - low]
                    # always 0, see `_evaluated`
                    ready = device.bits(acc_s[i]) & (site.kv_len >> 31)

    @cute.jit
    def _apply_pairs(self, tile: TileValues, block: BlockValues, acc_s: cute.Tensor):
        """Apply a mod with a table of pairs, which is read once a row if all columns have one index."""
        if cute.arch.vote_all_sync(block.one_class):
            pairs = self.hooks.pair_values(tile.site, tile.rows, block.columns)
            self._write_scores(tile, block, acc_s, pairs)
        else:
            self._write_scores(tile, block, acc_s)

    def _write_scores(
        self, tile: TileValues, block: BlockValues, acc_s: cute.Tensor, pairs: Any = None
    ) -> None:
        """Apply the mod in place; `pairs` is the result of the hook `pair_values`."""
        hooks = self.hooks
        elements = [(r, j, acc_s[i]) for i, (r, j) in enumerate(block.places)]
        scores = hooks.score(
            tile.site, tile.head, tile.rows, block.columns, elements, block.relatives, pairs
        )
        if hooks.ignores_score:
            # Nothing reads S: without a dependency on it, its registers would be reused while
            # the MMA is in flight.
            scores = device.after(scores, [s for _, _, s in elements])
        for i, x in enumerate(scores):
            acc_s[i] = x

    def apply_mask(
        self, bits: list[list[Int32]] | None, acc_s: cute.Tensor, masked: float | None = None
    ) -> None:
        """Set the masked scores in place to `masked`; by default -inf, or 0 if scores are weights."""
        if bits is not None:
            if masked is None:
                masked = 0.0 if self.config.softmax == "none" else NEG_INF
            for i in range(cute.size(acc_s)):
                j = column_of(i)
                keep = device.bit(bits[row_of(i)][j // 32], j)
                acc_s[i] = cutlass.select_(keep, acc_s[i], Float32(masked))

    @cute.jit
    def mask_if(self, masked: Boolean, kv_block: Int32, tile: TileValues, acc_s: cute.Tensor):
        """Set the masked scores of a kv block to -inf if `masked` is set."""
        if masked:
            self.apply_mask(self.mask_bits(tile, kv_block, True), acc_s)

    def _words(self) -> int:
        return (self.config.block_kv // 4 + 31) // 32

    def _inside(
        self, intervals: Any, left: Int32, full: Boolean, kv_len: Int32
    ) -> list[list[Int32]]:
        """Return bit masks of the columns that are inside one of their row's intervals."""
        words, masks = self._words(), []
        for pairs in intervals:
            total = [Int32(0)] * words
            for low, high in pairs:
                below, above = (device.bits_below(end - left, words) for end in (high, low))
                total = [t | (x & ~y) for t, x, y in zip(total, below, above, strict=True)]
            if self.hooks.lists_override_mask:
                valid = device.bits_below(kv_len - left, words)
                total = [cutlass.select_(full, v, t) for v, t in zip(valid, total, strict=True)]
            masks.append(total)
        return masks

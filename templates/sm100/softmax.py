"""Compute the softmax of a row's scores on Blackwell: mod, mask, maximum, exponentials and sums.

A thread has one row, the lane of tensor memory with its index. The row is computed in chunks of 32
or 16 columns. The hooks evaluate a chunk like a block of that width, and one 32-bit word says which
of its columns the mask keeps.

The online softmax is that of Milakov and Gimelshein (2018). As in FlashAttention-4, P is relative
to a maximum that is updated only when P would exceed 2**8; output and sums are rescaled only then.
A row's largest P is therefore not always 1, and is rounded like the others. If it is nearly all of
the row's sum, its rounding error would change the output by the same fraction. The output is
therefore divided by a sum in which the largest P of each block is rounded too. The LSE uses the sum
without rounding.

Without a softmax (`ForwardConfig.weights`) P is the modified score or its sigmoid: there is no
maximum, no sum and nothing to rescale.

The methods are traced inside the kernel. Those with a dynamic branch are `cute.jit`; the others are
plain Python, so that they can pass records and the hooks' tuples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute

from attnkit.templates.common import device as common_device
from attnkit.templates.common.constants import NEG_INF, RESCALE_THRESHOLD
from attnkit.templates.common.dropout import DropoutState, pair_mask, survivor_scale
from attnkit.templates.common.forward_work import Scalars
from attnkit.templates.common.hooks import ForwardHooks, Values
from attnkit.templates.common.sigmoid import sigmoid
from attnkit.templates.common.site import Site
from attnkit.templates.common.softmax import (
    at_least,
    largest,
    rescaled_moment,
    row_entropy,
    row_results,
)
from attnkit.templates.sm100 import device
from attnkit.templates.sm100.config import HEAVIEST, ForwardConfig
from attnkit.templates.sm100.cta_group import CtaGroup
from attnkit.templates.sm100.exp2 import DEGREES, exp2_pair

# From this estimated number of instructions per score on, the chunks of a row are computed in a
# loop. The second value is for CTA pairs, whose threads have fewer free registers.
HEAVY, HEAVY_IN_PAIRS = 10, 8
CHAINS = 4  # independent dependency chains of maxima, and of pairs of sums
CHUNK = 32  # maximum columns of a chunk: the bits of a mask word


@dataclass(frozen=True)
class RowState:
    """Holds the running softmax state of a thread's row.

    Attributes:
        max: f32 [1], the maximum that is subtracted in P and in `sum`.
        sum: f32 [1], the sum of P.
        highest: f32 [1], the largest score, if the kernel writes the maxima.
        moment: f32 [1], the sum of P log2(P), if the kernel writes entropies; otherwise `highest`.
    """

    max: cute.Tensor
    sum: cute.Tensor
    highest: cute.Tensor
    moment: cute.Tensor

    @staticmethod
    def create(need_entropy: bool) -> RowState:
        """Allocate the state in registers."""
        # f32 [1] each
        row_max, row_sum, highest = (cute.make_rmem_tensor(1, Float32) for _ in range(3))
        moment = cute.make_rmem_tensor(1, Float32) if need_entropy else highest
        return RowState(row_max, row_sum, highest, moment)

    def reset(self) -> None:
        """Reset the state for a new work tile."""
        self.max[0], self.sum[0] = Float32(NEG_INF), Float32(0.0)
        self.moment[0] = Float32(0.0)
        self.highest[0] = Float32(NEG_INF)  # last, because it may be `moment`


@dataclass(frozen=True)
class TileValues:
    """Holds the values that a thread computes once per work tile.

    Attributes:
        site: position of the tile.
        head: values of the hook `head`.
        row: (q, values of the hook `row`) of the thread's row; q is clamped to the tensor.
        column_constants: for each column of a chunk, the value of `fixed_columns`, shared by all
            blocks.
        intervals: the intervals [low, high) of kv that the row keeps; None if the mask has no such
            form.
        dropout: state of dropout; None without dropout.
    """

    site: Site
    head: Values
    row: tuple[Any, Values]
    column_constants: tuple[Any, ...]
    intervals: tuple[tuple[Any, Any], ...] | None
    dropout: DropoutState | None


@dataclass(frozen=True)
class UpperHalf:
    """Holds the barriers of the upper half of S, if it is computed after the lower half.

    Attributes:
        full, phase: barrier and parity; completes when the half is computed.
        empty: barrier to arrive at when all of S is read.
    """

    full: cute.Pointer
    phase: Int32
    empty: cute.Pointer


@dataclass(frozen=True)
class BlockScores:
    """Holds the scores of a row in a block.

    Attributes:
        chunks: f32 values of each chunk.
        bases: term to add to the scores of each chunk, or None.
        peak: the largest score of the row.
    """

    chunks: list[list[Float32]]
    bases: list[Float32 | None]
    peak: Float32


class Softmax:
    """Computes P from S = Q K^T for a thread's row.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
        group: the CTAs that compute MMAs together.
    """

    def __init__(self, config: ForwardConfig, hooks: ForwardHooks, group: CtaGroup) -> None:
        self.config = config
        self.hooks = hooks
        self.group = group
        self.dtype = common_device.DTYPES[config.dtype]

    def chunk(self, masked: bool) -> int:
        """Return the number of columns that are computed together.

        It is small if each column needs registers of its own.
        """
        hooks = self.hooks
        if self.rolled(masked):
            return CHUNK // 2 if hooks.instruction_estimate >= HEAVIEST else CHUNK
        return (
            CHUNK // 2 if hooks.prefetches or hooks.branches_on_score or hooks.row_factor else CHUNK
        )

    def rolled(self, masked: bool) -> bool:
        """Return whether chunks are computed in a loop that writes scores back to tensor memory.

        With many instructions per score, unrolled code does not fit in the instruction caches and
        takes long to compile. The compiler would also interleave all chunks and need too many
        registers.
        """
        heavy = HEAVY_IN_PAIRS if self.config.two_cta else HEAVY
        return self.hooks.instruction_estimate >= heavy or (masked and self.by_element)

    @property
    def by_element(self) -> bool:
        """Return whether the mask has to be evaluated for every score."""
        return self.hooks.has_mask and self.hooks.intervals is None

    @property
    def sums(self) -> int:
        """Return the number of independent chains of pairs of sums.

        It is smaller if the exponentials leave few registers: the polynomial for float16 has a
        higher degree, and a mod that reads the score adds a multiplication to each exponential.
        """
        crowded = (
            self.config.two_cta and self.config.dtype == "float16" and not self.hooks.ignores_score
        )
        return CHAINS // 2 if crowded else CHAINS

    def site(
        self, captured: list, batch: Int32, head: Int32, scalars: Scalars, first_row: Int32
    ) -> Site:
        """Return the site of a work tile, with `first_row` as the origin of distances."""
        steps = (0,), range(CHUNK)
        q_len, kv_len, scale = scalars.q_len, scalars.kv_len, scalars.scale
        return Site(captured, batch, head, q_len, kv_len, scale, first_row, steps)

    # ------------------------------------------------------------------ values known once a tile

    def begin_tile(self, site: Site, q: Int32, heads: Int32) -> TileValues:
        """Compute the values that the thread's row `q` uses for a whole work tile.

        `heads` is the number of query heads.
        """
        hooks = self.hooks
        inside = cutlass.min(q, site.q_len - 1)
        head = hooks.head(site)
        row = (inside, hooks.row(site, head, inside))
        constants = hooks.fixed_columns(site, head, list(range(CHUNK)))
        # pinned, because the compiler would recompute them in each block
        constants = tuple(
            x if x is None or hooks.prefetches else common_device.pinned(x) for x in constants
        )
        if not hooks.has_mask:
            intervals: Any = ((Int32(0), site.kv_len),)
        elif self.by_element:
            intervals = None
        else:
            intervals = tuple(
                (low, cutlass.min(high, site.kv_len))
                for low, high in hooks.kept_intervals(site, head, inside)
            )
        dropout = None
        if hooks.has_dropout:
            dropout = DropoutState.read(hooks.dropout(site.tensors), site.b * heads + site.h)
        return TileValues(site, head, row, constants, intervals, dropout)

    def factor(self, tile: TileValues) -> Float32 | None:
        """Return the factor that converts scores to log2 units, or None for 1."""
        return self.hooks.factor(tile.site, tile.head)

    # -------------------------------------------------------------------------- scores of a block

    def scores(
        self,
        tile: TileValues,
        number: Int32,
        masked: bool,
        row: Int32,
        column: Int32,
        upper: UpperHalf | None,
    ) -> BlockScores:
        """Load the scores of a block and apply the mod and (if `masked`) the mask.

        Args:
            tile: values of the work tile.
            number: index n of the kv block. If block lists take precedence over the mask, ~n stands
                for a FULL block, in which only positions beyond the end of the tensor are masked.
            masked: whether the block needs the mask.
            row: row of the thread.
            column: first column of the scores in tensor memory.
            upper: barriers of the upper half of the columns if it is computed later, else None.
        """
        full, kv_block = Boolean(False), number
        if self.hooks.lists_override_mask:
            full = number < 0
            kv_block = cutlass.select_(full, ~number, number)
        start, rolled = kv_block * self.config.block_kv, self.rolled(masked)
        wide = self.chunk(masked)
        count = self.config.block_kv // wide
        half = count // 2
        chains: list[Any] = [None] * CHAINS
        peak = None
        if rolled:
            peak = self._rolled(tile, start, full, masked, row, column, upper)
        loaded: list[Any] = []
        chunks: list[list[Any]] = []
        bases: list[Any] = []
        for c in range(count):
            if upper is not None and c == half and not rolled:
                cute.arch.mbarrier_wait(upper.full, upper.phase)
            if not self.hooks.only_scales and not rolled:
                loading = [c]  # one by one, because the mod needs registers too
            else:  # by halves: the maximum of one half is computed while the other loads
                loading = list(range(c, c + half)) if c % half == 0 else []
            loaded += [device.load_row(row, column + wide * k, wide) for k in loading]
            if loading:
                cute.arch.fence_view_async_tmem_load()
                if upper is not None and loading[-1] == count - 1:
                    self.group.arrive_leader(upper.empty)
            chunk, base = loaded[c], None
            if not rolled:
                chunk, base = self._chunk(tile, start + wide * c, full, masked, chunk)
                if not self.config.weights:
                    peak, chains = self._peak(chunk, base, peak, chains)
            chunks.append(chunk)
            bases.append(base)
        if chains[0] is not None:
            peak = largest(chains, self.config.need_max)
        return BlockScores(chunks, bases, peak)

    def _rolled(
        self,
        tile: TileValues,
        start: Int32,
        full: Boolean,
        masked: bool,
        row: Int32,
        column: Int32,
        upper: UpperHalf | None,
    ) -> Any:
        """Replace a block's scores in tensor memory by modified scores; return the row maximum.

        Args:
            start: first kv column of the block.
            full: whether block lists keep the whole block.
            Others: as for `scores`.
        """
        wide, nan = self.chunk(masked), self.config.need_max

        def compute(c: Int32, peak: Any) -> Any:
            place = column + wide * c
            chunk = device.load_row(row, place, wide)
            cute.arch.fence_view_async_tmem_load()
            chunk, base = self._chunk(tile, start + wide * c, full, masked, chunk)
            if base is not None:
                chunk = [x + base for x in chunk]
            device.store_row(row, place, chunk)
            _, chains = self._peak(chunk, None, None, [None] * CHAINS)
            return _larger(peak, largest(chains, nan), nan)

        count, peak = self.config.block_kv // wide, Float32(NEG_INF)
        if upper is None:
            peak = _repeated(compute, 0, count, peak)
        else:
            peak = _repeated(compute, 0, count // 2, peak)
            cute.arch.mbarrier_wait(upper.full, upper.phase)
            peak = _repeated(compute, count // 2, count, peak)
        cute.arch.fence_view_async_tmem_store()
        return peak

    def _chunk(
        self, tile: TileValues, start: Int32, full: Boolean, masked: bool, chunk: list[Float32]
    ) -> tuple[list[Any], Any]:
        """Apply mod and mask to a chunk; return its scores, and the term to add to all or None."""
        site, head, hooks = tile.site, tile.head, self.hooks
        wide = len(chunk)
        rows, places = [tile.row], [(0, j) for j in range(wide)]
        positions = [start + j for j in range(wide)]
        if masked:  # a mod or a mask may load at these positions
            positions = [cutlass.min(kv, site.kv_len - 1) for kv in positions]
        values = hooks.columns(site, head, positions, masked)
        columns = list(zip(positions, tile.column_constants[:wide], values, strict=True))
        if not hooks.only_scales:
            relatives = hooks.relatives(site, head, rows, columns, places)
            elements = [(r, j, chunk[j]) for r, j in places]
            chunk = list(hooks.score(site, head, rows, columns, elements, relatives))
        if masked:
            valid = device.bits_below(site.kv_len - start)
            if tile.intervals is not None:
                word = self._inside(tile.intervals, start)
                if hooks.lists_override_mask:
                    word = cutlass.select_(full, valid, word)
                keep = [common_device.bit(word, j) for j in range(wide)]
            else:
                keep = hooks.keep(site, head, rows, columns, places)
                keep = [
                    (yes | full if hooks.lists_override_mask else yes) & common_device.bit(valid, j)
                    for j, yes in enumerate(keep)
                ]
            out = Float32(0.0 if self.config.weights == "linear" else NEG_INF)
            chunk = [cutlass.select_(yes, x, out) for yes, x in zip(keep, chunk, strict=True)]
        return [Float32(x) for x in chunk], hooks.block(site, head, start)

    def _inside(self, intervals: Any, start: Int32) -> Any:
        """Return a bit mask of the columns of a chunk that are inside one of the intervals."""
        total = Int32(0)
        for low, high in intervals:
            total = total | (device.bits_below(high - start) & ~device.bits_below(low - start))
        return total

    # ------------------------------------------------------------------------------- exponentials

    def _peak(
        self, chunk: Any, base: Float32 | None, peak: Any, chains: list[Any]
    ) -> tuple[Any, list[Any]]:
        """Update the row maximum with a chunk; return the row's maximum so far and the open chains.

        A chain is a partial maximum. Chains stay open across chunks without a base, and the caller
        reduces them at the end.
        """
        nan, chains = self.config.need_max, list(chains)  # torch's maximum propagates NaN
        for j in range(0, len(chunk), 2):
            c, x, y = j // 2 % CHAINS, chunk[j], chunk[j + 1]
            if chains[c] is None:
                chains[c] = cute.arch.fmax(x, y, nan=nan)
            else:
                chains[c] = device.fmax3(chains[c], x, y, nan)
        if base is None:
            return peak, chains
        return _larger(peak, largest(chains, nan) + base, nan), [None] * CHAINS

    def move_maximum(self, state: RowState, peak: Float32, factor: Float32 | None) -> Any:
        """Update the row maximum with a block's `peak`; return the rescale factor of O.

        The sum of P log2(P) is rescaled here, the sum of P by the caller.
        """
        nan = self.config.need_max
        old = state.max[0]
        new = cute.arch.fmax(old, peak, nan=nan)
        if const_expr(self.config.need_max):
            state.highest[0] = cute.arch.fmax(state.highest[0], peak, nan=nan)
        growth = new - old if factor is None else (new - old) * factor
        # small growth: keep the old maximum, with nothing to rescale
        new = cutlass.select_(growth <= Float32(RESCALE_THRESHOLD), old, new)
        state.max[0] = new
        drop = old - common_device.finite_or_zero(new)
        change = drop if factor is None else drop * factor
        scale = common_device.exp2(change)
        if self.config.need_entropy:
            state.moment[0] = rescaled_moment(state.moment[0], state.sum[0], change, scale)
        return scale

    def compute_p(
        self,
        values: list[Float32],
        first: int,
        base: Float32 | None,
        row_max: Float32,
        factor: Float32 | None,
        state: RowState,
    ) -> list[Any]:
        """Return P of adjacent columns, from column `first` of a block on, as float32 pairs.

        Their P log2(P) is added to `state.moment` if the kernel writes entropies.
        """
        less = self.shift(base, row_max, factor)
        pairs = []
        for j in range(0, len(values), 2):
            pair = values[j], values[j + 1]
            if factor is None:
                pair = cute.arch.add_packed_f32x2(pair, (less, less))
            else:
                pair = cute.arch.fma_packed_f32x2(pair, (factor, factor), (less, less))
            poly, exponents = self.config.poly, pair
            if poly and (first + j) // 2 % poly == poly - 1:
                pair = exp2_pair(pair[0], pair[1], DEGREES[self.config.dtype])
            else:
                pair = common_device.exp2(pair[0]), common_device.exp2(pair[1])
            pairs.append(pair)
            if self.config.need_entropy:
                for value, x in zip(pair, exponents, strict=True):
                    state.moment[0] = cute.math.fma(value, at_least(x), state.moment[0])
        return pairs

    def weights(self, values: list[Float32], factor: Float32 | None) -> list[Any]:
        """Return P of adjacent columns without a softmax as float32 pairs.

        It is values * factor, or the sigmoid of it.
        """
        pairs: list[Any] = [(values[j], values[j + 1]) for j in range(0, len(values), 2)]
        if factor is not None:
            pairs = [cute.arch.mul_packed_f32x2(pair, (factor, factor)) for pair in pairs]
        if self.config.weights == "sigmoid":
            pairs = [tuple(sigmoid(x) for x in pair) for pair in pairs]
        return pairs

    def shift(self, base: Float32 | None, row_max: Float32, factor: Float32 | None) -> Any:
        """Return the value to add to scores * factor to get the exponents of P."""
        less = common_device.finite_or_zero(row_max)
        less = less if base is None else less - base
        return -less if factor is None else -(less * factor)

    def rounding(self, peak: Float32, row_max: Float32, factor: Float32 | None) -> Any:
        """Return the rounding error of a block's largest P: rounded value minus exact value.

        `peak` is the score of the largest P.
        """
        less = self.shift(None, row_max, factor)
        if factor is None:
            power = peak + less
        else:  # bitwise the exponent of `compute_p`
            power = device.pure("fma.rn.f32", Float32, peak, factor, less)
        greatest = common_device.exp2(power)
        return device.rounded(greatest, self.dtype) - greatest

    def survivors(self, tile: TileValues, number: Int32, column: int) -> list[Any] | None:
        """Return a mask for each pair of 16 columns of P, see `pair_mask`; None without dropout.

        Args:
            tile: values of the work tile.
            number: number of the kv block, as for `scores`.
            column: the first of the columns in the block.
        """
        if tile.dropout is None:
            return None
        if self.hooks.lists_override_mask:
            number = cutlass.select_(number < 0, ~number, number)
        q, kv = tile.row[0], number * self.config.block_kv + column
        odd, shift = (q & 1) != 0, q & 8  # bit 3 of q selects the byte, 8 bits further
        words = []
        for c in range(4):  # a call of Philox has columns kv, kv + 1, kv + 8 and kv + 9
            drawn = tile.dropout.words(q, kv + 2 * c)
            own = [cutlass.select_(odd, drawn[k + 1], drawn[k]) for k in (0, 2)]
            first, second = (tile.dropout.compared(word) >> shift for word in own)
            words.append((first, second))
        return [pair_mask(*words[j % 4], 2 * (j // 4)) for j in range(8)]

    def store_p(
        self,
        pairs: list[Any],
        row: Int32,
        column: Int32,
        sums: list[Any],
        survivors: list[Any] | None,
    ) -> None:
        """Add pairs of P to the row's sums, and issue their store to tensor memory.

        `sums` is empty without a softmax. What is stored lacks the elements that dropout drops, see
        `survivors`.
        """
        for j, pair in enumerate(pairs if sums else ()):
            c = j % len(sums)
            sums[c] = pair if sums[c] is None else cute.arch.add_packed_f32x2(sums[c], pair)
        packed = [device.pack(x, y, self.dtype) for x, y in pairs]
        if survivors is not None:
            packed = [p & mask for p, mask in zip(packed, survivors, strict=True)]
        device.store_row(row, column, packed)

    # ------------------------------------------------------------------------------ end of a tile

    def finish(
        self, tile: TileValues, state: RowState, gap: Float32 | None, sink: Float32 | None
    ) -> tuple[Float32, Float32, tuple[Float32, Float32]]:
        """Return the factor of the output, the LSE, and (largest score, entropy) of the row.

        Args:
            tile: values of the work tile.
            state: softmax state of the row.
            gap: rounding correction of the sum, see `RowThread.gaps`; None for 0.
            sink: attention sink to add to the row; None for none.
        """
        if self.config.weights:
            return Float32(1.0), Float32(0.0), (Float32(0.0), Float32(0.0))
        factor = self.factor(tile)
        row_max, row_sum, highest = state.max[0], state.sum[0], state.highest[0]
        lse_term = self.hooks.lse_offset(tile.site, tile.head, tile.row[1])
        scale, lse, most = row_results(row_sum, gap, row_max, highest, factor, lse_term, sink)
        entropy = Float32(0.0)
        if self.config.need_entropy:
            entropy = row_entropy(row_sum, state.moment[0], row_max, factor, lse_term, sink)
        if tile.dropout is not None:
            scale = scale * survivor_scale(self.hooks.dropout(tile.site.tensors))
        return scale, lse, (most, entropy)


@cute.jit
def _repeated(
    compute: cutlass.Constexpr, first: cutlass.Constexpr, end: cutlass.Constexpr, value: Float32
):
    """Compute `value = compute(c, value)` for c in range(first, end), in a device loop."""
    for c in cutlass.range(first, end, unroll=1):
        value = compute(c, value)
    return value


def total_of(sums: Any) -> Any:
    """Return the total of all elements of pairs of sums."""
    pair = sums[0]
    for other in sums[1:]:
        pair = cute.arch.add_packed_f32x2(pair, other)
    return pair[0] + pair[1]


def _larger(a: Any, b: Any, nan: bool) -> Any:
    return b if a is None else cute.arch.fmax(a, b, nan=nan)

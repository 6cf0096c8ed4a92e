"""Compute P and dS from S and dP in registers in the Hopper backward, with mod and mask.

The backward computes transposed scores. A thread of a consumer warpgroup holds two kv columns of
the attention matrix, 8 apart. It holds the q rows 8 g and 8 g + 1 of each column, counted from the
thread's first row. Element i of the accumulator belongs to column (i >> 1) & 1 and to the thread's
row 2 (i // 4) + (i & 1).

The gradient of the raw scores is dS = P J (dP - delta), where J is the derivative of the mod with
respect to the raw score, called its slope. P J replaces the scores in their registers as soon as it
is known. A mod therefore needs no extra registers, and subexpressions that the mod and J share are
computed once. If the hooks have `row_factors`, J depends on the row alone: P replaces the scores,
dK gets dS = J dF for dF = P (dP - delta), and dQ gets dF, which the postprocess multiplies by J.

Without a softmax P is the modified score itself, and dS = J dP: there is no delta.

The gradient g of a row's entropy E adds -g P J (log(P) + E) to dS. Delta includes g E.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.common.constants import LN2, LOG2_E
from attnkit.templates.common.dropout import DropoutState
from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.common.softmax import at_least
from attnkit.templates.common.work_tile import APPLY_MASK, FULL_BLOCK
from attnkit.templates.sm90.backward_alibi import Alibi, Term
from attnkit.templates.sm90.backward_config import BackwardConfig
from attnkit.templates.sm90.backward_shared import load_pair
from attnkit.templates.sm90.config import LONG_MOD
from attnkit.templates.sm90.dropout import BackwardDropout


def column_of(i: int) -> int:
    """Return which of the thread's two columns contains element `i` of the accumulator."""
    return (i >> 1) & 1


def row_of(i: int) -> int:
    """Return which of the thread's rows contains element `i` of the accumulator."""
    return 2 * (i // 4) + (i & 1)


@dataclass(frozen=True)
class KvBlock:
    """Holds the values that a thread computes once per kv block.

    Attributes:
        site: position of the block; the origin is its first column.
        head: values of the hook `head`.
        columns: (kv, value of `fixed_columns`, values of `columns`) of the thread's two columns.
        inside: whether each of the two columns is inside the tensors.
        first_column: position of the thread's first column.
        dropout: state of dropout; None without dropout.
    """

    site: Site
    head: Any
    columns: tuple[Any, ...]
    inside: tuple[Any, ...]
    first_column: Int32
    dropout: DropoutState | None


@dataclass(frozen=True)
class QBlock:
    """Describes the rows of a thread in a q block.

    Attributes:
        word: the block's number and bits, see `common.work_tile`.
        row0: the thread's first row within the block.
        lse: LSE of the thread's rows in log2 units, inf for fully masked rows, f32 [2, pairs] in
            shared memory; None if the MMA has subtracted it.
        delta: -delta of these rows in the same form; None if the accumulator of dP was initialised
            to it.
        packed_row: in shared memory, the query position of the block's first row if heads are
            packed; otherwise None, because the block's number says it.
    """

    word: Int32
    row0: Int32
    lse: cute.Tensor | None
    delta: cute.Tensor | None = None
    packed_row: cute.Pointer | None = None


class SoftmaxBackward:
    """Computes P and dS of a q block.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
        alibi: terms that are linear in kv - q.
        late: round P in `compute_ds`, where dS is rounded, instead of in `compute_p`.
        keeps_scores: leave the scores in their registers in `compute_p`, because dS is computed from
            them. None: do so if gradients are summed score by score.
    """

    def __init__(
        self, config: BackwardConfig, hooks: BackwardHooks, alibi: Alibi, late: bool = False,
        keeps_scores: bool | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.hooks = hooks
        self.alibi = alibi
        self.late = late
        self.keeps_scores = bool(hooks.gradient_levels) if keeps_scores is None else keeps_scores
        self.dtype = device.DTYPES[config.dtype]

    def begin(self, site: Site, offset: Any, dropout: DropoutState | None) -> KvBlock:
        """Compute the values that a thread uses for a whole kv block.

        Args:
            site: position of the block; its origin is the block's first column.
            offset: the thread's first column within the block; the second is 8 columns further.
            dropout: state of dropout; None without dropout.
        """
        hooks = self.hooks
        head = hooks.head(site)
        offsets = [offset, offset + 8]
        kv = [site.origin + o for o in offsets]
        clamped = [cutlass.min(at, site.kv_len - 1) for at in kv]
        held = hooks.fixed_columns(site, head, offsets)
        values = hooks.columns(site, head, clamped, hooks.has_mask)
        columns = tuple(zip(clamped, held, values, strict=True))
        inside = tuple(at < site.kv_len for at in kv)
        return KvBlock(site, head, columns, inside, kv[0], dropout)

    @property
    def masks_later(self) -> bool:
        """Whether the mask is applied to P, so that there is one copy of the code of a long mod.

        A mask that is evaluated for each score would need the values of its row once more.
        """
        hooks = self.hooks
        known = not hooks.has_mask or hooks.intervals is not None
        return known and hooks.instruction_estimate >= LONG_MOD

    @cute.jit
    def compute_p(
        self,
        block: QBlock,
        tile: KvBlock,
        scores: cute.Tensor,
        slopes: cute.Tensor,
        p: cute.Tensor,
        factors: cute.Tensor | None = None,
    ):
        """Compute P J into `slopes` and P into `p`, with the mask if the block needs it.

        Without a softmax, `slopes` receives J.

        With `keeps_scores`, `slopes` receives the unchanged scores. With
        `row_factors`, it receives P, and `factors` receives J. If `rounded`,
        `slopes` is not written, because the slope is 1. If `late`, `p` is not written: `compute_ds`
        rounds P.

        Args:
            block: the q block.
            tile: values of the kv block.
            scores: f32, accumulator of S^T; may be the same registers as `slopes`.
            slopes: f32, P J.
            p: P in the dtype.
            factors: f32 J of the thread's rows; None without `row_factors`.
        """
        if const_expr(self.masks_later):
            self._compute_p(block, None, tile, scores, slopes, p, factors)
            if (block.word & APPLY_MASK) != 0:
                self._mask_p(block, tile, slopes, p)
        # two copies of the code: a FULL block runs no instruction of the mask
        elif (block.word & APPLY_MASK) != 0:
            self._compute_p(block, True, tile, scores, slopes, p, factors)
        else:
            self._compute_p(block, False, tile, scores, slopes, p, factors)

    def first_row(self, block: QBlock) -> Any:
        """Return the query position of the thread's first row of a q block."""
        if block.packed_row is not None:
            return block.packed_row.load() + block.row0
        return (block.word >> 2) * self.config.block_q + block.row0

    def _mask_p(self, block: QBlock, tile: KvBlock, slopes: cute.Tensor, p: cute.Tensor) -> None:
        """Apply the mask and the ends of the tensors to the P that `_compute_p` wrote without them."""
        first = self.first_row(block)
        pairs, bits = cute.recast_tensor(p, Int32), self.mask_bits(block, tile, first)
        for i in range(0, cute.size(slopes), 2):  # two rows of a column
            keep = [device.bit(bits[column_of(i)], row_of(i + k)) for k in range(2)]
            if not self.late:
                low, high = (
                    cutlass.select_(k, Int32(half), Int32(0))
                    for k, half in zip(keep, (0xFFFF, -0x10000), strict=True)
                )
                pairs[i // 2] = pairs[i // 2] & (low | high)
            if not (self.config.rounded or self.keeps_scores):
                for k in range(2):
                    slopes[i + k] = cutlass.select_(keep[k], slopes[i + k], Float32(0.0))

    def _compute_p(
        self,
        block: QBlock,
        masked: bool | None,
        tile: KvBlock,
        scores: cute.Tensor,
        slopes: cute.Tensor,
        p: cute.Tensor,
        factors: cute.Tensor | None,
    ) -> None:
        """Implement `compute_p`; `masked` is None for a block that may need the mask afterwards."""
        hooks = self.hooks
        first = self.first_row(block)
        if masked and hooks.loads_per_score and not hooks.loads_per_element:
            # Otherwise both copies share their sums of row positions, in a form from which the
            # compiler cannot tell that the addresses of an unmasked block differ by constants.
            first = device.recomputed(first, block.word)
        out = cute.recast_tensor(p, Int32)  # pairs of the dtype
        bits = self.mask_bits(block, tile, first) if masked else []
        shared: dict[Any, Any] = {}
        terms = self.alibi.terms(block, tile)
        for g in range(cute.size(scores) // 4):
            # two rows of both columns at a time, to save registers
            rows, places = self.group(masked is not False, tile, first, g, scores)
            lse = load_pair(block.lse, g)
            ps, slope = self.exponentials(tile, rows, places, lse, g, shared, terms)
            if factors is not None:
                for k, (_, row) in enumerate(rows):
                    factors[2 * g + k] = hooks.row_slope(tile.site, tile.head, row)
                slope = None
            ws = self.score_weights(ps, slope)
            if masked:
                keep = self.keep(block, tile, rows, bits, g)
                ps, ws = (
                    [cutlass.select_(k, x, Float32(0.0)) for k, x in zip(keep, xs, strict=True)]
                    for xs in (ps, ws)
                )
            if not self.late:
                for k in range(2):
                    out[2 * g + k] = device.pack(ps[2 * k], ps[2 * k + 1], self.dtype)
            if not self.config.rounded:
                for i, w in enumerate(ws):
                    slopes[4 * g + i] = scores[4 * g + i] if self.keeps_scores else w

    def score_weights(self, ps: list[Any], slope: list[Any] | None) -> list[Any]:
        """Return P J, the factor of dP - delta in dS; without a softmax J."""
        if self.config.weights:
            return [Float32(1.0)] * len(ps) if slope is None else slope
        return ps if slope is None else [w * j for w, j in zip(ps, slope, strict=True)]

    def score_gradients(self, ps: list[Any], dp: list[Any]) -> list[Any]:
        """Return the gradients of modified scores from P and dP - delta."""
        return dp if self.config.weights else [w * x for w, x in zip(ps, dp, strict=True)]

    def group(
        self, masked: bool, tile: KvBlock, first: Any, g: int, scores: cute.Tensor
    ) -> tuple[list[Any], list[Any]]:
        """Return (q, values) of the rows of group `g` and (row, column, score) of its elements."""
        inside = [first + 8 * g + k for k in range(2)]
        if masked:
            inside = [cutlass.min(at, tile.site.q_len - 1) for at in inside]
        rows = [(at, self.hooks.row(tile.site, tile.head, at)) for at in inside]
        return rows, [(row_of(i), column_of(i), scores[4 * g + i]) for i in range(4)]

    def exponentials(
        self, tile: KvBlock, rows: Any, places: Any, lse: Any, g: int, shared: dict[Any, Any],
        terms: Term | None, known: Any = None,
    ) -> tuple[list[Any], list[Any] | None]:  # fmt: skip
        """Return unmasked P of the elements of group `g`, and the slopes (None if all are 1).

        Args:
            tile: values of the kv block.
            rows, places: what `group` returns.
            lse: LSE of the group's rows, f32 [2]; None if the MMA has subtracted it.
            g: index of the group.
            shared: cache of values by q - kv. Elements of a later group have the same q - kv as
                elements of an earlier group in the other column.
            terms: see `Alibi.terms`.
            known: see `BackwardHooks.block_values`.
        """
        site, head = tile.site, tile.head
        steps = [8 * (g - c) + j for j, c, _ in places]
        x, slope = self.hooks.score_and_derivative(
            site, head, rows, tile.columns, places, steps, shared, known
        )
        factor = self.hooks.factor(site, head)
        if self.config.weights:
            return [device.shifted(s, factor, None) for s in x], slope
        bounds = self._bounds(tile, rows, lse)
        addends = [terms and terms(at, c) for at, (_, c, _) in zip(steps, places, strict=True)]
        scaled = [device.shifted(s, factor, a) for s, a in zip(x, addends, strict=True)]
        if bounds is not None:
            scaled = [s - bounds[j] for s, (j, *_) in zip(scaled, places, strict=True)]
        if self.config.bias_first:
            # The LSE of a row whose bias is very large is rounded to a multiple of more than 100. P is
            # then wrong, but must stay finite: the row's dO may be 0, and 0 * inf is NaN.
            scaled = [cutlass.min(s, Float32(1.0)) for s in scaled]
        return [device.exp2(s) for s in scaled], slope

    def mask_bits(self, block: QBlock, tile: KvBlock, first: Any) -> list[Any]:
        """Return a bit mask of the kept rows for each of the thread's columns.

        Bit 2 g + k is row 8 g + k. It is set if the row is inside the tensors and, for a mask with
        intervals, inside one of the column's intervals.
        """
        site, hooks, words = tile.site, self.hooks, []
        below = device.bits_below(site.q_len - first, 1)[0]
        for (kv, *_), inside in zip(tile.columns, tile.inside, strict=True):
            word = below
            if hooks.has_mask and hooks.intervals is not None:
                unmasked = Int32(0)
                for low, high in hooks.kept_intervals(site, tile.head, kv):
                    above, under = (device.bits_below(x - first, 1)[0] for x in (low, high))
                    unmasked = unmasked | (under & ~above)
                if hooks.lists_override_mask:
                    is_full = (block.word & FULL_BLOCK) != 0
                    unmasked = cutlass.select_(is_full, Int32(-1), unmasked)
                word = word & unmasked
            words.append(cutlass.select_(inside, word, Int32(0)))
        return words

    def keep(self, block: QBlock, tile: KvBlock, rows: Any, bits: Any, g: int) -> list[Any]:
        """Return whether the mask keeps each element of group `g`; `bits` is from `mask_bits`."""
        hooks, pairs = self.hooks, [(row_of(i), column_of(i)) for i in range(4)]
        keep = [device.bit(bits[c], 2 * g + j) for j, c in pairs]
        if hooks.has_mask and hooks.intervals is None:
            unmasked = hooks.keep(tile.site, tile.head, rows, tile.columns, pairs)
            if hooks.lists_override_mask:
                unmasked = [one | ((block.word & FULL_BLOCK) != 0) for one in unmasked]
            keep = [one & other for one, other in zip(keep, unmasked, strict=True)]
        return keep

    def _bounds(self, tile: KvBlock, rows: Any, lse: Any) -> list[Any] | None:
        """Return the values to subtract from the exponents of two rows; None for 0."""
        terms = [self.hooks.lse_offset(tile.site, tile.head, row[1]) for row in rows]
        if lse is None:
            return None if terms[0] is None else [-term * LOG2_E for term in terms]
        return [lse[k] if term is None else lse[k] - term * LOG2_E for k, term in enumerate(terms)]

    def entropy_factors(
        self, grads: list, block: QBlock, tile: KvBlock, groups: int
    ) -> list[tuple[Any, Any]] | None:
        """Return -g ln(2) of the two rows of each group of a q block; None without entropies.

        Args:
            grads: f32 [B, H, S], the gradients g of the entropies; empty without entropies.
            block: the q block.
            tile: values of the kv block.
            groups: number of groups of 8 rows.
        """
        if not self.config.with_entropy:
            return None
        site, first = tile.site, self.first_row(block)
        rows = [
            [cutlass.min(first + 8 * g + k, site.q_len - 1) for k in (0, 1)] for g in range(groups)
        ]
        low, high = (
            [grads[0][site.b, site.h, pair[k]] * Float32(-LN2) for pair in rows] for k in (0, 1)
        )
        return list(zip(low, high, strict=True))

    def dropout(
        self, block: QBlock, tile: KvBlock, groups: int, words: cute.Tensor | None = None
    ) -> BackwardDropout | None:
        """Draw the random bits of a q block with `groups` groups of 8 rows; None without dropout.

        `words` are bits that are known, see `BackwardDropout`.
        """
        if tile.dropout is None:
            return None
        first = self.first_row(block)
        delta = None if self.config.rounded else block.delta
        return BackwardDropout(tile.dropout, first, tile.first_column, delta, groups, words)

    def compute_ds(
        self,
        slopes: cute.Tensor,
        p: cute.Tensor,
        dp: cute.Tensor,
        delta: Any,
        ds: cute.Tensor,
        entropy: list[tuple[Any, Any]] | None = None,
        dropout: BackwardDropout | None = None,
    ) -> None:
        """Compute dS = P J (dP - delta) into `ds` in the dtype; with entropies, their gradient too.

        With dropout, `p` loses the elements that are dropped, as it is an operand of dV.

        Args:
            slopes: f32 P J; not read if `rounded`, because J is 1.
            p: P in the dtype, written here if `late`.
            dp: f32 dP if `rounded`, else dP - delta.
            delta: -delta of the thread's rows, f32 [2, pairs]; read only if `rounded`.
            ds: dS in the dtype, written.
            entropy: see `entropy_factors`.
            dropout: drops elements; None without dropout, and if `p` is no operand of dV.
        """
        pairs, rounded = cute.recast_tensor(ds, Int32), cute.recast_tensor(p, Int32)
        for i in range(0, cute.size(dp), 2):  # two rows of a column
            low, high = dp[i], dp[i + 1]
            if dropout is not None:
                low, high = dropout.dp(i, low, high)
            if self.config.rounded:
                pair = load_pair(delta, i // 4)
                low, high = low + pair[0], high + pair[1]
                weights = device.unpack(rounded[i // 2], self.dtype)
            else:
                weights = slopes[i], slopes[i + 1]
                if self.late:
                    rounded[i // 2] = device.pack(*weights, self.dtype)
                if entropy is not None:
                    probs = weights if self.late else device.unpack(rounded[i // 2], self.dtype)
                    logs = [at_least(cute.math.log2(x, fastmath=True)) for x in probs]
                    factors = entropy[i // 4]
                    low, high = low + factors[0] * logs[0], high + factors[1] * logs[1]
            pairs[i // 2] = device.pack(weights[0] * low, weights[1] * high, self.dtype)
            if dropout is not None:
                rounded[i // 2] = dropout.p(i, rounded[i // 2])


def init_dp(acc: cute.Tensor, delta: cute.Tensor, share: float = 1.0) -> None:
    """Initialise the accumulator of dP to -delta, so that dS needs no subtraction.

    Args:
        acc: f32, 4 elements for each pair of rows.
        delta: -delta of the thread's rows, f32 [2, pairs].
        share: multiplies delta; below 1 if several accumulators are added up.
    """
    for g in range(cute.size(acc) // 4):
        pair = load_pair(delta, g)
        for i in range(2):  # both columns of the thread have the same rows
            value = pair[i] if share == 1.0 else pair[i] * Float32(share)
            acc[4 * g + i] = value
            # opaque, because the compiler would move a plain copy after the wgmma fence
            acc[4 * g + 2 + i] = device.pinned(value)

"""Drop elements of the softmax in the Hopper forward and backward.

The forward drops elements of P after it has summed them, and multiplies the output by the
survivors' scale s, so that the sums and the LSE do not change. In the backward, with D = 0 or s,
dV = (P D)^T dO and dS = P (D dP - delta). The preprocess divides delta by s, and adds log(s) to P by
way of the LSE. Then the main kernel has P s, and dS = P s (keep dP - delta / s) only needs dP to be
replaced by 0, or dP - delta / s by -delta / s.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from attnkit.templates.common.dropout import DropoutState, is_kept, pair_mask
from attnkit.templates.sm90.backward_shared import load_pair


def forward_words(state: DropoutState, row: Int32, column: Int32, groups: int) -> tuple[Any, Any]:
    """Return two words with a bit for each element of a thread in a kv block of the forward.

    Shifted left by g, they are the two compared words of group g of 16 columns.

    Args:
        state: state of the dropout.
        row: position of the thread's first row, whose bit 3 is 0; the second is 8 rows below.
        column: position of the thread's first column in a kv block, whose bits 0 and 3 are 0.
        groups: number of groups of 16 columns.
    """
    return state.collected(
        groups, (row & 1) != 0, ((0, 1), (2, 3)), lambda g: (row, column + 16 * g)
    )


def drop_forward(words: tuple[Any, Any] | None, packed: cute.Tensor) -> None:
    """Set the elements of P that dropout drops to 0, in place; None for no dropout.

    Args:
        words: result of `forward_words`.
        packed: pairs of 16-bit P in the layout of the accumulator, see `sm90.softmax`.
    """
    if words is None:
        return
    pairs = cute.recast_tensor(packed, Int32)
    for i in range(cute.size(pairs)):
        first, second = (word << (i // 4) for word in words)
        pairs[i] = pairs[i] & pair_mask(first, second, (i & 1) + 2 * (i // 2 & 1))


class BackwardDropout:
    """Draws the random bits of a thread's elements in a q block of the backward, and drops them.

    The methods take the index of the first element of a pair: two rows of a column, as in
    `sm90.backward_softmax`.

    Args:
        state: state of the dropout.
        row: position of the thread's first row in the q block, whose bits 0 and 3 are 0.
        column: position of the thread's first column, whose bit 3 is 0; the second is 8 further.
        delta: -delta of the thread's rows, f32 [2, pairs], if the accumulator of dP includes it;
            otherwise None.
        groups: number of groups of 8 rows, even.
        words: what `keep_words` has copied; None to draw.
    """

    def __init__(
        self, state: DropoutState, row: Int32, column: Int32, delta: cute.Tensor | None,
        groups: int, words: cute.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._delta = delta
        # of the first and of the second row of each pair
        self._words: tuple[Any, Any]
        if words is None:
            self._words = state.collected(
                groups // 2,
                (column & 1) != 0,
                ((0, 2), (1, 3)),
                lambda g: (row + 16 * g, column),
            )
        else:
            self._words = words[0], words[1]

    def keep_words(self, to: cute.Tensor) -> None:
        """Copy the random bits to registers, int32 [2], so that they need not be drawn again."""
        to[0], to[1] = self._words

    def dp(self, i: int, low: Any, high: Any) -> tuple[Any, Any]:
        """Return dP, or dP - delta, of a pair; 0, or -delta, for an element that is dropped."""
        zero = Float32(0.0)
        dropped = (zero, zero) if self._delta is None else load_pair(self._delta, i // 4)
        low, high = (
            cutlass.select_(is_kept(words, i // 8, self._byte(i)), x, other)
            for words, x, other in zip(
                self._words, (low, high), (dropped[0], dropped[1]), strict=True
            )
        )
        return low, high

    def p(self, i: int, packed: Any) -> Any:
        """Return P of a pair, packed in 16-bit floats; 0 for an element that is dropped."""
        first, second = self._words
        return packed & pair_mask(first << (i // 8), second << (i // 8), self._byte(i))

    def _byte(self, i: int) -> int:
        return (i // 4 & 1) + 2 * (i // 2 & 1)

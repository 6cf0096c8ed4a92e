"""Draw the random bits of dropout in the Blackwell backward, and drop elements of P and dP.

A thread has one kv position, so that it needs 4 of the 16 elements of a Philox call (see
`common.dropout`): those of its bits 0 and 3 of kv. The four lanes whose numbers differ in these two
bits need the same calls. Each of them makes a quarter of the calls: those of rows whose bits 1 and 2
are the lane's bits 0 and 3. Then they exchange what they have drawn in two steps.

With D = 0 or the survivors' scale s, dV = (P D)^T dO and dS = P J (D dP - delta). The preprocess
divides delta by s, and adds log(s) to P by way of the LSE. The main kernel then has P s, and only
sets elements of P s and of dP to 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from attnkit.templates.common.device import bit
from attnkit.templates.common.dropout import DropoutState, inserted, pair_mask

CALL_ROWS = 16  # rows among which the four lanes make one call each
LANE_BITS = 1, 8  # lane bits that are bits 0 and 3 of the kv position
NIBBLE = 4  # distance in a byte from the bits of even rows to those of odd rows


@dataclass(frozen=True)
class BackwardDropout:
    """Holds the random bits of a thread's rows in a q block: a bit for each row that is kept.

    Word w has the rows whose bit 1 is w. Its halves are those of bit 2, and their bytes those of
    bit 3. In a byte, even rows have bits 7 to 4, and odd rows bits 3 to 0, each from the first 16
    rows to the last.

    Attributes:
        words: the two Int32.
    """

    words: tuple[Any, Any]

    @staticmethod
    def draw(state: DropoutState, first: Int32, kv: Int32, rows: int) -> BackwardDropout:
        """Draw the bits of `rows` rows; all lanes of a warp must call it.

        Args:
            state: state of the dropout.
            first: position of the thread's first row, a multiple of 16.
            kv: the thread's kv position. Its lowest five bits are the number of the lane.
            rows: number of rows, a multiple of 16, at most 64.
        """
        lane = cute.arch.lane_idx()
        upper = [(lane & b) != 0 for b in LANE_BITS]
        own_first = first
        for is_upper, row in zip(upper, (2, 4), strict=True):
            own_first = own_first + cutlass.select_(is_upper, Int32(row), Int32(0))
        drawn = [Int32(0), Int32(0)]  # for kv positions whose bit 0 is 0, and 1
        for i in range(rows // CALL_ROWS):
            words = state.words(own_first + CALL_ROWS * i, kv)
            for k, odd in ((0, 0), (0, 1), (1, 0), (1, 1)):
                word = state.compared(words[2 * k + odd])
                drawn[k] = inserted(drawn[k], word, NIBBLE * odd + i)
        # each lane needs the word of its bit 0 of kv, and of that word the half of its bit 3
        pair = _exchanged(upper[0], drawn[0], drawn[1], LANE_BITS[0])
        pair = _exchanged(upper[1], *_halves(*pair), LANE_BITS[1])
        return BackwardDropout(_halves(*pair))

    def is_kept(self, row: int) -> Any:
        """Return whether the element of the thread's row `row` is kept."""
        byte, i = _place(row)
        return bit(self.words[row >> 1 & 1], 8 * byte + 7 - NIBBLE * (row & 1) - i)

    def pair_mask(self, row: int) -> Any:
        """Return a mask for the elements of two rows: ones in the half of each element that is kept.

        The rows are `row`, which is even, and the next. They are the lower and the upper half.
        """
        byte, i = _place(row)
        word = self.words[row >> 1 & 1]
        return pair_mask(word << i, word << (NIBBLE + i), byte)


def _exchanged(upper: Any, low: Any, high: Any, lane_bit: int) -> tuple[Any, Any]:
    """Swap words with the lane whose number differs in `lane_bit`; return those of both lanes.

    The lane with the lower number gets the words `low` of both, the other one the words `high`.
    That of the lower lane comes first.

    Args:
        upper: whether `lane_bit` is set in the number of this lane.
        low, high: the words of this lane.
        lane_bit: the bit in which the lanes differ.
    """
    own, sent = cutlass.select_(upper, high, low), cutlass.select_(upper, low, high)
    other = cute.arch.shuffle_sync_bfly(sent, lane_bit)
    return cutlass.select_(upper, other, own), cutlass.select_(upper, own, other)


def _halves(first: Any, second: Any) -> tuple[Any, Any]:
    """Return the lower halves of two words in one word, and their upper halves in another."""
    return cute.arch.prmt(first, second, 0x5410), cute.arch.prmt(first, second, 0x7632)


def _place(row: int) -> tuple[int, int]:
    """Return where the bit of a row is in its word: (byte, index of the row's group of 16)."""
    return 2 * (row >> 2 & 1) + (row >> 3 & 1), row >> 4

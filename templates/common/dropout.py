"""Draw the random bits of dropout in registers, and drop elements of fragments.

`attnkit/util/dropout.py` defines the bits: one call of Philox-4x32 with 7 rounds (Salmon et al.,
2011) serves the 16 elements whose positions agree but for bits 0 and 3 of q and of kv. Byte
`q bit 3 + 2 * (kv bit 3)` of word `q bit 0 + 2 * (kv bit 0)` belongs to an element, which is dropped
if the byte is below the threshold.

A thread with an accumulator of S holds rows q, q + 8 and columns kv, kv + 1, kv + 8, so that it
needs two words of each call: those of its bit 0 of q. With an accumulator of S^T they are those of
its bit 0 of kv. Both pack the two elements that lie in the same bytes of these two words as a pair.
The lane whose number differs in bit 2 needs the two other words. So each of them makes every other
call. It collects the bits of all its calls, and the two exchange those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, Uint64, cute

from attnkit.templates.common import device

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 7
THRESHOLD_BIT = 55  # of both words of the state
STEPS = 256
SHARED = ~9  # bits of a position that all elements of a call have in common
PARTNER = 4  # the bit in which the numbers of two lanes differ that exchange words
SEVEN_BITS = 0x7F7F7F7F
EACH_BYTE = 0x01010101


@dataclass(frozen=True)
class DropoutState:
    """Holds the state of a call's dropout for one score matrix, as 32-bit words.

    Attributes:
        key: the two words of the key: the seed.
        matrix: number of the score matrix, b * heads + h.
        offset: the lower word of the offset.
        addend: for each byte, 128 - threshold % 128.
        low: -1 if the threshold is below 128, else 0.
    """

    key: tuple[Any, Any]
    matrix: Any
    offset: Any
    addend: Any
    low: Any

    @staticmethod
    def read(state: cute.Tensor, matrix: Any) -> DropoutState:
        """Read the state, int64 [2], for score matrix number `matrix`."""
        seed, offset = state[0], state[1]
        threshold = _threshold(state)
        uniform = [
            Uint32(cute.arch.make_warp_uniform(Int32(x)))
            for x in (seed, seed >> 32, matrix, offset)
        ]
        addend = (Int32(128) - (threshold & 127)) * EACH_BYTE
        low = cutlass.select_(threshold < 128, Int32(-1), Int32(0))
        return DropoutState((uniform[0], uniform[1]), uniform[2], uniform[3], addend, low)

    def words(self, q: Any, kv: Any) -> tuple[Any, Any, Any, Any]:
        """Return the four words, Int32, of the call of Philox that position (q, kv) belongs to."""
        x = (Uint32(q & SHARED), Uint32(kv & SHARED), self.matrix, self.offset)
        for i in range(ROUNDS):
            first, second = (_product(x[2 * k], MULTIPLIERS[k]) for k in range(2))
            keys = [
                key + Uint32(i * step & 0xFFFFFFFF)
                for key, step in zip(self.key, WEYL, strict=True)
            ]
            x = (second[0] ^ x[1] ^ keys[0], second[1], first[0] ^ x[3] ^ keys[1], first[1])
        first_word, second_word, third_word, fourth_word = (Int32(word) for word in x)
        return first_word, second_word, third_word, fourth_word

    def collected(
        self, count: int, odd: Any, places: tuple[tuple[int, int], ...], at: Any
    ) -> tuple[Any, Any]:
        """Return random bits of `count` Philox calls; the lane makes half of them, another lane the rest.

        All lanes of a warp must call it. Each result is an Int32 that is a compared word of call g
        after a left shift by g.

        Args:
            count: number of calls, at most 8.
            odd: whether the lane needs the second words of `places`. It is True in one of two lanes
                whose numbers differ in bit 2, and these have the same calls.
            places: for each of the two words, its number without and with `odd`.
            at: function of an Int32, the number of a call, that returns its position (q, kv).
        """
        step = cutlass.select_(odd, Uint32(1), Uint32(0))
        totals = [Int32(0)] * 4
        for g in range(0, count - 1, 2):
            drawn = self.words(*at(Int32(step) + g))
            totals = [inserted(t, self.compared(x), g) for t, x in zip(totals, drawn, strict=True)]
        results = []
        for a, b in places:
            own = cutlass.select_(odd, totals[b], totals[a])
            sent = cutlass.select_(odd, totals[a], totals[b])
            other = cute.arch.shuffle_sync_bfly(sent, PARTNER)
            results.append(Int32((Uint32(own) >> step) | (Uint32(other) >> (Uint32(1) - step))))
        if count % 2:  # no call to exchange the last one for
            drawn = self.words(*at(Int32(count - 1)))
            for i, (a, b) in enumerate(places):
                word = self.compared(cutlass.select_(odd, drawn[b], drawn[a]))
                results[i] = inserted(results[i], word, count - 1)
        return results[0], results[1]

    def compared(self, word: Any) -> Any:
        """Return a word whose bit 7 of each byte is set if the byte is at least the threshold.

        The other bits have no meaning.
        """
        # bit 7 of the sum: are the lower seven bits at least those of the threshold?
        total = (word & SEVEN_BITS) + self.addend
        # the byte's own bit 7 decides first: with `or` for a low threshold, else with `and`
        return (word & total) | (self.low & (word | total))  # the majority, one instruction


def survivor_scale(state: cute.Tensor) -> Float32:
    """Return 1 / (probability that an element is kept) of a state, int64 [2]."""
    return Float32(STEPS) / Float32(Int32(STEPS) - _threshold(state))


def log_survivor_scale(state: cute.Tensor) -> Float32:
    """Return the natural logarithm of `survivor_scale`."""
    return cute.math.log(survivor_scale(state))


def pair_mask(first: Any, second: Any, byte: int) -> Any:
    """Return a mask for a pair of 16-bit elements: ones in the half of each element that is kept.

    Args:
        first, second: compared words, with the element of the lower and of the upper half.
        byte: the byte of both.
    """
    # prmt copies bit 7 of a byte to all bits of the result's byte if bit 3 of the selector is set
    low, high = 8 | byte, 8 | 4 | byte
    return cute.arch.prmt(first, second, low | low << 4 | high << 8 | high << 12)


def is_kept(words: Any, g: int, byte: int) -> Any:
    """Return whether the element of a byte of call `g` is kept, see `DropoutState.collected`."""
    return device.bit(words, 8 * byte + 7 - g)


def inserted(words: Any, word: Any, g: int) -> Any:
    """Return `words` with the bits 7 of a compared word's bytes, `g` places further to the right.

    `g` is from 0 to 7.
    """
    # an arithmetic shift, but the mask removes the copies of the sign
    mask = (~SEVEN_BITS & 0xFFFFFFFF) >> g
    return words | ((word >> g) & Int32(mask - (1 << 32) * (g == 0)))


def _product(x: Any, factor: int) -> tuple[Any, Any]:
    """Return the upper and the lower 32 bits of a product of unsigned words."""
    wide = Uint64(x) * Uint64(factor)
    return Uint32(wide >> 32), Uint32(wide)


def _threshold(state: cute.Tensor) -> Any:
    return cute.arch.make_warp_uniform(Int32(state[1] >> THRESHOLD_BIT))

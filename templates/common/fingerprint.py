"""Compute fingerprints of tensors, or compare tensors with fingerprints computed earlier.

`attnkit.util.fingerprint` defines the fingerprint and explains it. A warp computes the two sums of
a chunk, and writes them or compares them with the expected ones. Warps share no sums, so that no
memory has to be cleared, no warp waits, and the result does not depend on the order of the warps.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

WARPS = 4  # per CTA
CHUNK = 256  # words per chunk
KEY = 0x9E3779B9
MIX_A = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), 16)
MIX_B = ((16, 0x7FEB352D), (15, 0x846CA68B), 16)


class Fingerprint:
    """Computes fingerprints of several tensors, or compares them and reports a difference."""

    @cute.jit
    def __call__(
        self,
        tensors: list,
        expected: list,
        report: cute.Tensor,
        codes: list,
        records: Int32,
        ctas: Int32,
        stream: Any,
    ):
        """Launch the kernel.

        Args:
            tensors: integers, first axis fastest, see `words_of`.
            expected: fingerprints, int32 [chunks, 2] for each tensor; read, or written if
                `records`.
            report: int64 [1] in host memory. The kernel writes the code of a tensor that differs,
                and nothing if all are equal.
            codes: int64 codes, one for each tensor.
            records: 1 to compute fingerprints, 0 to compare.
            ctas: number of CTAs in the grid.
            stream: CUDA stream.
        """
        self.kernel(tensors, expected, report, codes, records).launch(
            grid=(ctas, 1, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, tensors: list, expected: list, report: cute.Tensor, codes: list, records: Int32
    ):
        """Compute or compare fingerprints, one chunk per warp in a grid-stride loop."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        for which in cutlass.range_constexpr(len(tensors)):
            words, sums = tensors[which], expected[which]
            size = cute.size(words)
            for chunk in cutlass.range(
                cta * WARPS + thread // 32, sums.shape[0], ctas * WARPS, unroll=1
            ):
                a, b = Uint32(0), Uint32(0)
                for j in cutlass.range_constexpr(CHUNK // 32):
                    within = lane + 32 * j
                    at = chunk * CHUNK + within
                    inside = at < size
                    word = Uint32(Int32(words[cutlass.select_(inside, at, Int32(0))]))
                    key = Uint32(within + 1) * Uint32(KEY)
                    a = a + cutlass.select_(inside, self.mix(word + key, MIX_A), Uint32(0))
                    b = b + cutlass.select_(inside, self.mix(word ^ key, MIX_B), Uint32(0))
                for step in (16, 8, 4, 2, 1):
                    a = a + cute.arch.shuffle_sync_bfly(a, step)
                    b = b + cute.arch.shuffle_sync_bfly(b, step)
                if lane == 0:
                    if records != 0:
                        sums[chunk, 0] = Int32(a)
                        sums[chunk, 1] = Int32(b)
                    elif (Int32(a) != sums[chunk, 0]) | (Int32(b) != sums[chunk, 1]):
                        report[0] = codes[which]

    def mix(self, x: Any, how: Any) -> Any:
        """Return the word `x` with its bits mixed, see `attnkit.util.fingerprint`."""
        first, second, last = how
        for shift, factor in (first, second):
            x = (x ^ (x >> Uint32(shift))) * Uint32(factor)
        return x ^ (x >> Uint32(last))

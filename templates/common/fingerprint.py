"""Compute fingerprints of tensors, or compare tensors with fingerprints computed earlier.

`attnkit.util.fingerprint` defines the fingerprint and explains it. A warp computes the two sums of
a chunk, and writes them or compares them with the expected ones. Warps share no sums, so that no
memory has to be cleared, no warp waits, and the result does not depend on the order of the warps.

`Fingerprint` is a kernel of its own. `compare_chunks` is for warps of another kernel, which share
the chunks; a launch costs the host 5 us.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

WARPS = 4  # per CTA
CHUNK = 256  # words per chunk
KEY = 0x9E3779B9
MIX_A = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), 16)
MIX_B = ((16, 0x7FEB352D), (15, 0x846CA68B), 16)
LOADS = 4  # words that a lane of `compare_chunks` loads at once; more do not fit in its registers


class CheckedWord(IntEnum):
    """Indices of the int64 words in a row of the table that `compare_chunks` reads.

    A row describes one tensor of contiguous int32 words.
    """

    DATA = 0  # address of the words
    SIZE = 1  # number of words, at most 2**30
    EXPECTED = 2  # address of the fingerprint, int32 [chunks, 2]
    REPORT = 3  # address of the report
    CODE = 4  # what to write there if the data differs


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
                a, b = chunk_sums(words, size, chunk * CHUNK + lane, lane, CHUNK // 32)
                a, b = warp_sum(a), warp_sum(b)
                if lane == 0:
                    if records != 0:
                        sums[chunk, 0] = Int32(a)
                        sums[chunk, 1] = Int32(b)
                    elif (Int32(a) != sums[chunk, 0]) | (Int32(b) != sums[chunk, 1]):
                        report[0] = codes[which]


@cute.jit
def compare_chunks(table: cute.Tensor, warp: Int32, warps: Int32):
    """Compare data with its fingerprints; report a difference.

    All lanes of a warp call this. It uses no shared memory and no barrier.

    Args:
        table: int64 [tensors, 5], see `CheckedWord`.
        warp: index of this warp among the warps of the grid that call this.
        warps: number of these warps.
    """
    lane = cute.arch.lane_idx()
    for row in cutlass.range(table.shape[0], unroll=1):
        size = Int32(table[row, CheckedWord.SIZE])
        words = _int32_at(table[row, CheckedWord.DATA], size)
        for chunk in cutlass.range(warp, (size + (CHUNK - 1)) // CHUNK, warps, unroll=1):
            a, b = Uint32(0), Uint32(0)
            for start in cutlass.range(lane, CHUNK, 32 * LOADS, unroll=1):
                more = chunk_sums(words, size, chunk * CHUNK + start, start, LOADS)
                a, b = a + more[0], b + more[1]
            a, b = warp_sum(a), warp_sum(b)
            if lane == 0:
                sums = _int32_at(table[row, CheckedWord.EXPECTED] + Int64(chunk) * 8, 2)
                if (Int32(a) != sums[0]) | (Int32(b) != sums[1]):
                    report = cute.make_ptr(
                        Int64, table[row, CheckedWord.REPORT], cute.AddressSpace.gmem
                    )
                    cute.make_tensor(report, 1)[0] = table[row, CheckedWord.CODE]


def _int32_at(address: Any, size: Any) -> cute.Tensor:
    """Return the int32 tensor [size] at an address in global memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, size)


def chunk_sums(words: Any, size: Any, at: Any, within: Any, count: int) -> tuple[Any, Any]:
    """Return the sums of `count` words, one of every 32, of which the first has index `at`.

    Args:
        words: integers [size].
        size: number of words; those beyond count as nothing.
        at: index of the first word.
        within: index of the first word within its chunk.
        count: number of words.
    """
    a, b = Uint32(0), Uint32(0)
    for j in range(count):
        inside = at + 32 * j < size
        word = Uint32(Int32(words[cutlass.select_(inside, at + 32 * j, Int32(0))]))
        key = Uint32(within + (32 * j + 1)) * Uint32(KEY)
        a = a + cutlass.select_(inside, mix(word + key, MIX_A), Uint32(0))
        b = b + cutlass.select_(inside, mix(word ^ key, MIX_B), Uint32(0))
    return a, b


def warp_sum(x: Any) -> Any:
    """Return the sum of `x` over the lanes of a warp, in every lane."""
    for step in (16, 8, 4, 2, 1):
        x = x + cute.arch.shuffle_sync_bfly(x, step)
    return x


def mix(x: Any, how: Any) -> Any:
    """Return the word `x` with its bits mixed, see `attnkit.util.fingerprint`."""
    first, second, last = how
    for shift, factor in (first, second):
        x = (x ^ (x >> Uint32(shift))) * Uint32(factor)
    return x ^ (x >> Uint32(last))

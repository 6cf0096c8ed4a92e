"""Subtract LSE and delta inside the backward's MMAs, with one extra k-step of 16 columns.

A thread of the backward has one or two kv positions and many rows. It would have to read LSE and
delta of these rows from shared memory one by one. Instead, S^T = K Q^T gets 16 more columns of K
and Q whose products sum to -LSE / scale. If the config says so, dP^T = V dO^T gets 16 more columns
for -delta. Then P = 2**(factor S) and dS = P dP, and no thread reads these statistics.

A float32 number x equals the sum of three bfloat16 numbers x0 + x1 + x2. A row of Q's extra columns
is x0 x1 x0 x2 x1 x0 v v for x = -LSE, where v is the row's position in the q block. A row of K's
extra columns is a0 a0 a1 a0 a1 a2 0 0 for a = 1 / (2 scale). The products left out are below 2**-24
of the largest. A k-step has 16 columns: the eight columns are used twice, hence the 2 in a. These
columns are bfloat16 for every dtype of the tensors.

In shared memory they are core matrices without swizzle: eight rows of eight columns in 128 bytes.
All rows of K's extra columns are equal. One core matrix with strides of zero represents all of
them.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from attnkit.templates.common import device

ROW_WORDS = 4  # 32-bit words per row: eight columns
CORE_WORDS = 8 * ROW_WORDS  # 32-bit words per core matrix
MIN_SCALE = 2.0**-60  # replaces scales nearer to zero: S * scale rounds to zero with either


def split_bfloat16(x: Any) -> tuple[Any, Any, Any]:
    """Split a float32 into three terms that are exact in bfloat16 and sum to it."""
    terms, rest = [], x
    for _ in range(3):
        word = device.pack(rest, Float32(0.0), BFloat16)
        term = cute.arch.inline_ptx(
            "shl.b32 {$w0}, {$r0}, 16;", write_only_types=[Float32], read_only_args=[word]
        )
        terms.append(term)
        rest = rest - term
    return terms[0], terms[1], terms[2]


def row_columns(x: tuple[Any, Any, Any], last: Any) -> list[Any]:
    """Pack a row's eight extra columns of Q or dO into four words: terms `x`, then `last`."""
    return _words((x[0], x[1], x[0], x[2], x[1], x[0]), last)


def factor_columns(x: tuple[Any, Any, Any], last: Any = (0.0, 0.0)) -> list[Any]:
    """Pack a row's eight extra columns of K or V into four words: terms `x`, then `last`."""
    return _words((x[0], x[0], x[1], x[0], x[1], x[2]), last)


def _words(six: tuple[Any, ...], last: Any) -> list[Any]:
    pairs = (six[:2], six[2:4], six[4:], last)
    return [device.pack(Float32(low), Float32(high), BFloat16) for low, high in pairs]


def nonzero_scale(scale: Any) -> Any:
    """Return the scale, or `MIN_SCALE` where the scale is too close to zero to divide by."""
    small = cutlass.max(scale, -scale) < Float32(MIN_SCALE)
    return cutlass.select_(small, Float32(MIN_SCALE), scale)


def write_factor(start: Any, x: Any) -> None:
    """Write the extra columns of K or V to shared memory as one core matrix.

    One warp calls it; a fence of the async proxy must follow.

    Args:
        start: int32 pointer to shared memory.
        x: Float32, the factor that multiplies the extra columns of Q or dO.
    """
    lane = cute.arch.lane_idx()
    words, own = factor_columns(split_bfloat16(x)), Int32(0)
    for k in range(3):  # the fourth word is zero
        own = cutlass.select_(lane % ROW_WORDS == k, words[k], own)
    (start + lane).store(own)

"""Gradients of captured tensors: float32 sums in any order, or exact sums that no order changes.

An exact sum consists of integers, so that the order of the additions does not matter. A float is a
whole number of 24 bits times a power of two. Numbers whose exponents agree but for their last three
bits are added to one of 32 integers of 64 bits, their bin; infinite numbers and NaN set bits of one
more. 2**32 numbers fit a bin. `attnkit.splice.exact_sums` reads the sums. After the long
accumulator of Kulisch and Miranker (1981).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

STEP = 8  # exponents of a bin
BINS = 256 // STEP + 1
LARGEST = 255  # the exponent of what is infinite or NaN
DIGITS = (1 << 23) - 1
INFINITE, NEGATIVE, NO_NUMBER = 1, 2, 4  # bits of the last bin


class ExactSums:
    """Adds to gradients of captured tensors in memory."""

    hooks: Any
    config: Any

    def place_of(self, i: int, site: Any, total: Any, q: Any, kv: Any) -> tuple[Any, ...]:
        """Return the index of load i of an element in its gradient."""
        shape = total.shape[:-1] if self.config.sum_order else total.shape
        return self.hooks.gradient_index(i, site, shape, q, kv)

    def add_where(self, condition: Any, total: Any, place: Any, value: Any) -> None:
        """Add a value to a gradient in memory; where sums have an order, to its bins."""
        if self.config.sum_order:
            self.add_exactly(condition, cute.domain_offset((*place, 0), total).iterator, value)
        else:
            self.add_at(condition, cute.domain_offset(place, total).iterator, value)

    def add_of_warp(self, i: int, site: Any, total: Any, value: Any) -> None:
        """Add the sum of the warp's values to load i, whose index is known per head."""
        for step in (16, 8, 4, 2, 1):
            value = value + cute.arch.shuffle_sync_bfly(value, step)
        place = self.place_of(i, site, total, None, None)
        self.add_where(cute.arch.lane_idx() == 0, total, place, value)

    @cute.jit
    def add_at(self, condition: cutlass.Boolean, target: cute.Pointer, value: Float32):
        """Add a value to a float32 in memory, if a condition holds."""
        if condition:
            cute.arch.red(target, value, op="add", dtype="f32", sem="relaxed", scope="gpu")

    @cute.jit
    def add_exactly(self, condition: cutlass.Boolean, bins: cute.Pointer, value: Float32):
        """Add a value to its bin, if a condition holds."""
        if condition:
            bits = cute.arch.inline_ptx(
                "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
            )
            exponent, digits = (bits >> 23) & 255, bits & DIGITS
            if exponent == LARGEST:
                kind = cutlass.select_(bits < 0, Int32(NEGATIVE), Int32(INFINITE))
                kind = cutlass.select_(digits != 0, Int32(NO_NUMBER), kind)
                last = bins + (BINS - 1)
                cute.arch.red(last, Int64(kind), op="or", dtype="b64", sem="relaxed", scope="gpu")
            else:
                # the least exponent stands for the same power as the next, without a leading 1
                digits = digits | cutlass.select_(exponent > 0, Int32(DIGITS + 1), Int32(0))
                exponent = cutlass.max(exponent, Int32(1))
                number = digits << (exponent % STEP)
                number = cutlass.select_(bits < 0, -number, number)
                cute.arch.red(
                    bins + exponent // STEP, Int64(number), op="add", dtype="u64", sem="relaxed",
                    scope="gpu",
                )  # fmt: skip

"""Accumulate gradients of captured tensors in global memory, in float32 or exactly.

An exact sum consists of integers, so its result does not depend on the order of the additions. A
float32 is an integer of 24 bits times a power of two. An exact sum has 32 bins, which are 64-bit
integers. Floats go to the same bin if their exponents differ only in the last three bits; a bin has
room for 2**32 of them. One more integer has flag bits for infinities and NaN.
`attnkit.splice.exact_sums` converts the bins to floats. The method is the long accumulator of
Kulisch and Miranker (1981).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from attnkit.templates.common.cache_policy import evict_first

STEP = 8  # number of exponents that share a bin
BINS = 256 // STEP + 1
LARGEST = 255  # exponent field of infinities and NaN
DIGITS = (1 << 23) - 1
INFINITE, NEGATIVE, NO_NUMBER = 1, 2, 4  # flag bits of the last bin: +inf, -inf, NaN


class ExactSums:
    """Mixin that adds values to gradients of captured tensors in global memory."""

    hooks: Any
    config: Any

    def place_of(
        self, i: int, site: Any, total: Any, q: Any, kv: Any, known: Any = None
    ) -> cute.Pointer:
        """Return the place in `total` to which load `i` adds its gradient for (`q`, `kv`)."""
        exact = self.config.sum_order
        shape = total.shape[:-1] if exact else total.shape
        index = self.hooks.gradient_index(i, site, shape, q, kv, known)
        return cute.domain_offset((*index, 0) if exact else index, total).iterator

    def add_where(self, condition: Any, place: cute.Pointer, value: Any) -> None:
        """Add `value` at `place` where `condition` holds.

        The sum is exact if `config.sum_order` is set, and float32 otherwise.
        """
        if self.config.sum_order:
            self.add_exactly(condition, place, value)
        else:
            self.add_at(condition, place, value)

    def add_of_warp(self, i: int, site: Any, total: Any, value: Any) -> None:
        """Add the warp's sum of `value` to the gradient of load `i`, whose level is "head"."""
        for step in (16, 8, 4, 2, 1):
            value = value + cute.arch.shuffle_sync_bfly(value, step)
        place = self.place_of(i, site, total, None, None)
        self.add_where(cute.arch.lane_idx() == 0, place, value)

    def add_at(self, condition: Any, target: cute.Pointer, value: Any, again: bool = True) -> None:
        """Add `value` to a float32 in global memory, in the lanes where `condition` is true.

        By predication: a branch would cost more than the addition, and separate the lanes. See
        `store_at` for `again`.
        """
        hint, policy = "", []
        if not again:
            hint, policy = ".L2::cache_hint", [evict_first()]
        operands = "[{$r1}], {$r2}" + ", {$r3}" * len(policy)
        cute.arch.inline_ptx(
            "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0;"
            f" @p red.relaxed.gpu.global.add{hint}.f32 {operands}; }}",
            read_only_args=[
                cutlass.select_(condition, Int32(1), Int32(0)),
                target.toint(),
                Float32(value),
                *policy,
            ],
        )

    def store_at(
        self, condition: Any, target: cute.Pointer, value: Any, again: bool = False
    ) -> None:
        """Store a float32 in global memory, in the lanes where `condition` is true.

        Use this for the first value of a sum. Memory to which nothing is added `again` need not
        stay in a cache.
        """
        kind = "st.global.f32" if again else "st.global.cs.f32"
        cute.arch.inline_ptx(
            f"{{ .reg .pred p; setp.ne.s32 p, {{$r0}}, 0; @p {kind} [{{$r1}}], {{$r2}}; }}",
            read_only_args=[
                cutlass.select_(condition, Int32(1), Int32(0)),
                target.toint(),
                Float32(value),
            ],
        )

    @cute.jit
    def add_exactly(self, condition: cutlass.Boolean, bins: cute.Pointer, value: Float32):
        """Add `value` to the bin of its exponent where `condition` holds."""
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
                # subnormals: exponent 0 has the same power of two as 1, but no implicit leading 1
                digits = digits | cutlass.select_(exponent > 0, Int32(DIGITS + 1), Int32(0))
                exponent = cutlass.max(exponent, Int32(1))
                number = digits << (exponent % STEP)
                number = cutlass.select_(bits < 0, -number, number)
                cute.arch.red(
                    bins + exponent // STEP, Int64(number), op="add", dtype="u64", sem="relaxed",
                    scope="gpu",
                )  # fmt: skip

"""Define small device functions that the kernels of both architectures use."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, cute

from attnkit.templates.common.constants import NEG_INF
from attnkit.templates.common.polynomials import EXP2_FROM_NEAREST

DTYPES = {"bfloat16": BFloat16, "float16": Float16}
_PACK = {BFloat16: "cvt.rn.bf16x2.f32", Float16: "cvt.rn.f16x2.f32"}


def pack(low: Any, high: Any, dtype: Any) -> Any:
    """Round two float32 values to 16-bit floats and pack them into one Int32.

    The DSL's own conversion of a fragment falls back to single values for most tile widths.
    """
    return cute.arch.inline_ptx(
        _PACK[dtype] + " {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[high, low],
    )


def unpack(pair: Any, dtype: Any) -> tuple[Any, Any]:
    """Convert the two 16-bit floats of an Int32 to float32."""
    if dtype is BFloat16:  # the upper half of a float32
        text = "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;"
    else:
        text = (
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
            "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
        )
    return cute.arch.inline_ptx(text, write_only_types=[Float32, Float32], read_only_args=[pair])


def bits_below(x: Any, words: int) -> list[Any]:
    """Return bit masks that mark which of a thread's columns are less than `x`.

    A thread has columns 8 g and 8 g + 1 of a row for g = 0, 1, ...; their bits are 2 g and 2 g + 1.

    Args:
        x: Int32, counted from the thread's first column.
        words: number of Int32 masks to return, each for 16 groups g.
    """
    count = (x >> 3) * 2 + cutlass.min(x & 7, Int32(2))
    masks = []
    for word in range(words):
        inside = cutlass.min(cutlass.max(count - 32 * word, Int32(0)), Int32(32))
        # a shift by 32 gives zero in PTX; in the DSL's arithmetic it is undefined
        above = cute.arch.inline_ptx(
            "shl.b32 {$w0}, {$r0}, {$r1};",
            write_only_types=[Int32],
            read_only_args=[Int32(-1), inside],
        )
        masks.append(~above)
    return masks


def bit(mask: Any, j: int) -> Any:
    """Return whether bit `j` of the Int32 `mask` is set."""
    return (mask & Int32(one(j))) != 0


def one(j: int) -> int:
    """Return 1 << (j mod 32) as a signed 32-bit integer."""
    j %= 32
    return (1 << j) - (1 << 32) * (j == 31)


def shifted(x: Any, factor: Any, more: Any) -> Any:
    """Return `x * factor + more` as one FMA; None for `factor` means 1, None for `more` means 0.

    In a plain expression the compiler may share the product between two uses and not fuse it.
    """
    if factor is None:
        return x if more is None else x + more
    return x * factor if more is None else cute.math.fma(x, factor, more)


def exp2(x: Any) -> Any:
    """Compute 2**x on the MUFU unit; subnormal results are flushed to zero."""
    return cute.math.exp2(x, fastmath=True)


def exp2_on_fma(x: Any) -> Any:
    """Compute 2**x on the FMA units for x > -126 or NaN, with a relative error of 1.02e-4.

    With x = j + f, where j is the nearest integer and |f| <= 1/2, the result is a polynomial of
    degree 3 for 2**f (see `polynomials`) times 2**j, built from exponent bits. Integers are exact.
    The last step is a multiply: adding j to the exponent bits would turn NaN into a number.
    """
    magic = Float32(12582912.0)  # 1.5 * 2**23: the low bits of the sum are the nearest integer
    t = x + magic
    f = x - (t - magic)
    *lower, p = (Float32(c) for c in EXP2_FROM_NEAREST)
    for c in reversed(lower):
        p = p * f + c
    return cute.arch.inline_ptx(
        "{ .reg .b32 j; .reg .f32 s; mov.b32 j, {$r1}; shl.b32 j, j, 23;"
        " add.s32 j, j, 1065353216; mov.b32 s, j; mul.f32 {$w0}, {$r0}, s; }",
        write_only_types=[Float32],
        read_only_args=[p, t],
    )


def reciprocal_on_fma(x: Any) -> Any:
    """Compute 1 / x without the MUFU unit, for x >= 1 or NaN, with a relative error of 3.3e-5.

    The result is 0 where it would be less than 2**-125, infinity included.

    A difference of the bits of two numbers is about the difference of their logarithms, so that a
    constant minus the bits of x is y, 1 / x within 5 %. With e = 1 - x y, 1 / x is y / (1 - e).
    The result is y (e'**2 + d) with e' = k - x y, a polynomial of degree 2 in e; the three
    constants minimize the largest relative error over one octave of x.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 j; .reg .f32 a, y, e;"
        " min.NaN.ftz.f32 a, {$r0}, 0f7EC00000;"  # 1.5 * 2**126, whose y is subnormal: taken for 0
        " mov.b32 j, a; sub.s32 j, 2129870848, j; mov.b32 y, j;"
        " neg.ftz.f32 a, a;"
        " fma.rn.ftz.f32 e, a, y, {$r1}; fma.rn.ftz.f32 e, e, e, {$r2};"
        " mul.ftz.f32 {$w0}, y, e; }",
        write_only_types=[Float32],
        read_only_args=[x, Float32(1.50097101), Float32(0.7490293)],
    )


def pinned(x: Any) -> Any:
    """Return `x` through an opaque `mov`, so that the compiler neither recomputes nor moves it."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def settle(values: cute.Tensor) -> None:
    """Complete all writes to `values` before the next fence.

    The compiler could otherwise move a write behind the fence, next to the MMAs that read it.

    Args:
        values: f32, in registers.
    """
    for i in range(cute.size(values)):
        values[i] = pinned(values[i])


def recomputed(x: Any, changing: Any) -> Any:
    """Return the Int32 `x` through an opaque `mov` that seems to depend on `changing`.

    In a loop in which `changing` changes, the compiler then does not compute before the loop what
    depends on `x`, where it would occupy registers.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 t; mov.b32 t, {$r1}; mov.b32 {$w0}, {$r0}; }",
        write_only_types=[Int32],
        read_only_args=[x, changing],
    )


def after(values: list[Any], others: list[Any]) -> list[Any]:
    """Return `values` with a false dependency on `others` that the compiler cannot remove.

    The lists have the same length, and values[i] then depends on others[i].
    """
    none = cute.arch.inline_ptx("mov.b32 {$w0}, 0;", write_only_types=[Int32], read_only_args=[])
    return [
        cute.arch.inline_ptx(
            "{ .reg .b32 a, b; mov.b32 a, {$r0}; mov.b32 b, {$r1};"
            " lop3.b32 a, a, b, {$r2}, 0xF8; mov.b32 {$w0}, a; }",  # a | b & 0
            write_only_types=[Float32],
            read_only_args=[x, y, none],
        )
        for x, y in zip(values, others, strict=True)
    ]


def quad_max(x: Any, nan: bool) -> Any:
    """Return the maximum over the four lanes that share a row; `nan` propagates NaN."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 1), nan=nan)
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, 2), nan=nan)


def quad_sum(x: Any) -> Any:
    """Return the sum of `x` over the four lanes that share a row."""
    x = x + cute.arch.shuffle_sync_bfly(x, 1)
    return x + cute.arch.shuffle_sync_bfly(x, 2)


def bits(x: Any) -> Any:
    """Return the bits of a Float32 as Int32."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]
    )


def finite_or_zero(x: Any) -> Any:
    """Return `x`, or 0 where `x` is -inf (row maximum of a row fully masked so far)."""
    return cutlass.select_(x == Float32(NEG_INF), Float32(0.0), x)


def test_wait(barrier: Any, parity: Any) -> Any:
    """Return whether a phase of an mbarrier has completed, without waiting for it.

    The result is uniform over the warp.

    Args:
        barrier: pointer to the mbarrier.
        parity: parity of the phase.
    """
    done = cute.arch.inline_ptx(
        "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [{$r0}], {$r1}; "
        "selp.b32 {$w0}, 1, 0, done; }",
        write_only_types=[Int32],
        read_only_args=[barrier.toint(), parity],
    )
    return cute.arch.make_warp_uniform(done) != 0


def arrive(barrier: Any) -> None:
    """Arrive at an mbarrier with one elected lane of the warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def store_matrix(to: Any, words: list[Any]) -> None:
    """Store four 8 x 8 matrices of 16-bit floats from a warp's registers to shared memory.

    Args:
        to: pointer to the lane's row of 16 bytes: lane 8 m + r has the address of row r of matrix
            m.
        words: the lane's word of each matrix.
    """
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[to.toint(), *words],
    )


def store_where(inside: Any, to: Any, words: list[Any]) -> None:
    """Store 16 bytes to global memory where `inside` holds, by predication.

    The lines leave L2 first, see `cache_policy`: use this for results that the kernel writes once.
    """
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0;"
        " @p st.global.cs.v4.b32 [{$r1}], {{$r2}, {$r3}, {$r4}, {$r5}}; }",
        read_only_args=[cutlass.select_(inside, Int32(1), Int32(0)), to.toint(), *words],
    )


def store_vector(to: Any, words: list[Any]) -> None:
    """Store four 32-bit words to global memory at a 16-byte aligned address.

    The DSL copies a fragment of Int32 word by word.
    """
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[to.toint(), *words],
    )

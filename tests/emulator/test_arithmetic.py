"""Compare arithmetic, comparison and conversion instructions with independent references.

Section titles are those of the PTX ISA document, chapter "Instruction Set".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit import emulator
from tests.emulator.ptx_kit import evaluate
from tests.emulator.sections import ours, section

N = 64
rng = np.random.default_rng(0)
U4 = rng.integers(0, 2**32, N, dtype=np.uint64).astype(np.uint32)
V4 = rng.integers(0, 2**32, N, dtype=np.uint64).astype(np.uint32)
SMALL = (U4 % 70).astype(np.uint32)
U8 = rng.integers(0, 2**63, N, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
V8 = rng.integers(0, 2**63, N, dtype=np.uint64)
U2 = U4.astype(np.uint16)
EDGE = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -2.5, 3e38, 1e-40, -1e-39], np.float32)
F4 = np.concatenate([EDGE, rng.normal(size=N - EDGE.size).astype(np.float32) * 10])
G4 = np.roll(F4, 7)
H4 = np.roll(F4, 23)


def s(x: int, bits: int = 32) -> int:
    """Convert an unsigned number of `bits` bits to signed."""
    return x - (1 << bits) if x >> (bits - 1) else x


def low24(x: int) -> int:
    """Return the low 24 bits of a number as a signed number."""
    return s(x % 2**24, 24)


def trunc_div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


# (section, instructions, inputs, output bits, reference on Python integers)
INTEGER: list[tuple[str, str, list[Any], int, Callable[..., int]]] = [
    ("add", "add.s32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: a + b),
    ("add", "add.s64 {o}, {a0}, {a1};", [U8, V8], 64, lambda a, b: a + b),
    ("add", "add.s16 {o}, {a0}, 7;", [U2], 16, lambda a: a + 7),
    ("sub", "sub.u32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: a - b),
    ("add.cc", "add.cc.u32 %r1, {a0}, {a1}; addc.u32 {o}, {a1}, 7;", [U4, V4], 32,
     lambda a, b: b + 7 + (a + b >> 32)),
    ("addc", "add.cc.u32 %r1, {a0}, {a1}; addc.cc.u32 %r1, {a0}, -1; addc.u32 {o}, 0, 0;",
     [U4, V4], 32, lambda a, b: a + 2**32 - 1 + (a + b >> 32) >> 32),
    ("sub.cc", "sub.cc.u32 %r1, {a0}, {a1}; subc.u32 {o}, {a1}, 7;", [U4, V4], 32,
     lambda a, b: b - 7 - (a < b)),
    ("subc", "sub.cc.s32 {a0}, {a0}, {a1}; subc.cc.u32 %r1, 5, {a1}; subc.u32 {o}, 9, 0;",
     [U4, V4], 32, lambda a, b: 9 - (5 < b + (a < b))),
    ("mad.cc", "mad.lo.cc.u32 %r1, {a0}, {a1}, {a0}; madc.hi.u32 {o}, {a0}, {a1}, 0;",
     [U4, V4], 32, lambda a, b: a * b + a >> 32),
    ("mad.cc", "mad.hi.cc.s32 {o}, {a0}, {a1}, {a0};", [U4, V4], 32,
     lambda a, b: (s(a) * s(b) >> 32) + a),
    ("madc", "mad.lo.cc.u32 %r1, {a0}, {a1}, {a0}; madc.lo.s32 {o}, {a0}, {a1}, {a1};",
     [U4, V4], 32, lambda a, b: a * b + b + ((a * b) % 2**32 + a >> 32)),
    ("mul", "mul.lo.s32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: a * b),
    ("mul", "mul.hi.s32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: s(a) * s(b) >> 32),
    ("mul", "mul.hi.u32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: a * b >> 32),
    ("mul", "mul.wide.s32 {o}, {a0}, {a1};", [U4, V4], 64, lambda a, b: s(a) * s(b)),
    ("mul", "mul.wide.u32 {o}, {a0}, {a1};", [U4, V4], 64, lambda a, b: a * b),
    ("mul", "mul.wide.s16 {o}, {a0}, 3;", [U2], 32, lambda a: s(a, 16) * 3),
    ("mul", "mul.hi.u64 {o}, {a0}, {a1};", [U8, V8], 64, lambda a, b: a * b >> 64),
    ("mul24", "mul24.lo.s32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: low24(a) * low24(b)),
    ("mul24", "mul24.hi.s32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: low24(a) * low24(b) >> 16),
    ("mul24", "mul24.hi.u32 {o}, {a0}, {a1};", [U4, V4], 32,
     lambda a, b: (a % 2**24) * (b % 2**24) >> 16),
    ("mad24", "mad24.lo.u32 {o}, {a0}, {a1}, {a0};", [U4, V4], 32,
     lambda a, b: (a % 2**24) * (b % 2**24) + a),
    ("mad24", "mad24.hi.s32 {o}, {a0}, {a1}, {a1};", [U4, V4], 32,
     lambda a, b: (low24(a) * low24(b) >> 16) + b),
    ("bfind", "bfind.u32 {o}, {a0};", [SMALL - SMALL[0]], 32, lambda a: a.bit_length() - 1),
    ("bfind", "bfind.shiftamt.u32 {o}, {a0};", [SMALL - SMALL[0]], 32,
     lambda a: 32 - a.bit_length() if a else -1),
    ("bfind", "bfind.shiftamt.s64 {o}, {a0};", [np.append(U8, [0, -1 % 2**64]).astype(np.uint64)], 32,
     lambda a: (lambda n: 64 - n.bit_length() if n else -1)(~s(a, 64) if a >> 63 else a)),
    ("mad", "mad.lo.s32 {o}, {a0}, {a1}, {a0};", [U4, V4], 32, lambda a, b: a * b + a),
    ("mad", "mad.wide.s32 {o}, {a0}, 5, {a1};", [U4, U8], 64, lambda a, b: s(a) * 5 + b),
    ("mad", "mad.hi.u32 {o}, {a0}, {a1}, 9;", [U4, V4], 32, lambda a, b: (a * b >> 32) + 9),
    ("div", "div.s32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: trunc_div(s(a), s(b))),
    ("div", "div.u32 {o}, {a0}, 17;", [U4], 32, lambda a: a // 17),
    ("rem", "rem.s32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: int(math.fmod(s(a), s(b)))),
    ("rem", "rem.u32 {o}, {a0}, 17;", [U4], 32, lambda a: a % 17),
    ("min", "min.s32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: min(s(a), s(b))),
    ("max", "max.u32 {o}, {a0}, {a1};", [U4, V4], 32, max),
    ("abs", "abs.s32 {o}, {a0};", [U4], 32, lambda a: abs(s(a))),
    ("neg", "neg.s32 {o}, {a0};", [U4], 32, lambda a: -a),
    ("and", "and.b32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: a & b),
    ("or", "or.b64 {o}, {a0}, {a1};", [U8, V8], 64, lambda a, b: a | b),
    ("xor", "xor.b32 {o}, {a0}, {a1};", [U4, V4], 32, lambda a, b: a ^ b),
    ("not", "not.b32 {o}, {a0};", [U4], 32, lambda a: ~a),
    # Shift amounts beyond the width are clamped to the width.
    ("shl", "shl.b32 {o}, {a0}, {a1};", [U4, SMALL], 32, lambda a, b: a << b),
    ("shr", "shr.u32 {o}, {a0}, {a1};", [U4, SMALL], 32, lambda a, b: a >> b),
    ("shr", "shr.s32 {o}, {a0}, {a1};", [U4, SMALL], 32, lambda a, b: s(a) >> b),
    ("shr", "shr.s32 {o}, {a0}, 31;", [U4], 32, lambda a: s(a) >> 31),
    ("shf", "shf.l.wrap.b32 {o}, {a0}, {a1}, 11;", [U4, V4], 32,
     lambda a, b: ((b << 32 | a) << 11) >> 32),
    ("shf", "shf.r.clamp.b32 {o}, {a0}, {a1}, 40;", [U4, V4], 32, lambda a, b: b),
    ("popc", "popc.b32 {o}, {a0};", [U4], 32, lambda a: a.bit_count()),
    ("clz", "clz.b32 {o}, {a0};", [SMALL], 32, lambda a: 32 - a.bit_length()),
    ("brev", "brev.b32 {o}, {a0};", [U4], 32, lambda a: int(f"{a:032b}"[::-1], 2)),
    ("bfe", "bfe.u32 {o}, {a0}, 5, 9;", [U4], 32, lambda a: a >> 5 & 511),
    ("bfe", "bfe.s32 {o}, {a0}, 5, 9;", [U4], 32, lambda a: s((a >> 5 & 511), 9)),
    ("bfi", "bfi.b32 {o}, {a0}, {a1}, 4, 8;", [U4, V4], 32,
     lambda a, b: (b & ~0xFF0) | (a & 0xFF) << 4),
    ("prmt", "prmt.b32 {o}, {a0}, {a1}, 0x5410;", [U4, V4], 32,
     lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16),
    ("prmt", "prmt.b32 {o}, {a0}, {a1}, 0xBBBB;", [U4, V4], 32,
     lambda a, b: 0xFFFFFFFF if a >> 31 else 0),
    ("lop3", "lop3.b32 {o}, {a0}, {a1}, 0x0F0F0F0F, 0xE8;", [U4, V4], 32,
     lambda a, b: (a & b) | (a & 0x0F0F0F0F) | (b & 0x0F0F0F0F)),
    ("mov, packing", "mov.b64 {o}, {{{a0}, {a1}}};", [U4, V4], 64, lambda a, b: b << 32 | a),
    ("mov, unpacking", "mov.b64 {{_, {o}}}, {a0};", [U8], 32, lambda a: a >> 32),
    ("mov b128", "mov.b128 %q1, {{{a0}, {a1}}}; mov.b128 {{%d9, {o}}}, %q1;", [U8, V8], 64,
     lambda a, b: b),
    ("cvt", "cvt.s64.s32 {o}, {a0};", [U4], 64, s),
    ("cvt", "cvt.u64.u32 {o}, {a0};", [U4], 64, lambda a: a),
    ("cvt", "cvt.u16.u32 {o}, {a0};", [U4], 16, lambda a: a),
    ("cvt", "cvt.s32.s8 {o}, {a0};", [U4], 32, lambda a: s(a & 255, 8)),
    ("cvt.sat", "cvt.sat.u8.s32 %r1, {a0}; mov.b32 {o}, %r1;", [U4], 32,
     lambda a: min(max(s(a), 0), 255)),
    ("setp, selp", "setp.lt.s32 %p1, {a0}, {a1}; selp.b32 {o}, 1, 2, %p1;", [U4, V4], 32,
     lambda a, b: 1 if s(a) < s(b) else 2),
    ("setp, unsigned", "setp.hi.u32 %p1, {a0}, {a1}; selp.b32 {o}, 1, 2, %p1;", [U4, V4], 32,
     lambda a, b: 1 if a > b else 2),
    ("setp with Boolean", "setp.ne.s32 %p2, {a0}, 5; setp.gt.and.u32 %p1, {a0}, {a1}, %p2;"
     "selp.b32 {o}, 1, 0, %p1;", [U4, V4], 32, lambda a, b: int(a > b and a != 5)),
    ("predicates", "setp.gt.u32 %p1, {a0}, {a1}; not.pred %p2, %p1; mov.pred %p3, %p2;"
     "selp.b32 {o}, 1, 0, %p3;", [U4, V4], 32, lambda a, b: int(a <= b)),
    ("guarded", "mov.b32 {o}, 3; setp.gt.u32 %p1, {a0}, {a1}; @!%p1 mov.b32 {o}, {a1};",
     [U4, V4], 32, lambda a, b: 3 if a > b else b),
]  # fmt: skip


@pytest.mark.parametrize("case", INTEGER, ids=lambda c: c[1].split()[0])
@section(
    "Integer Arithmetic Instructions",
    "Extended-Precision Integer Arithmetic Instructions",
    "Logic and Shift Instructions",
    "Comparison and Selection Instructions",
    "Data Movement and Conversion Instructions",
    "Manipulating Predicates",
)
def test_integer(case: Any) -> None:
    section, text, inputs, bits, reference = case
    got = evaluate(text, inputs, f"u{bits // 8}")
    want = [
        reference(*x) & ((1 << bits) - 1) for x in zip(*(i.tolist() for i in inputs), strict=True)
    ]
    assert got.tolist() == want, section


def f(x: Any) -> Any:
    return x.astype(np.float64)


def flush(x: Any) -> Any:
    """Replace subnormal float32 values by zeros of the same sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(0, x), x)


with np.errstate(all="ignore"):
    # (section, instructions, inputs, reference in float64 rounded once to float32)
    FLOAT: list[tuple[str, str, list[Any], Any]] = [
        ("add.f32", "add.f32 {o}, {a0}, {a1};", [F4, G4], F4 + G4),
        ("sub.f32", "sub.f32 {o}, {a0}, {a1};", [F4, G4], F4 - G4),
        ("mul.f32", "mul.f32 {o}, {a0}, {a1};", [F4, G4], F4 * G4),
        ("div.rn.f32", "div.rn.f32 {o}, {a0}, {a1};", [F4, G4], F4 / G4),
        ("fma.rn.f32", "fma.rn.f32 {o}, {a0}, {a1}, {a2};", [F4, G4, H4],
         (f(F4) * f(G4) + f(H4)).astype(np.float32)),
        ("mov of bits", "mov.b32 %r9, 0x3f800000; add.f32 {o}, {a0}, %r9;", [F4], F4 + np.float32(1)),
        # min and max drop a NaN unless .NaN is given.
        ("max.f32", "max.f32 {o}, {a0}, {a1};", [F4, G4], np.fmax(F4, G4)),
        ("min.f32", "min.f32 {o}, {a0}, {a1};", [F4, G4], np.fmin(F4, G4)),
        ("max.NaN.f32", "max.NaN.f32 {o}, {a0}, {a1};", [F4, G4], np.maximum(F4, G4)),
        ("max, three operands (sm_100)", "max.f32 {o}, {a0}, {a1}, {a2};", [F4, G4, H4],
         np.fmax(np.fmax(F4, G4), H4)),
        ("neg.f32", "neg.f32 {o}, {a0};", [F4], -F4),
        ("abs.f32", "abs.f32 {o}, {a0};", [F4], np.abs(F4)),
        ("copysign.f32", "copysign.f32 {o}, {a0}, {a1};", [F4, G4], np.copysign(G4, F4)),
        ("add.sat.f32", "add.sat.f32 {o}, {a0}, {a1};", [F4, G4],
         np.nan_to_num(np.clip(F4 + G4, 0, 1))),
        ("mul.ftz.f32", "mul.ftz.f32 {o}, {a0}, 0f3F800000;", [F4],
         flush(F4)),
        ("ex2", "ex2.approx.f32 {o}, {a0};", [F4], np.exp2(f(F4))),
        ("lg2", "lg2.approx.f32 {o}, {a0};", [F4], np.log2(f(F4))),
        ("rcp", "rcp.approx.ftz.f32 {o}, {a0};", [G4], flush(1 / f(flush(G4)))),
        ("sqrt", "sqrt.rn.f32 {o}, {a0};", [F4], np.sqrt(F4)),
        ("rsqrt", "rsqrt.approx.f32 {o}, {a0};", [np.abs(F4)], 1 / np.sqrt(f(np.abs(F4)))),
        ("tanh", "tanh.approx.f32 {o}, {a0};", [F4], np.tanh(f(F4))),
        ("sin", "sin.approx.f32 {o}, {a0};", [H4], np.sin(f(H4))),
        ("selp.f32", "setp.gt.f32 %p1, {a0}, {a1}; selp.f32 {o}, {a0}, {a1}, %p1;", [F4, G4],
         np.where(F4 > G4, F4, G4)),
        ("cvt.rn.f32.s32", "cvt.rn.f32.s32 {o}, {a0};", [U4], U4.view(np.int32).astype(np.float32)),
        ("cvt.rni", "cvt.rni.f32.f32 {o}, {a0};", [F4], np.rint(F4)),
        ("f32x2 (sm_100)", "mov.b64 %d1, {{{a0}, {a1}}}; mov.b64 %d2, {{{a1}, {a2}}};"
         "fma.rn.f32x2 %d3, %d1, %d2, %d1; mov.b64 {{%r1, {o}}}, %d3;", [F4, G4, H4],
         (f(G4) * f(H4) + f(G4)).astype(np.float32)),
    ]  # fmt: skip


@pytest.mark.parametrize("case", FLOAT, ids=lambda c: c[0])
@section(
    "Floating-Point Instructions",
    "Comparison and Selection Instructions",
    "Data Movement and Conversion Instructions",
)
def test_float(case: Any) -> None:
    section, text, inputs, want = case
    got = evaluate(text, inputs, np.float32, "sm_100a" if "sm_100" in section else "sm_90a")
    approximate = want.dtype == np.float64
    with np.errstate(all="ignore"):
        want = want.astype(np.float32)
    if approximate:
        np.testing.assert_allclose(got, want, rtol=3e-7, err_msg=section)
    else:
        np.testing.assert_array_equal(got, want, err_msg=section)
        assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()


@pytest.mark.parametrize("how", ["rm", "rp", "rz"])
@section("Floating Point Instructions: add")
def test_directed_rounding_of_exact_sums(how: str) -> None:
    """Directed rounding returns the float32 neighbour of the exact sum.

    The exact sum may need more digits than a float64 has.
    """
    magnitude = 10.0 ** rng.integers(-38, 38, N)
    x = (rng.normal(size=N) * magnitude).astype(np.float32)
    y = np.roll(x, 1)
    y[:4] = -x[:4]
    got = evaluate(f"add.{how}.f32 {{o}}, {{a0}}, {{a1}};", [x, y], np.float32)
    for a, b, r in zip(x.tolist(), y.tolist(), got, strict=True):
        exact = Fraction(a) + Fraction(b)
        down = how == "rm" or (how == "rz" and exact > 0)
        assert (Fraction(float(r)) - exact) * (1 if down else -1) <= 0
        beyond = np.nextafter(r, np.float32(np.inf if down else -np.inf))
        assert (Fraction(float(beyond)) - exact) * (1 if down else -1) > 0
        assert exact or np.signbit(r) == (how == "rm")


SETP_F32 = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: (a < b) | np.isnan(a) | np.isnan(b),
    "leu": lambda a, b: (a <= b) | np.isnan(a) | np.isnan(b),
    "gtu": lambda a, b: (a > b) | np.isnan(a) | np.isnan(b),
    "geu": lambda a, b: (a >= b) | np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


@pytest.mark.parametrize("cmp", SETP_F32)
@section("Floating Point Comparisons", "setp")
def test_float_comparisons_with_nan(cmp: str) -> None:
    """With a NaN operand, ordered setp comparisons are false and unordered ones are true."""
    text = f"setp.{cmp}.f32 %p1, {{a0}}, {{a1}}; selp.b32 {{o}}, 1, 0, %p1;"
    got = evaluate(text, [F4, G4], np.uint32)
    np.testing.assert_array_equal(got, SETP_F32[cmp](F4, G4).astype(np.uint32))


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@section("cvt")
def test_float_to_integer_saturates(mode: str) -> None:
    """Float-to-integer cvt saturates out of range, and converts NaN to 0."""
    got = evaluate(f"cvt.{mode}.s32.f32 {{o}}, {{a0}};", [F4], np.int32)
    fn = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    want = [
        0 if math.isnan(x) else int(min(max(fn(x), -(2.0**31)), 2.0**31 - 1))
        for x in f(F4).tolist()
    ]
    assert got.tolist() == want


def torch_bits(x: Any, dtype: torch.dtype, view: torch.dtype) -> Any:
    return torch.from_numpy(x).to(dtype).view(view).numpy()


@section("cvt")
def test_cvt_to_bf16_and_f16() -> None:
    """cvt to bf16 and f16 equals torch; in x2 forms the first source is the high half."""
    x = F4[~np.isnan(F4)][:60]
    y = np.roll(x, 3)
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        got = evaluate(f"cvt.rn.{kind}.f32 {{o}}, {{a0}};", [x], np.uint16)
        want = torch_bits(x, dtype, torch.int16).view(np.uint16)
        np.testing.assert_array_equal(got, want)
        two = evaluate(f"cvt.rn.{kind}x2.f32 {{o}}, {{a0}}, {{a1}};", [x, y], np.uint32)
        np.testing.assert_array_equal((two >> 16).astype(np.uint16), want)
        np.testing.assert_array_equal(
            two.astype(np.uint16), torch_bits(y, dtype, torch.int16).view(np.uint16)
        )
        back = evaluate(f"cvt.f32.{kind} {{o}}, {{a0}};", [want], np.float32)
        np.testing.assert_array_equal(back, torch.from_numpy(x).to(dtype).float().numpy())


@pytest.mark.parametrize(
    ("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
@section("cvt")
def test_cvt_to_fp8(kind: str, dtype: torch.dtype) -> None:
    """cvt to fp8 rounds to nearest even in range and saturates beyond."""
    x = np.concatenate([H4[np.isfinite(H4)][:40], np.float32([440, 460, 1e9, -1e9, 2**-9, 2**-10])])
    got = evaluate(f"cvt.rn.satfinite.{kind}x2.f32 {{o}}, {{a0}}, {{a0}};", [x], np.uint16)
    top = torch.finfo(dtype).max
    want = torch.from_numpy(x).clamp(-top, top).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal((got & 0xFF).astype(np.uint8), want)
    half = evaluate(f"cvt.rn.f16x2.{kind}x2 {{o}}, {{a0}};", [got], np.uint32)
    np.testing.assert_array_equal(
        half.astype(np.uint16).view(np.float16).astype(np.float32),
        torch.from_numpy(want).view(dtype).float().numpy(),
    )


@section(
    "Half Precision Floating Point Instructions: fma",
    "Mixed Precision Floating Point Instructions: fma",
)
def test_packed_and_mixed_half_arithmetic() -> None:
    """Packed bf16 arithmetic rounds once, and fma.rn.f32.bf16 multiplies bf16 into float32."""
    x = torch.randn(64).bfloat16()
    y, z = torch.randn(64).bfloat16(), torch.randn(64)
    bits = [v.view(torch.int16).numpy().view(np.uint16) for v in (x, y)]
    got = evaluate(
        "fma.rn.f32.bf16 {o}, {a0}, {a1}, {a2};", [*bits, z.numpy()], np.float32, "sm_100a"
    )
    want = (x.double() * y.double() + z.double()).float()
    np.testing.assert_array_equal(got, want.numpy())
    pair = [(b.astype(np.uint32) << 16) | b for b in bits]
    got = evaluate("mul.bf16x2 {o}, {a0}, {a1};", pair, np.uint32)
    want16 = (x * y).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal((got >> 16).astype(np.uint16), want16)
    np.testing.assert_array_equal(got.astype(np.uint16), want16)


@ours
def test_unknown_opcode_is_named() -> None:
    with pytest.raises(emulator.UnknownOpcode, match=r"dp4a\.s32\.s32"):
        evaluate("dp4a.s32.s32 {o}, {a0}, {a0}, {a0};", [U4], np.uint32)
    with pytest.raises(emulator.UnknownOpcode, match=r"add\.cc\.u64"):
        evaluate("add.cc.u64 {o}, {a0}, {a0};", [U8], np.uint64)


REFUSED = [
    "mul24.wide.s32 {o}, {a0}, {a0};",
    "mad24.hi.sat.s32 {o}, {a0}, {a0}, {a0};",
    "mad.hi.sat.s32 {o}, {a0}, {a0}, {a0};",
    "sqrt.rz.f32 {o}, {a0};",
    "rcp.rp.f32 {o}, {a0};",
    "div.rm.f32 {o}, {a0}, {a0};",
    "fma.rn.relu.f32 {o}, {a0}, {a0}, {a0};",
    "cvt.rz.f32.s64 {o}, %d1;",
    "cvt.rm.f64.u64 %d2, %d1;",
    "cvt.rn.f16.s64 %h1, %d1;",
    "cvt.rn.satfinite.f16.f32 %h1, {a0};",
    "cvt.rn.satfinite.bf16x2.f32 {o}, {a0}, {a0};",
    "cvt.rz.tf32.f32 {o}, {a0};",
    "isspacep.const %p1, %d1;",
    "mma.sync.aligned.m16n8k16.row.col.satfinite.s32.s8.s8.s32 "
    "{{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%r7}}, {{%r1, %r2, %r3, %r4}};",
    "wgmma.mma_async.sync.aligned.m64n8k32.satfinite.s32.s8.s8 "
    "{{%r1, %r2, %r3, %r4}}, %d1, %d2, %p1;",
]


@pytest.mark.parametrize("text", REFUSED, ids=lambda t: t.split()[0])
@ours
def test_forms_that_are_not_implemented_are_refused(text: str) -> None:
    with pytest.raises(emulator.UnknownOpcode, match=text.split()[0]):
        evaluate(text, [U4], np.uint32)


def nearest(x: Fraction, digits: int, least: int) -> Fraction:
    """Round to `digits` binary digits, to even, with no digit below 2 ** least."""
    if x == 0:
        return x
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    e -= Fraction(2) ** e > abs(x)
    unit = Fraction(2) ** max(e - digits + 1, least)
    return round(x / unit) * unit


# Numbers close to the middle of two neighbours of bf16 or f16, and anywhere.
CLOSE = st.builds(
    lambda n, e, tiny: math.ldexp(n + tiny, e),
    st.integers(-(2**13), 2**13),
    st.integers(-150, 3),
    st.sampled_from([0.0, 2.0**-30, -(2.0**-30), 0.5]),
)


@given(st.lists(CLOSE, min_size=32, max_size=32))
@pytest.mark.parametrize(("kind", "digits", "least"), [("bf16", 8, -133), ("f16", 11, -24)])
@section("cvt")
def test_cvt_of_f64_to_16_bits_rounds_once(
    kind: str, digits: int, least: int, values: list[float]
) -> None:
    x = np.array(values)
    got = evaluate(
        f"cvt.rn.{kind}.f64 %h1, {{a0}}; cvt.f32.{kind} {{o}}, %h1;",
        [x.view(np.uint64)],
        np.float32,
    )
    small = [v for v in values if abs(v) < 60000]
    want = [nearest(Fraction(v), digits, least) for v in small]
    assert [Fraction(float(g)) for g, v in zip(got, values, strict=True) if v in small] == want


@section("cvt")
def test_cvt_of_integers_to_16_bits_rounds_once() -> None:
    x = np.array([2**24 + 2**16 + 1, 2**31 - 1, 257, 0] * 8, np.int32)
    got = evaluate(
        "cvt.rn.bf16.s32 %h1, {a0}; cvt.f32.bf16 {o}, %h1;", [x.view(np.uint32)], np.float32
    )
    want = [nearest(Fraction(v), 8, -133) for v in x.tolist()]
    assert [Fraction(float(g)) for g in got] == want


@pytest.mark.parametrize("op", ["fma.rn", "mad.rn"])
@section("Floating-Point Instructions")
def test_fma_of_f64_rounds_once(op: str) -> None:
    a, b = rng.normal(size=(2, N))
    c = -(a * b) * (1 + rng.integers(-2, 3, N) * 2.0**-30)
    got = evaluate(
        f"{op}.f64 {{o}}, {{a0}}, {{a1}}, {{a2}};",
        [x.view(np.uint64) for x in (a, b, c)],
        np.uint64,
    ).view(np.float64)
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a, b, c, strict=True)]
    assert [Fraction(float(g)) for g in got] == [nearest(x, 53, -1074) for x in exact]


@pytest.mark.parametrize("how", ["rm", "rp", "rz"])
@pytest.mark.parametrize("op", ["fma", "add", "sub"])
@section("Mixed Precision Floating Point Instructions: fma")
def test_mixed_precision_rounds_and_saturates_as_it_says(op: str, how: str) -> None:
    x, y = (torch.randn(64).bfloat16() for _ in range(2))
    z = torch.randn(64).numpy()
    bits = [v.view(torch.int16).numpy().view(np.uint16) for v in (x, y)]
    args = "{a0}, {a1}, {a2}" if op == "fma" else "{a0}, {a2}"
    got = evaluate(f"{op}.{how}.f32.bf16 {{o}}, {args};", [*bits, z], np.float32, "sm_100a")
    left = x.double() * y.double() if op == "fma" else x.double()
    exact = left.numpy() + (-1 if op == "sub" else 1) * z.astype(np.float64)
    down = (exact > 0) if how == "rz" else np.full(64, how == "rm")
    assert ((got <= exact) == down)[got != exact].all()
    assert (np.abs(got - exact) < np.spacing(np.abs(got)) * 1.001).all()
    clamped = evaluate(f"{op}.{how}.sat.f32.bf16 {{o}}, {args};", [*bits, z], np.float32, "sm_100a")
    np.testing.assert_array_equal(clamped, np.clip(got, 0, 1))


@pytest.mark.parametrize(
    ("to", "source", "want"),
    [
        ("s32", "f32", 0), ("u32", "f32", 0), ("s64", "f32", 2**63), ("u64", "f32", 2**63),
        ("s32", "f64", 2**31), ("u32", "f64", 2**31), ("s64", "f64", 2**63), ("u64", "f64", 2**63),
    ],
)  # fmt: skip
@section("cvt")
def test_nan_to_integer(to: str, source: str, want: int) -> None:
    x = np.full(32, np.nan, f"f{int(source[1:]) // 8}").view(f"u{int(source[1:]) // 8}")
    got = evaluate(f"cvt.rzi.{to}.{source} {{o}}, {{a0}};", [x], f"u{int(to[1:]) // 8}")
    assert got.tolist() == [want] * 32


@section("cvt")
def test_ftz_flushes_a_subnormal_before_it_becomes_an_integer() -> None:
    x = np.full(32, 1e-40, np.float32)
    assert evaluate("cvt.rpi.s32.f32 {o}, {a0};", [x], np.int32).tolist() == [1] * 32
    assert evaluate("cvt.rpi.ftz.s32.f32 {o}, {a0};", [x], np.int32).tolist() == [0] * 32

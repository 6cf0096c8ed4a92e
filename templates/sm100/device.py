"""Emit packed conversions, tensor memory accesses and barrier arrivals on Blackwell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, cute
from cutlass._mlir.dialects import llvm, nvvm, vector
from cutlass._mlir.dialects.nvvm import MemScopeKind, Tcgen05LdStShape
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import T, dsl_user_op

# A tensor-memory address has the lane in its upper 16 bits and the column in its lower 16 bits.
_WARP = 21  # shift from a warp's index to the lane field of an address: 16 + log2(32)
_TENSOR_MEMORY = 6  # LLVM's number of this address space
_SHAPE = Tcgen05LdStShape.SHAPE_32X32B

_PACK = {BFloat16: "cvt.rn.bf16x2.f32", Float16: "cvt.rn.f16x2.f32"}
_LETTERS = {Int32: "r", Float32: "f"}


@dsl_user_op
def pure(op: str, result: Any, *args: Any, loc: Any = None, ip: Any = None) -> Any:
    """Emit one PTX instruction whose result depends only on its operands.

    Unlike `cute.arch.inline_ptx`, it does not copy each operand to a named register.
    """
    operands = ", ".join(f"${i}" for i in range(len(args) + 1))
    letters = ",".join([f"={_LETTERS[result]}", *(_LETTERS[type(a)] for a in args)])
    values = [a.ir_value(loc=loc, ip=ip) for a in args]
    value = llvm.inline_asm(
        result.mlir_type,
        values,
        f"{op} {operands};",
        letters,
        has_side_effects=False,
        loc=loc,
        ip=ip,
    )
    return result(value)


def pack(low: Any, high: Any, dtype: Any) -> Any:
    """Round two float32 to 16-bit floats and return them as one Int32."""
    return pure(_PACK[dtype], Int32, high, low)


def rounded(x: Any, dtype: Any) -> Any:
    """Round a float32 to a 16-bit float and convert it back."""
    if dtype is BFloat16:
        return pack(Float32(0.0), x, dtype).bitcast(Float32)
    return x.to(dtype).to(Float32)


def fmax3(a: Any, b: Any, c: Any, nan: bool) -> Any:
    """Return the largest of three float32; `nan` propagates NaN."""
    return pure("max.NaN.f32" if nan else "max.f32", Float32, a, b, c)


def bits_below(x: Any) -> Any:
    """Return an Int32 with the bits below bit `x` set: none for x <= 0, all for x >= 32."""
    # a shift by 32 or more gives zero in PTX; in the DSL's arithmetic it is undefined
    above = cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(-1), cutlass.max(x, Int32(0))],
    )
    return ~above


def column(at: Any) -> Any:
    """Return a pointer to column `at` (32 bits) of tensor memory.

    The kernel allocates all of tensor memory, so that column 0 is its base.
    """
    return cute.make_ptr(Float32, at, mem_space=cute.AddressSpace.tmem, assumed_align=16)


@dsl_user_op
def load_row(thread: Any, start: Any, count: int, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """Issue a load of `count` columns from column `start` of this thread's lane of tensor memory.

    The function emits the instruction itself. A copy of the DSL would trace fifty more operations,
    and one more for each use of a value.

    Returns:
        Float32 values, valid after `cute.arch.fence_view_async_tmem_load`.
    """
    place = _warp_column(thread, start, loc, ip)
    words = nvvm.tcgen05_ld(T.vector(count, T.i32()), _SHAPE, place, loc=loc, ip=ip)
    words = vector.bitcast(T.vector(count, T.f32()), words, loc=loc, ip=ip)
    return [Float32(vector.extract(words, [], [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def store_row(
    thread: Any, start: Any, values: Sequence[Any], *, loc: Any = None, ip: Any = None
) -> None:
    """Issue a store of 32-bit values from column `start` of this thread's lane of tensor memory."""
    place, count = _warp_column(thread, start, loc, ip), len(values)
    numbers = [v.ir_value(loc=loc, ip=ip) for v in values]
    words = vector.from_elements(T.vector(count, numbers[0].type), numbers, loc=loc, ip=ip)
    words = vector.bitcast(T.vector(count, T.i32()), words, loc=loc, ip=ip)
    nvvm.tcgen05_st(_SHAPE, place, words, loc=loc, ip=ip)


def _warp_column(thread: Any, start: Any, loc: Any, ip: Any) -> Any:
    """Return an LLVM pointer to a tensor memory column in the lanes of the thread's warp."""
    at = ((thread // 32) << _WARP) + start
    at = at.ir_value(loc=loc, ip=ip)
    return llvm.inttoptr(llvm.PointerType.get(_TENSOR_MEMORY), at, loc=loc, ip=ip)


def arrive(barrier: Any) -> None:
    """Arrive once per warp, after all previous operations of its threads."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def arrive_first(barrier: Any) -> None:
    """Arrive once per warp at the pair's first CTA, after the warp's tensor memory accesses."""
    fence_before()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, Int32(0), scope=MemScopeKind.CLUSTER)


def commit(barrier: Any) -> None:
    """Arrive at `barrier` once all MMAs that this warp issued so far are complete."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


def commit_pair(barrier: Any) -> None:
    """Arrive at `barrier` in both CTAs of a pair once all MMAs issued so far are complete."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier, 3, tcgen05.CtaGroup.TWO)


def fence_before() -> None:
    """Order this thread's tensor memory accesses before a later arrival at a barrier."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after() -> None:
    """Order this thread's tensor memory accesses after an earlier wait at a barrier."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def after(value: Any, others: Sequence[Any], zero: Any) -> Any:
    """Return `value` with a false dependency on `others` that the compiler cannot remove.

    Args:
        value: Int32.
        others: values of 32 bits.
        zero: an Int32 that is 0 at run time, but not known to the compiler.
    """
    for other in others:
        value = cute.arch.inline_ptx(
            "{ .reg .b32 a; mov.b32 a, {$r1}; lop3.b32 {$w0}, {$r0}, a, {$r2}, 0xF8; }",  # r0 | a & r2
            write_only_types=[Int32],
            read_only_args=[value, other, zero],
        )
    return value


def opaque_copy(x: Any, when: Any) -> Any:
    """Return `x`, an Int32, with a false dependency on `when`.

    Values computed from the result are recomputed wherever `when` changes, instead of being kept in
    registers.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 t; mov.b32 t, {$r1}; mov.b32 {$w0}, {$r0}; }",
        write_only_types=[Int32],
        read_only_args=[x, when],
    )

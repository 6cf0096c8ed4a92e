"""Small device functions of the Blackwell kernels."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import tcgen05

LANE = 1 << 16  # from one lane of tensor memory to the next, in an address


def bits_below(x: Any) -> Any:
    """32 bits, of which those below x are set."""
    # a shift by 32 or more gives zero in PTX; in the DSL's arithmetic it is undefined
    above = cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(-1), cutlass.max(x, Int32(0))],
    )
    return ~above


def column(at: Any) -> Any:
    """A pointer to a 32-bit column of tensor memory, all of which the kernel has."""
    return cute.make_ptr(Float32, at, mem_space=cute.AddressSpace.tmem, assumed_align=16)


def columns(start: Any, count: int) -> Any:
    """All lanes of `count` columns."""
    return cute.make_tensor(column(start), cute.make_layout((128, count), stride=(LANE, 1)))


def load_row(thread: Any, start: Any, values: Any) -> None:
    """Begin to load columns from `start` of this thread's lane into a register tensor."""
    count = cute.size(values)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(count)), Float32)
    copy = tcgen05.make_tmem_copy(atom, columns(0, count))
    mine = copy.get_slice(thread)
    shape = mine.partition_D(cute.make_identity_tensor((128, count))).shape
    to = cute.make_tensor(values.iterator, cute.make_layout(shape))
    cute.copy(copy, mine.partition_S(columns(start, count)), to)


def store_row(thread: Any, start: Any, values: Any) -> None:
    """Begin to store a register tensor into columns from `start` of this thread's lane."""
    count = cute.size(values)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(count)), Float32)
    copy = tcgen05.make_tmem_copy(atom, columns(0, count))
    mine = copy.get_slice(thread)
    shape = mine.partition_S(cute.make_identity_tensor((128, count))).shape
    source = cute.make_tensor(values.iterator, cute.make_layout(shape))
    cute.copy(copy, source, mine.partition_D(columns(start, count)))


def arrive(barrier: Any) -> None:
    """One arrival a warp, for what all its threads did before."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


def commit(barrier: Any) -> None:
    """An arrival once all matrix products that this warp issued so far are done."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


def anew(x: Any, when: Any) -> Any:
    """The same Int32, computed from again wherever `when` changes: not kept in many registers."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 t; mov.b32 t, {$r1}; mov.b32 {$w0}, {$r0}; }",
        write_only_types=[Int32],
        read_only_args=[x, when],
    )

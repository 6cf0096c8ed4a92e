"""Emit PTX for tensor memory and tensor cores of Blackwell: descriptors, MMAs, loads, stores.

An operand in shared memory is a tile of 16-bit elements as TMA writes it with the 128-byte swizzle:
blocks of 64 columns, 128 bytes per row. The same tile can be an operand with its columns along k
(`k_major`) or with its rows along k (`mn_major`); only the descriptors differ. An address in tensor
memory has the lane in its upper 16 bits and the 32-bit column in its lower 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import BFloat16, Float32, Int32, cute

from attnkit.templates.sm100.config import TMEM_COLUMNS

LANES = 32  # lanes of tensor memory that a warp can access, selected by its index modulo 4
STEP = 16  # K of one MMA instruction

_BLOCK = 64  # columns of a swizzled block
_ROW = 2 * _BLOCK  # bytes per row of a block
# Upper half of a descriptor: 1024 bytes between groups of 8 rows, version, 128-byte swizzle.
_VERSION = 1 << 14
_UPPER = (1024 >> 4) | _VERSION | 2 << 29


def k_major(start: Int32, rows: int, step: int) -> Int32:
    """Return the lower half of the descriptor of a tile whose columns are along k.

    Args:
        start: shared address of the tile, a multiple of 1024.
        rows: rows of the tile.
        step: index of the 16 columns.
    """
    block, inside = divmod(step * STEP, _BLOCK)
    return _lower(start, block * rows * _ROW + 2 * inside, 1)


def mn_major(start: Int32, rows: int, step: int, first: int = 0) -> Int32:
    """Return the lower half of the descriptor of a tile whose rows are along k.

    Args:
        start: shared address of the tile, a multiple of 1024.
        rows: rows of the tile.
        step: index of the 16 rows.
        first: first column, a multiple of 64.
    """
    block = rows * _ROW
    return _lower(start, first // _BLOCK * block + step * STEP * _ROW, block >> 4)


def column_part(start: Any, rows: int, part: Any, columns: int) -> Any:
    """Return the shared address of a part of the columns of a swizzled tile.

    Args:
        start: shared address of the tile.
        rows: rows of the tile.
        part: index of the part; the int 0 returns `start`.
        columns: columns of a part, a multiple of 64.
    """
    if isinstance(part, int) and part == 0:
        return start
    return start + part * (columns // _BLOCK * rows * _ROW)


def _lower(start: Int32, offset: int, leading: int) -> Int32:
    return (start >> 4) + Int32((offset >> 4) + (leading << 16))


def swizzled_address(start: Any, rows: int, row: Any, vector: Any, block: Any) -> Any:
    """Return the shared address of 8 elements in a row of a swizzled tile.

    Args:
        start: shared address of the tile.
        rows: rows of the tile.
        row: index of the row.
        vector: index of the 8 elements in the block's 64 columns.
        block: index of the block of 64 columns.
    """
    return start + block * (rows * _ROW) + row * _ROW + ((vector ^ (row & 7)) << 4)


def instruction_descriptor(
    m: int, n: int, dtype: Any, *, a_rows: bool = False, b_rows: bool = False
) -> int:
    """Return the descriptor of an MMA instruction with Float32 accumulators (PTX ISA, tcgen05).

    Args:
        m, n: rows and columns of the result.
        dtype: dtype of both operands.
        a_rows, b_rows: whether k runs along the rows of the operand's tile.
    """
    kind = 1 if dtype is BFloat16 else 0
    formats = 1 << 4 | kind << 7 | kind << 10
    return formats | int(a_rows) << 15 | int(b_rows) << 16 | n >> 3 << 17 | m >> 4 << 24


def issue_mma(
    out: Any,
    a: Any,
    b: Any,
    form: int,
    accumulate: Any,
    *,
    a_in_tmem: bool,
    ctas: int = 1,
    strides: tuple[int, int] | None = None,
) -> None:
    """Issue one MMA instruction with K = 16, from one thread.

    MMAs are asynchronous and execute in the order of issue. With ctas=2, one CTA of a pair issues a
    joint MMA. Each CTA then has half of the rows of a and of the result, and half of the rows of b
    (half of its columns if k runs along its rows), at the same addresses.

    Args:
        out: tensor-memory address of the result.
        a: lower half of a descriptor, or an address in tensor memory if `a_in_tmem`.
        b: lower half of a descriptor.
        form: instruction descriptor from `instruction_descriptor`.
        accumulate: whether to add to the old value of the result; a bool, or an Int32 that is
            nonzero for true.
        a_in_tmem: whether a is in tensor memory.
        ctas: number of CTAs that compute the MMA, 1 or 2.
        strides: bytes between groups of 8 rows of a and of b, if they are core matrices without
            swizzle; None for swizzled tiles.
    """
    uppers = (_UPPER, _UPPER)
    if strides is not None:
        uppers = (strides[0] >> 4 | _VERSION, strides[1] >> 4 | _VERSION)
    number = Int32(int(accumulate)) if isinstance(accumulate, bool) else accumulate
    first, pack = "[{$r1}]", ""
    if not a_in_tmem:
        first, pack = "a", f"mov.b64 a, {{{{$r1}}, {uppers[0]}}};"
    cute.arch.inline_ptx(
        "{ .reg .b64 a, b; .reg .b32 form; .reg .pred p; "
        f"{pack} mov.b64 b, {{{{$r2}}, {uppers[1]}}}; mov.b32 form, {form}; "
        "setp.ne.b32 p, {$r3}, 0; "
        f"tcgen05.mma.cta_group::{ctas}.kind::f16 [{{$r0}}], {first}, b, form, p; }}",
        read_only_args=[out, a, b, number],
    )


def commit_pair(barrier: cute.Pointer) -> None:
    """Arrive in both CTAs of a pair once all MMAs that this thread issued so far are complete."""
    cute.arch.inline_ptx(
        "{ .reg .b16 both; mov.b16 both, 3; tcgen05.commit.cta_group::2.mbarrier::arrive::one"
        ".shared::cluster.multicast::cluster.b64 [{$r0}], both; }",
        read_only_args=[barrier.toint()],
    )


def commit(barrier: cute.Pointer) -> None:
    """Arrive at `barrier` once all MMAs that this thread issued so far are complete."""
    cute.arch.inline_ptx(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];",
        read_only_args=[barrier.toint()],
    )


def load(address: Int32, columns: int) -> Sequence[Any]:
    """Load `columns` columns of the thread's lane of tensor memory as Float32, and wait."""
    outputs = ", ".join(f"{{$w{i}}}" for i in range(columns))
    return cute.arch.inline_ptx(
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{outputs}}}, [{{$r0}}];"
        " tcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * columns,
        read_only_args=[address],
    )


def store(address: Int32, values: Sequence[Any]) -> None:
    """Issue a store of Int32 values to the thread's lane of tensor memory; see `wait_stores`."""
    inputs = ", ".join(f"{{$r{i + 1}}}" for i in range(len(values)))
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{len(values)}.b32 [{{$r0}}], {{{inputs}}};",
        read_only_args=[address, *values],
    )


def wait_stores() -> None:
    """Wait until the thread's stores to tensor memory are complete."""
    cute.arch.inline_ptx("tcgen05.wait::st.sync.aligned;")


def write_shared(address: Int32, values: Sequence[Any]) -> None:
    """Write four Int32 to a shared memory address that is a multiple of 16."""
    cute.arch.inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )


def remote_address(address: Int32, rank: Int32) -> Any:
    """Return the cluster address of shared memory `address` in the CTA of rank `rank`."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, rank],
    )


def write_remote(address: Int32, values: Sequence[Any]) -> None:
    """Write four Int32 to an address from `remote_address`, a multiple of 16."""
    cute.arch.inline_ptx(
        "st.shared::cluster.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )


def scaled(x: Sequence[Any], factor: Any, more: Sequence[Any]) -> list[Any]:
    """Return x * factor + more elementwise, in packed pairs; None for `factor` means 1."""
    if factor is None:
        return plus(x, more)
    return _pairs(
        lambda a, b: cute.arch.fma_packed_f32x2(a, (factor, factor), b, rnd="rn"), x, more
    )


def plus(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """Return a + b elementwise, in packed pairs."""
    return _pairs(lambda x, y: cute.arch.add_packed_f32x2(x, y, rnd="rn"), a, b)


def times(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """Return a * b elementwise, in packed pairs."""
    return _pairs(lambda x, y: cute.arch.mul_packed_f32x2(x, y, rnd="rn"), a, b)


def _pairs(operation: Any, a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    results: list[Any] = []
    for k in range(0, len(a), 2):
        results += operation((a[k], a[k + 1]), (b[k], b[k + 1]))
    return results


def allocate(place: cute.Pointer, ctas: int = 1) -> None:
    """Allocate all of tensor memory from one whole warp, and write its address to `place`."""
    cute.arch.inline_ptx(
        f"tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [{{$r0}}], {TMEM_COLUMNS};"
        f" tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;",
        read_only_args=[place.toint()],
    )


def allocated(place: cute.Pointer) -> Any:
    """Return the tensor memory address that `allocate` wrote to shared memory."""
    return cute.arch.make_warp_uniform(
        cute.arch.inline_ptx(
            "ld.shared.b32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[place.toint()],
        )
    )


def free(address: Int32, ctas: int = 1) -> None:
    """Free tensor memory from the warp that allocated it."""
    cute.arch.inline_ptx(
        f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 {{$r0}}, {TMEM_COLUMNS};",
        read_only_args=[address],
    )

"""Build fake arguments to compile kernels with: they fix some sizes and strides at compile time."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_tensor

_DTYPES = {
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float32": cutlass.Float32,
    "float64": cutlass.Float64,
    "int64": cutlass.Int64,
    "int32": cutlass.Int32,
    "int16": cutlass.Int16,
    "int8": cutlass.Int8,
    "uint8": cutlass.Uint8,
    "uint16": cutlass.Uint16,
    "uint32": cutlass.Uint32,
    "uint64": cutlass.Uint64,
}


def tile_tensor(dtype: str, head_dim: int) -> Any:
    """Build a fake tensor [B, H, S, D] with contiguous rows and 16-byte aligned strides."""
    strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
    return make_fake_tensor(_DTYPES[dtype], (*_sizes(3), head_dim), (*strides, 1), assumed_align=16)


def row_tensor() -> Any:
    """Build a fake float32 tensor [B, H, S]."""
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    return make_fake_tensor(Float32, _sizes(3), strides, assumed_align=4)


def statistics_tensor() -> Any:
    """Build a fake float32 tensor [n, B, H, S]."""
    strides = (*(cute.sym_int64() for _ in range(3)), 1)
    return make_fake_tensor(Float32, _sizes(4), strides, assumed_align=4)


def captured_tensor(dtype: str, ndim: int, contiguous: bool) -> Any:
    """Build a fake captured tensor of any sizes and strides; `contiguous` fixes the last stride."""
    number = _DTYPES[dtype]
    strides: tuple[Any, ...] = tuple(cute.sym_int64() for _ in range(ndim))
    if contiguous:
        strides = (*strides[:-1], 1)
    return make_fake_tensor(number, _sizes(ndim), strides, assumed_align=number.width // 8)


def _sizes(count: int) -> tuple[Any, ...]:
    return tuple(cute.sym_int() for _ in range(count))


def forward_arguments(
    dtype: str,
    head_dim: int,
    value_dim: int,
    tile: tuple[int, int],
    captured: tuple[tuple[str, int, bool], ...],
    need_entropy: bool = False,
) -> tuple[Any, ...]:
    """Build the arguments of the forward kernels of `templates.sm90` and `templates.sm100`.

    Args:
        dtype: dtype of query, key and value.
        head_dim, value_dim: head dims of query and key, and of value.
        tile: rows and columns of an output tile.
        captured: (dtype, rank, whether rows are contiguous) of each captured tensor.
        need_entropy: whether the kernel writes entropies, beside or instead of row maxima.
    """
    work_tiles = make_fake_tensor(Int32, (cute.sym_int(), 12), (12, 1), assumed_align=16)
    runs = (
        make_fake_tensor(Int32, (2, cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)
        for _ in range(2)
    )
    counter = make_fake_tensor(Int32, (1,), (1,), assumed_align=4)
    return (
        tile_tensor(dtype, head_dim),
        tile_tensor(dtype, head_dim),
        tile_tensor(dtype, value_dim),
        tile_tensor(dtype, value_dim),
        row_tensor(),
        statistics_tensor() if need_entropy else row_tensor(),
        work_tiles,
        *runs,
        counter,
        *part_tensors(*tile),
        [captured_tensor(*c) for c in captured],
        Float32(1.0),
        Int32(1),
        Int32(1),
        cuda.CUstream(0),
    )


def part_tensors(rows: int, value_width: int) -> tuple[Any, Any]:
    """Build fake split-KV results: outputs [slots, rows, value_width] and LSEs [slots, rows]."""
    slots = cute.sym_int()
    sizes = (slots, rows, value_width)
    strides = (cute.sym_int64(divisibility=32), value_width, 1)
    parts = make_fake_tensor(Float32, sizes, strides, assumed_align=16)
    lse = make_fake_tensor(Float32, sizes[:2], (cute.sym_int64(), 1), assumed_align=4)
    return parts, lse


def combine_arguments(
    dtype: str, value_dim: int, tile: tuple[int, int], sink: tuple[str, int, bool] | None
) -> tuple[Any, ...]:
    """Build the arguments of `templates.common.combine.Combine` for partial results [*tile].

    `sink` is the kind of the attention sink, as in `captured_tensor`; None without a sink.
    """
    sinks = [] if sink is None else [captured_tensor(*sink)]
    split = make_fake_tensor(Int32, (cute.sym_int(), 3), (3, 1), assumed_align=4)
    split_ptr = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4)
    out = tile_tensor(dtype, value_dim)
    return (*part_tensors(*tile), split, split_ptr, out, row_tensor(), sinks, cuda.CUstream(0))


def fingerprint_arguments(kinds: tuple[tuple[str, int, bool], ...]) -> tuple[Any, ...]:
    """Build the arguments of `templates.common.fingerprint.Fingerprint`.

    Args:
        kinds: (dtype, rank, whether the first axis has stride 1) of each tensor.
    """
    return (
        [_words(*kind) for kind in kinds],
        [make_fake_tensor(Int32, (cute.sym_int(), 2), (2, 1), assumed_align=4) for _ in kinds],
        make_fake_tensor(Int64, (1,), (1,), assumed_align=8),
        [Int64(1) for _ in kinds],
        Int32(1),
        Int32(1),
        cuda.CUstream(0),
    )


def _words(dtype: str, ndim: int, dense: bool) -> Any:
    """Build a fake integer tensor of any sizes and strides; `dense` fixes the first stride at 1."""
    strides: tuple[Any, ...] = tuple(cute.sym_int64() for _ in range(ndim))
    if dense:
        strides = (1, *strides[1:])
    number = _DTYPES[dtype]
    return make_fake_tensor(number, _sizes(ndim), strides, assumed_align=number.width // 8)

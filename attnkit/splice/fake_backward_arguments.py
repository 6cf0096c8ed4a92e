"""Build fake arguments to compile the kernels of a backward with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor

from attnkit.splice.fake_arguments import captured_tensor, row_tensor, tile_tensor


def _floats() -> Any:
    return make_fake_tensor(Float32, (cute.sym_int64(),), (1,), assumed_align=16)


def _ints(*sizes: int) -> Any:
    """Build a fake contiguous int32 tensor [any length, *sizes]."""
    strides = (sizes[0], 1) if sizes else (1,)
    return make_fake_tensor(Int32, (cute.sym_int(), *sizes), strides, assumed_align=4)


def preprocess_arguments(
    dtype: str,
    value_dim: int,
    learned: tuple[list[Any], list[Any]] | None = None,
    checks: Sequence[tuple[str, int, bool]] = (),
    sinks: int = 0,
    more: Sequence[tuple[str, int, bool]] = (),
) -> tuple[Any, ...]:
    """Build the arguments of `templates.common.preprocess.Preprocess`.

    Args:
        dtype: dtype of query, key and value.
        value_dim: head dim of value.
        learned: captured tensors and their gradients, from `learned_arguments`; None without hooks.
        checks: kind of the table of checked data, as in `main_arguments`, if there is one.
        sinks: number of tensors of an attention sink, see `preprocess_source`.
        more: kinds of the tensors of dropout and entropies that follow.
    """
    tiles, rows = (tile_tensor(dtype, value_dim) for _ in range(2)), (row_tensor(), row_tensor())
    tables = [captured_tensor(*kind) for kind in checks]
    captured, totals = learned or ([], [])
    floats = (_floats() for _ in range(3))
    sink = [captured_tensor("float32", 1, True), row_tensor()][:sinks]
    sink += [captured_tensor(*kind) for kind in more]
    return (*tiles, *rows, *floats, tables, captured, totals, sink, cuda.CUstream(0))


def postprocess_arguments(
    dtype: str, head_dim: int, learned: tuple[list[Any], list[Any]] | None = None
) -> tuple[Any, ...]:
    """Build the arguments of the postprocess kernels of `templates.sm90` and `templates.sm100`.

    Args:
        dtype: dtype of query, key and value.
        head_dim: head dim of the gradient.
        learned: captured tensors and their gradients, from `learned_arguments`, for a postprocess
            that multiplies rows by factors; None for any other.
    """
    first = (_floats(), tile_tensor(dtype, head_dim))
    more = () if learned is None else (tile_tensor(dtype, head_dim), *learned)
    return (*first, *more, Int32(1), Float32(1.0), cuda.CUstream(0))


def clear_arguments() -> tuple[Any, ...]:
    """Build the arguments of `templates.common.clear_gradient.ClearGradient`."""
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    sizes = tuple(cute.sym_int() for _ in range(3))
    total = make_fake_tensor(Float32, sizes, strides, assumed_align=16)
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    sizes = tuple(cute.sym_int() for _ in range(3))
    visited = make_fake_tensor(Int32, sizes, strides, assumed_align=4)
    return total, visited, _ints(), Int32(1), Int32(1), cuda.CUstream(0)


def learned_arguments(
    captured: Sequence[tuple[str, int, bool]], totals: Sequence[int], deterministic: bool
) -> tuple[list[Any], list[Any]]:
    """Build captured tensors, and gradients of those that need one.

    Args:
        captured, totals, deterministic: see `main_arguments`.
    """
    # deterministic gradients are sums in bins, see `templates.common.exact_sums`
    sums = [
        captured_tensor("int64", n + 1, True)
        if deterministic
        else captured_tensor("float32", n, True)
        for n in totals
    ]
    return [captured_tensor(*c) for c in captured], sums


def main_arguments(
    dtype: str,
    head_dims: tuple[int, int],
    captured: Sequence[tuple[str, int, bool]],
    totals: Sequence[int],
    *,
    deterministic: bool,
    first_writer: bool,
    whole_heads: bool = False,
    arrivals: bool = False,
    leaders: bool = False,
) -> tuple[Any, ...]:
    """Build the arguments of the main backward kernels of `templates.sm90` and `templates.sm100`.

    Args:
        dtype: dtype of query, key and value.
        head_dims: head dims of query and key, and of value.
        captured: (dtype, rank, whether rows are contiguous) of each captured tensor.
        totals: rank of each captured tensor that needs a gradient.
        deterministic: whether gradients are accumulated in a fixed order.
        first_writer: whether the first kv tile of a row stores its part of dQ instead of adding it.
        whole_heads: whether a CTA computes all kv tiles of a head, and writes dQ.
        arrivals: whether dQ is summed in the order in which its parts arrive.
        leaders: whether batch element 0 stores the gradient of a bias before others add theirs.
    """
    wide, deep = head_dims
    runs = (
        make_fake_tensor(Int32, (2, cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)
        for _ in range(2)
    )
    return (
        *(tile_tensor(dtype, d) for d in (wide, wide, deep, deep, wide, deep)),
        *(_floats() for _ in range(3)),
        make_fake_tensor(Int32, (cute.sym_int(), 12), (12, 1), assumed_align=16),
        *runs,
        _ints(),
        *learned_arguments(captured, totals, deterministic),
        # deterministic: semaphores and tables of the order; whole heads: their first work tiles, and
        # dQ; arrivals: counters, visits, and dQ; leaders: counters of stored blocks of dS; else flags
        # of stored chunks of dQ
        [_ints(), _ints(4), _ints(), _ints(), _ints(2)]
        if deterministic
        else [_ints(), tile_tensor(dtype, wide)]
        if whole_heads
        else [_ints(), _ints(), tile_tensor(dtype, wide)]
        if arrivals
        else [captured_tensor("int32", 2, True)]
        if leaders
        else [_ints()] * first_writer,
        Float32(1.0),
        Int32(1),
        Int32(1),
        cuda.CUstream(0),
    )

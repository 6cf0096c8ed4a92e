"""Check the small device functions of the Hopper kernels, executed on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

cutlass = pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

import cuda.bindings.driver as cuda  # noqa: E402
from cutlass import BFloat16, Float16, Float32, Int32, cute  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor  # noqa: E402

from attnkit import emulator  # noqa: E402
from attnkit.templates.common import device  # noqa: E402
from attnkit.templates.common.sigmoid import (  # noqa: E402
    SMALL,
    sigmoid,
    sigmoid_pair,
    small_sigmoid,
)

THREADS = 128


class Each:
    """Kernel that calls `function` once per thread, with one input and `outputs` outputs."""

    def __init__(self, function: Any, outputs: int = 1) -> None:
        self.function = function
        self.outputs = outputs

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        blocks = (x.shape[0] + THREADS - 1) // THREADS
        self.kernel(x, y).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * THREADS + thread
        if i < x.shape[0]:
            self.store(x[i], y, i)

    def store(self, x: Any, y: Any, i: Any) -> None:
        values = self.function(x)
        for j, value in enumerate(values if isinstance(values, list) else [values]):
            y[i * self.outputs + j] = value


def run(function: Any, x: Tensor, dtype: torch.dtype, outputs: int = 1) -> Tensor:
    """Return y[i] = function(x[i]) as a tensor of `dtype`, int32 or float32."""
    kinds = {torch.int32: Int32, torch.float32: Float32}
    fakes = [make_fake_compact_tensor(kinds[t], (cute.sym_int(),)) for t in (x.dtype, dtype)]
    options = "--gpu-arch sm_90a"
    stream = cuda.CUstream(0)
    exe = emulator.compile(Each(function, outputs), *fakes, stream, options=options)
    y = torch.zeros(x.numel() * outputs, dtype=dtype)
    emulator.run(exe, x, emulator.Undefined(y), raises=True)
    return y.view(x.numel(), outputs) if outputs > 1 else y


def test_exp2_on_the_fma_units() -> None:
    x = torch.cat([torch.linspace(-125.9, 126, 2001), torch.linspace(-1, 1, 999)])
    found = run(device.exp2_on_fma, x, torch.float32).double()
    exact = torch.exp2(x.double())
    assert float(((found - exact) / exact).abs().max()) < 1.02e-4


def test_exp2_on_the_fma_units_is_exact_at_integers() -> None:
    """The LSE of equal scores has no error of the polynomial then."""
    x = torch.arange(-125.0, 127.0)
    assert torch.equal(run(device.exp2_on_fma, x, torch.float32), torch.exp2(x))


def test_exp2_on_the_fma_units_passes_nan_of_any_bits() -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000], dtype=torch.int32)
    found = run(device.exp2_on_fma, bits.view(torch.float32), torch.float32)
    assert bool(found.isnan().all())


def test_reciprocal_on_the_fma_units() -> None:
    x = torch.cat([torch.linspace(1, 4, 3001), torch.logspace(0, 125.8, 2001, base=2.0)])
    found = run(device.reciprocal_on_fma, x, torch.float32).double()
    assert float((found * x.double() - 1).abs().max()) < 3.4e-5


def test_reciprocal_on_the_fma_units_of_extremes() -> None:
    x = torch.tensor([math.inf, 2.0**127, math.nan])
    found = run(device.reciprocal_on_fma, x, torch.float32)
    assert found[:2].tolist() == [0.0, 0.0]
    assert bool(found[2].isnan())


def test_sigmoid_keeps_its_relative_error() -> None:
    """Small weights are as exact as large ones; the error is small beside a rounding to float16."""
    x = torch.cat([torch.linspace(-125.5, 40, 4001), torch.linspace(-2, 2, 1999)])
    exact = 1 / (1 + torch.exp2(-x.double()))
    found = run(sigmoid, x, torch.float32).double()
    assert float(((found - exact) / exact).abs().max()) < 4e-5 < torch.finfo(torch.float16).eps / 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sigmoid_of_infinities_and_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([math.inf, -math.inf, 3e38, -3e38, math.nan, -0.0, 0.0])
    found = run(sigmoid, x, torch.float32).to(dtype)
    assert found[:4].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert bool(found[4].isnan())
    assert found[5] == found[6]


def test_small_sigmoid_keeps_its_relative_error() -> None:
    x = torch.cat([torch.linspace(-125.5, SMALL, 4001), torch.tensor([-math.inf, math.nan])])
    exact = 1 / (1 + torch.exp2(-x[:-2].double()))
    found = run(small_sigmoid, x, torch.float32).double()
    assert float(((found[:-2] - exact) / exact).abs().max()) < 1.7e-4
    assert float(found[-2]) == 0.0
    assert bool(found[-1].isnan())


@pytest.mark.parametrize("other", [0.0, -60.0, 60.0, -math.inf, math.inf, -3e38])
@pytest.mark.parametrize("first", [True, False])
def test_sigmoids_that_share_a_reciprocal(other: float, first: bool) -> None:
    """An extreme partner does not change a sigmoid, and takes part in no overflow itself."""

    def one(x: Any) -> Any:
        return sigmoid_pair(x, Float32(other))[0] if first else sigmoid_pair(Float32(other), x)[1]

    x = torch.cat([torch.linspace(-62, 40, 2001), torch.tensor([-math.inf, math.inf, math.nan])])
    exact = 1 / (1 + torch.exp2(-x[:-3].double()))
    found = run(one, x, torch.float32).double()
    assert float(((found[:-3] - exact) / exact).abs().max()) < 1e-6
    assert 0 <= float(found[-3]) <= 2.0**-62
    assert float(found[-2]) == pytest.approx(1.0, rel=1e-6)
    assert bool(found[-1].isnan())


def test_bits_of_the_columns_below() -> None:
    """`bits_below` sets the bits of a thread's columns that are below a bound.

    A thread's columns are 8 g + c for c = 0 and 1, at bits 2 g + c.
    """
    x = torch.arange(-300, 300, dtype=torch.int32)
    words = 2
    found = run(lambda v: device.bits_below(v, words), x, torch.int32, words)
    for below, masks in zip(x.tolist(), found.tolist(), strict=True):
        columns = [8 * g + c for g in range(16 * words) for c in (0, 1)]
        bits = [masks[j // 32] >> (j % 32) & 1 for j in range(32 * words)]
        assert bits == [int(column < below) for column in columns]


def test_bit() -> None:
    x = torch.tensor([0, 1, -1, -(2**31), 2**31 - 1, 0x12345678], dtype=torch.int32)
    found = run(lambda v: [Int32(device.bit(v, j)) for j in range(32)], x, torch.int32, 32)
    assert found.tolist() == [[v >> j & 1 for j in range(32)] for v in x.tolist()]


@pytest.mark.parametrize(("kind", "dtype"), [(BFloat16, torch.bfloat16), (Float16, torch.float16)])
def test_pack(kind: Any, dtype: torch.dtype) -> None:
    """`pack` rounds two numbers to nearest and puts the first in the low half."""
    x = torch.tensor([0.0, 1.0, -1.00390625, 3.14159, 1e30, -1e-30, math.inf])
    found = run(lambda v: device.pack(v, v * 0.5, kind), x, torch.int32)
    halves = found.view(torch.int16).view(dtype).view(-1, 2)
    assert torch.equal(halves[:, 0], x.to(dtype))
    assert torch.equal(halves[:, 1], (x * 0.5).to(dtype))


def test_finite_or_zero() -> None:
    x = torch.tensor([-math.inf, math.inf, 0.0, -3.5])
    found = run(device.finite_or_zero, x, torch.float32)
    assert found.tolist() == [0.0, math.inf, 0.0, -3.5]

"""Check 2**x on the FMA units: coefficients, accuracy, and the ends of the range."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

cutlass = pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

import cuda.bindings.driver as cuda  # noqa: E402
from cutlass import Float32, cute  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor  # noqa: E402

from attnkit import emulator  # noqa: E402
from attnkit.templates.common.polynomials import EXP2_FROM_FLOOR, EXP2_FROM_NEAREST  # noqa: E402
from attnkit.templates.sm100.exp2 import DEGREES, exp2_pair  # noqa: E402
from tests.templates.remez import exp2_polynomial  # noqa: E402

THREADS = 128
# degree -> largest relative error in float32 in FlashAttention-4's paper (bfloat16: 3.9e-3)
STATED = {3: 8.77e-5, 4: 3.05e-6, 5: 1.44e-7}
BFLOAT16 = 3.9e-3


class Pairs:
    """Kernel that computes y[2 i], y[2 i + 1] = exp2_pair(x[2 i], x[2 i + 1])."""

    def __init__(self, degree: int) -> None:
        self.degree = degree

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        blocks = (x.shape[0] + 2 * THREADS - 1) // (2 * THREADS)
        self.kernel(x, y).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = 2 * (block * THREADS + thread)
        if i < x.shape[0]:
            y[i], y[i + 1] = exp2_pair(x[i], x[i + 1], self.degree)


def run(x: Tensor, degree: int = 3) -> Tensor:
    fake: Any = make_fake_compact_tensor(Float32, (cute.sym_int(),))
    stream = cuda.CUstream(0)
    exe = emulator.compile(Pairs(degree), fake, fake, stream, options="--gpu-arch sm_100a")
    x = torch.nn.functional.pad(x, (0, x.numel() % 2))
    y = torch.zeros_like(x)
    emulator.run(exe, x, emulator.Undefined(y), raises=True)
    return y


def relative(found: Tensor, x: Tensor) -> float:
    exact = torch.exp2(x.double())
    return float(((found.double() - exact) / exact).abs().max())


@pytest.mark.parametrize("degree", EXP2_FROM_FLOOR)
def test_coefficients_are_those_of_remez(degree: int) -> None:
    wanted = exp2_polynomial(degree, 0, 1, exact_at_zero=True)
    found = np.array(EXP2_FROM_FLOOR[degree], np.float32)
    assert np.array_equal(found, wanted.astype(np.float32))


def test_coefficients_around_the_nearest_integer() -> None:
    wanted = exp2_polynomial(3, -0.5, 0.5, exact_at_zero=True)
    found = np.array(EXP2_FROM_NEAREST, np.float32)
    assert np.array_equal(found, wanted.astype(np.float32))


@pytest.mark.parametrize(("degree", "stated"), STATED.items())
def test_errors_are_those_of_the_paper(degree: int, stated: float) -> None:
    random = torch.Generator().manual_seed(degree)
    steps = torch.arange(1 << 16) / (1 << 16)
    x = -torch.cat([steps, 1 + 24 * torch.rand(1 << 16, generator=random)])  # x - floor(x) is exact
    found = run(x, degree)
    assert relative(found, x) == pytest.approx(stated, rel=0.05)
    assert relative(found.bfloat16(), x) == pytest.approx(BFLOAT16, rel=0.01)


@pytest.mark.parametrize(("degree", "bound"), [(3, 8.6e-5), (4, 3e-6), (5, 1.7e-7)])
def test_the_whole_range(degree: int, bound: float) -> None:
    near = torch.linspace(-1, 1, 1 << 16)
    x = torch.cat([torch.linspace(-126, 127.99, 4001), near, torch.tensor([-125.999, 127.9999])])
    assert relative(run(x, degree)[: x.numel()], x) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_are_rounded_to_another_number(dtype: torch.dtype) -> None:
    """Fewer than 0.1 % of the results round to another 16-bit number than the exact power.

    The forward assumes that a row's largest weight rounds as the exact power does.
    """
    x = torch.arange(1 << 16) * 2.0**-13  # up to what a maximum may grow by
    exact = torch.exp2(x.double())
    found = run(x, DEGREES[str(dtype).removeprefix("torch.")]).to(dtype)
    wanted = exact.to(dtype)
    assert float((found != wanted).double().mean()) < 1e-3
    # the exact power is nearly as close to the one as to the other
    errors = [(y.double() - exact).abs() for y in (found, wanted)]
    assert bool((errors[0] <= 1.02 * errors[1]).all())


@pytest.mark.parametrize("degree", EXP2_FROM_FLOOR)
def test_integers_are_exact(degree: int) -> None:
    x = torch.arange(-126.0, 128)
    assert torch.equal(run(x, degree), torch.exp2(x))


def test_too_small_is_zero_and_nan_of_any_bits_passes() -> None:
    small = torch.tensor([-math.inf, -1e30, -3e38, -127.5, -127.0, -126.0001])
    assert run(small).tolist() == [0.0] * 6
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000, -1], dtype=torch.int32)
    mixed = torch.stack([bits.view(torch.float32), torch.zeros(6)], 1).flatten()
    found = run(mixed).view(6, 2)
    assert bool(found[:, 0].isnan().all())
    assert found[:, 1].tolist() == [1.0] * 6

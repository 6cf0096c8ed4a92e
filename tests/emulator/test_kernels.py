"""Compare kernels of the CuTe DSL, including their generated host code, with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import emulator
from attnkit.emulator import CheckReport, Executable, Undefined

pytest.importorskip("cutlass")

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from tests.emulator.kernels import ampere, blackwell, hopper, micro, simt

_cache: dict[str, Executable] = {}
ARCHS = ["sm_80", "sm_90a", "sm_100a"]


def build(kernel: Any, arch: str, *specs: Any) -> Executable:
    key = f"{type(kernel).__name__} {arch}"
    if key not in _cache:
        _cache[key] = emulator.compile(kernel, *specs, options=f"--gpu-arch {arch}")
    return _cache[key]


def checked(exe: Executable, *args: Any, **options: Any) -> CheckReport:
    report = emulator.check(exe, *args, seeds=2, **options)
    assert report.ok, str(report)
    assert report.findings == ()
    return report


def rows(dtype: Any, columns: int | None = None) -> Any:
    return simt.matrix(dtype, None, columns)


@pytest.mark.parametrize("arch", ARCHS)
def test_softmax(arch: str) -> None:
    exe = build(simt.Softmax(), arch, rows(Float32), rows(Float32))
    x = torch.randn(5, 300) * 4
    y = torch.full_like(x, float("nan"))
    checked(exe, x, Undefined(y))
    torch.testing.assert_close(y, torch.softmax(x.double(), 1).float(), rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("arch", ARCHS)
def test_block_reduction(arch: str) -> None:
    exe = build(simt.BlockSum(), arch, simt.vector(Int32), simt.vector(Int32))
    x = torch.randint(-1000, 1000, (700,), dtype=torch.int32)
    out = torch.zeros(1, dtype=torch.int32)
    checked(exe, x, out)
    assert int(out) == int(x.sum())


def close(got: torch.Tensor, exact: torch.Tensor, same: torch.Tensor) -> None:
    """Check that the error is at most twice the error of the same product in float32."""
    limit = 2 * float((same.double() - exact).abs().max())
    assert float((got.double() - exact).abs().max()) <= limit


def test_gemm_ampere() -> None:
    exe = build(ampere.Gemm(), "sm_80", *[rows(BFloat16, 192)] * 2, rows(Float32, 128))
    a, b = torch.randn(128, 192).bfloat16(), torch.randn(128, 192).bfloat16()
    c = torch.full((128, 128), float("nan"))
    checked(exe, a, b, Undefined(c))
    close(c, a.double() @ b.double().T, a.float() @ b.float().T)


def gemm_hopper() -> tuple[Executable, Any, Any, Any]:
    """Return the Hopper kernel with ragged operands that need three laps of the ring."""
    column = cute.runtime.make_fake_compact_tensor(
        Float32,
        (cute.sym_int(), cute.sym_int(divisibility=4)),
        stride_order=(1, 0),
        assumed_align=16,
    )
    wide = cute.runtime.make_fake_compact_tensor(
        BFloat16,
        (cute.sym_int(), cute.sym_int(divisibility=8)),
        stride_order=(1, 0),
        assumed_align=16,
    )
    exe = build(hopper.MappedGemm(30.0), "sm_90a", wide, wide, column)
    return exe, torch.randn(100, 400).bfloat16(), torch.randn(72, 400).bfloat16(), None


def test_mapped_gemm_hopper() -> None:
    exe, a, b, _ = gemm_hopper()
    start = torch.randn(100, 72)
    c = start.clone()
    checked(exe, a, b, c)
    cap = lambda x: 30 * torch.tanh(x / 30)
    exact = start.double() + cap(a.double() @ b.double().T)
    close(c, exact, start + cap(a.float() @ b.float().T))


def test_scores_blackwell() -> None:
    exe = build(
        blackwell.Scores(),
        "sm_100a",
        *[rows(BFloat16, 64)] * 2,
        rows(Float32),
        simt.vector(Float32),
    )
    a, b = torch.randn(256, 64).bfloat16() / 3, torch.randn(448, 64).bfloat16() / 3
    s, sums = torch.full((256, 448), float("nan")), torch.full((256,), float("nan"))
    checked(exe, a, b, Undefined(s), Undefined(sums))
    exact = a.double() @ b.double().T
    close(s, exact, a.float() @ b.float().T)
    torch.testing.assert_close(sums.double(), torch.exp2(exact).sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_ring_of_mbarriers(arch: str) -> None:
    exe = build(micro.Ring(), arch, simt.vector(Float32), simt.vector(Float32))
    x = torch.randn(32 * 10)
    y = torch.full_like(x, float("nan"))
    checked(exe, x, Undefined(y))
    torch.testing.assert_close(y, 2 * x, rtol=0, atol=0)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_cluster_exchange(arch: str) -> None:
    exe = build(micro.ClusterSum(), arch, simt.vector(Int32), simt.vector(Int32))
    x = torch.randint(-50, 50, (8 * 32,), dtype=torch.int32)
    out = torch.full((8,), -1, dtype=torch.int32)
    checked(exe, x, Undefined(out))
    want = x.reshape(2, 128).sum(1).repeat_interleave(4).int()
    torch.testing.assert_close(out, want, rtol=0, atol=0)

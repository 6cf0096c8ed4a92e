"""Check the torch-operator template and the tile classification on a CUDA device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import DeviceError, create_block_mask, flex_attention, masks

LENGTH = 300


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 4, LENGTH, 32), (2, 2, LENGTH, 32), (2, 2, LENGTH, 24))
    q, k, v = (torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in shapes)
    return q, k, v


def variant() -> tuple[Any, Any, tuple[Tensor, ...]]:
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    table = torch.randn(4, 2 * LENGTH, device="cuda", requires_grad=True)
    documents = torch.arange(LENGTH, device="cuda") // 70
    gain = torch.tensor(0.5)  # a 0-d tensor may stay on the CPU

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.tanh(s * gain) + slopes[h] * (kv - q) * 0.01 + table[h, q - kv + LENGTH]

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (documents[q] == documents[kv]) & (q != 100)

    return mod, mask, (slopes, table)


@pytest.fixture
def _without_tf32() -> Iterator[None]:
    """Disable TF32 and restore the setting afterwards.

    monkeypatch would restore it by deletion, which torch forbids.
    """
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    yield
    matmul.allow_tf32 = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.usefixtures("_without_tf32")
def test_exact(dtype: torch.dtype) -> None:
    mod, mask, captured = variant()
    own = tensors(dtype)
    weights: list[Tensor] = []
    results = []
    for backend, kind in (("cpu", dtype), ("eager", dtype), ("eager", torch.float64)):
        qkv = tuple(t.detach().to(kind).requires_grad_() for t in own)
        out, lse = flex_attention(
            *qkv, mod, mask, return_lse=True, enable_gqa=True, backend=backend
        )
        weights = weights or [torch.randn_like(out), torch.randn_like(lse)]
        alive = torch.where(lse == -math.inf, 0, lse)
        total = (out * weights[0]).double().sum() + (alive * weights[1]).double().sum()
        results.append((out, alive, *torch.autograd.grad(total, (*qkv, *captured))))
    for ours, dense, exact in zip(*results, strict=True):
        assert ours.device.type == "cuda"
        error = (ours.double() - exact.double()).abs().max()
        allowed = (dense.double() - exact.double()).abs().max()
        floor = 8 * torch.finfo(ours.dtype).eps * exact.abs().max()
        assert error <= 2 * allowed + floor


def test_same_bits_twice() -> None:
    mod, mask, captured = variant()
    q, k, v = tensors(torch.float32)
    found = []
    for _ in range(2):
        out = flex_attention(q, k, v, mod, mask, enable_gqa=True)
        found.append((out, *torch.autograd.grad(out.sum(), (q, k, v, *captured))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_classification_is_that_of_the_cpu() -> None:
    _, mask, _ = variant()
    documents = torch.arange(LENGTH) // 70
    plain = lambda b, h, q, kv: (q >= kv) & (documents[q] == documents[kv]) & (q != 100)
    for block in ((128, 128), (64, 32), (7, 50)):
        ours = create_block_mask(mask, None, None, LENGTH, LENGTH, BLOCK_SIZE=block)
        assert ours.device.type == "cuda"
        theirs = create_block_mask(plain, None, None, LENGTH, LENGTH, BLOCK_SIZE=block)
        assert torch.equal(ours.to_dense().cpu(), theirs.to_dense())


def test_captured_tensor_left_on_the_cpu() -> None:
    left = torch.rand(4)
    q, k, v = tensors(torch.float32)
    with pytest.raises(DeviceError, match=r"'left' on cpu, query is on cuda:0"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + left[h], enable_gqa=True)


def test_tiles_of_numbers_that_are_left_on_the_cpu() -> None:
    """Captured numbers may be on the CPU while the mask's other tensors are on the GPU."""
    number, flag = torch.tensor(3), torch.tensor(True)
    runs = []
    for device in ("cuda", "cpu"):
        ids = torch.arange(LENGTH, device=device) // 70

        def mask(b: Any, h: Any, q: Any, kv: Any, ids: Tensor = ids) -> Any:
            known = (number * 2 > h) & flag
            return known & ((ids[q] == ids[kv]) | (kv % (number + 4) == number)) & (number > 1)

        for block in ((32, 32), (128, 128)):
            made = create_block_mask(mask, None, 8, LENGTH, LENGTH, device, block)
            runs.append(made.to_dense().cpu())
    assert torch.equal(runs[0], runs[2])
    assert torch.equal(runs[1], runs[3])


@pytest.mark.parametrize("length", [300, 5000])
@pytest.mark.parametrize("default", ["cuda", "meta"])
def test_default_device_decides_nothing(default: str, length: int) -> None:
    """Results do not depend on torch's default device.

    Short masks are classified on the CPU and long ones on the GPU, so both lengths are tested.
    """
    shape, options = (1, 2, length, 64), {"device": "cuda", "dtype": torch.bfloat16}
    qkv = [torch.randn(shape, **options).requires_grad_() for _ in range(3)]  # type: ignore[call-overload]
    slopes = torch.rand(2, device="cuda")
    documents = torch.arange(length, device="cuda") // 70
    found = []
    for around in (nullcontext(), torch.device(default)):
        # functions of their own, so that nothing is known of them
        mod = lambda s, b, h, q, kv: s + slopes[h] * (kv - q)
        mask = masks.causal() & (lambda b, h, q, kv: documents[q] == documents[kv])
        with around:
            for kept in (mask, masks.causal()):
                out = flex_attention(*qkv, mod, kept, deterministic=True)
                found.append((out, *torch.autograd.grad(out.sum(), qkv)))
    for a, b in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

"""Check packed sequences on a GPU, and PyTorch's own attention functions through its registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import attention
from torch.nn.attention import varlen

from attnkit.integrations import torch_attention
from attnkit.integrations.flash_attn import flash_attn_varlen_func
from tests.integrations import packed_reference
from tests.integrations.flash_attn.test_packed import offsets, with_gradients
from tests.integrations.packed_reference import check_close
from tests.integrations.torch_attention.versions import GROUPED

Q_LENGTHS, K_LENGTHS = [300, 0, 513, 40], [300, 64, 700, 0]


def inputs(q: int = sum(Q_LENGTHS), k: int = sum(K_LENGTHS), seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = (q, 4, 64), (k, 2, 64), (k, 2, 64)
    return [torch.randn(s, generator=random).bfloat16().cuda() for s in shapes]


def compare(run: Any, tensors: list[Tensor], **options: Any) -> None:
    """Compare results and gradients with those of one sequence after the other, on the CPU."""
    ends = offsets(Q_LENGTHS).tolist(), offsets(K_LENGTHS).tolist()

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = packed_reference.attend(q, k, v, *ends, **options)
        return out, lse.detach()

    def on_the_gpu(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = run(q, k, v)
        return out.cpu(), lse.detach().cpu()

    found = [t.cpu() for t in with_gradients(on_the_gpu, tensors)]
    own = [t.cpu() for t in tensors]
    exact = with_gradients(reference, [t.double() for t in own])
    check_close(found, exact, with_gradients(reference, own))


@pytest.fixture
def _activated() -> Iterator[None]:
    torch_attention.register()
    attention.activate_flash_attention_impl("attnkit")
    yield
    attention.restore_flash_attention_impl()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 20)])
def test_flash_attn_varlen_func(window: tuple[int, int]) -> None:
    cu_q, cu_k = offsets(Q_LENGTHS).cuda(), offsets(K_LENGTHS).cuda()
    slopes = torch.rand(4)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_varlen_func(
            *(q, k, v, cu_q, cu_k, 513, 700),
            window_size=window,
            softcap=20.0,
            alibi_slopes=slopes.cuda(),
            return_softmax_lse=True,
        )

    for seed in range(2):
        compare(run, inputs(seed=seed), window=window, softcap=20.0, slopes=slopes)


def test_repeated_calls_wait_for_nothing() -> None:
    cu_q, cu_k = offsets(Q_LENGTHS).cuda(), offsets(K_LENGTHS).cuda()

    def step(seed: int) -> None:
        qkv = [t.requires_grad_() for t in tensors[seed]]
        out = flash_attn_varlen_func(*qkv, cu_q, cu_k, 513, 700, causal=True)
        torch.autograd.grad(out, qkv, out.detach())

    tensors = [inputs(seed=seed) for seed in range(4)]
    for seed in range(3):
        step(seed)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_new_lengths_in_the_same_tensor() -> None:
    cu = offsets([400, 600]).cuda()
    q, k, v = inputs(1000, 1000)
    for middle in (400, 30, 999):
        cu[1] = middle
        out = flash_attn_varlen_func(q, k, v, cu, cu, 1000, 1000, causal=True)
        ends = [0, middle, 1000]
        own = q.cpu().double(), k.cpu().double(), v.cpu().double()
        exact, _ = packed_reference.attend(*own, ends, ends, window=(-1, 0))
        torch.testing.assert_close(out.cpu().double(), exact, rtol=0.05, atol=0.02)


@pytest.mark.usefixtures("_activated")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 20)])
def test_varlen_attn_of_pytorch(window: tuple[int, int]) -> None:
    cu_q, cu_k = offsets(Q_LENGTHS).cuda(), offsets(K_LENGTHS).cuda()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen.varlen_attn(
            *(q, k, v, cu_q, cu_k, 513, 700),
            window_size=window,
            **GROUPED,
            return_aux=varlen.AuxRequest(lse=True),
        )

    for seed in range(2):
        compare(run, inputs(seed=seed), window=window)


@pytest.mark.usefixtures("_activated")
@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch chooses flash attention, which is attnkit's; results agree with its math backend."""
    calls = []
    import attnkit

    whole = attnkit.flex_attention

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[0].shape)
        return whole(*arguments, **options)

    monkeypatch.setattr(attnkit, "flex_attention", counted)
    options: Any = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    qkv = [torch.randn(2, 300, 4, 64, **options).transpose(1, 2) for _ in range(3)]
    attend = nn.functional.scaled_dot_product_attention
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        out = attend(*qkv, is_causal=causal)
    assert calls == [(2, 4, 300, 64)]
    grads = torch.autograd.grad(out.square().sum(), qkv)
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        wide = [t.detach().double().requires_grad_() for t in qkv]
        exact = attend(*wide, is_causal=causal)
        expected = torch.autograd.grad(exact.square().sum(), wide)
    for found, true in zip((out, *grads), (exact, *expected), strict=True):
        torch.testing.assert_close(found.double(), true, rtol=0.05, atol=0.05)

"""Check repeated calls on a GPU: edits between calls take effect, and graphs keep their data."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import attnkit
from attnkit import flex_attention, masks, mods
from attnkit.splice import run_time_numbers
from tests.gpu import cute_kit as kit

LENGTH = 900


def inputs(seed: int = 0, length: int = LENGTH) -> list[Tensor]:
    random = torch.Generator(kit.DEVICE).manual_seed(seed)
    options: dict[str, Any] = {"generator": random, "device": kit.DEVICE}
    return [torch.randn(2, 4, length, 64, **options).to(torch.bfloat16) for _ in range(3)]


def forget() -> None:
    """Clear all of attnkit's caches and collect garbage."""
    attnkit.clear_caches()
    gc.collect()


def attention(qkv: Any, mod: Any, mask: Any) -> tuple[Tensor, Tensor]:
    out, lse = flex_attention(*qkv, mod, mask, return_lse=True, backend=kit.BACKEND)
    return out, lse


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_edits_between_calls_count() -> None:
    ids = torch.arange(LENGTH, device=kit.DEVICE) // 70
    slopes = torch.rand(4, device=kit.DEVICE)
    gain = torch.tensor(0.5)  # on the CPU
    mod = lambda s, b, h, q, kv: s * gain + slopes[h] * (kv - q)
    mask = masks.document(ids) & masks.causal()
    seen: list[tuple[Tensor, Tensor]] = []
    for step in range(8):
        if step == 2:
            ids.copy_(torch.arange(LENGTH, device=kit.DEVICE) // 400)
        elif step == 4:
            gain.fill_(2.0)
        elif step == 6:
            slopes.mul_(3)
        found = attention(inputs(), mod, mask)
        again = attention(inputs(), mod, mask)
        forget()
        fresh = attention(inputs(), mod, mask)
        assert same(found, again)
        assert same(found, fresh)
        if step % 2:
            assert same(found, seen[-1])
        elif seen:
            assert not same(found, seen[-1])
        seen.append(found)


def test_inputs_that_a_kernel_cannot_read_as_they_are() -> None:
    q, k, v = inputs()
    flat = torch.empty(q.numel() + 1, dtype=q.dtype, device=q.device)
    shifted = flat[1:].view(q.shape).copy_(q)
    turned = q.mT.contiguous().mT
    expected = attention((q, k, v), None, masks.causal())
    for _ in range(2):
        for other in (q, shifted, turned, q):
            assert same(attention((other, k, v), None, masks.causal()), expected)


def test_another_stream_at_once() -> None:
    """A call prepared on one stream is correct on another stream without synchronization."""
    qkv = inputs(1)
    mask = masks.document(torch.arange(LENGTH, device=kit.DEVICE) // 90)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    first = attention(qkv, None, mask)
    with torch.cuda.stream(stream):
        second = attention(qkv, None, mask)
    torch.cuda.synchronize()
    assert same(first, second)


def test_a_graph_outlives_the_caches() -> None:
    qkv = inputs()
    ids = torch.arange(LENGTH, device=kit.DEVICE) // 70
    gain = torch.tensor(0.5)
    mod = lambda s, b, h, q, kv: s * gain
    mask = lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)
    expected = attention(qkv, mod, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(qkv, mod, mask)
    forget()
    junk = [torch.full((n,), 7, dtype=torch.int32, device=kit.DEVICE) for n in range(1, 4000, 3)]
    for t in found:
        t.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert junk
    assert same(found, expected)


def test_a_graph_keeps_the_numbers_that_its_kernel_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_time_numbers, "MOST_CONSTANTS", 0)
    forget()
    qkv = inputs()
    mod, mask = mods.softcap(7.0), masks.sliding_window(90)
    expected = attention(qkv, mod, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(qkv, mod, mask)
    others = [attention(qkv, mods.softcap(8.0 + i), masks.sliding_window(91 + i)) for i in range(3)]
    forget()
    junk = [torch.full((n,), 7, dtype=torch.int32, device=kit.DEVICE) for n in range(1, 400)]
    for t in found:
        t.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert junk
    assert same(found, expected)
    assert not any(same(other, expected) for other in others)
    forget()


def test_tensors_of_inference_mode() -> None:
    qkv = inputs()
    with torch.inference_mode():
        ids = torch.arange(LENGTH, device=kit.DEVICE) // 70
        mask = masks.document(ids)
        first = attention(qkv, None, mask)
        assert same(attention(qkv, None, mask), first)
        ids.floor_divide_(3)
        second = attention(qkv, None, mask)
    assert not same(first, second)
    assert same(second, attention(qkv, None, masks.document(torch.arange(LENGTH, device=kit.DEVICE) // 70 // 3)))  # fmt: skip


def test_autocast_and_modes_are_seen() -> None:
    qkv = inputs()
    mask = masks.causal()
    for _ in range(4):
        expected = attention(qkv, None, mask)
        with torch.autocast("cuda", torch.float16):
            assert attention(qkv, None, mask)[0].dtype == torch.float16
        with torch.inference_mode():
            assert same(attention(qkv, None, mask), expected)
        with torch.no_grad(), torch.device("cpu"):
            assert same(attention(qkv, None, mask), expected)


def test_gradients_of_repeated_calls() -> None:
    slopes = torch.rand(4, device=kit.DEVICE)
    mod = lambda s, b, h, q, kv: s + slopes[h] * (kv - q)
    qkv = [t.requires_grad_() for t in inputs()]
    grad = torch.randn_like(qkv[0])
    found = []
    for _ in range(4):
        out = flex_attention(*qkv, mod, masks.causal(), backend=kit.BACKEND, deterministic=True)
        found.append((out, *torch.autograd.grad(out, qkv, grad)))
        assert not flex_attention(
            *(t.detach() for t in qkv), mod, backend=kit.BACKEND
        ).requires_grad
    assert all(same(found[0], other) for other in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_in_turn() -> None:
    qkv = inputs()
    expected = attention(qkv, None, masks.causal())
    for _ in range(3):
        for device in ("cuda:1", "cuda:0"):
            found = attention([t.to(device) for t in qkv], None, masks.causal())
            assert found[0].device == torch.device(device)
            assert same(tuple(t.to("cuda:0") for t in found), expected)

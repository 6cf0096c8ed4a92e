"""Check repeated backwards on a GPU: the fast path gives the gradients of a full call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attnkit
from attnkit import flex_attention, masks
from attnkit.errors import UnsupportedError
from attnkit.runtime.reuse.backward import BackwardReuse
from tests.gpu import cute_kit as kit

ROWS, COLUMNS = 300, 60


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each backward appends whether it took the fast path."""
    made, found = BackwardReuse.try_fast_path, []

    def noted(*a: Any) -> Any:
        gradients = made(*a)
        found.append(gradients is not None)
        return gradients

    monkeypatch.setattr(BackwardReuse, "try_fast_path", noted)
    return found


def inputs(seed: int, kv_heads: int = 4, dim: int = 64) -> list[Tensor]:
    random = torch.Generator(kit.DEVICE).manual_seed(seed)
    shapes = [(2, 4, ROWS, dim), (2, kv_heads, COLUMNS, dim), (2, kv_heads, COLUMNS, dim)]
    made = [torch.randn(s, generator=random, device=kit.DEVICE) for s in shapes]
    return [t.to(torch.bfloat16).requires_grad_() for t in made]


def forget() -> None:
    attnkit.clear_caches()


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Check equality up to the order of additions, within 2^-7 of the largest element."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).abs().max() <= 2**-7 * b.double().abs().max()


def poison() -> None:
    """Fill freed GPU memory with NaN, so that allocations that reuse it contain NaN."""
    sizes = [2**n for n in range(9, 24)]
    junk = [torch.full((n,), torch.nan, device=kit.DEVICE) for n in sizes for _ in range(3)]
    del junk


def gradients(qkv: Any, *rest: Any, lse: bool = False, **options: Any) -> list[Tensor]:
    (query, key, value), (mod, mask, learned, grad) = qkv, rest
    out, row = flex_attention(
        *(query, key, value, mod, mask),
        return_lse=True,
        backend=kit.BACKEND,
        enable_gqa=True,
        **options,
    )
    outs, grads = ([out, row], [grad, grad.float().sum(-1)]) if lse else ([out], [grad])
    return list(torch.autograd.grad(outs, [*qkv, *learned], grads))


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(("kv_heads", "dim"), [(4, 64), (2, 128), (2, 192)])
def test_repeated(replayed: list[bool], kv_heads: int, dim: int, lse: bool) -> None:
    ids = torch.arange(COLUMNS, device=kit.DEVICE) // 20
    mask = lambda b, h, q, kv: (ids[kv] != 1) | (q > 100)
    grad = torch.randn(2, 4, ROWS, dim, device=kit.DEVICE, dtype=torch.bfloat16)
    expected = []
    for seed in range(4):
        forget()
        expected.append(gradients(inputs(seed, kv_heads, dim), None, mask, [], grad, lse=lse))
    replayed.clear()
    forget()
    for seed in (3, 2, 1, 0, 1, 2, 3):
        qkv = inputs(seed, kv_heads, dim)
        poison()
        found = gradients(qkv, None, mask, [], grad, lse=lse)
        close(found, expected[seed])
    assert replayed[-1]


def test_learned_tables(replayed: list[bool]) -> None:
    slopes = torch.rand(4, device=kit.DEVICE).requires_grad_()
    mod = lambda s, b, h, q, kv: s + slopes[h] * (kv - q)
    grad = torch.randn(2, 4, ROWS, 64, device=kit.DEVICE, dtype=torch.bfloat16)
    first = gradients(inputs(0), mod, None, [slopes], grad)
    for _ in range(4):
        found = gradients(inputs(0), mod, None, [slopes], grad)
        close(found, first)
    assert replayed[-1]


def test_tensors_that_share_memory(replayed: list[bool]) -> None:
    mask = masks.prefix(30)
    grad = torch.randn(2, 4, COLUMNS, 64, device=kit.DEVICE, dtype=torch.bfloat16)

    def one(seed: int) -> Tensor:
        return inputs(seed)[1].detach().requires_grad_()

    def found(*seeds: int) -> list[Tensor]:
        leaves = {seed: one(seed) for seed in seeds}
        query, key, value = (leaves[s] for s in seeds)
        out = flex_attention(query, key, value, None, mask, backend=kit.BACKEND)
        return list(torch.autograd.grad(out, list(leaves.values()), grad))

    calls = [(1, 1, 1), (1, 2, 3), (1, 1, 2), (3, 2, 1), (2, 2, 2)]
    expected = []
    for seeds in calls:
        forget()
        expected.append(found(*seeds))
    forget()
    for _ in range(3):
        for seeds, wanted in zip(calls, expected, strict=True):
            close(found(*seeds), wanted)
    assert all(replayed[-5:])


def test_gradients_of_other_strides_and_addresses() -> None:
    qkv = inputs(0)
    grad = torch.randn(2, 4, ROWS, 64, device=kit.DEVICE, dtype=torch.bfloat16)
    turned = grad.transpose(1, 2).contiguous().transpose(1, 2)
    memory = torch.empty(grad.numel() + 1, device=kit.DEVICE, dtype=grad.dtype)
    shifted = memory[1:].view(grad.shape).copy_(grad)
    expanded = grad[:, :, :1].expand_as(grad)
    other = gradients(qkv, None, None, [], expanded.contiguous())
    expected = gradients(qkv, None, None, [], grad)
    for _ in range(3):
        for g in (grad, turned, shifted):
            close(gradients(qkv, None, None, [], g), expected)
        close(gradients(qkv, None, None, [], expanded), other)


def test_saved_tensors_that_come_back_elsewhere() -> None:
    qkv = inputs(0)
    grad = torch.randn(2, 4, ROWS, 64, device=kit.DEVICE, dtype=torch.bfloat16)
    expected = gradients(qkv, None, masks.prefix(30), [], grad)
    for _ in range(4):
        with torch.autograd.graph.save_on_cpu():
            close(gradients(qkv, None, masks.prefix(30), [], grad), expected)
        close(gradients(qkv, None, masks.prefix(30), [], grad), expected)


def test_a_second_derivative_stays_refused() -> None:
    qkv: Any = inputs(0)
    for _ in range(4):
        out = flex_attention(*qkv, backend=kit.BACKEND)
        torch.autograd.grad(out, qkv, torch.ones_like(out))
    out = flex_attention(*qkv, backend=kit.BACKEND)
    (first, *_) = torch.autograd.grad(out.float().square().sum(), qkv, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        torch.autograd.grad(first.float().sum(), qkv)


def test_streams_and_graphs() -> None:
    qkv, mask = inputs(0), masks.prefix(30)
    grad = torch.randn(2, 4, ROWS, 64, device=kit.DEVICE, dtype=torch.bfloat16)
    for _ in range(4):
        expected = gradients(qkv, None, mask, [], grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            found = gradients(qkv, None, mask, [], grad)
    torch.cuda.current_stream().wait_stream(side)
    close(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(qkv, None, mask, [], grad)
    for t in captured:
        t.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    close(captured, expected)

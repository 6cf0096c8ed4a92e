"""Check backward calls: bit-identical repeats, graphs, no host waiting, bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnkit import flex_attention, masks
from attnkit.testing.tolerance import FACTOR
from tests.gpu import backward_kit
from tests.gpu import cute_kit as kit

BF16 = torch.bfloat16
SLOPES = (0.5, 0.25, 0.125, 0.0625)


def inputs(length: int, *, seed: int = 0, kv_heads: int = 4, dim: int = 64) -> list[Tensor]:
    """Return [query, key, value], which require grad, and a gradient of the output."""
    random = torch.Generator(kit.DEVICE).manual_seed(seed)
    options: dict[str, Any] = {"generator": random, "device": kit.DEVICE}
    made = [torch.randn(2, h, length, dim, **options).to(BF16) for h in (4, kv_heads, kv_heads, 4)]
    return [*(t.requires_grad_() for t in made[:3]), made[3]]


def attention(length: int, **options: Any) -> Callable[..., Tensor]:
    """Return causal attention within documents with ALiBi; score and mask capture tensors."""
    ids = torch.arange(length, device=kit.DEVICE) // 70
    slopes = torch.tensor(SLOPES, device=kit.DEVICE)
    mod = lambda score, b, h, q, kv: score + slopes[h] * (kv - q)
    mask = lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv])
    return lambda *qkv: flex_attention(
        *qkv, mod, mask, enable_gqa=True, backend=kit.BACKEND, **options
    )


def both_ways(call: Callable[..., Tensor], made: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the output and the gradients of query, key and value."""
    out = call(*made[:3])
    return out, *torch.autograd.grad(out, made[:3], made[3])


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_deterministic_gives_the_same_bits(kv_heads: int) -> None:
    """Deterministic gradients are bit-identical in repeated calls, with other calls in between."""
    call, made = attention(1500, deterministic=True), inputs(1500, kv_heads=kv_heads)
    other, more = attention(700, deterministic=True), inputs(700, seed=1, kv_heads=kv_heads)
    with backward_kit.counted() as seen:
        first = both_ways(call, made)
        for _ in range(20):
            both_ways(other, more)
            assert same(both_ways(call, made), first)
    assert seen == [True] * 41


@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (192, 128), (256, 256)], ids=str)
def test_deterministic_is_exact(dims: tuple[int, int]) -> None:
    from attnkit.runtime.variant import Variant
    from attnkit.testing import Case

    sizes: dict[str, Any] = {"heads": 4, "head_dim": dims[0], "value_dim": dims[1], "dtype": BF16}
    for kv_heads in (4, 2):
        case = Case(520, 400, batch=2, kv_batch=2, kv_heads=kv_heads, **sizes)
        mask = masks.causal() & masks.sliding_window(150)
        backward_kit.check(Variant(None, mask), case, deterministic=True)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_deterministic_gives_the_same_bits_of_short_sequences(dims: tuple[int, int]) -> None:
    """One CTA computes a whole head here, for head dims up to 128."""
    random = torch.Generator(kit.DEVICE).manual_seed(0)
    made = [
        torch.randn(2, 132, 500, d, generator=random, device=kit.DEVICE).to(BF16)
        for d in (dims[0], dims[0], dims[1], dims[1])
    ]
    made[:3] = [t.requires_grad_() for t in made[:3]]
    call = lambda *qkv: flex_attention(
        *qkv, None, masks.causal(), backend=kit.BACKEND, deterministic=True
    )
    first = both_ways(call, made)
    for _ in range(10):
        assert same(both_ways(call, made), first)
    plain = lambda *qkv: flex_attention(*qkv, None, masks.causal(), backend=kit.BACKEND)
    for ours, other in zip(first, both_ways(plain, made), strict=True):
        torch.testing.assert_close(ours, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_deterministic_gives_the_same_bits_of_captured_gradients(dim: int) -> None:
    """Deterministic gradients of captured tables are bit-identical in repeated calls.

    The tables are indexed by head, by row, by column, by q - kv, and by a hash of positions.
    """
    random = torch.Generator(kit.DEVICE).manual_seed(0)
    shapes = [(4,), (4, 900), (900,), (1799,), (64,)]
    scale, rows, columns, along, buckets = tables = [
        torch.randn(shape, generator=random, device=kit.DEVICE, requires_grad=True)
        for shape in shapes
    ]

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        mine = rows[h, q] + columns[kv] + along[q - kv + 899]
        return score * (1 + scale[h] / 8) + mine + buckets[(q * 7 + kv) % 64]

    made = inputs(900, kv_heads=2, dim=dim)

    def gradients() -> tuple[Tensor, ...]:
        out = flex_attention(
            *made[:3], mod, masks.causal(), enable_gqa=True, backend=kit.BACKEND,
            deterministic=True,
        )  # fmt: skip
        return torch.autograd.grad(out, [*made[:3], *tables], made[3])

    with backward_kit.counted() as seen:
        first = gradients()
        for _ in range(20):
            assert same(gradients(), first)
    assert seen == [True] * 21


def test_torchs_deterministic_switch_is_obeyed() -> None:
    call, made = attention(700), inputs(700)
    torch.use_deterministic_algorithms(True)
    try:
        with backward_kit.counted() as seen:
            both_ways(call, made)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True]


def test_inputs_are_left_alone() -> None:
    call, made = attention(700), inputs(700)
    before = tuple(t.detach().clone() for t in made)
    both_ways(call, made)
    assert same(tuple(t.detach() for t in made), before)


def test_calls_do_not_wait_for_the_device() -> None:
    call, made = attention(700), inputs(700)
    both_ways(call, made)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both_ways(call, made)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_of_forward_and_backward() -> None:
    call, made = attention(700, deterministic=True), inputs(700)
    others = [inputs(700, seed=seed) for seed in (1, 2)]
    expected = [both_ways(call, other) for other in others]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both_ways(call, made)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both_ways(call, made)
    for _ in range(2):
        for other, truth in zip(others, expected, strict=True):
            with torch.no_grad():
                for t, new in zip(made, other, strict=True):
                    t.copy_(new)
                for t in found:
                    t.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert same(found, truth)


def test_streams_side_by_side() -> None:
    call, sets = attention(900, deterministic=True), [inputs(900, seed=seed) for seed in range(4)]
    expected = [both_ways(call, made) for made in sets]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in sets]
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in sets]
    for _ in range(5):
        for stream, made, kept in zip(streams, sets, found, strict=True):
            with torch.cuda.stream(stream):
                kept.append(both_ways(call, made))
    torch.cuda.synchronize()
    for kept, truth in zip(found, expected, strict=True):
        assert all(same(one, truth) for one in kept)


def test_split_kv_blocks_are_joined_in_every_call() -> None:
    """Split kv blocks are combined correctly in repeated calls, on parallel streams and in graphs.

    With one batch element and two heads on a whole GPU, kv blocks are split.
    """
    mask = masks.causal()
    drawn = [[t[:1, :2].detach() for t in inputs(2100, seed=s, dim=128)] for s in range(3)]
    sets = [[*(t.requires_grad_() for t in qkv), grad] for *qkv, grad in drawn]
    plain = lambda **options: (
        lambda *qkv: flex_attention(*qkv, block_mask=mask, backend=kit.BACKEND, **options)
    )
    call = plain()
    expected = [both_ways(plain(deterministic=True), made) for made in sets]
    streams, found = [torch.cuda.Stream() for _ in sets], []
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, made, truth in zip(streams, sets, expected, strict=True):
            with torch.cuda.stream(stream):
                found.append((both_ways(call, made), truth))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # leaves of its own: those above have nodes in autograd that belong to the default stream
    fresh = [*(t.detach().requires_grad_() for t in sets[0][:3]), sets[0][3]]
    with torch.cuda.graph(graph):
        replayed = both_ways(call, fresh)
    for _ in range(3):
        graph.replay()
        found.append((tuple(t.clone() for t in replayed), expected[0]))
    torch.cuda.synchronize()
    for own, truth in found:
        for a, b in zip(own, truth, strict=True):
            # sums in another order: float32's rounding, and then perhaps the other 16-bit number
            unit = 2**-7 * b.abs().float() + 2**-18 * b.abs().max().float()
            assert ((a.float() - b.float()).abs() <= unit).all()


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_peak_memory(kv_heads: int) -> None:
    """A backward allocates no more than its buffers besides inputs and outputs.

    The buffers are LSE, delta, float32 dQ, and with shared heads float32 dK and dV.
    """
    batch, heads, length, dim = 2, 8, 8192, 64
    shape, shared = (batch, heads, length, dim), (batch, kv_heads, length, dim)
    query, grad = (torch.randn(shape, device=kit.DEVICE).to(BF16) for _ in range(2))
    key, value = (torch.randn(shared, device=kit.DEVICE).to(BF16) for _ in range(2))
    for t in (query, key, value):
        t.requires_grad_()
    call = lambda: flex_attention(
        query, key, value, block_mask=masks.causal(), enable_gqa=True, backend=kit.BACKEND
    )
    torch.autograd.grad(call(), (query, key, value), grad)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = torch.autograd.grad(call(), (query, key, value), grad)
    most = torch.cuda.max_memory_allocated() - before
    elements = query.numel()
    out = 2 * elements
    gradients = sum(2 * t.numel() for t in found)
    sums = 4 * (elements + (2 * key.numel() if kv_heads != heads else 0))
    rows = 3 * 4 * elements // dim  # LSE, and LSE and D as the kernel reads them
    assert most <= 1.02 * (out + gradients + sums + rows) + (1 << 20)
    assert most < batch * heads * length * length // 8


def test_million_tokens_in_a_window() -> None:
    """Gradients are exact for tensors with more than 2^31 elements.

    The rows that have a gradient of the output are compared.
    """
    length, window, heads, dims = 1 << 20, 1000, 18, 128
    size = 2 * heads * length * dims
    if torch.cuda.mem_get_info()[0] < 12 * size:
        pytest.skip(f"needs {12 * size >> 30} GiB of GPU memory")
    random = torch.Generator(kit.DEVICE).manual_seed(0)
    options: dict[str, Any] = {"generator": random, "device": kit.DEVICE, "dtype": BF16}
    qkv = [torch.randn(1, heads, length, dims, **options).requires_grad_() for _ in range(3)]
    mask = masks.causal() & masks.sliding_window(window)
    out = flex_attention(*qkv, block_mask=mask, backend=kit.BACKEND)
    grad = torch.zeros_like(out)
    rows = ((0, 5), (0, length // 2 + 77), (heads - 1, 600_000), (heads - 1, length - 1))
    for head, row in rows:
        grad[0, head, row] = torch.randn(dims, **options)
    found = torch.autograd.grad(out, qkv, grad)
    for head, row in rows:
        seen = slice(max(0, row - window), row + 1)  # itself and the window before it
        places = (slice(row, row + 1), seen, seen)
        parts = [t[0, head, at].detach() for t, at in zip(qkv, places, strict=True)]
        gradients = []
        for dtype in (torch.float64, BF16):
            own = [t.to(dtype).requires_grad_() for t in parts]
            arrives = grad[0, head, row].double()
            gradients.append(torch.autograd.grad(kit.dense_row(*own)[0], own, arrives))
        for t, at, truth, rough in zip(found, places, *gradients, strict=True):
            error = (t[0, head, at] - truth).abs().max()
            assert error <= FACTOR * (rough - truth).abs().max()
            t[0, head, at] = 0
    assert not any(t.any() for t in found)


# --- what training does around it


def test_gradients_accumulate() -> None:
    call, made = attention(700, deterministic=True), inputs(700)
    for _ in range(2):
        call(*made[:3]).backward(made[3])
    _, *once = both_ways(call, made)
    for t, grad in zip(made, once, strict=False):
        assert torch.equal(t.grad, grad + grad)  # type: ignore[arg-type]


def test_checkpointing() -> None:
    call, made = attention(700, deterministic=True), inputs(700)
    plain = both_ways(call, made)
    again = both_ways(lambda *qkv: checkpoint(call, *qkv, use_reentrant=False), made)
    assert same(plain, again)


def test_autocast() -> None:
    call, made = attention(700), inputs(700)
    wide = [t.detach().float().requires_grad_() for t in made[:3]]
    with torch.autocast("cuda", BF16), backward_kit.counted() as seen:
        out, *grads = both_ways(call, [*wide, made[3]])
    assert seen == [False]
    assert out.dtype == BF16
    assert all(g.dtype == torch.float32 for g in grads)

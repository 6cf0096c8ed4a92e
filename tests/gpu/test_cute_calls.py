"""Check forward calls: streams, graphs, no host waiting, no state between calls, long inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import flex_attention, masks
from attnkit.runtime.variant import Variant
from attnkit.testing.tolerance import FACTOR
from tests.gpu import cute_kit as kit

SLOPES = (0.5, 0.25, 0.125, 0.0625)


def inputs(length: int, *, seed: int = 0, batch: int = 2, heads: int = 4, dim: int = 64) -> Any:
    random = torch.Generator(kit.DEVICE).manual_seed(seed)
    shape = (batch, heads, length, dim)
    options: dict[str, Any] = {"generator": random, "device": kit.DEVICE}
    return [torch.randn(shape, **options).to(torch.bfloat16) for _ in range(3)]


def attention(length: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return causal attention within documents with ALiBi; score and mask capture tensors."""
    ids = torch.arange(length, device=kit.DEVICE) // 70
    slopes = torch.tensor(SLOPES, device=kit.DEVICE)
    variant = Variant(
        lambda score, b, h, q, kv: score + slopes[h] * (kv - q),
        lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]),
    )
    return lambda *qkv: variant(*qkv, return_lse=True, backend=kit.BACKEND)


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_poison_works() -> None:
    with kit.poisoned():
        assert torch.empty(1000, device=kit.DEVICE).isnan().all()
        assert torch.empty_like(inputs(8)[0]).isnan().all()


def test_every_output_is_written() -> None:
    call, qkv = attention(700), inputs(700)
    with kit.poisoned():
        out, lse = call(*qkv)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert same(call(*qkv), (out, lse))


def test_same_bits_again_and_again() -> None:
    call, qkv = attention(2000), inputs(2000)
    first = call(*qkv)
    assert all(same(call(*qkv), first) for _ in range(20))


def test_inputs_are_left_alone() -> None:
    call, qkv = attention(700), inputs(700)
    before = [t.clone() for t in qkv]
    call(*qkv)
    assert same(tuple(qkv), tuple(before))


def test_other_shapes_in_between() -> None:
    """Counters and cached lists of one call do not affect calls of other shapes."""
    calls = {length: (attention(length), inputs(length)) for length in (700, 64, 1500, 1)}
    first = {length: call(*qkv) for length, (call, qkv) in calls.items()}
    for _ in range(3):
        for length, (call, qkv) in calls.items():
            assert same(call(*qkv), first[length])


def test_call_does_not_wait_for_the_device() -> None:
    call, qkv = attention(700), inputs(700)
    call(*qkv)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*qkv)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_host_runs_ahead() -> None:
    """Calls return before the device has executed them."""
    call, qkv = attention(700), inputs(700)
    expected = call(*qkv)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    found = [call(*qkv) for _ in range(5)]
    done.record()
    ahead = not done.query()
    torch.cuda.synchronize()
    assert ahead
    assert all(same(pair, expected) for pair in found)


def test_graph_is_captured_and_replayed() -> None:
    call, qkv = attention(700), inputs(700)
    others = [inputs(700, seed=seed) for seed in (1, 2, 3)]
    expected = [call(*other) for other in others]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(*qkv)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(*qkv)
    for other, truth in zip(others, expected, strict=True):
        for t, new in zip(qkv, other, strict=True):
            t.copy_(new)
        for t in found:
            t.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert same(found, truth)


def test_graph_of_many_calls() -> None:
    """Several calls in one CUDA graph are correct at every replay, so each resets its counters."""
    call, sets = attention(700), [inputs(700, seed=seed) for seed in range(4)]
    expected = [call(*qkv) for qkv in sets]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call(*qkv) for qkv in sets]
    for _ in range(3):
        for pair in found:
            for t in pair:
                t.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(same(pair, truth) for pair, truth in zip(found, expected, strict=True))


def test_streams_side_by_side() -> None:
    call, sets = attention(1500), [inputs(1500, seed=seed) for seed in range(4)]
    expected = [call(*qkv) for qkv in sets]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in sets]
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in sets]
    for _ in range(10):
        for stream, qkv, kept in zip(streams, sets, found, strict=True):
            with torch.cuda.stream(stream):
                kept.append(call(*qkv))
    torch.cuda.synchronize()
    for kept, truth in zip(found, expected, strict=True):
        assert all(same(pair, truth) for pair in kept)


def test_stream_order_is_kept() -> None:
    """A call on a stream reads the results of earlier work on that stream."""
    call, qkv, new = attention(700), inputs(700), inputs(700, seed=1)
    truth = call(*new)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for t, later in zip(qkv, new, strict=True):
            t.copy_(later)
        found = call(*qkv)
        copied = [t.clone() for t in found]
    stream.synchronize()
    assert same(tuple(copied), truth)


@pytest.mark.parametrize("dims", [64, 128])
def test_million_tokens_in_a_window(dims: int) -> None:
    """Results are exact for tensors with more than 2^31 elements.

    Rows up to the far end are compared with dense attention.
    """
    length, window = 1 << 20, 1000
    heads = 18 if dims == 128 else 2
    free = torch.cuda.mem_get_info()[0]
    if free < 5 * 2 * heads * length * dims:
        pytest.skip(f"needs {10 * heads * length * dims >> 30} GiB of GPU memory")
    random = torch.Generator(kit.DEVICE).manual_seed(0)
    options: dict[str, Any] = {"generator": random, "device": kit.DEVICE, "dtype": torch.bfloat16}
    qkv = [torch.randn(1, heads, length, dims, **options) for _ in range(3)]
    mask = masks.causal() & masks.sliding_window(window)
    out, lse = flex_attention(*qkv, block_mask=mask, return_lse=True, backend=kit.BACKEND)
    for head, row in ((0, 5), (0, length // 2 + 77), (heads - 1, length - 1), (heads - 1, 600_000)):
        seen = slice(max(0, row - window), row + 1)  # itself and the window before it
        part = [qkv[0][0, head, row, None], *(t[0, head, seen] for t in qkv[1:])]
        truth, top = kit.dense_row(*(t.double() for t in part))
        rough, coarse = kit.dense_row(*part)
        for found, expected, own in ((out, truth, rough), (lse, top, coarse)):
            error = (found[0, head, row] - expected).abs().max()
            half = torch.finfo(found.dtype).eps / 2 * expected.abs().max()
            assert error <= FACTOR * torch.maximum((own - expected).abs().max(), half)

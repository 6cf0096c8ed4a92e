"""Check that each stream has its own counters, and that CUDA graph capture uses other ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import attnkit
from attnkit.splice import counters
from attnkit.splice.counters import zero_counters

CPU = torch.device("cpu")


class Device:
    """Stub of a CUDA device whose tensors are allocated on the host."""

    index = 0


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a one-element list with the current stream number, which tests set."""
    current, zeros = [1], torch.zeros
    monkeypatch.setattr(counters, "stream_of", lambda index: current[0])
    monkeypatch.setattr(torch, "zeros", lambda *a, device, **k: zeros(*a, **k))
    attnkit.clear_caches()
    return current


@pytest.mark.parametrize("count", [1, 9])
def test_each_stream_has_one_counter(stream: list[int], count: int) -> None:
    device: Any = Device()
    first = zero_counters(device, False, count)
    assert zero_counters(device, False, count) is first
    stream[0] = 2
    assert zero_counters(device, False, count) is not first
    stream[0] = 1
    assert zero_counters(device, False, count) is first
    assert first.dtype == torch.int32
    assert not first.any()
    assert first.numel() == count


def test_a_longer_call_gets_more(stream: list[int]) -> None:
    device: Any = Device()
    single, short = zero_counters(device, False), zero_counters(device, False, 9)
    long = zero_counters(device, False, 17)
    assert long.numel() == 17
    assert zero_counters(device, False, 9) is long is not short
    assert zero_counters(device, False) is single  # a kernel may take just one


def test_each_graph_has_its_own_counters(stream: list[int]) -> None:
    device: Any = Device()
    shared = zero_counters(device, False)
    captured = [zero_counters(device, True) for _ in range(2)]
    assert captured[0] is not captured[1]
    assert all(t is not shared for t in captured)
    assert zero_counters(device, False) is shared


def test_each_thread_on_the_host_has_its_own_counters() -> None:
    """Emulated kernels use one set of counters per host thread."""
    attnkit.clear_caches()
    own = zero_counters(CPU, False)
    assert zero_counters(CPU, False) is own
    assert zero_counters(CPU, True) is not own
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(zero_counters, CPU, False).result()
    assert other is not own

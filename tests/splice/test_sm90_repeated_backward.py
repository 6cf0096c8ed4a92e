"""Check what reaches the Hopper backward at repeated calls, with kernels that record it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")  # without it no call is planned for the kernel

import attnkit
from attnkit import flex_attention, masks
from attnkit.runtime.reuse.backward import BackwardReuse
from attnkit.splice import backward_call, forward, replay, workers
from attnkit.util import devices


class Kernels:
    """Stand for compiled kernels; keep the shapes and strides that each launch works on."""

    def __init__(self) -> None:
        self.again = True
        self.seen: list[tuple[str, list[Any]]] = []

    def kernel(self, source: Any, **_: Any) -> Any:
        kernels = self

        def note(arguments: Any) -> None:
            kernels.seen.append((source.key, [what(a) for a in arguments]))

        class Kernel:
            def __call__(self, *arguments: Any) -> None:
                note(arguments)

            def relauncher(self, like: Any, changing: Any) -> Any:
                if not kernels.again:
                    return None
                numbers = [i for i in changing if not isinstance(like[i], Tensor)]

                def run(stream: int, addresses: Any, given: Any = ()) -> None:
                    found = list(like)
                    for i, number in zip(numbers, given, strict=True):
                        found[i] = number
                    note(found)

                return run

        return Kernel()


def what(a: Any) -> Any:
    return (tuple(a.shape), a.stride()) if isinstance(a, Tensor) else a


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_kernel_that_runs_for_several_gradients(
    monkeypatch: pytest.MonkeyPatch, dim: int, kv_heads: int
) -> None:
    kernels = Kernels()
    monkeypatch.setattr(devices, "compute_capability", lambda device: (9, 0))
    for module in (forward, backward_call):
        monkeypatch.setattr(module, "kernel", kernels.kernel)
    monkeypatch.setattr(workers, "sm_count", lambda device: 132)
    monkeypatch.setattr(backward_call, "device_index", lambda: None, raising=False)
    monkeypatch.setattr(backward_call, "stream_of", lambda index: 0, raising=False)
    counters = torch.zeros(1000, dtype=torch.int32)
    monkeypatch.setattr(backward_call, "zero_counters", lambda device, capturing, count: counters)
    monkeypatch.setattr(replay, "device_index", lambda: None)
    monkeypatch.setattr(replay, "is_stream_capturing", lambda: False)
    monkeypatch.setattr(replay, "stream_of", lambda index: 0)
    relaunch, replayed = BackwardReuse.try_fast_path, []

    def noted(*a: Any) -> Any:
        found = relaunch(*a)
        replayed.append(found is not None)
        return found

    monkeypatch.setattr(BackwardReuse, "try_fast_path", noted)
    monkeypatch.setattr("attnkit.splice.backward.supports", lambda *a: True)
    attnkit.clear_caches()
    q = torch.randn(2, 4, 200, dim, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(2, kv_heads, 260, dim, dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(2, 260, kv_heads, dim, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    def launches(fixed: bool = False) -> list[Any]:
        out = flex_attention(
            q, k, v, None, masks.causal(), enable_gqa=True, backend="cute", deterministic=fixed
        )
        kernels.seen.clear()
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
        return list(kernels.seen)

    kernels.again = False
    expected = launches()
    kernels.again = True
    assert len(expected) >= 3
    replayed.clear()
    for _ in range(4):
        assert launches() == expected
    assert replayed == [False, False, True, True]  # kernels are told what repeats at the second
    replayed.clear()
    ordered = [launches(fixed=True) for _ in range(4)]
    assert ordered[0] != expected
    assert replayed == [False] * 4  # each needs semaphores that are 0

"""Check that repeated emulated calls take the fast path of a GPU and reuse its counters."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

import attnkit
from attnkit import flex_attention, masks
from attnkit.jit import emulation
from attnkit.runtime import reuse
from attnkit.splice import forward_call
from attnkit.splice.counters import zero_counters

CPU = torch.device("cpu")
CAUSAL = masks.causal()


class Paths:
    """Count calls on the fast path and relaunches of kernels.

    Attributes:
        fast: calls that took the fast path.
        relaunches: forwards that were relaunched.
    """

    def __init__(self) -> None:
        self.fast = self.relaunches = 0


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Paths:
    count = Paths()
    fast_path, repeated = reuse.try_fast_path, forward_call.repeated_forward

    def noted(*arguments: Any) -> Any:
        found = fast_path(*arguments)
        count.fast += found is not None
        return found

    def watched(*arguments: Any) -> Any:
        relaunch = repeated(*arguments)

        def run(*tensors: Any) -> Any:
            found = relaunch(*tensors)
            count.relaunches += found is not None
            return found

        return run

    monkeypatch.setattr(reuse, "try_fast_path", noted)
    monkeypatch.setattr(forward_call, "repeated_forward", watched)
    attnkit.clear_caches()
    return count


def inputs(length: int = 200, heads: int = 1) -> list[Tensor]:
    return [torch.randn(1, heads, length, 64, dtype=torch.bfloat16) for _ in range(3)]


def check(qkv: list[Tensor], score_mod: Any = None, mask: Any = CAUSAL, **options: Any) -> None:
    """Check that an emulated call has at most twice the error of dense attention, from float64."""
    found = flex_attention(*qkv, score_mod, mask, return_lse=True, backend="emulate", **options)
    wide = [t.double() for t in qkv]
    exact = flex_attention(*wide, score_mod, mask, return_lse=True, backend="eager", **options)
    dense = flex_attention(*qkv, score_mod, mask, return_lse=True, backend="eager", **options)
    for ours, theirs, true in zip(found, dense, exact, strict=True):
        allowed = 2 * (theirs.double() - true).abs().max()
        assert (ours.double() - true).abs().max() <= allowed + 1e-5


def test_a_repeated_call_is_relaunched_with_new_addresses(paths: Paths) -> None:
    bias = torch.randn(2)
    mod = lambda s, b, h, q, kv: s + bias[h] * (kv - q) / 64
    for step in range(4):
        check(inputs(heads=2), mod, scale=0.1 * (step + 1))
    assert paths.fast >= 2
    assert paths.relaunches == 3


def test_rows_that_are_split_are_relaunched(paths: Paths) -> None:
    """Relaunched calls with split rows combine the partial results of the same call."""
    query = torch.randn(1, 1, 16, 64, dtype=torch.bfloat16)
    for _ in range(3):
        _, key, value = inputs(1100)
        check([query, key, value], mask=None)
    assert paths.relaunches == 2


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_address_that_tma_cannot_read_is_copied(paths: Paths, place: int) -> None:
    """A call with a misaligned tensor is not relaunched; the next aligned call is."""
    check(inputs())
    qkv = inputs()
    flat = torch.randn(qkv[place].numel() + 8, dtype=torch.bfloat16)
    qkv[place] = flat[4:-4].view(qkv[place].shape)
    assert qkv[place].data_ptr() % 16 == 8
    check(qkv)
    assert paths.relaunches == 0
    check(inputs())
    assert paths.relaunches == 1


def test_a_kernel_leaves_the_counters_that_it_shares_at_zero(paths: Paths) -> None:
    """Every call on shared counters leaves them at zero (three heads of two tiles, two CTAs)."""
    counters = zero_counters(CPU, False)
    for _ in range(3):
        check(inputs(heads=3))
        assert zero_counters(CPU, False) is counters
        assert not counters.any()
    assert paths.relaunches == 2


@pytest.mark.parametrize("calls", [1, 2])
def test_counters_that_are_not_zero_are_noticed(paths: Paths, calls: int) -> None:
    """Nonzero counters raise an error that names the kernel, and the next call is correct.

    This holds at a first call and at a relaunch.
    """
    for _ in range(calls - 1):
        check(inputs())
    zero_counters(CPU, False).fill_(3)
    with pytest.raises(AssertionError, match=r"forward.* finds its work counters at \[3\]"):
        flex_attention(*inputs(), None, CAUSAL, backend="emulate")
    check(inputs())


def test_calls_without_an_lse_leave_that_of_others(paths: Paths) -> None:
    """The memory of an LSE that no caller asked for is used again, that of a returned one is not."""
    first, second = inputs(), inputs()
    for qkv in (first, second):
        flex_attention(*qkv, None, CAUSAL, backend="emulate")
    _, lse = flex_attention(*first, None, CAUSAL, return_lse=True, backend="emulate")
    before = lse.clone()
    for qkv in (second, first, second):
        flex_attention(*qkv, None, CAUSAL, backend="emulate")
    assert torch.equal(lse, before)
    assert paths.relaunches == 5


def test_a_relaunch_runs_as_its_session_says(paths: Paths) -> None:
    for mode in ("eager", "adversarial", "race"):
        with emulation.session(mode=mode) as session:
            check(inputs())
        assert session.ok
        assert [report.mode for _, report in session.reports] == [mode]  # type: ignore[union-attr]
    assert paths.relaunches == 2


def test_no_tensor_of_a_call_is_kept_alive(paths: Paths) -> None:
    bias = torch.randn(1)
    mod = lambda s, b, h, q, kv: s + bias[h]
    qkv = inputs()
    for _ in range(2):
        flex_attention(*qkv, mod, CAUSAL, backend="emulate")
    assert paths.relaunches == 1
    alive = [weakref.ref(t) for t in (*qkv, bias)]
    qkv.clear()
    bias = mod = None  # type: ignore[assignment]
    gc.collect()
    assert all(t() is None for t in alive)

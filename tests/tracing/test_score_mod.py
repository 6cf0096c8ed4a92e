"""Check that `ScoreMod` computes what its function computes, and that a shift moves positions."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnkit
import attnkit.tracing.guards
from attnkit import ArgumentError, ScoreMod, flex_attention
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.tracing.tracer import trace

N = 6


def both(s, b, h, q, kv):
    return s * (1 + q) + 10 * kv + b


def values(mod, q_len=N, kv_len=N, batch=2):
    """Evaluate a mod eagerly at every position; return [batch, q_len, kv_len]."""
    score = torch.ones(batch, q_len, kv_len)
    b = torch.arange(batch)[:, None, None]
    return mod(score, b, 0, torch.arange(q_len)[:, None], torch.arange(kv_len))


def attend(mod):
    torch.manual_seed(0)
    x = torch.randn(2, 1, N, 8)
    return flex_attention(x, x, x, mod)


def test_is_its_function():
    mod = ScoreMod(both)
    assert repr(mod) == "both"
    assert torch.equal(values(mod), values(both))
    assert torch.equal(attend(mod), attend(both))
    assert torch.equal(attend(copy.copy(mod)), attend(both))


@given(q=st.integers(-4, 9), kv=st.integers(-4, 9))
def test_a_shift_moves_positions(q, kv):
    moved = ScoreMod(both).shift(q=q, kv=kv)
    direct = lambda s, b, h, row, column: both(s, b, h, row + q, column + kv)
    assert torch.equal(values(moved), values(direct))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=2), st.booleans())
def test_a_shift_by_a_tensor(by, shared):
    shift = torch.tensor(by[0] if shared else by)
    moved = ScoreMod(both).shift(q=shift)
    direct = lambda s, b, h, q, kv: both(s, b, h, q + (shift if shared else shift[b]), kv)
    assert torch.equal(values(moved), values(direct))
    torch.testing.assert_close(attend(moved), attend(direct))


def test_shifts_add_up_and_print():
    twice = ScoreMod(both, "mod()").shift(q=2).shift(q=3, kv=torch.tensor(1))
    once = ScoreMod(both).shift(q=5, kv=1)
    assert torch.equal(values(twice), values(once))
    assert repr(twice) == "mod().shift(q=2).shift(q=3, kv=[])"


def test_a_mod_that_changes_is_traced_again():
    scale = 2.0
    mod = ScoreMod(lambda s, b, h, q, kv: s * scale)
    first = attend(mod)
    scale = 3.0
    torch.testing.assert_close(attend(mod), attend(lambda s, b, h, q, kv: s * 3.0))
    assert not torch.equal(attend(mod), first)
    mod.function = lambda s, b, h, q, kv: s * 2.0
    assert torch.equal(attend(mod), first)


def test_repeated_calls_trace_once(monkeypatch):
    traced = []
    own = attnkit.tracing.guards.trace
    monkeypatch.setattr(attnkit.tracing.guards, "trace", lambda *a: traced.append(a) or own(*a))
    attnkit.clear_caches()
    table = torch.zeros(N)
    make = lambda: ScoreMod(lambda s, b, h, q, kv: s + table[kv]).shift(q=1)
    mod = make()
    for _ in range(3):
        attend(mod)
    attend(make())
    assert len(traced) == 1


def test_a_backward_of_its_own():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    root = trace(ScoreMod(lambda s, b, h, q, kv: Double.apply(s)), "score").root
    assert adjoint(root).dscore is ir.arg("grad")


@pytest.mark.parametrize("by", [1.5, True, torch.ones(2), torch.ones(1, 1).int(), "1"])
def test_bad_shifts(by):
    with pytest.raises(
        ArgumentError, match=r"shift takes an int or an integer tensor, \[\] or \[B\], as q"
    ):
        ScoreMod(both).shift(q=by)

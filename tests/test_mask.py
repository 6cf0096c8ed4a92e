"""Masks compose like the booleans that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.errors import ArgumentError
from attnkit.interp.torch import evaluate
from attnkit.mask import Mask, and_masks, noop_mask, or_masks
from attnkit.trace import trace

N = 6
CAUSAL = Mask(lambda b, h, q, kv: q >= kv, "causal()")
NEAR = Mask(lambda b, h, q, kv: (q - kv).abs() <= 1, "near()")
ODD = Mask(lambda b, h, q, kv: kv % 2 == 1, "odd()")


def dense(mask: Any) -> torch.Tensor:
    env = {n: torch.zeros((), dtype=torch.int32) for n in "bh"}
    env["q"] = torch.arange(N, dtype=torch.int32).view(N, 1)
    env["kv"] = torch.arange(N, dtype=torch.int32)
    (kept,) = evaluate([trace(mask, "mask").root], env, ())
    return kept.expand(N, N)


MASKS = st.recursive(
    st.sampled_from([CAUSAL, NEAR, ODD]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] & p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] | p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] ^ p[1]),
        inner.map(lambda m: ~m),
    ),
    max_leaves=6,
)


@given(MASKS, MASKS)
def test_operators_are_those_of_booleans(a: Mask, b: Mask) -> None:
    x, y = dense(a), dense(b)
    assert torch.equal(dense(a & b), x & y)
    assert torch.equal(dense(a | b), x | y)
    assert torch.equal(dense(a ^ b), x ^ y)
    assert torch.equal(dense(~a), ~x)
    assert torch.equal(dense(~~a), x)


@given(MASKS)
def test_label_is_the_expression(mask: Mask) -> None:
    names = {"causal": lambda: CAUSAL, "near": lambda: NEAR, "odd": lambda: ODD}
    assert torch.equal(dense(eval(repr(mask), names)), dense(mask))


def test_plain_functions_mix_in() -> None:
    plain = lambda b, h, q, kv: kv > 2
    assert torch.equal(dense(CAUSAL & plain), dense(CAUSAL) & dense(plain))
    assert torch.equal(dense(plain | CAUSAL), dense(CAUSAL) | dense(plain))
    assert torch.equal(dense(plain ^ CAUSAL), dense(CAUSAL) ^ dense(plain))


def test_and_or_masks() -> None:
    assert torch.equal(dense(and_masks(CAUSAL, NEAR, ODD)), dense(CAUSAL & NEAR & ODD))
    assert torch.equal(dense(or_masks(CAUSAL, NEAR, ODD)), dense(CAUSAL | NEAR | ODD))
    assert dense(and_masks()).all()
    assert not dense(or_masks()).any()
    assert dense(noop_mask).all()


def test_truth_value_is_refused() -> None:
    with pytest.raises(ArgumentError, match="has no truth value; combine masks with `&`"):
        _ = CAUSAL and NEAR
    with pytest.raises(ArgumentError, match=r"the mask causal\(\)"):
        bool(CAUSAL)


def test_not_a_function() -> None:
    with pytest.raises(ArgumentError, match="must be a function"):
        Mask(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        CAUSAL & 3  # type: ignore[operator]

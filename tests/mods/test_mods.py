"""Check that every mod equals its formula in value and gradients, eagerly and traced."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit import mods
from attnkit.graph.eval_torch import evaluate
from attnkit.sparsity.index_bounds import check_bounds
from attnkit.tracing.tracer import trace
from tests.mods.cases import BATCH, CASES, HEADS
from tests.tracing.traced_once import check_traced_once

CPU = torch.device("cpu")
NOT_MODS = {"Example", "ScoreMod", "examples"}
EXAMPLES = mods.examples(17)
LONG = mods.examples(1 << 11)


def test_every_mod_has_a_formula_and_an_example():
    names = set(mods.__all__) - NOT_MODS
    examples = {name.partition("/")[0] for name in EXAMPLES}
    assert names - set(CASES) == set(), "add a @case of this name to tests/mods/cases.py"
    assert names - examples == set(), "add an instance to mods/_examples.py"
    assert set(CASES) | examples == names, "add it to __all__ of mods/__init__.py"


def positions(sizes):
    """Return b, h, q, kv as int32 tensors of shape `sizes`, by name."""
    places = [torch.arange(n, dtype=torch.int32) for n in sizes]
    return dict(zip(("b", "h", "q", "kv"), torch.meshgrid(*places, indexing="ij"), strict=True))


def traced_values(mod, score):
    """Evaluate the traced mod on scores [B, H, Sq, Skv], in their dtype."""
    found = trace(mod, "score")
    env = {**positions(score.shape), "score": score}
    (values,) = evaluate([found.root], env, found.tensors, score.dtype)
    return values.expand(score.shape)


def gradients(values, cotangent, tensors):
    """Return gradients of the finite values; a score of -inf contributes none."""
    kept = values.isfinite()
    if not values.requires_grad:
        return [torch.zeros_like(t) for t in tensors]
    found = torch.autograd.grad(values[kept], tensors, cotangent[kept], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


@pytest.mark.parametrize("name", sorted(CASES))
@given(data=st.data())
def test_mod_is_its_formula(name, data):
    case = data.draw(CASES[name])
    sizes = (BATCH, HEADS, case.q_len, case.kv_len)
    score = (4 * torch.randn(sizes, dtype=torch.float64)).requires_grad_()
    places = torch.cartesian_prod(*(torch.arange(n) for n in sizes)).reshape(-1, 4).tolist()
    flat = [case.formula(score[tuple(place)], *place) for place in places]
    want = torch.stack(flat).reshape(sizes)
    got = traced_values(case.mod, score)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    cotangent = torch.randn(sizes, dtype=torch.float64)
    wanted = gradients(want, cotangent, [score, *case.learned])
    for own, other in zip(gradients(got, cotangent, [score, *case.learned]), wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_traced_mod_is_the_function_called_eagerly(name):
    mod, q_len, kv_len, batch, heads, _ = EXAMPLES[name]
    sizes = (batch, heads, q_len, kv_len)
    score = torch.randn(sizes)
    values = traced_values(mod, score)
    for _ in range(100):
        place = tuple(random.randrange(n) for n in sizes)
        eager = mod(score[place], *(torch.tensor(i, dtype=torch.int32) for i in place))
        assert eager.dtype == torch.float32
        assert eager.shape == ()
        torch.testing.assert_close(values[place], eager)


@pytest.mark.parametrize("examples", [EXAMPLES, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_integers_and_indices_are_proven_safe(name, examples):
    mod, q_len, kv_len, batch, heads, _ = examples[name]
    found = trace(mod, "score")
    sizes = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "heads": heads}
    assert not check_bounds([found.root], found.tensors, found.names, **sizes)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_one_trace_serves_every_mod_of_the_same_shape(name, monkeypatch):
    rebuilt = mods.examples(17)[name].mod
    check_traced_once(EXAMPLES[name].mod, rebuilt, "score", monkeypatch)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_examples_hold_the_tables_they_say(requires_grad):
    found = mods.examples(20, 3, 1, dtype=torch.float64, requires_grad=requires_grad)
    for name, (mod, *_, learned) in found.items():
        graph = trace(mod, "score")
        floats = [t for t in graph.tensors if t.dtype == torch.float64]
        assert {id(t) for t in floats} == {id(t) for t in learned}, name
        assert all(t.requires_grad == requires_grad for t in learned)

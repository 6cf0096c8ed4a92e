"""Check how loads of learned tensors are sorted, and that sums over rows suffice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.graph.eval_torch import evaluate
from attnkit.graph.learned_loads import learned_loads
from attnkit.tracing.tracer import trace

LENGTH = 6
TABLE = torch.randn(LENGTH, LENGTH)

# mod, and the numbers of loads that are row shifts, row factors, others
MODS: dict[str, tuple[Any, tuple[int, int, int]]] = {
    "row": (lambda s, b, h, q, kv: s + TABLE[h, q], (1, 0, 0)),
    "head": (lambda s, b, h, q, kv: s - TABLE[h, 0].abs(), (1, 0, 0)),
    "row times row": (lambda s, b, h, q, kv: s * 2 + TABLE[h, q] * q, (1, 0, 0)),
    "some rows": (lambda s, b, h, q, kv: s + torch.where(q < 3, TABLE[h, q], 0.0), (1, 0, 0)),
    "gate": (lambda s, b, h, q, kv: s + TABLE[h, q] - TABLE[h, kv], (1, 0, 1)),
    "column": (lambda s, b, h, q, kv: s + TABLE[h, kv], (0, 0, 1)),
    "slope of columns": (lambda s, b, h, q, kv: s * 3 + TABLE[h, 0] * kv, (0, 0, 1)),
    "scale": (lambda s, b, h, q, kv: s * TABLE[h, q], (0, 1, 0)),
    "scale of a head": (lambda s, b, h, q, kv: s * TABLE[h, 0].exp(), (0, 1, 0)),
    "twice": (lambda s, b, h, q, kv: s * TABLE[h, q] + TABLE[h, q], (1, 1, 0)),
    "all": (lambda s, b, h, q, kv: s * TABLE[h, q] + TABLE[q, h] - TABLE[kv, h], (1, 0, 2)),
    "slope": (lambda s, b, h, q, kv: s + TABLE[h, 0] * (q - kv), (0, 0, 1)),
    "inside": (lambda s, b, h, q, kv: torch.tanh(s + TABLE[h, q]), (0, 0, 1)),
    "outside": (lambda s, b, h, q, kv: torch.tanh(s) + TABLE[h, q], (1, 0, 0)),
    "column outside": (lambda s, b, h, q, kv: torch.tanh(s) + TABLE[h, kv], (0, 0, 1)),
    "relative": (lambda s, b, h, q, kv: s + TABLE[h, q - kv], (0, 0, 1)),
    "scale of columns": (lambda s, b, h, q, kv: s * TABLE[h, kv], (0, 0, 1)),
    "scale and relative": (lambda s, b, h, q, kv: s * TABLE[h, q] + TABLE[h, q - kv], (0, 0, 2)),
}


@pytest.mark.parametrize("name", MODS)
def test_kinds_of_loads(name: str) -> None:
    mod, expected = MODS[name]
    traced = trace(mod, "score")
    found = learned_loads(traced.root, [True] * len(traced.tensors), row_sums=True)
    assert tuple(map(len, found)) == expected
    # without row sums only shifts of rows are apart
    plain = learned_loads(traced.root, [True] * len(traced.tensors))
    assert plain.factors == ()
    assert learned_loads(traced.root, [False] * len(traced.tensors), True) == ((),) * 3


def gradient_of_sums(mod: Any, score: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of `TABLE` from the sums of `learned_loads`, score by score if need be.

    Args:
        mod: the score_mod.
        score: scores [H, Sq, Skv].
        gradient: gradients of the modified scores.
    """
    traced = trace(mod, "score")
    loads = learned_loads(traced.root, [True] * len(traced.tensors), row_sums=True)
    h, q, kv = torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
    sums = (
        gradient.sum(2, keepdim=True),
        (gradient * score).sum(2, keepdim=True),
        gradient,
    )
    places = (q[..., :1], kv[..., :1]), (q[..., :1], kv[..., :1]), (q, kv)
    tables = [t.double() for t in traced.tensors]
    total = torch.zeros_like(TABLE, dtype=torch.float64)
    for group, grad, (rows, columns) in zip(loads, sums, places, strict=True):
        env = {"score": score, "grad": grad, "b": torch.tensor(0), "h": h[:, :1, :1]}
        env |= {"q": rows, "kv": columns}  # no sum is read at the positions of its axis
        for load, cotangent in group:
            values, *index = (
                t.expand(grad.shape)
                for t in evaluate([cotangent, *load.args], env, tables, torch.float64)
            )
            total.index_put_(tuple(index), values, accumulate=True)
    return total


@given(st.sampled_from(list(MODS)), st.integers(0, 2**31))
def test_sums_give_the_gradient_of_autograd(name: str, seed: int) -> None:
    mod, _ = MODS[name]
    torch.manual_seed(seed)
    score, gradient = torch.randn(2, LENGTH, LENGTH, LENGTH, dtype=torch.float64)
    table = TABLE.double().requires_grad_()
    own = type(mod)(mod.__code__, {**mod.__globals__, "TABLE": table})
    positions = torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
    own(score, 0, *positions).backward(gradient)
    torch.testing.assert_close(gradient_of_sums(mod, score, gradient), table.grad)


@given(st.integers(0, 2**31))
def test_the_sum_over_a_row_is_the_gradient_of_the_lse(seed: int) -> None:
    torch.manual_seed(seed)
    score = torch.randn(LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)
    value, weights = torch.randn(2, LENGTH, LENGTH, dtype=torch.float64)
    lse_weights = torch.randn(LENGTH, dtype=torch.float64)
    total = (torch.softmax(score, -1) @ value * weights).sum()
    (total + (score.logsumexp(-1) * lse_weights).sum()).backward()
    torch.testing.assert_close(score.grad.sum(-1), lse_weights)


@pytest.mark.parametrize("name", MODS)
def test_without_a_softmax_every_load_needs_work_per_score(name: str) -> None:
    mod, counts = MODS[name]
    traced = trace(mod, "score")
    found = learned_loads(traced.root, [True] * len(traced.tensors), True, softmax=False)
    assert not found.shifts
    assert not found.factors
    assert len(found.scores) >= max(counts)

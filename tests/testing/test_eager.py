"""Check the user's function called by torch: all kinds of indexing, and the pointwise fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit.testing.eager import POINTS, call

CPU = torch.device("cpu")
SHAPE = (2, 3, 5, 7)
TABLE = torch.randn(3, 5, 7)
ROWS = torch.arange(70).view(10, 7)

MASKS: dict[str, Any] = {
    "compare": lambda b, h, q, kv: q >= kv,
    "two indices": lambda b, h, q, kv: TABLE[h, q, kv] > 0,
    "part, then the rest": lambda b, h, q, kv: TABLE[h][q][kv] > 0,
    "int and index": lambda b, h, q, kv: TABLE[1, q, kv] > 0,
    "slice and index": lambda b, h, q, kv: (TABLE[h, q, 2:5] > 0.5).any(-1),
    "index, then a column": lambda b, h, q, kv: ROWS[q + b][3] > 20,
    "negative index": lambda b, h, q, kv: ROWS[q - kv, 0] > 20,
    "constant": lambda b, h, q, kv: True,
}


def by_loops(function: Any) -> torch.Tensor:
    values = torch.zeros(SHAPE, dtype=torch.bool)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in SHAPE)):
        values[tuple(place.tolist())] = bool(function(*place.to(torch.int32)))
    return values


@pytest.mark.parametrize("name", MASKS)
def test_same_as_calling_it_with_numbers(name: str) -> None:
    found = call(MASKS[name], SHAPE, CPU)
    assert found.points is None
    assert torch.equal(found.values.expand(SHAPE), by_loops(MASKS[name]))


def test_scores() -> None:
    score = torch.randn(SHAPE)
    found = call(lambda s, b, h, q, kv: s * TABLE[h, q, kv] + b, SHAPE, CPU, score)
    expected = score * TABLE + torch.arange(2)[:, None, None, None]
    torch.testing.assert_close(found.values, expected)


class _Double(torch.autograd.Function):
    """A function without a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def test_what_vmap_cannot_run_is_called_at_points() -> None:
    score = torch.randn(SHAPE)
    found = call(lambda s, b, h, q, kv: _Double.apply(s) + kv, SHAPE, CPU, score)
    assert found.points is not None
    assert found.values.shape == (POINTS + 2,)
    torch.testing.assert_close(found.values, found.pick(2 * score + torch.arange(7.0)))
    assert found.pick(torch.arange(7.0).view(1, 1, 1, 7)).tolist() == found.points[3].tolist()

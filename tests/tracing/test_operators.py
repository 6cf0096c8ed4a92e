"""Check operators of torch.ops in a score_mod: those of aten, and custom ones with a decomposition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import register_decomposition
from torch.nn import functional as F

from attnkit import flex_attention
from attnkit.errors import TraceError
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.simplify import build
from attnkit.tracing.tracer import trace

TABLE = nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4))
NAME = "attnkit_operators"

library = torch.library.Library(NAME, "DEF")
library.define("composite(Tensor x, float factor=2.0) -> Tensor")
library.impl("composite", lambda x, factor=2.0: torch.tanh(x) * factor, "CompositeImplicitAutograd")
library.define("pair(Tensor x) -> (Tensor, Tensor)")
library.impl("pair", lambda x: (torch.sin(x), torch.cos(x)), "CompositeImplicitAutograd")
library.define("listed(Tensor x) -> Tensor")
library.impl("listed", lambda x: x * 3, "CPU")
library.define("wrong(Tensor x) -> Tensor")
library.define("hidden(Tensor x) -> Tensor")
library.impl("hidden", lambda x: x * 3, "CPU")
torch.library.register_autograd(f"{NAME}::hidden", lambda ctx, grad: grad * 5, lib=library)


@torch.library.custom_op(f"{NAME}::waved", mutates_args=())
def waved(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) * y


@torch.library.custom_op(f"{NAME}::steered", mutates_args=())
def steered(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) * y


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _steer(ctx: Any, grad: Any) -> Any:
    x, y = ctx.saved_tensors
    return grad * torch.cos(x) * y * 7, None


steered.register_autograd(_steer, setup_context=_save)

ops: Any = getattr(torch.ops, NAME)
register_decomposition(ops.listed.default)(lambda x: x + x + x)
register_decomposition(ops.wrong.default)(lambda x: 3)
register_decomposition(ops.hidden.default)(lambda x: x * 3)
register_decomposition(ops.waved.default)(lambda x, y: torch.sin(x) * y)
register_decomposition(ops.steered.default)(lambda x, y: torch.sin(x) * y)

aten = torch.ops.aten

# name -> (function of an operator, the same function without it)
SAME: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "composite": (
        lambda s, h, q: ops.composite(s) + ops.composite.default(TABLE[h, q], factor=0.5),
        lambda s, h, q: torch.tanh(s) * 2 + torch.tanh(TABLE[h, q]) * 0.5,
    ),
    "two results": (
        lambda s, h, q: ops.pair(s)[0] * ops.pair(TABLE[h, q])[1],
        lambda s, h, q: torch.sin(s) * torch.cos(TABLE[h, q]),
    ),
    "table of decompositions": (lambda s, h, q: ops.listed(s), lambda s, h, q: s + s + s),
    "custom_op": (
        lambda s, h, q: waved(s, TABLE[h, q]),
        lambda s, h, q: torch.sin(s) * TABLE[h, q],
    ),
    "aten.mish": (lambda s, h, q: aten.mish(s), lambda s, h, q: F.mish(s)),
    "aten.add": (
        lambda s, h, q: aten.add.Tensor(s, TABLE[h, q], alpha=2),
        lambda s, h, q: torch.add(s, TABLE[h, q], alpha=2),
    ),
    "aten.gelu": (
        lambda s, h, q: aten.gelu.default(s, approximate="tanh"),
        lambda s, h, q: F.gelu(s, approximate="tanh"),
    ),
    "aten.embedding": (
        lambda s, h, q: s + aten.embedding(TABLE, h)[q],
        lambda s, h, q: s + TABLE[h, q],
    ),
    "aten.where": (
        lambda s, h, q: aten.where.self(s > 0, s, -s),
        lambda s, h, q: torch.where(s > 0, s, -s),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_an_operator_is_what_it_computes(name: str) -> None:
    operator, plain = SAME[name]
    found, expected = (
        trace(lambda s, b, h, q, kv, f=f: f(s, h, q), "score") for f in (operator, plain)
    )
    assert found.root is expected.root
    assert [t is TABLE for t in found.tensors] == [True] * len(expected.tensors)
    assert found.derived == (not name.startswith("aten"))  # what a decomposition reads may change


def test_a_custom_operator_has_its_own_gradient() -> None:
    root = trace(lambda s, b, h, q, kv: steered(s, TABLE[h, q]), "score").root
    found = adjoint(root)
    load = ir.load(0, "f32", [ir.arg("h"), ir.arg("q")])
    slope = build("mul", build("mul", build("cos", ir.arg("score")), load), ir.const(7.0))
    assert found.dscore is build("mul", ir.arg("grad"), slope)
    assert found.loads == ()


def test_a_decomposition_that_changes_is_seen() -> None:
    factor = 1.0
    library.define("changing(Tensor x) -> Tensor")
    library.impl("changing", lambda x: x * factor, "CompositeImplicitAutograd")
    query = torch.randn(1, 1, 8, 8)

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ops.changing(s)

    for factor in (1.0, 3.0):
        plain = flex_attention(query * factor, query, query)
        torch.testing.assert_close(flex_attention(query, query, query, mod), plain)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "no decomposition": (
        lambda s: torch.ops.aten.rrelu(s),
        "rrelu is not supported .*; draw the numbers outside",
    ),
    "hidden gradient": (lambda s: ops.hidden(s), "hidden has a gradient of its own"),
    "wrong result": (lambda s: ops.wrong(s), "the decomposition of .*wrong returned int"),
    "wrong arguments": (lambda s: aten.mish(s, 1, 2, 3), "mish: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(TraceError, match=message):
        trace(lambda s, b, h, q, kv: function(s), "score")


def test_the_sum_of_nothing_is_zero() -> None:
    table = torch.zeros(8, 0)
    traced = trace(lambda s, b, h, q, kv: s + table[q].sum(), "score")
    assert traced.root is trace(lambda s, b, h, q, kv: s, "score").root

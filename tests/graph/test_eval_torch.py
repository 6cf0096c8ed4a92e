"""Check what the torch operators of graph nodes add to torch's own."""

from __future__ import annotations

import torch

from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import F32, arg, load, node

score, kv = arg("score"), arg("kv")


def test_a_value_with_a_slope_of_its_own() -> None:
    """Autograd gets the slope that the node names in place of the value's derivative."""
    value, slope = load(1, F32, [kv]), load(2, F32, [kv])
    x = torch.tensor([[1.0], [2.0]], requires_grad=True)
    values, slopes = torch.tensor([5.0, 7.0, 9.0]), torch.tensor([2.0, -3.0, 0.5])
    env = {"score": x, "kv": torch.arange(3)}
    (out,) = evaluate([node("with_slope", value, score, slope)], env, [x, values, slopes])
    assert torch.equal(out, values.expand(2, 3))
    upstream = torch.tensor([[1.0, 1.0, 1.0], [0.0, 2.0, 4.0]])
    (found,) = torch.autograd.grad(out, x, upstream)
    assert found.tolist() == [[2.0 - 3.0 + 0.5], [-6.0 + 2.0]]  # sums over kv, as x has one column

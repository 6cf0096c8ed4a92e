"""Check what the torch operators of graph nodes add to torch's own."""

from __future__ import annotations

import torch

from attnkit.graph.eval_torch import evaluate, indices, positions
from attnkit.graph.ir import F32, I32, arg, const, load, node

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


def test_positions_are_int32_and_on_the_device() -> None:
    cpu = torch.device("cpu")
    with torch.device("meta"):  # the default device, on which there are no numbers
        assert indices(4, cpu).tolist() == [0, 1, 2, 3]
        assert indices(4, "cpu").dtype == torch.int32
        found = positions((2, 3, 4, 5), cpu)
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        "b": (2, 1, 1, 1), "h": (1, 3, 1, 1), "q": (1, 1, 4, 1), "kv": (1, 1, 1, 5),
    }  # fmt: skip
    for t in found.values():
        assert t.dtype == torch.int32
        assert t.flatten().tolist() == list(range(t.numel()))
    assert indices(0, "meta").device.type == "meta"


def test_a_constant_with_a_slope_is_on_the_device_of_the_scores() -> None:
    scores = torch.empty(2, 3, device="meta")
    root = node("with_slope", const(3.0), score, const(2.0))
    (found,) = evaluate([root], {"score": scores}, [])
    assert (found.shape, found.device.type) == ((2, 3), "meta")


def test_indices_that_depend_on_data_are_clamped() -> None:
    """The data may have changed since the indices were checked; negative ones count from the end."""
    numbers = torch.tensor([10.0, 11.0, 12.0, 13.0])
    places = torch.tensor([-9, -5, -4, -1, 0, 2, 3, 4, 9], dtype=torch.int32)
    root = load(0, F32, [load(1, I32, [arg("q")])])
    at = torch.arange(len(places), dtype=torch.int32)
    (found,) = evaluate([root], {"q": at}, [numbers, places], clamps=True)
    assert found.tolist() == [10, 10, 10, 13, 10, 12, 13, 13, 13]

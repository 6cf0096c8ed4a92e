"""Compare every library mask and mod, evaluated as in a kernel, with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import masks, mods
from attnkit.codegen.cute_host import run_on_cpu
from attnkit.graph.adjoint import adjoint
from attnkit.graph.eval_torch import evaluate, positions
from attnkit.graph.ir import BOOL, Node
from attnkit.tracing.tracer import trace

LENGTH = 32
MASKS = masks.examples(LENGTH)
MODS = mods.examples(LENGTH)


def assert_same(roots: list[Node], env: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> None:
    shape = torch.broadcast_shapes(*(t.shape for t in env.values()))
    found = run_on_cpu(roots, env, tensors)
    exact = evaluate(roots, {k: _double(v) for k, v in env.items()}, tensors, torch.float64)
    plain = evaluate(roots, env, tensors)
    for root, ours, wide, single in zip(roots, found, exact, plain, strict=True):
        if root.type == BOOL:
            assert torch.equal(ours.expand(shape), wide.expand(shape))
            continue
        a, b, c = torch.broadcast_tensors(ours.double(), wide, single.double())
        assert torch.equal(a.isfinite(), b.isfinite())
        keep = b.isfinite()
        error, allowed = (a - b)[keep].abs(), (c - b)[keep].abs().max()
        floor = 4 * torch.finfo(torch.float32).eps * b[keep].abs()
        assert (error <= 2 * allowed + floor).all()


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str) -> None:
    example: Any = MASKS[name]
    traced = trace(example.mask, "mask")
    shape = (example.batch, example.heads, example.q_len, example.kv_len)
    assert_same([traced.root], positions(shape, torch.device("cpu")), traced.tensors)


@pytest.mark.parametrize("name", MODS)
def test_mod_and_its_gradients(name: str) -> None:
    example: Any = MODS[name]
    traced = trace(example.mod, "score")
    shape = (example.batch, example.heads, example.q_len, example.kv_len)
    env = positions(shape, torch.device("cpu"))
    env["score"], env["grad"] = torch.randn(shape) * 3, torch.randn(shape)
    derived = adjoint(traced.root)
    roots = [traced.root, derived.dscore, *(c for _, c in derived.loads)]
    assert_same(roots, env, traced.tensors)

"""Check that policies of selective activation checkpointing save calls, by one operator name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from attnkit import flex_attention, masks
from attnkit.runtime import torch_ops
from attnkit.runtime.compile import op
from attnkit.util.torch_private import is_intercepted
from tests.sampling import crossed

LENGTH = 40


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by one entry whenever a forward is computed."""
    seen: list[str] = []
    plain, direct = op.run_forward, torch_ops.run

    def in_operator(*arguments: Any) -> Any:
        seen.append("operator")
        return plain(*arguments)

    def run(prepared: Any, inputs: Any) -> Any:
        tensors = inputs.query, inputs.key, inputs.value, *inputs.captured.scores
        if not is_intercepted(tensors):  # else the operator computes it
            seen.append("direct")
        return direct(prepared, inputs)

    monkeypatch.setattr(op, "run_forward", in_operator)
    monkeypatch.setattr(torch_ops, "run", run)
    return seen


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.slopes = nn.Parameter(torch.randn(2))

    def mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + self.slopes[h] * (q - kv)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        mask = masks.causal() & masks.document(torch.arange(LENGTH) // 20)
        out: Tensor = flex_attention(y, y, y, self.mod, mask)
        return x + out.sin()


def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    if operator == torch.ops.attnkit.attention.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


SAVING: list[Any] = [policy, [torch.ops.attnkit.attention.default]]


def check(call: Callable[[Tensor], Tensor], block: Block, runs: list[str], count: int) -> None:
    """Check gradients, and how often the forward of attention is computed for them."""
    x = torch.randn(1, 2, LENGTH, 16, requires_grad=True)
    tensors = x, *block.parameters()
    expected = torch.autograd.grad(block(x).sum(), tensors)
    call(x).sum().backward()  # compiles
    runs.clear()
    found = torch.autograd.grad(call(x).sum(), tensors)
    assert len(runs) == count
    for ours, own in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("saving", "backend"),
    [
        *crossed(SAVING, [None, "aot_eager"]),
        *(pytest.param(saving, "inductor", marks=pytest.mark.exhaustive) for saving in SAVING),
    ],
)
def test_a_policy_that_saves_attention(saving: Any, backend: str | None, runs: list[str]) -> None:
    block = Block()
    contexts = functools.partial(create_selective_checkpoint_contexts, saving)
    call = lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    if backend is not None:
        call = torch.compile(call, fullgraph=True, backend=backend)
    check(call, block, runs, count=1)


def test_a_checkpoint_without_a_policy_computes_twice(runs: list[str]) -> None:
    block = Block()
    check(lambda x: checkpoint(block, x, use_reentrant=False), block, runs, count=2)

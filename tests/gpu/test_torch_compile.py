"""Check the Hopper kernels inside torch.compile: one graph, same bits, no second compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from attnkit import flex_attention, masks
from attnkit.jit import build
from tests.gpu import backward_kit
from tests.gpu import cute_kit as kit

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


class Layer(nn.Module):
    """Causal attention within documents with a learned slope per head; builds its mods per call."""

    def __init__(self, length: int, deterministic: bool = False) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(4, device=kit.DEVICE))
        self.register_buffer("ids", torch.arange(length, device=kit.DEVICE) // 70)
        self.deterministic = deterministic

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score + self.slopes[h] * (kv - q)

        mask = masks.causal() & (lambda b, h, q, kv: self.ids[q] == self.ids[kv])
        out: Tensor = flex_attention(
            *(query * 2, key, value, mod, mask),
            backend=kit.BACKEND, deterministic=self.deterministic,
        )  # fmt: skip
        return out * 3


def inputs(length: int, seed: int = 0) -> list[Tensor]:
    random = torch.Generator(kit.DEVICE).manual_seed(seed)
    options: dict[str, Any] = {"generator": random, "device": kit.DEVICE}
    return [
        torch.randn(2, length, 4, 64, **options).to(BF16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]


def results(call: Any, layer: Layer, made: list[Tensor]) -> list[Tensor]:
    out = call(*made)
    return [out, *torch.autograd.grad(out.square().sum(), [*made, layer.slopes])]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_kernels_run_in_one_graph(backend: str) -> None:
    layer, made = Layer(700), inputs(700)
    whole = torch.compile(layer, fullgraph=True, backend=backend)
    with backward_kit.counted() as seen:
        for _ in range(2):
            found = results(whole, layer, made)
    assert len(seen) == 2
    expected = results(layer, layer, made)
    for a, b in zip(found, expected, strict=True):
        # dQ and the slopes' gradient are summed in any order; inductor fuses what is around
        assert (a.double() - b.double()).abs().max() <= 2e-2 * b.double().abs().max()
    assert [a.stride() for a in found] == [b.stride() for b in expected]


def test_lengths_share_a_graph_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, counter = Layer(900), CompileCounterWithBackend("aot_eager")
    whole = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for length in (500, 150):  # work tiles of 192 and of 128 rows
        results(whole, layer, inputs(length))
    made: list[Any] = []
    plain = build.compile_source
    monkeypatch.setattr(build, "compile_source", lambda s, *a: made.append(s) or plain(s, *a))
    for length in (700, 160, 900, 333):  # all of several documents
        found = results(whole, layer, inputs(length))
        for a, b in zip(found[:1], results(layer, layer, inputs(length)), strict=False):
            assert torch.equal(a, b)
    assert counter.frame_count == 1
    assert not made


def test_recorded_graphs_do_not_keep_old_tiles() -> None:
    """With mode="reduce-overhead" (CUDA graphs), an edit of captured ids gives new tiles."""
    layer = Layer(700, deterministic=True).requires_grad_(False)
    whole = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for seed in range(6):
        made = [t.detach() for t in inputs(700, seed)]
        if seed == 4:
            layer.ids.copy_(torch.arange(700, device=kit.DEVICE) // 200)
        torch.compiler.cudagraph_mark_step_begin()
        found = whole(*made).clone()
        expected = layer(*made)
        assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()

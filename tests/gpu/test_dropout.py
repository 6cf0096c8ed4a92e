"""Check dropout in the GPU kernels: the published bits, repeatable, new in each replay of a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnkit import Variant, flex_attention, masks, mods
from attnkit.testing import Case, check_case
from tests.gpu import cute_kit as kit

LENGTH = 1000
VARIANTS = {
    "plain": lambda: Variant(),
    "window": lambda: Variant(None, masks.causal() & masks.sliding_window(128)),
    "elements": lambda: Variant(None, lambda b, h, q, kv: (q * 7 + kv * h) % 5 > 1),
    "alibi": lambda: Variant(
        mods.alibi(torch.linspace(0.1, 1.0, 4, device=kit.DEVICE)), masks.causal()
    ),
    "softcap": lambda: Variant(mods.softcap(20.0), masks.causal()),
}


def draw(rows: int = LENGTH, keys: int = LENGTH) -> list[Tensor]:
    """Return query [2, 4, rows, 64], key and value [2, 2, keys, 64]."""
    random = torch.Generator().manual_seed(0)
    shapes = [(2, 4, rows, 64), (2, 2, keys, 64), (2, 2, keys, 64)]
    return [torch.randn(s, generator=random).bfloat16().to(kit.DEVICE) for s in shapes]


def attend(qkv: list[Tensor], **options: object) -> Tensor:
    options = {"enable_gqa": True, "backend": kit.BACKEND, "dropout_p": 0.2} | options
    found: Tensor = flex_attention(*qkv, None, masks.causal(), **options)
    return found


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_agrees_with_float64(name: str, dim: int) -> None:
    case = Case(
        q_len=LENGTH,
        kv_len=LENGTH - 3,
        heads=4,
        kv_heads=2,
        head_dim=dim,
        value_dim=dim,
        dtype=torch.float16 if name == "window" else torch.bfloat16,
        sink=dim == 64,
        dropout_p=0.1 if dim < 192 else 0.6,
    )
    with kit.poisoned():
        check_case(VARIANTS[name](), case, device=kit.DEVICE, backends=(kit.BACKEND,))


def test_a_seed_repeats_output_and_gradients() -> None:
    found = []
    for step in range(5):
        torch.manual_seed(step % 2)
        learned = [t.requires_grad_() for t in draw()]
        out = attend(learned, deterministic=True)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), learned)))
    for a, b in ((0, 2), (0, 4), (1, 3)):
        assert all(map(torch.equal, found[a], found[b]))
    assert not torch.equal(found[0][0], found[1][0])


def test_split_rows_are_scaled_once() -> None:
    query, key, value = draw(16, 20_000)
    results = []
    for t, backend in ((torch.bfloat16, kit.BACKEND), (torch.float64, "eager")):
        torch.manual_seed(0)
        qkv = [x.to(t) for x in (query, key, value)]
        results.append(
            flex_attention(*qkv, enable_gqa=True, backend=backend, dropout_p=0.5).double()
        )
    torch.testing.assert_close(*results, rtol=2**-6, atol=2e-3)


def test_a_graph_draws_new_bits_in_each_replay() -> None:
    """Replays draw what eager calls draw after the same seed."""
    qkv = [t.requires_grad_() for t in draw()]
    grad = torch.randn_like(qkv[0])
    torch.autograd.grad(attend(qkv), qkv, grad)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(qkv)
        gradients = torch.autograd.grad(out, qkv, grad)
    replays = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        replays.append([t.clone() for t in (out, *gradients)])
    assert not torch.equal(replays[0][0], replays[1][0])
    torch.cuda.manual_seed(11)
    graph.replay()
    torch.cuda.synchronize()
    torch.cuda.manual_seed(11)
    again = attend(qkv)
    assert torch.equal(out, again)

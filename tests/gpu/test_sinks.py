"""Check attention sinks in the GPU kernels: exact, repeatable, in graphs, and once in split rows."""

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
    "late": lambda: Variant(None, lambda b, h, q, kv: (q >= 400) & (kv <= q - 450)),
    "alibi": lambda: Variant(
        mods.alibi(torch.linspace(0.1, 1.0, 4, device=kit.DEVICE)), masks.causal()
    ),
    "softcap": lambda: Variant(mods.softcap(20.0), masks.causal()),
    "row": lambda: Variant(lambda s, b, h, q, kv: s + (q % 7).sqrt(), masks.causal()),
}


def draw(rows: int = LENGTH, keys: int = LENGTH, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Return query [2, 4, rows, 64], key and value [2, 2, keys, 64], and a sink [4]."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, rows, 64), (2, 2, keys, 64), (2, 2, keys, 64)]
    qkv = [torch.randn(s, generator=random).bfloat16().to(kit.DEVICE) for s in shapes]
    return qkv, torch.randn(4, generator=random).to(kit.DEVICE)


def attend(qkv: list[Tensor], sink: Tensor, mask: object = None) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = flex_attention(
        *qkv, None, mask, enable_gqa=True, return_lse=True, backend=kit.BACKEND, sink=sink
    )
    return found


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_agrees_with_float64(name: str, dim: int) -> None:
    case = Case(
        q_len=LENGTH,
        kv_len=LENGTH - 3,
        heads=4,
        kv_heads=2,
        head_dim=dim,
        value_dim=dim,
        dtype=torch.float16 if name == "window" else torch.bfloat16,
        sink=True,
    )
    with kit.poisoned():
        report = check_case(VARIANTS[name](), case, device=kit.DEVICE, backends=(kit.BACKEND,))
    assert {"dsink", "dsink through lse"} <= {row.quantity for row in report.rows}


def test_repeated_calls_read_the_sink_that_they_are_given() -> None:
    """Relaunched forwards and backwards give the bits of a first call."""
    attempts = []
    for step in range(5):
        qkv, sink = draw(seed=step % 2)
        learned = [t.requires_grad_() for t in (*qkv, sink)]
        out, lse = attend(learned[:3], sink, masks.causal())
        out.float().sum().backward()
        attempts.append((out, lse, sink.grad))
    for a, b in ((0, 2), (0, 4), (1, 3)):
        assert all(map(torch.equal, attempts[a], attempts[b]))
    assert not torch.equal(attempts[0][2], attempts[1][2])


def test_split_rows_have_one_sink() -> None:
    qkv, sink = draw(16, 20_000)
    out, lse = attend(qkv, sink)
    wide = [t.double() for t in qkv]
    exact, exact_lse = flex_attention(
        *wide, enable_gqa=True, return_lse=True, backend="eager", sink=sink.double()
    )
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_a_graph_reads_the_new_sink() -> None:
    qkv, sink = draw()
    mask = masks.causal()
    attend(qkv, sink, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(qkv, sink, mask)
    sink.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, (out, lse), attend(qkv, sink, mask)))


def test_deterministic_gradients_repeat() -> None:
    qkv, sink = draw()
    learned = [t.requires_grad_() for t in (*qkv, sink)]
    found = []
    for _ in range(3):
        out = flex_attention(
            *qkv,
            None,
            masks.causal(),
            enable_gqa=True,
            backend=kit.BACKEND,
            deterministic=True,
            sink=sink,
        )
        found.append(torch.autograd.grad(out.float().sum(), learned))
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))

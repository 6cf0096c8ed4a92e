"""Check gradients of learned tables whose entries many scores read: buckets, blocks, documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import masks
from attnkit.jit import emulation
from tests.sampling import sampled
from tests.templates.backward_kit import CAUSAL, check, draw, gradients, ordered

LENGTH = 200
HOPPER, BLACKWELL = "emulate", "emulate:sm_100a"
# the last q block of 64 rows, from 128, has one document; the kv block before it has two
DOCUMENTS = torch.tensor([0] * 100 + [1] * 28 + [2] * 72, dtype=torch.int32)
TYPES = torch.arange(LENGTH, dtype=torch.int32) * 7 % 5


def bucket(distance: Any) -> Any:
    """T5's buckets of the distance: one each below 4, then one for each power of two."""
    near = distance.clamp(min=0)
    far = 4 + torch.log2(near.clamp(min=4).float() / 4).to(torch.int32)
    return torch.where(near < 4, near, far.clamp(max=7))


Mod = Callable[..., Any]
MODS: dict[str, tuple[Callable[[Tensor], Mod], tuple[int, ...]]] = {
    "buckets": (lambda w: lambda s, b, h, q, kv: s + w[bucket(q - kv), h], (8, 2)),
    "clamped": (lambda w: lambda s, b, h, q, kv: s + w[h, (q - kv).clamp(-3, 3) + 3], (2, 7)),
    "blocks": (lambda w: lambda s, b, h, q, kv: s + w[h, q // 64 - kv // 64 + 4], (2, 8)),
    "documents": (lambda w: lambda s, b, h, q, kv: s * w[DOCUMENTS[q], DOCUMENTS[kv]], (3, 3)),
    "types": (lambda w: lambda s, b, h, q, kv: s + w[TYPES[q], TYPES[kv]], (5, 5)),
}


def checked(name: str, backend: str, mode: str = "eager", mask: Any = CAUSAL, **sizes: Any) -> None:
    mod, shape = MODS[name]
    check(draw(LENGTH, **sizes), mod, mask, [torch.rand(shape)], mode, backend=backend)


@pytest.mark.parametrize("name", sampled([(name,) for name in MODS if name != "documents"], 4))
def test_gradients(name: str) -> None:
    """Gradients are exact, as are those of documents in the tests below."""
    checked(name, HOPPER)


@pytest.mark.parametrize("name", sampled([("blocks",), ("buckets",)], 2))
def test_blackwell(name: str) -> None:
    checked(name, BLACKWELL)


@pytest.mark.exhaustive
def test_wide_heads() -> None:
    checked("documents", HOPPER, dims=(256, 256))


@pytest.mark.parametrize("backend", sampled([(HOPPER,), (BLACKWELL,)], 2))
def test_in_all_orders(backend: str) -> None:
    checked("documents", backend, "check", masks.sliding_window(150), heads=(2, 1))


@pytest.mark.exhaustive
def test_two_ctas_share_a_tile() -> None:
    checked("blocks", BLACKWELL, dims=(128, 128))


@pytest.mark.exhaustive
def test_the_same_bits_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "documents"
    mod, shape = MODS[name]
    table = torch.rand(shape)
    monkeypatch.setitem(ordered.__globals__["MODS"], name, (mod, lambda: [table]))
    first = ordered(HOPPER, "eager", 1, name=name)
    second = ordered(HOPPER, "adversarial", 3, name=name)
    assert all(map(torch.equal, first, second))


def test_a_repeated_place_is_added_once() -> None:
    """Equal ids need fewer instructions than ids that differ at every score."""

    def instructions(ids: Tensor) -> int:
        drawn = draw(LENGTH)

        def mod(w: Tensor) -> Mod:
            return lambda s, b, h, q, kv: s + w[ids[q], ids[kv]]

        table = torch.rand(LENGTH, LENGTH)
        with emulation.session() as session:
            gradients(HOPPER, *drawn, [table], mod, CAUSAL, None)
        return max(report.warp_instructions for _, report in session.reports)

    positions = torch.arange(LENGTH, dtype=torch.int32)
    assert instructions(0 * positions) < instructions(positions)


def test_infinite_gradients_reach_their_own_entry() -> None:
    """A run of finite values and one that is infinite are different places."""
    (query, key, value), weights = draw(LENGTH)
    weights[0][0, 0, 100] = torch.inf  # a row of document 1
    mod, shape = MODS["documents"]
    table = torch.rand(shape)
    arguments = ((query, key, value), weights, [table], mod, masks.document(DOCUMENTS), None)
    with emulation.session():
        *_, found = gradients(HOPPER, *arguments)
    assert found[0, 0].isfinite()
    assert found[2, 2].isfinite()
    assert not found[1, 1].isfinite()

"""Compare the Hopper backward whose work tiles have all query heads of a kv head with the oracle.

The limits are those of `test_sm90_backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnkit import create_block_mask, flex_attention, masks, mods

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation, kernel
from attnkit.schedule import whole_heads
from attnkit.splice import backward_work, workers
from attnkit.splice.backward_work import BackwardWork
from tests.sampling import sampled
from tests.templates.backward_kit import (
    BF16,
    CAUSAL,
    FP16,
    check,
    draw,
    gradients,
    observed,
    poisoned,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned")

NEAR = CAUSAL & masks.sliding_window(50)


def sources(
    mask: Any = NEAR,
    mod: Any = None,
    heads: tuple[int, int] = (4, 2),
    length: int = 1200,
    dim: int = 64,
    **options: Any,
) -> list[kernel.Source]:
    """Return the sources of the main kernels that a backward requests."""
    qkv = [
        torch.zeros(1, h, length, dim, dtype=BF16, requires_grad=True)
        for h in (heads[0], heads[1], heads[1])
    ]
    with emulation.session(execute=False), kernel.requested_sources() as found:
        out = flex_attention(*qkv, mod, mask, backend="emulate", enable_gqa=True, **options)
        out.sum().backward()
    return [s for s in found if s.name.startswith("backward")]


def packed(found: list[kernel.Source]) -> bool:
    """Return whether the kernels pack heads."""
    assert found
    return all("('pack_gqa', True)" in s.key for s in found)


LEARNED = torch.zeros(4, requires_grad=True)
PACKED: dict[str, Callable[[], list[kernel.Source]]] = {
    "window": sources,
    "softcap": lambda: sources(mod=mods.softcap(20.0)),
    "multi-query": lambda: sources(heads=(4, 1), length=2000),
    "fixed order": lambda: sources(heads=(80, 40), deterministic=True),
    "mask without intervals": lambda: sources(
        lambda b, h, q, kv: ((q ^ kv) & 5 != 0) & NEAR(b, h, q, kv)
    ),
}
NOT_PACKED: dict[str, Callable[[], list[kernel.Source]]] = {
    "a kv head for each head": lambda: sources(heads=(2, 2)),
    "few work tiles": lambda: sources(length=200),
    "long work tiles": lambda: sources(CAUSAL, length=8192),
    "no mask": lambda: sources(None),
    "a mask of a head": lambda: sources(lambda b, h, q, kv: (q - kv < 50) & (kv + h <= q)),
    "a mod of positions": lambda: sources(mod=mods.alibi(4)),
    "a learned mod": lambda: sources(mod=lambda s, b, h, q, kv: s * LEARNED[h]),
    "documents": lambda: sources(masks.document(torch.arange(1200) // 50)),
    "few work tiles for the fixed order of 132 SMs": lambda: sources(deterministic=True),
    "dropout": lambda: sources(dropout_p=0.5),
    "sigmoid": lambda: sources(normalization="sigmoid"),
    "wide heads": lambda: sources(dim=192),
}


@pytest.mark.parametrize("name", PACKED)
def test_heads_are_packed_where_work_tiles_are_short(name: str) -> None:
    assert packed(PACKED[name]())


def test_a_window_with_packed_heads_needs_no_memset_of_dq() -> None:
    found = sources(length=8192)
    assert packed(found)
    switches = "('first_writer', True)", "('whole_heads', True)"
    assert all(any(switch in s.key for switch in switches) for s in found)


@pytest.mark.parametrize("name", NOT_PACKED)
def test_other_calls_do_not_pack_heads(name: str) -> None:
    assert not packed(NOT_PACKED[name]())


def check_packed(drawn: Any, mod: Any, mask: Any, **options: Any) -> None:
    """Check the gradients, and that the kernels that computed them pack heads."""
    with kernel.requested_sources() as found:
        check(drawn, mod, mask, **options)
    assert packed([s for s in found if s.name.startswith("backward")])


CASES: list[tuple[Any, ...]] = [  # mask, mod, head dims, heads, batch, dtype
    (NEAR, None, (64, 64), (4, 2), 1, BF16),
    (NEAR, lambda: mods.softcap(5.0), (128, 128), (6, 2), 1, FP16),
    (masks.sliding_window(30), None, (128, 64), (3, 1), 2, BF16),
    (CAUSAL & masks.chunked(64), lambda: mods.softcap(5.0), (40, 72), (4, 2), 1, BF16),
]


@pytest.mark.parametrize("case", sampled([(c,) for c in CASES], 4))
def test_packed_heads(case: tuple[Any, ...]) -> None:
    mask, mod, dims, heads, batch, dtype = case
    drawn = draw(410, dims=dims, heads=heads, batch=(batch, batch), dtype=dtype)
    check_packed(drawn, mod, mask, mode="check")


@pytest.mark.parametrize("lengths", sampled([((333, 430),), ((430, 390),), ((385, 385),)], 2))
def test_ragged_lengths(lengths: tuple[int, int]) -> None:
    check_packed(draw(*lengths, heads=(4, 2)), None, masks.sliding_window(40))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["check", "adversarial"])
def test_orders_of_the_warps(mode: str) -> None:
    check_packed(draw(410, heads=(4, 2), dims=(128, 128)), None, NEAR, mode=mode)


@pytest.fixture
def fixed_order(monkeypatch: pytest.MonkeyPatch) -> list[BackwardWork]:
    """Request sums in a fixed order, of a kernel for two SMs; return a list of the tables."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(workers, "REFERENCE_SMS", 2)
    monkeypatch.setattr(backward_work, "REFERENCE_SMS", 2)
    return observed(monkeypatch, 2)


@pytest.mark.parametrize("case", sampled([(c,) for c in CASES], 4))
def test_a_fixed_order(case: tuple[Any, ...], fixed_order: list[BackwardWork]) -> None:
    mask, mod, dims, heads, batch, dtype = case
    drawn = draw(410, dims=dims, heads=heads, batch=(batch, batch), dtype=dtype)
    check_packed(drawn, mod, mask, mode="check")
    assert fixed_order[-1].order or fixed_order[-1].starts is not None


@pytest.mark.parametrize("lengths", [(333, 430), (430, 390)])
def test_ragged_lengths_in_a_fixed_order(
    lengths: tuple[int, int], fixed_order: list[BackwardWork], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_heads, "MOST", 0)
    check_packed(draw(*lengths, heads=(6, 2)), None, masks.sliding_window(40), mode="adversarial")
    assert fixed_order[-1].order


def test_equal_heads_have_equal_bits(fixed_order: list[BackwardWork]) -> None:
    """The first writers and the order of the sums are those of one head, in each packed head."""
    (query, key, value), weights = draw(900, heads=(3, 1), dims=(128, 128))
    query, out, lse = (t[:, :1].expand_as(t).contiguous() for t in (query, *weights))
    mask = CAUSAL & masks.sliding_window(300)
    with kernel.requested_sources() as found, emulation.session(mode="eager"):
        grad, *_ = gradients("emulate", (query, key, value), (out, lse), (), None, mask, None)
    assert packed([s for s in found if s.name.startswith("backward")])
    assert fixed_order[-1].order
    assert fixed_order[-1].first_writer
    assert torch.equal(grad, grad[:, :1].expand_as(grad))


def test_rows_and_keys_that_are_masked_for_all_heads() -> None:
    keep = lambda b, h, q, kv: (q - kv < 40) & (kv <= q) & (kv >= 130) & (q < 300)
    mask = create_block_mask(keep, None, None, 410, 410, device="cpu")
    inputs, weights = draw(410, heads=(4, 2))
    check_packed((inputs, weights), None, mask)
    found = gradients("emulate", inputs, weights, (), None, mask, None)
    assert not found[0][:, :, 300:].any()
    assert not found[1][:, :, :130].any()
    assert not found[2][:, :, :130].any()


def test_a_kernel_that_runs_again() -> None:
    inputs, weights = draw(410, heads=(4, 2))
    for _ in range(2):
        check_packed((inputs, weights), None, NEAR)


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("name", "dim"),
    sampled([(name, d) for name in ("window", "softcap", "mask without intervals") for d in (64, 128)], 3),
)  # fmt: skip
def test_no_registers_spill(name: str, dim: int) -> None:
    mod = mods.softcap(20.0) if name == "softcap" else None
    mask = (lambda b, h, q, kv: ((q ^ kv) & 5 != 0) & (q - kv < 50)) if "mask" in name else NEAR
    (source,) = sources(mask, mod, dim=dim)
    assert packed([source])
    assert kernel.kernel(source).artifact.problems == ()

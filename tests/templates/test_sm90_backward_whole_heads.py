"""Check dQ of whole heads of the Hopper backward, executed on the CPU in all orders.

The sums hold NaN before the kernel runs, so that a part which is added before the first one is
stored, or a sum which is read before it is complete, gives NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import flex_attention, masks, mods
from attnkit.schedule import whole_heads

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation
from attnkit.splice import workers
from attnkit.splice.backward_work import BackwardWork
from tests.sampling import diagonal, sampled
from tests.templates.backward_kit import (
    BF16,
    CAUSAL,
    FP16,
    MODS,
    check,
    draw,
    forget,
    observed,
    ordered,
    poisoned,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned")

WINDOW = CAUSAL & masks.sliding_window(150)
DOCUMENTS = CAUSAL & masks.document(torch.arange(400) // 130)


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[BackwardWork]:
    """Return a list of the tables of backwards on two CTAs, with expensive rounding of dQ."""
    monkeypatch.setattr(whole_heads, "BYTES_A_CLOCK", 1)
    monkeypatch.setattr(whole_heads, "MOST", 4)
    return observed(monkeypatch, 2)


@pytest.mark.parametrize(
    ("mask", "dims"),
    diagonal([CAUSAL, None, WINDOW, DOCUMENTS], [(128, 128), (64, 64)]),
    ids=str,
)
def test_masks(works: list[BackwardWork], mask: Any, dims: tuple[int, int]) -> None:
    check(draw(400, dims=dims, heads=(3, 3)), mask=mask, mode="adversarial", seeds=2)
    assert works[-1].starts is not None


@pytest.mark.exhaustive
@pytest.mark.parametrize("mod", [lambda: mods.softcap(5.0), None])
def test_in_all_orders(works: list[BackwardWork], mod: Any) -> None:
    check(draw(300, dims=(128, 128), heads=(2, 2), dtype=FP16), mod, mask=CAUSAL, mode="check")
    assert works[-1].starts is not None


def test_heads_of_one_q_block(works: list[BackwardWork]) -> None:
    """Consecutive kv blocks add to the same q block, which must be complete when it is read."""
    check(draw(60, 400, dims=(128, 128), heads=(3, 3)), mode="adversarial", seeds=2)
    assert works[-1].starts is not None


@pytest.mark.parametrize("dims", sampled([((40, 56),), ((96, 72),), ((128, 40),)], 3))
def test_packed_heads_and_ragged_ends(works: list[BackwardWork], dims: tuple[int, int]) -> None:
    check(draw(333, dims=dims, heads=(4, 2), batch=(2, 2)), mask=WINDOW, mode="adversarial")
    assert works[-1].starts is not None
    assert not works[-1].units[1]


@pytest.mark.parametrize(
    "mask",
    [CAUSAL, lambda b, h, q, kv: (kv < 128) | (q >= 384)],
    ids=["causal", "the last q block"],
)
def test_deterministic_bits_do_not_depend_on_workers_or_order(
    works: list[BackwardWork], mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second mask, consecutive kv blocks add to the same q block."""
    bits = []
    for mode, ctas in (("eager", 1), ("adversarial", 2), ("adversarial", 3)):
        forget(monkeypatch)
        bits.append(ordered("emulate", mode, ctas, (128, 128), mask, heads=(3, 3)))
        assert works[-1].starts is not None
        assert not works[-1].order
    for other in bits[1:]:
        assert all(map(torch.equal, bits[0], other))


def test_a_deterministic_backward_has_the_gradients_of_the_oracle(
    works: list[BackwardWork], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    check(draw(400, dims=(128, 128), heads=(3, 3)), mask=CAUSAL, mode="adversarial")
    assert works[-1].starts is not None


def plan_backward(dim: int, heads: int, length: int, mask: Any, deterministic: bool) -> None:
    """Build the tables of a backward without executing it."""
    shape = 1, heads, length, dim
    q, k, v = (torch.zeros(shape, dtype=BF16, requires_grad=True) for _ in range(3))
    with emulation.session(execute=False):
        out = flex_attention(q, k, v, None, mask, backend="emulate", deterministic=deterministic)
        out.sum().backward()


@pytest.mark.parametrize(
    ("dim", "heads", "length", "mask", "chosen"),
    [
        (128, 2, 512, CAUSAL, False),
        (128, 264, 512, CAUSAL, True),
        (64, 340, 300, None, True),  # semaphores are predicted to be faster without their waits
        (64, 40, 2048, CAUSAL, False),
    ],
)
def test_a_deterministic_backward_has_one_list_on_all_devices(
    dim: int, heads: int, length: int, mask: Any, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes whole heads where a call in any order does on 132 SMs."""
    works = observed(monkeypatch, workers.REFERENCE_SMS)
    plan_backward(dim, heads, length, mask, False)
    assert (works[-1].starts is not None) == chosen
    tables = []
    for ctas in (1, 78, 500):
        monkeypatch.setattr(workers, "EMULATED_SMS", ctas)
        forget(monkeypatch)
        plan_backward(dim, heads, length, mask, True)
        assert (works[-1].starts is not None) == chosen
        tables.append(works[-1].work_tiles)
    assert all(torch.equal(tables[0], other) for other in tables[1:])


def test_gradients_of_captured_tensors_use_sums(works: list[BackwardWork]) -> None:
    mod, captured = MODS["relative"]
    check(draw(200, dims=(128, 128)), mod, CAUSAL, captured())
    assert works[-1].starts is None


NO_KEYS = lambda b, h, q, kv: (kv <= q) & ((kv < 128) | (kv >= 256))
NO_QUERIES = lambda b, h, q, kv: (kv <= q) & ((q < 128) | (q >= 256))


def test_kv_blocks_without_queries(works: list[BackwardWork]) -> None:
    check(draw(400, dims=(128, 128), heads=(3, 3)), mask=NO_KEYS, mode="adversarial")
    assert works[-1].starts is not None


def test_rows_without_keys_use_sums(works: list[BackwardWork]) -> None:
    check(draw(400, dims=(128, 128), heads=(3, 3)), mask=NO_QUERIES)
    assert works[-1].starts is None

"""Check first-writer dQ of the Hopper backward, executed on the CPU in all orders.

The sums hold NaN before the kernel runs. A chunk whose first writer adds stays NaN, and a chunk
that is stored late lacks the earlier additions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnkit import masks, mods
from attnkit.schedule import arrivals, first_writer

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.schedule.targets import ORDERED
from attnkit.splice import BackwardInputs, KernelCall, backward_work
from attnkit.splice import backward as splice_backward
from attnkit.splice.backward_work import BackwardWork
from tests.sampling import diagonal, sampled
from tests.templates.backward_kit import (
    CAUSAL,
    FP16,
    MODS,
    check,
    draw,
    observed,
    poisoned,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned")

WINDOW = CAUSAL & masks.sliding_window(150)
BOTH_SIDES = masks.sliding_window(100)
DOCUMENTS = CAUSAL & masks.document(torch.arange(700) // 170)
SLOPED = lambda: mods.softcap(5.0)  # tiles of 64 rows at head dim 64


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[BackwardWork]:
    """Return a list of the tables of backwards on four CTAs, with expensive zero fills."""
    monkeypatch.setattr(first_writer, "BYTES_A_CLOCK", 1)
    return observed(monkeypatch, 4)


@pytest.mark.parametrize(
    ("mask", "dims"),
    diagonal([WINDOW, BOTH_SIDES, DOCUMENTS], [(128, 128), (64, 64)]),
    ids=str,
)
def test_bands(works: list[BackwardWork], mask: Any, dims: tuple[int, int]) -> None:
    check(draw(700, dims=dims, heads=(2, 2)), mask=mask, mode="adversarial", seeds=2)
    assert works[-1].flags


@pytest.mark.exhaustive
@pytest.mark.parametrize("mod", [SLOPED, None])
def test_in_all_orders(works: list[BackwardWork], mod: Any) -> None:
    check(draw(430, heads=(1, 1), dtype=FP16), mod, mask=CAUSAL, mode="check")
    assert works[-1].flags


@pytest.mark.parametrize("dims", sampled([((40, 72),), ((64, 128),)], 2))
def test_shared_heads_and_ragged_ends(works: list[BackwardWork], dims: tuple[int, int]) -> None:
    check(draw(333, 333, dims=dims, heads=(2, 1), batch=(2, 1)), mask=WINDOW, mode="adversarial")
    assert works[-1].flags
    assert works[-1].units[1]


@pytest.mark.parametrize("name", sampled([("head",), ("relative",)], 2))
def test_gradients_of_captured_tensors(works: list[BackwardWork], name: str) -> None:
    mod, captured = MODS[name]
    check(draw(200), mod, CAUSAL, captured(), "adversarial")
    assert works[-1].flags


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch backwards to accumulate sums in a fixed order."""
    plain = splice_backward.prepare

    def fixed(call: KernelCall, inputs: BackwardInputs) -> Any:
        return plain(replace(call, template=call.template + ORDERED), inputs)

    monkeypatch.setattr(splice_backward, "prepare", fixed)


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize(
    ("mask", "dims"), diagonal([WINDOW, None], [(128, 128), (64, 64)]), ids=str
)
def test_in_a_fixed_order(works: list[BackwardWork], mask: Any, dims: tuple[int, int]) -> None:
    """In a fixed order the kv block with the first turn stores, and no chunk needs a flag."""
    check(draw(430, dims=dims, heads=(2, 1)), mask=mask, mode="adversarial", seeds=2)
    assert works[-1].first_writer
    assert not works[-1].flags


GAPS = lambda b, h, q, kv: (kv <= q) & (q - kv < 150) & ((q < 128) | (q >= 384))


@pytest.mark.parametrize("most", [0, arrivals.MOST])
def test_some_rows_that_keep_nothing(
    works: list[BackwardWork], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "MOST", most)
    check(draw(500), mask=GAPS)
    assert not works[-1].first_writer
    assert (works[-1].visits is None) == (most == 0)  # else the kernel writes the zeros


@pytest.mark.usefixtures("in_turn")
def test_zeros_in_a_fixed_order(works: list[BackwardWork]) -> None:
    check(draw(500), mask=GAPS)
    assert works[-1].order
    assert not works[-1].first_writer


def test_adding_waits_for_the_first_store(
    works: list[BackwardWork], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a first writer the kernel deadlocks, so additions do wait for the first store."""
    plain = backward_work.choose_first_writers

    def nobody(*args: Any) -> Any:
        schedule, found = plain(*args)
        return schedule, replace(found, stop=torch.zeros_like(found.stop))

    monkeypatch.setattr(backward_work, "choose_first_writers", nobody)
    with pytest.raises(AssertionError, match=r"(?s)deadlock.*polls global memory"):
        check(draw(200), mask=CAUSAL)

"""First-writer dQ of the Hopper backward, executed on the CPU in all orders.

The sums hold NaN before the kernel: a chunk whose first writer adds stays NaN, and one that is
stored late lacks what was added.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnkit import masks, mods
from attnkit.schedule import first_writer

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.splice import backward as splice_backward
from attnkit.splice import backward_work
from attnkit.splice.backward_work import Work
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
def works(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """Record the tables of backwards, for four CTAs, where writing zeros is expensive."""
    monkeypatch.setattr(first_writer, "BYTES_A_CLOCK", 1)
    return observed(monkeypatch, 4)


@pytest.mark.parametrize("mask", [WINDOW, BOTH_SIDES, DOCUMENTS], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64)])
def test_bands(works: list[Work], mask: Any, dims: tuple[int, int]) -> None:
    check(draw(700, dims=dims, heads=(2, 2)), mask=mask, mode="adversarial", seeds=2)
    assert works[-1].marks


@pytest.mark.parametrize("mod", [None, SLOPED])
def test_in_all_orders(works: list[Work], mod: Any) -> None:
    check(draw(430, heads=(1, 1), dtype=FP16), mod, mask=CAUSAL, mode="check", seeds=2)
    assert works[-1].marks


@pytest.mark.parametrize("dims", [(64, 128), (40, 72)])
def test_shared_heads_and_ragged_ends(works: list[Work], dims: tuple[int, int]) -> None:
    check(draw(333, 333, dims=dims, heads=(4, 2), batch=(2, 1)), mask=WINDOW, mode="adversarial")
    assert works[-1].marks
    assert works[-1].units[1]


@pytest.mark.parametrize("name", ["head", "relative"])
def test_gradients_of_captured_tensors(works: list[Work], name: str) -> None:
    mod, captured = MODS[name]
    check(draw(200), mod, CAUSAL, captured(), "adversarial")
    assert works[-1].marks


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Form sums in a fixed order."""
    plain = splice_backward.backward
    fixed = lambda *args, **options: plain(*args, **{**options, "deterministic": True})
    monkeypatch.setattr(splice_backward, "backward", fixed)


@pytest.mark.usefixtures("in_turn")
@pytest.mark.parametrize("mask", [WINDOW, None], ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64)])
def test_in_a_fixed_order(works: list[Work], mask: Any, dims: tuple[int, int]) -> None:
    """The kv block with the first turn stores; no chunk needs a flag."""
    check(draw(430, dims=dims, heads=(2, 1)), mask=mask, mode="adversarial", seeds=2)
    assert works[-1].stored
    assert not works[-1].marks


GAPS = lambda b, h, q, kv: (kv <= q) & (q - kv < 150) & ((q < 128) | (q >= 384))


def test_zeros_where_some_rows_keep_nothing(works: list[Work]) -> None:
    check(draw(500), mask=GAPS)
    assert not works[-1].stored


@pytest.mark.usefixtures("in_turn")
def test_zeros_in_a_fixed_order(works: list[Work]) -> None:
    check(draw(500), mask=GAPS)
    assert works[-1].order
    assert not works[-1].stored


def test_who_adds_waits_for_what_is_stored(
    works: list[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no kv block is first, the kernel cannot end."""
    plain = backward_work.chosen

    def nobody(*args: Any) -> Any:
        schedule, found = plain(*args)
        return schedule, replace(found, stop=torch.zeros_like(found.stop))

    monkeypatch.setattr(backward_work, "chosen", nobody)
    with pytest.raises(AssertionError, match=r"(?s)deadlock.*polls global memory"):
        check(draw(200), mask=CAUSAL)

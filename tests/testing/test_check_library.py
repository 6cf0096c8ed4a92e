"""Run check_variant on every mask and every mod of the library, and on common combinations."""

from __future__ import annotations

from typing import Any

import pytest

from attnkit import masks, mods
from attnkit.testing import check_variant
from tests.sampling import sampled

LENGTH = 48
CALLS = 3  # per variant; `attnkit check masks:name` draws more

MASKS = masks.examples(LENGTH)
MODS = mods.examples(LENGTH, requires_grad=True)

PAIRS: dict[str, tuple[str, str]] = {
    "alibi, documents": ("alibi", "document/causal"),
    "softcap, window": ("softcap", "sliding_window"),
    "relative bias, prefix": ("relative_bias", "prefix_lm"),
    "t5 bias, padding": ("t5_bias", "padding"),
}


@pytest.mark.parametrize("name", sampled([(name,) for name in MASKS], 2))
def test_mask(name: str) -> None:
    assert check_variant(None, MASKS[name].mask, examples=CALLS).ok


@pytest.mark.parametrize("name", sampled([(name,) for name in MODS], 2))
def test_mod(name: str) -> None:
    example = MODS[name]
    report = check_variant(example.mod, examples=CALLS)
    assert report.ok
    found = {row.quantity for row in report.rows if row.backend == "cpu"}
    # some calls are drawn with sinks, and some with more statistics
    others = ("dsink", "entropy", "column_sums")
    captured = {q for q in found if not q.startswith(others) and not q.endswith(others)}
    # besides out, lse, max_scores and, twice, dquery, dkey, dvalue; and the fully masked rows
    assert len(captured) - 10 == 2 * len(example.learned)


@pytest.mark.parametrize("name", PAIRS)
def test_pair(name: str) -> None:
    mod, mask = PAIRS[name]
    assert check_variant(MODS[mod].mod, MASKS[mask].mask, examples=CALLS).ok


def test_pairs_are_of_the_library() -> None:
    used: list[Any] = [n for pair in PAIRS.values() for n in pair]
    assert set(used) <= {*MASKS, *MODS}

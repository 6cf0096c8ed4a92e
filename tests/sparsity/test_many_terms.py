"""Check the cost of masks with hundreds of terms, counted in Python calls rather than seconds."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attnkit
from attnkit import Mask, create_block_mask, create_mask, flex_attention
from attnkit.sparsity.witness import Resolver
from attnkit.util import caches

LENGTH = 512


def windows(count: int) -> Mask:
    """Return the union of `count` windows of 3 keys below the diagonal."""
    starts = torch.randint(0, LENGTH, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = Mask(lambda b, h, q, kv: kv < 0)
    for at in starts:
        whole = whole | (lambda b, h, q, kv, at=at: (kv >= at) & (kv < at + 3) & (q >= kv))
    return whole


def points_and_calls(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Run `run`; return the number of mask positions evaluated and of Python calls."""
    points = 0
    evaluate = Resolver._mask

    def counted(self: Resolver, tiles: Any, q: Any, kv: Any) -> Any:
        nonlocal points
        result = evaluate(self, tiles, q, kv)
        points += result.numel()
        return result

    monkeypatch.setattr(Resolver, "_mask", counted)
    profile = cProfile.Profile()
    profile.runcall(run)
    monkeypatch.undo()
    return points, pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def test_the_cost_of_a_union_grows_with_its_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    first = create_block_mask(windows(3), 1, 1, LENGTH, LENGTH)
    assert first.runs.counts()[1]  # imports what it needs
    costs = []
    for count in (60, 120, 240):
        caches.clear_all()
        mask = windows(count)
        tiles = lambda m=mask: create_block_mask(m, 1, 1, LENGTH, LENGTH, BLOCK_SIZE=64).runs
        costs.append(points_and_calls(tiles, monkeypatch))
    (points, calls), *larger = costs
    for factor, (more_points, more_calls) in zip((2, 4), larger, strict=True):
        assert more_calls < 1.3 * factor * calls
        assert more_points < 1.3 * factor * max(points, 1)


@pytest.mark.parametrize("sign", ["|", "&", "^"])
def test_a_thousand_terms(sign: str) -> None:
    """A combination of a thousand masks works in every operator.

    The combination is flat, because nested calls would exceed Python's recursion limit.
    """
    combine = {"|": Mask.__or__, "&": Mask.__and__, "^": Mask.__xor__}[sign]
    terms = [lambda b, h, q, kv, i=i: (q + i) % 7 != kv % (i + 3) for i in range(1000)]
    whole = Mask(terms[0])
    for term in terms[1:]:
        whole = combine(whole, term)
    assert len(whole.parts) == 1000
    assert repr(whole).count(f" {sign} ") == 999
    kept = create_mask(whole, 1, 1, 8, 8)
    expected = create_mask(terms[0], 1, 1, 8, 8)
    for term in terms[1:]:
        part = create_mask(term, 1, 1, 8, 8)
        expected = {"|": expected | part, "&": expected & part, "^": expected ^ part}[sign]
    assert torch.equal(kept, expected)


def test_many_terms_are_exact() -> None:
    mask = windows(100)
    dense = create_mask(mask, 1, 1, LENGTH, LENGTH)
    tiles = dense.view(1, 1, 16, 32, 16, 32)
    blocks = create_block_mask(mask, 1, 1, LENGTH, LENGTH, BLOCK_SIZE=32)
    states = blocks.runs.states()
    assert torch.equal(states > 0, tiles.any(5).any(3))
    assert torch.equal(states == 2, tiles.all(5).all(3))
    query = torch.randn(1, 1, LENGTH, 8)
    out = flex_attention(query, query, query, None, mask)
    torch.testing.assert_close(
        out, flex_attention(query, query, query, None, mask, backend="eager")
    )


def test_combinations_are_flat() -> None:
    a, b, c = (Mask(lambda b, h, q, kv, i=i: q > kv + i, str(i)) for i in range(3))
    assert repr(a | b | c) == "0 | 1 | 2"
    assert repr(a | (b | c)) == "0 | 1 | 2"
    assert repr((a | b) & c) == "(0 | 1) & 2"
    assert repr(~(a | b) | c) == "~(0 | 1) | 2"
    assert (a & b & c).parts == (a, b, c)
    assert repr(attnkit.or_masks(a & b, c)) == "(0 & 1) | 2"

"""Check that masks built for fixed lengths refuse other lengths, alone and in combinations."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex

import attnkit
from attnkit import (
    Mask,
    OptionError,
    ShapeError,
    Variant,
    create_block_mask,
    create_mask,
    explain,
    masks,
    per_batch,
    per_head,
)
from attnkit.inspection import picture
from attnkit.testing import check_variant
from attnkit.tracing.built_for import sizes_for
from attnkit.tracing.mask_lengths import Lengths, as_lengths

IMAGE = masks.natten((4, 4), 3)
RECT = Mask(lambda b, h, q, kv: kv >= q, "rect()", lengths=(4, 16))
WIDE = Mask(lambda b, h, q, kv: kv > q, "wide()", lengths=(None, 16))
FREE = masks.causal()

limits = st.none() | st.integers(1, 6) | st.tuples(st.integers(1, 6), st.none() | st.integers(6, 9))


def plain(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q == kv


def allows(mask: Mask, q_len: int, kv_len: int) -> bool:
    try:
        heads = sizes_for(mask)
        create_block_mask(mask, heads.get("b", 2), heads.get("h", 2), q_len, kv_len)
    except ShapeError:
        return False
    return True


def combined(parts: list[Mask], how: int) -> Mask:
    if how > 2:
        return (per_head if how == 3 else per_batch)(parts)
    whole, *rest = parts
    for part in rest:
        whole = (whole & part, whole | part, whole ^ ~part)[how]
    return whole


@given(st.lists(st.tuples(limits, limits), min_size=2, max_size=3), st.integers(0, 4))
def test_a_composition_suits_the_lengths_that_suit_all_parts(
    several: list[tuple[Any, Any]], how: int
) -> None:
    parts = [Mask(plain, f"m{i}()", lengths=pair) for i, pair in enumerate(several)]
    pairs = [(q, kv) for q in range(1, 11) for kv in range(1, 11)]
    common = {pair for pair in pairs if all(allows(m, *pair) for m in parts)}
    if common:
        whole = combined(parts, how)
        assert {pair for pair in pairs if allows(whole, *pair)} == common
    else:
        with pytest.raises(ShapeError, match=r"m\d\(\).* was built for .* cannot be combined"):
            combined(parts, how)


@pytest.mark.parametrize(
    "mask",
    [
        IMAGE & FREE, FREE | IMAGE, plain ^ IMAGE, ~IMAGE, ~(IMAGE & plain), per_head([FREE, IMAGE]),
        per_batch([IMAGE, plain]), attnkit.and_masks(plain, IMAGE), attnkit.or_masks(IMAGE, FREE),
        WIDE & Mask(plain, lengths=(16, None)), IMAGE.shift(),
    ],
    ids=repr,
)  # fmt: skip
def test_lengths_are_carried(mask: Mask) -> None:
    assert mask.lengths == ((16, 16), (16, 16))
    assert allows(mask, 16, 16)
    assert not allows(mask, 15, 16)
    assert not allows(mask, 16, 17)


def test_conflicts_are_found_when_masks_are_combined() -> None:
    with pytest.raises(
        ShapeError,
        match=r"^natten\(\(4, 4\), 3\) was built for query length 16 and rect\(\) for 4: they "
        "cannot be combined; build both for the same query length$",
    ):
        _ = FREE & (RECT | IMAGE)
    with pytest.raises(ShapeError, match=r"for kv length 16 and natten\(\(9,\), 3\) for 9"):
        per_head([WIDE, masks.natten((9,), 3)])
    with pytest.raises(ShapeError, match="query length"):
        per_batch([RECT, IMAGE])


def test_a_shifted_mask_is_a_window_on_it() -> None:
    whole = create_mask(IMAGE, None, None, 16, 16)[0, 0]
    for start in (0, 5, 12):  # chunks of 4 queries
        chunk = IMAGE.shift(q=start)
        assert chunk.lengths == ((1, 16 - start), (16, 16))
        kept = create_mask(chunk, None, None, 4, 16)[0, 0]
        assert torch.equal(kept, whole[start : start + 4])
        with pytest.raises(ShapeError, match=f"query length {16 - start} at most, got 17"):
            create_mask(chunk, None, None, 17, 16)
        with pytest.raises(ShapeError, match="kv length 16, got 15"):
            create_mask(chunk, None, None, 4, 15)
    assert IMAGE.shift(q=-3).lengths.q == (1, 19)
    assert IMAGE.shift(q=4).shift(q=4).lengths.q == (1, 8)
    assert (IMAGE.shift(q=8) & FREE).lengths == ((1, 8), (16, 16))
    assert IMAGE.shift(q=torch.tensor(3)).lengths == ((1, None), (16, 16))
    with pytest.raises(ShapeError, match="shifted by 16 nothing is left of it"):
        IMAGE.shift(kv=16)
    with pytest.raises(ShapeError, match=r"rect\(\) was built for query length 4 and .* 3 at most"):
        _ = IMAGE.shift(q=13) & RECT


def test_every_way_in_refuses_other_lengths() -> None:
    query, key = torch.randn(1, 1, 12, 8), torch.randn(1, 1, 16, 8)
    message = r"the mask natten\(\(4, 4\), 3\) was built for query length 16, got 12; build it for"
    for backend in ("cpu", "eager"):
        with pytest.raises(ShapeError, match=message):
            attnkit.flex_attention(query, key, key, block_mask=IMAGE, backend=backend)
    ways: list[Any] = [
        lambda: create_block_mask(IMAGE, None, None, 12, 16),
        lambda: create_mask(IMAGE, None, None, 12, 16),
        lambda: Variant(None, IMAGE)(query, key, key),
        lambda: explain(None, IMAGE, q_len=12, kv_len=16),
        lambda: attnkit.intervals(IMAGE, 12, 16),
        lambda: picture.show(IMAGE, 12, 16),
        lambda: check_variant(None, IMAGE, q_len=12, examples=1),
    ]
    for way in ways:
        with pytest.raises(ShapeError, match=message):
            way()
    theirs = flex.create_block_mask(IMAGE, None, None, 12, 16, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(ShapeError, match=message):
        attnkit.flex_attention(query, key, key, block_mask=theirs)
    query = torch.randn(1, 1, 16, 8)
    assert attnkit.flex_attention(query, key, key, block_mask=IMAGE).shape == query.shape


def test_more_queries_than_the_mask_has_are_not_told_to_shift() -> None:
    with pytest.raises(ShapeError) as error:
        create_block_mask(IMAGE, None, None, 20, 16)
    assert "shift" not in str(error.value)
    with pytest.raises(ShapeError, match=r"mask\.shift\(kv=first position\)"):
        create_block_mask(IMAGE, None, None, 16, 8)


def test_checks_draw_the_lengths_of_the_mask() -> None:
    report = check_variant(None, IMAGE & FREE, examples=2, dtype=torch.float32)
    assert report.ok
    assert report.cases == 2
    assert check_variant(None, IMAGE.shift(q=9), examples=2, dtype=torch.float32).ok


@pytest.mark.parametrize(
    "lengths", [3, (3,), (0, 4), (None, -1), (True, 4), ("3", 4), ((4, 3), None), ((None, 3), 3)]
)
def test_bad_lengths(lengths: Any) -> None:
    with pytest.raises(OptionError, match="lengths must be"):
        Mask(plain, lengths=lengths)


def test_lengths_are_told_in_words() -> None:
    assert str(Lengths()) == "any lengths"
    assert str(Lengths((4, 4), (2, None))) == "query length 4, kv length 2 or more"
    assert str(Lengths(kv=(1, 9))) == "kv length 9 at most"
    assert str(Lengths(q=(3, 9))) == "query length 3 to 9"


def test_lengths_as_a_value() -> None:
    assert as_lengths(None) == Lengths()
    assert as_lengths((3, (2, None))) == ((3, 3), (2, None))
    at_least = Mask(plain, "m()", lengths=(None, (2, None)))
    with pytest.raises(ShapeError, match="kv length 2 or more, got 1"):
        create_block_mask(at_least, None, None, 1, 1)
    some = Mask(plain, "m()", lengths=((3, 5), None))
    with pytest.raises(ShapeError, match="query length 3 to 5, got 6"):
        create_block_mask(some, None, None, 6, 1)


EXPECTED = " in lengths must be None, a positive int, or (least, most) with least <= most, got "


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (3, r"lengths must be a (query, kv) pair or None, got 3"),
        ((1, 2, 3), r"lengths must be a (query, kv) pair or None, got (1, 2, 3)"),
        ((None, 0), "the kv length" + EXPECTED + "0"),
        ((2.5, None), "the query length" + EXPECTED + "2.5"),
        (((3, 2), None), "the query length" + EXPECTED + "(3, 2)"),
        ((None, (1, 2, 3)), "the kv length" + EXPECTED + "(1, 2, 3)"),
    ],
)
def test_wrong_lengths_are_shown(lengths: Any, message: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Mask(lambda b, h, q, kv: q >= kv, lengths=lengths)

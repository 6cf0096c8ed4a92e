"""Check that masks and mods with declared tables refuse calls of other sizes."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnkit
from attnkit import (
    ArgumentError,
    Axes,
    Mask,
    OptionError,
    ScoreMod,
    ShapeError,
    create_block_mask,
    create_mask,
    flex_attention,
    per_batch,
    per_head,
)
from attnkit.tracing.axes import Sizes

B, H, Q, KV = 2, 3, 5, 7
IDENTITY = lambda s, b, h, q, kv: s
KEEP = lambda b, h, q, kv: kv >= 0


def attend(score_mod=None, mask=None, kv_heads=H, **options):
    """Call attention with batch 2, 3 query heads, 5 queries and 7 keys."""
    key = torch.randn(B, kv_heads, KV, 8)
    query = torch.randn(B, H, Q, 8)
    options["enable_gqa"] = kv_heads != H
    return flex_attention(query, key, key, score_mod, mask, **options)


def declared(name, table, *axes):
    """Return keyword arguments of `attend`: a score_mod and a mask that each declare a table."""
    own = [Axes(name, table, *axes)]
    return [{"score_mod": ScoreMod(IDENTITY, axes=own)}, {"mask": Mask(KEEP, axes=own)}]


FITTING = [
    ((H,), "h"), ((B,), "b"), ((B, H), "b", "h"), ((Q,), "q"), ((KV,), "kv"), ((KV,), "len"),
    ((9,), "len"), ((H, 40), "h", None), ((3, 2), ("q", 2), None), ((2,), ("kv", 4)), (H, "h"),
    ((1, 1, Q, KV), None, None, "q", "kv"),
]  # fmt: skip

REFUSED = [
    (((9,), "h"), "slopes has shape (9,), read as [h]: for 9 query heads, got 3"),
    (((8, H), "h", None), "slopes has shape (8, 3), read as [h, _]: for 8 query heads, got 3; it looks transposed: pass slopes.T"),
    (((4, 8), "h", None), "for 4 query heads, got 3; build it for the heads of the query"),
    (((4,), "b"), "for batch size 4, got 2; build it for the batch of the query"),
    (((1, 9), "b", "len"), "for batch size 1, got 2; to share it, pass slopes.expand(2, -1)"),
    (((7, B), "b", "len"), "for batch size 7, got 2; it looks transposed: pass slopes.T"),
    (((7, 5), "q", None), None),
    (((4,), "q"), "read as [q]: for query length 4 at most, got 5; build it for that length"),
    (((6,), "kv"), "for kv length 6 at most, got 7"),
    (((6,), "len"), "read as [len]: for kv length 6 at most, got 7"),
    (((7, 5), "kv", "q"), None),
    (((5, 7), "kv", "q"), "for kv length 5 at most, got 7; it looks transposed: pass slopes.T"),
    (((2,), ("q", 2)), "read as [q / 2]: for query length 4 at most, got 5"),
    (((1, 4, 3), None, "h", None), "for 4 query heads, got 3; it looks transposed: pass slopes.transpose(1, 2)"),
    ((4, "h"), "slopes is 4: for 4 query heads, got 3"),
]  # fmt: skip


@pytest.mark.parametrize("table", FITTING, ids=str)
def test_a_table_that_fits(table):
    shape, *axes = table
    for call in declared("slopes", shape if isinstance(shape, int) else torch.zeros(shape), *axes):
        attend(**call)


@pytest.mark.parametrize(("table", "message"), REFUSED, ids=[str(t) for t, _ in REFUSED])
def test_a_table_of_another_size(table, message):
    shape, *axes = table
    for call in declared("slopes", shape if isinstance(shape, int) else torch.zeros(shape), *axes):
        if message is None:
            attend(**call)
            continue
        with pytest.raises(ShapeError, match=re.escape(message)):
            attend(**call)


def test_heads_are_query_heads():
    fits, too_few = torch.zeros(H), torch.zeros(1)
    attend(**declared("slopes", fits, "h")[0], kv_heads=1)
    hint = (
        "an entry per kv head, but heads are query heads: pass slopes.repeat_interleave(3, dim=0)"
    )
    with pytest.raises(ShapeError, match=re.escape(hint)):
        attend(**declared("slopes", too_few, "h")[0], kv_heads=1)


def test_every_way_to_use_a_mask_compares_the_tables():
    mask = Mask(lambda b, h, q, kv: ids[b, q] == ids[b, kv], axes=[Axes("ids", (3, 8), "b", "len")])
    ids = torch.zeros(3, 8, dtype=torch.int32)
    create_block_mask(mask, 3, None, 8, 8)
    for batch, length in ((2, 8), (3, 9)):
        sizes = batch, 1, length, length
        with pytest.raises(ShapeError, match="ids is"):
            create_block_mask(mask, *sizes)
        with pytest.raises(ShapeError, match="ids is"):
            create_mask(mask, *sizes)
        with pytest.raises(ShapeError, match="ids is"):
            attnkit.intervals(mask, length, length, batch=batch)
        with pytest.raises(ShapeError, match="ids is"):
            attnkit.explain(None, mask, q_len=length, batch=batch)
        x = torch.zeros(batch, 1, length, 8, device="meta")
        with pytest.raises(ShapeError, match="ids is"):
            flex_attention(x, x, x, block_mask=mask)


def test_a_table_in_a_repeated_call():
    mod = ScoreMod(lambda s, b, h, q, kv: s + slopes[h], axes=[Axes("slopes", (H,), "h")])
    slopes = torch.zeros(H)
    for _ in range(3):
        attend(mod)
    more = torch.zeros(B, H - 1, Q, 8)
    for _ in range(2):
        with pytest.raises(ShapeError, match="slopes is 3: for 3 query heads, got 2"):
            flex_attention(more, more, more, mod)


def test_functions_that_only_differ_in_their_declarations():
    slopes = torch.zeros(H)
    make = lambda *axes: ScoreMod(lambda s, b, h, q, kv: s + slopes[h], axes=axes)
    attend(make(Axes("slopes", slopes, "h")))
    with pytest.raises(ShapeError, match="slopes"):
        attend(make(Axes("slopes", slopes, "b")))


def test_the_shape_is_read_at_the_call():
    ids = torch.zeros(4, dtype=torch.int32)
    mask = Mask(lambda b, h, q, kv: ids[q] == ids[kv], axes=[Axes("ids", ids, "len")])
    with pytest.raises(ShapeError, match="ids has shape"):
        attend(mask=mask)
    ids.data = torch.zeros(9, dtype=torch.int32)
    attend(mask=mask)


def test_a_copy_declares_the_same_tables():
    slopes = torch.ones(H, requires_grad=True) * 2  # torch refuses to copy what is not a leaf
    mod = ScoreMod(lambda s, b, h, q, kv: s + slopes[h], axes=[Axes("slopes", slopes, "h")])
    copied = copy.deepcopy([mod])[0]
    assert copied.axes[0].table is slopes
    attend(copied)


def test_a_combination_declares_the_tables_of_its_parts():
    two, three = (Mask(KEEP, str(n), axes=[Axes(f"ids{n}", (n,), "b")]) for n in (2, 3))
    for mask in (two & KEEP, KEEP | two, ~two, two ^ KEEP, per_head([two, KEEP, KEEP])):
        assert [t.name for t in mask.axes if "ids" in t.name] == ["ids2"]
    message = "ids2 is for batch size 2 and ids3 for 3: they cannot be combined"
    for join in (lambda: two & three, lambda: per_head([two, three])):
        with pytest.raises(ShapeError, match=message):
            join()


@pytest.mark.parametrize(("make", "size"), [(per_head, 2), (per_batch, 3)])
def test_one_mask_for_each_head_or_batch_entry(make, size):
    mask = make([KEEP, lambda b, h, q, kv: kv <= q] * size)
    with pytest.raises(ShapeError, match=f"the number of masks is {2 * size}: for "):
        attend(mask=mask)


@given(
    size=st.integers(1, 30),
    q=st.one_of(st.none(), st.integers(-5, 9)),
    kv=st.one_of(st.none(), st.integers(-5, 9)),
    axis=st.sampled_from(["q", "kv", "len"]),
)
def test_a_shift_moves_the_limits(size, q, kv, axis):
    moved = Axes("ids", (size,), axis).shifted(q, kv)
    for name, by in (("q", q), ("kv", kv)):
        most = size - (by or 0)
        if axis not in (name, "len"):
            most = 1000
        for length in (most - 1, most, most + 1):
            sizes = Sizes(**{name: length})
            if length <= most or axis not in (name, "len"):
                moved.check(sizes)
            else:
                with pytest.raises(ShapeError, match="ids is"):
                    moved.check(sizes)


def test_a_shift_by_a_tensor_leaves_no_limit():
    ids = Axes("ids", (3, 8), "b", "len").shifted(torch.tensor([1, 2, 3]), None)
    ids.check(Sizes(b=3, q=100, kv=8))
    with pytest.raises(ShapeError, match="kv length 8 at most"):
        ids.check(Sizes(b=3, kv=9))
    mask = Mask(KEEP).shift(q=torch.tensor([1, 2, 3]))
    with pytest.raises(ShapeError, match=re.escape("q has shape (3,), read as [b]")):
        attend(mask=mask)


def test_a_block_mask_whose_mask_reads_the_batch_is_not_shared():
    rows = torch.tensor([1, 7])
    mask = create_block_mask(lambda b, h, q, kv: kv < rows[b], 1, None, Q, KV)
    with pytest.raises(
        ShapeError, match="built for batch 1 and its mask_mod reads b, query has batch 2"
    ):
        attend(mask=mask)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Axes(3, 3, "h"), ArgumentError, "the name of a table must be a str, got int"),
        (lambda: Axes("t", "abc", "h"), ArgumentError, "the table t must be a tensor, an int or a shape, got str"),
        (lambda: Axes("t", (2, 3), "h"), ShapeError, "t has 2 axes, shape (2, 3); 1 were declared"),
        (lambda: Axes("t", (2,), "heads"), OptionError, "an axis of t must be \"b\", \"h\""),
        (lambda: Axes("t", (2,), ("q", 0)), OptionError, "got ('q', 0)"),
        (lambda: Mask(KEEP, axes=Axes("t", 2, "h")), ArgumentError, "axes must be a list of attnkit.Axes"),
        (lambda: Mask(KEEP, label=3), ArgumentError, "label must be a str or None, got int"),
        (lambda: Mask(KEEP, frame="other"), OptionError, 'frame must be "", "common" or "separate", got \'other\''),
        (lambda: ScoreMod(IDENTITY, axes=["h"]), ArgumentError, "axes must be a list of attnkit.Axes, got ['h']"),
        (lambda: ScoreMod(3), ArgumentError, "score_mod must be a function score_mod(score, b, h, q, kv), got int"),
    ],
    ids=range(10),
)  # fmt: skip
def test_bad_declarations(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()

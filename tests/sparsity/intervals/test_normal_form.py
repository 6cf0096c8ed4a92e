"""Check the interval normal form of masks against brute force, and the reason for refusals."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attnkit
from attnkit import create_mask, masks
from attnkit.errors import BoundsError, DeviceError, DTypeError, OptionError, ShapeError
from attnkit.graph.eval_torch import evaluate
from attnkit.sparsity.intervals.normal_form import (
    Intervals,
    NoIntervals,
    find_intervals,
    intervals_of,
)
from attnkit.tracing.guards import trace_cached
from attnkit.tracing.mask import Mask, per_batch, per_head
from attnkit.tracing.tracer import Traced, trace
from attnkit.util import caches
from tests.sparsity.mask_graphs import Case, cases
from tests.sparsity.mask_graphs import dense as dense_graph

EXAMPLES = masks.examples(96)

# largest number of intervals per row at length 96; the other examples have no interval form
COUNTS = {
    "causal": 1, "sliding_window": 1, "sliding_window/both": 1, "sliding_window/right": 1,
    "prefix_lm": 1, "longformer": 2, "streaming_llm": 2, "block_diagonal": 1,
    "causal/bottom-right": 1, "prefix": 1, "block_diagonal/cross": 1, "block_diffusion": 2,
    "document": 1, "document/causal": 1, "document_from_lengths": 1,
    "document_from_cu_seqlens": 1, "shared_prefix": 2, "shared_prefix/groups": 2, "padding": 1,
    "padding/rows": 1, "prefix_lm/batch": 1, "causal/cached": 1, "topk_blocks": 3, "natten": 1,
    "natten/2d": 3, "sliding_tile": 2,
}  # fmt: skip
REFUSED = [
    "dilated", "dilated/both", "strided", "fixed", "document/unsorted", "document/batch",
    "topk_blocks/marked", "natten/3d", "tree_from_table", "paged",
]  # fmt: skip


def kept(found: Intervals) -> Tensor:
    """Return the dense mask of the interval bounds, bool [batch, heads, q_len, kv_len]."""
    low, high = found.rows().unbind(-1)
    kv = torch.arange(found.shape[3])
    return ((kv >= low[..., None]) & (kv < high[..., None])).any(-2)


def check(mask: Callable[..., Any], q_len: int, kv_len: int, batch: int, heads: int) -> int:
    """Compare the form with the dense mask; return its number of intervals, -1 if it has none."""
    found = intervals_of(mask, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads)
    if isinstance(found, NoIntervals):
        return -1
    expected = create_mask(mask, batch, heads, q_len, kv_len)
    assert torch.equal(kept(found).expand(expected.shape), expected)
    case = Case(found.predicate(), found.tensors, q_len, kv_len, batch, heads)
    assert torch.equal(dense_graph(case.root, case.tensors, case), expected)
    return len(found)


@pytest.mark.parametrize("name", EXAMPLES)
def test_library(name: str) -> None:
    count = check(*EXAMPLES[name])
    if name in COUNTS:
        assert count == COUNTS[name]
    if name in REFUSED:
        assert count == -1


@given(
    divisor=st.integers(1, 9).map(lambda n: -n),
    op=st.sampled_from(["//", "%", "trunc"]),
    limit=st.integers(-9, 9),
    sides=st.sampled_from(["kv", "-kv", "q - kv", "kv - 20", "2 * kv + q"]),
    keep_below=st.booleans(),
)
def test_negative_divisors(divisor: int, op: str, limit: int, sides: str, keep_below: bool) -> None:
    """Intervals and tiles are exact for division by negative constants."""

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        x = {"kv": kv, "-kv": -kv, "q - kv": q - kv, "kv - 20": kv - 20, "2 * kv + q": 2 * kv + q}
        if op == "trunc":
            value = torch.div(x[sides], divisor, rounding_mode="trunc")
        else:
            value = x[sides] // divisor if op == "//" else x[sides] % divisor
        return value <= limit if keep_below else value > limit

    q, kv = torch.arange(40)[:, None], torch.arange(50)
    expected = mask(0, 0, q, kv).expand(40, 50)
    assert torch.equal(create_mask(mask, 1, 1, 40, 50)[0, 0], expected)
    check(mask, 40, 50, 1, 1)
    tiles = attnkit.create_block_mask(mask, 1, 1, 40, 50, BLOCK_SIZE=10).to_dense()[0, 0]
    assert torch.equal(tiles > 0, expected.view(4, 10, 5, 10).any(3).any(1))


@pytest.mark.parametrize("limit", [-3, 0, 7])
@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("of_two", [torch.minimum, torch.maximum])
def test_limits_of_the_lesser_and_the_greater(of_two: Any, below: bool, limit: int) -> None:
    """A limit of min or max is solved for both arguments, from either side."""

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        value = of_two(kv - q, 20 - kv)
        return value <= limit if below else value > limit

    assert check(mask, 40, 50, 1, 1) > 0


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "distance": lambda q, kv: (q - kv).abs(),
    "distance to a column": lambda q, kv: (kv - 30).abs() - q // 2,
    "where a row": lambda q, kv: torch.where(q < 11, kv - q, 25 - kv),
    "where a column": lambda q, kv: torch.where(kv < 30, kv - q, 3),
    "where a diagonal": lambda q, kv: torch.where(q - kv >= 4, q - kv - 2, 30 - kv),
    "bool": lambda q, kv: 9 * (kv > q).to(torch.int32),
    "shift": lambda q, kv: (kv - q) >> 2,
    "quotient": lambda q, kv: (kv + 3) // 5 - q // 8,
}


@pytest.mark.parametrize("limit", [-3, 0, 1, 8])
@pytest.mark.parametrize("comparison", [operator.le, operator.gt, operator.eq, operator.ne])
@pytest.mark.parametrize("name", FORMS)
def test_limits_of_one_term(name: str, comparison: Any, limit: int) -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return comparison(FORMS[name](q, kv), limit)

    assert check(mask, 40, 50, 1, 1) >= 0


@pytest.mark.parametrize(
    "comparison", [operator.lt, operator.le, operator.eq, operator.ne, operator.xor]
)
def test_comparisons_of_conditions(comparison: Any) -> None:
    for mask in (
        lambda b, h, q, kv: comparison(kv <= q, kv < 17),
        lambda b, h, q, kv: comparison(q < 9, kv <= q),
        lambda b, h, q, kv: ~comparison(kv > q + 3, q < 20),
    ):
        assert check(mask, 40, 50, 1, 1) > 0


def test_tables_of_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnkit.sparsity.intervals.tables._MAX_ENTRIES", 39)
    reason = shown(masks.document(torch.arange(40) // 7), q_len=40, kv_len=40)
    assert reason.endswith("its ends in all rows are 40 numbers, too many to hold")


@pytest.mark.parametrize("length", [32, 61, 200])
def test_library_at_other_lengths(length: int) -> None:
    found = {name: check(*example) for name, example in masks.examples(length).items()}
    assert sum(count > 0 for count in found.values()) > len(found) // 2


# Masks of the library that fit any length, and random documents, at length up to 80.
LENGTH = 80


@st.composite
def simple_masks(draw: st.DrawFn) -> Mask:
    size = lambda least=0: draw(st.integers(least, LENGTH))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    ids = torch.randint(0, draw(st.integers(1, 6)), (LENGTH,), generator=seed)
    own = torch.randint(0, 3, (2, LENGTH), generator=seed).sort(-1).values
    lengths = torch.randint(0, LENGTH, (2,), generator=seed)
    cuts = torch.randint(-1, LENGTH, (3, LENGTH), generator=seed)
    return draw(
        st.sampled_from(
            [
                lambda: masks.causal(),
                lambda: masks.sliding_window(size(), size()),
                lambda: masks.prefix(size()),
                lambda: masks.prefix_lm(lengths),
                lambda: masks.padding(lengths, lengths.flip(0)),
                lambda: masks.streaming_llm(size(), size()),
                lambda: masks.longformer(size(), draw(st.integers(0, 3))),
                lambda: masks.block_diagonal(size(1), size(1)),
                lambda: masks.dilated(size(), draw(st.integers(1, 30)), size()),
                lambda: masks.fixed(size(8)),
                lambda: masks.document(ids.sort().values),
                lambda: masks.document(ids.sort(descending=True).values),
                lambda: masks.document(ids),
                lambda: masks.document(own),
                lambda: Mask(lambda b, h, q, kv: cuts[h, q] > kv, "below()"),
                lambda: Mask(lambda b, h, q, kv: (2 * kv + q).abs() < 3 * cuts[h, q], "wide()"),
                lambda: Mask(lambda b, h, q, kv: kv * cuts[0, 5] <= q, "slope()"),
                lambda: per_head([masks.causal(), masks.prefix(9), masks.sliding_window(5)]),
                lambda: masks.causal().shift(q=draw(st.integers(-9, 9)), kv=-3),
            ]
        )
    )()


COMPOSED = st.recursive(
    simple_masks(),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: p[0] & p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] | p[1]),
        st.tuples(inner, inner).map(lambda p: p[0] ^ p[1]),
        inner.map(lambda m: ~m),
    ),
    max_leaves=3,
)


@given(COMPOSED, st.integers(1, LENGTH), st.integers(1, LENGTH))
def test_compositions(mask: Mask, q_len: int, kv_len: int) -> None:
    check(mask, q_len, kv_len, 2, 3)


@given(cases(max_len=50, max_depth=3))
def test_any_expression(case: Case) -> None:
    mask = Traced("mask", case.root, case.tensors, tuple(f"t{i}" for i in range(9)))
    try:
        found = find_intervals(mask, **case.sizes())
    except BoundsError:
        return
    if isinstance(found, Intervals):
        expected = dense_graph(case.root, case.tensors, case)
        assert torch.equal(kept(found).expand(expected.shape), expected)
        assert torch.equal(dense_graph(found.predicate(), found.tensors, case), expected)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.booleans())
def test_documents_have_the_form_exactly_where_their_ids_stand_together(
    ids: list[int], causal: bool
) -> None:
    table = torch.tensor(ids)
    mask = masks.document(table) & masks.causal() if causal else masks.document(table)
    count = check(mask, len(ids), len(ids), 1, 1)
    dense = create_mask(mask, None, None, len(ids), len(ids))[0, 0].int()
    runs = (dense.diff(prepend=torch.zeros(len(ids), 1), dim=1) > 0).sum(1).max()
    if runs == 1:
        assert count == 1
    if runs > 4:
        assert count == -1


# --- the form


def shown(mask: Callable[..., Any], **sizes: int) -> str:
    return str(intervals_of(mask, **{"q_len": 64, "kv_len": 64, **sizes}))


def test_formulas() -> None:
    one = "1 interval a row\n  "
    assert shown(masks.causal()) == one + "kv < q + 1"
    assert shown(masks.sliding_window(8, 2)) == one + "q - 8 <= kv < q + 3"
    assert shown(masks.prefix_lm(9)) == one + "kv < max(q + 1, 9)"
    assert shown(masks.block_diagonal(8)) == one + "q // 8 * 8 <= kv < q // 8 * 8 + 8"
    assert shown(masks.causal() | ~masks.causal()) == one + "every kv"
    assert shown(masks.causal() & ~masks.causal()) == "0 intervals a row\n  nothing"
    near = Mask(lambda b, h, q, kv: (q - kv).abs() <= 3)
    assert shown(near) == one + "q - 3 <= kv < q + 4"
    assert shown(near ^ masks.causal()) == (
        "2 intervals a row\n  q + 1 <= kv < q + 4\n  kv < q - 3"
    )
    assert shown(masks.streaming_llm(8, 4)) == (
        "2 intervals a row\n  q - 8 <= kv < q + 1\n  kv < min(q + 1, 4)"
    )


def test_formulas_read_captured_tensors() -> None:
    lengths = torch.tensor([3, 5])
    found = intervals_of(lambda b, h, q, kv: kv < lengths[b], q_len=8, kv_len=8, batch=2)
    assert str(found) == "1 interval a row\n  kv < lengths[b]"
    assert isinstance(found, Intervals)
    assert found.captured == len(found.tensors) == 1
    assert found.tensors[0] is lengths


def test_document_tables() -> None:
    ids = torch.tensor([3, 3, 5, 5, 5, 9])
    mask = lambda b, h, q, kv: (ids[q] == ids[kv]) & (kv <= q)
    found = intervals_of(mask, q_len=6, kv_len=6)
    assert isinstance(found, Intervals)
    assert str(found) == (
        "1 interval a row\n"
        "  ids_start[q] <= kv < min(ids_end[q], q + 1)\n"
        "  ids_start: computed once, int32 [6]\n"
        "  ids_end: computed once, int32 [6]"
    )
    assert found.names == ("ids", "ids_start", "ids_end")
    assert found.tensors[1].tolist() == [0, 0, 2, 2, 2, 5]
    assert found.tensors[2].tolist() == [2, 2, 5, 5, 5, 6]


def test_per_head_needs_no_more_intervals_than_a_head() -> None:
    mask = per_head([masks.causal(), masks.sliding_window(4, 2), masks.prefix(5)])
    assert check(mask, 20, 20, 1, 3) == 1
    rows = per_batch([masks.streaming_llm(3, 2), masks.causal()])
    assert check(rows, 20, 20, 2, 1) == 2


def test_reasons() -> None:
    ids = torch.tensor([0, 1] * 20)
    reason = shown(lambda b, h, q, kv: ids[q] == ids[kv], q_len=40, kv_len=40)
    assert reason == "no interval form: `ids[kv]` is not in order along kv"
    assert "in too many stretches of q - kv" in shown(masks.dilated(30, 3))
    table = torch.ones(64, 64, dtype=torch.bool)
    assert "`table[q, kv]`" in shown(lambda b, h, q, kv: table[q, kv])
    product = shown(lambda b, h, q, kv: q * kv < 30)
    assert product == "no interval form: `q * kv` depends on q and kv together"
    assert shown(masks.fixed(8)).endswith("separate intervals, more than 4")


def test_reasons_name_the_type() -> None:
    wave = shown(lambda b, h, q, kv: torch.sin(q * 0.7 + kv * 1.3) < 0.5)
    assert wave.endswith("compares floats that depend on q and kv")
    quotient = shown(lambda b, h, q, kv: kv // (q + 1) < 3)
    assert quotient.endswith("`kv // (q + 1)` cannot be solved for kv")


def test_starts_from_two_tables_and_one_end() -> None:
    """Two stretches that end together are one, from the lower of their starts."""
    first, second = torch.tensor([0, 3, 1, 2, 0, 5]), torch.tensor([0, 0, 2, 2, 4, 1])
    count = check(
        lambda b, h, q, kv: ((kv >= first[q]) | (kv >= second[q])) & (kv <= q), 6, 6, 1, 1
    )
    assert count == 1


@pytest.mark.parametrize("name", [name for name in COUNTS if "document" in name or "topk" in name])
def test_searches_in_passes_find_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = check(*masks.examples(96)[name])
    caches.clear_all()
    monkeypatch.setattr("attnkit.sparsity.intervals.search._PASS_NUMBERS", 30)
    assert check(*masks.examples(96)[name]) == expected


def test_bounds_are_on_the_device_of_the_mask() -> None:
    ids = torch.tensor([0, 0, 1, 1, 1])
    with torch.device("meta"):  # on which nothing can be computed by mistake
        found = attnkit.intervals(masks.document(ids) & masks.causal(), 5, 5)
        assert found is not None
        found_ends = found.ends()
    assert found_ends[0].flatten().tolist() == [0, 0, 2, 2, 2]
    assert all(end.device == torch.device("cpu") for end in found_ends)


def test_no_more_than_the_most_intervals() -> None:
    mask = trace(masks.streaming_llm(8, 4), "mask")
    assert isinstance(find_intervals(mask, q_len=64, kv_len=64, most=2), Intervals)
    assert isinstance(find_intervals(mask, q_len=64, kv_len=64, most=1), NoIntervals)
    # the window reaches the sinks in every row: one interval is enough, as a table
    found = find_intervals(mask, q_len=12, kv_len=64, most=1)
    assert isinstance(found, Intervals)
    assert len(found) == 1


# --- caching of the form


def test_kept_until_the_data_changes() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    mask = trace(lambda b, h, q, kv: ids[q] == ids[kv], "mask")
    first = find_intervals(mask, q_len=4, kv_len=4)
    assert find_intervals(mask, q_len=4, kv_len=4) is first
    ids[1] = 1
    second = find_intervals(mask, q_len=4, kv_len=4)
    assert isinstance(second, Intervals)
    assert second.tensors[1].tolist() == [0, 1, 1, 1]


def test_float64_masks_are_decided_in_float64() -> None:
    edge = torch.tensor(1 + 1e-12, dtype=torch.float64)
    mask = trace(lambda b, h, q, kv: kv.double() < edge, "mask")
    counts = []
    for dtype in (torch.float32, torch.float64):
        found = find_intervals(mask, q_len=1, kv_len=4, dtype=dtype)
        assert isinstance(found, Intervals)
        kv = {"kv": torch.arange(4, dtype=torch.int32), "q": torch.zeros(1, dtype=torch.int32)}
        (expected,) = evaluate([mask.root], kv, mask.tensors, dtype)
        low, high = found.rows(dtype).unbind(-1)
        counts.append(int(high - low))
        assert counts[-1] == int(expected.sum())
    assert counts == [1, 2]


# --- the public function


def test_public_function() -> None:
    found = attnkit.intervals(masks.causal(), 5, 7)
    assert found is not None
    assert found.rows().tolist() == [[[[[0, q + 1]] for q in range(5)]]]
    assert attnkit.intervals(masks.dilated(30, 3), 64, 64) is None
    padded = attnkit.intervals(masks.padding(torch.tensor([2, 3])), 2, 4, batch=2)
    assert padded is not None
    assert padded.rows()[:, 0, 0, 0].tolist() == [[0, 2], [0, 3]]


def test_bad_input() -> None:
    with pytest.raises(OptionError, match="q_len must be a positive int, got 0"):
        attnkit.intervals(masks.causal(), 0, 4)
    with pytest.raises(ShapeError, match=r"ids has shape \(4,\), .* got 8"):
        attnkit.intervals(masks.document(torch.tensor([0, 0, 1, 1])), 8, 4)
    ids = torch.tensor([0, 0, 1, 1])
    with pytest.raises(BoundsError, match="has 4 entries"):
        attnkit.intervals(Mask(lambda b, h, q, kv: ids[q] == ids[kv]), 8, 4)
    with pytest.raises(DeviceError, match="meta"):
        attnkit.intervals(masks.document(torch.tensor([0, 1])), 2, 2, device="meta")
    score = replace(trace_cached(masks.causal(), "mask", torch.device("cpu")))
    wrong = replace(score, root=score.root.args[0])
    with pytest.raises(DTypeError, match="a mask must be bool"):
        find_intervals(wrong, q_len=2, kv_len=2)


def test_ends_beyond_int32_are_refused() -> None:
    mask = lambda b, h, q, kv: kv - q <= 2**31 - 1
    assert "cannot be computed" in shown(mask)


def test_a_mask_of_many_conditions_ends_in_time() -> None:
    table = torch.randint(0, 50, (64, 40))

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        kept = table[kv, 0] == q
        for i in range(1, 40):
            kept = kept ^ (table[kv, i] <= q + i)
        return kept

    assert shown(mask).startswith("no interval form")


@settings(max_examples=20)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**16))
def test_sorted_tables_of_any_kind(q_len: int, kv_len: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    keys = torch.randint(-20, 20, (2, kv_len), generator=random).sort(-1).values
    limits = torch.randint(-25, 25, (3, q_len), generator=random)
    mask = lambda b, h, q, kv: (keys[b, kv] <= limits[h, q]) & (limits[h, q] - 9 < keys[b, kv])
    assert check(mask, q_len, kv_len, 2, 3) in (0, 1)


def test_reasons_show_the_condition() -> None:
    random = torch.Generator().manual_seed(2)
    first, second = (torch.randperm(90, generator=random) for _ in range(2))
    kept = torch.arange(90) % 2 == 0
    reasons: list[tuple[Callable[..., Any], str]] = [
        (
            lambda b, h, q, kv: first[kv] + second[kv] <= q,
            "`first[kv] + second[kv]` is not in order along kv",
        ),
        (lambda b, h, q, kv: kept[kv], "`kept[kv]` holds in too many stretches of kv"),
        (lambda b, h, q, kv: ~kept[kv], "`~kept[kv]` holds in too many stretches of kv"),
        (
            lambda b, h, q, kv: kept[q - kv],
            "`kept[q - kv]` holds in too many stretches of q - kv",
        ),
        (
            lambda b, h, q, kv: ~kept[q - kv],
            "`~kept[q - kv]` holds in too many stretches of q - kv",
        ),
    ]
    for mask, reason in reasons:
        found = intervals_of(mask, q_len=90, kv_len=90)
        assert isinstance(found, NoIntervals)
        assert str(found) == f"no interval form: {reason}"


def test_a_mask_that_keeps_nothing_has_no_rows_on_any_device() -> None:
    found = intervals_of(lambda b, h, q, kv: kv < 0, q_len=5, kv_len=7)
    assert isinstance(found, Intervals)
    with torch.device("meta"):
        rows = found.rows()
    assert (rows.shape, rows.dtype, rows.device.type) == ((1, 1, 5, 0, 2), torch.int32, "cpu")
    assert found.rows(device=torch.device("meta")).device.type == "meta"


def test_tables_of_diagonals_are_named_by_what_they_hold() -> None:
    near = torch.zeros(2, 199, dtype=torch.bool)
    near[0, 95:98] = near[1, 100:124] = True
    mask = lambda b, h, q, kv: near[h, q - kv + 99]
    found = intervals_of(mask, q_len=100, kv_len=100, batch=1, heads=2)
    assert str(found).splitlines()[1:] == [
        "  q - near_last[h] <= kv < q - near_first[h]",
        "  near_first: computed once, int32 [2]",
        "  near_last: computed once, int32 [2]",
    ]


@pytest.mark.parametrize("name", ["q_len", "kv_len", "batch", "heads", "most"])
def test_a_wrong_size_is_named(name: str) -> None:
    sizes = {"q_len": 4, "kv_len": 4, "batch": 1, "heads": 1, name: 0}
    with pytest.raises(OptionError, match=f"^{name} must be a positive int, got 0"):
        find_intervals(trace(lambda b, h, q, kv: q >= kv, "mask"), **sizes)  # type: ignore[arg-type]


def test_rows_of_several_tables_have_no_more_intervals_than_they_need() -> None:
    near, next_to_it = torch.zeros(2, 199, dtype=torch.bool), torch.zeros(2, 199, dtype=torch.bool)
    near[0, 90:96] = next_to_it[0, 96:99] = True
    near[1, 50:60] = next_to_it[1, 60:66] = True
    mask = lambda b, h, q, kv: near[h, q - kv + 99] | next_to_it[h, q - kv + 99]
    found = intervals_of(mask, q_len=100, kv_len=100, batch=1, heads=2)
    assert str(found).startswith("1 interval a row")


def test_a_shift_by_nothing_is_solved() -> None:
    found = intervals_of(lambda b, h, q, kv: (q + kv) >> 0 <= 2 * q + 3, q_len=9, kv_len=9)
    assert str(found) == "1 interval a row\n  kv < q + 4"

"""Compare intersections and unions of spans with sets of positions, and check proofs of order."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.affine import Affine, Sides
from attnkit.graph.eval_torch import evaluate
from attnkit.graph.ir import BOOL, I32, Node, arg, const, load
from attnkit.graph.simplify import FALSE, TRUE, build, negate
from attnkit.sparsity.intervals.spans import (
    EVERYTHING,
    NOTHING,
    UNLIMITED,
    ZERO,
    Span,
    SpanAlgebra,
    Spans,
    ends,
    rows_where,
    to_node,
)

ROWS, COLUMNS = 8, 14
Q, H = arg("q"), arg("h")
TENSORS = (
    torch.tensor([3, 0, 9, 5, 5, 1, 12, 7], dtype=torch.int32),
    torch.arange(ROWS) % 3 == 0,
    torch.arange(ROWS) > 4,
)
TABLE = load(0, I32, [Q])
THIRDS, LATE = (load(slot, BOOL, [Q]) for slot in (1, 2))


def at_rows(n: Node) -> Tensor:
    """Return the values of an expression in all rows and two heads: [2, ROWS, 1]."""
    env = {
        "q": torch.arange(ROWS, dtype=torch.int32).view(-1, 1),
        "h": torch.arange(2, dtype=torch.int32).view(-1, 1, 1),
    }
    return evaluate([n], env, TENSORS)[0].expand(2, ROWS, 1)


def kept(spans: Spans) -> Tensor:
    """Return the positions that a union of spans keeps, bool [2, ROWS, COLUMNS]."""
    kv = torch.arange(COLUMNS)
    found = torch.zeros(2, ROWS, COLUMNS, dtype=torch.bool)
    for span in spans:
        inside = torch.ones_like(found)
        for n in span.lows:
            inside &= kv >= at_rows(n)
        for n in span.highs:
            inside &= kv < at_rows(n)
        for n in span.gates:
            inside &= at_rows(n)
        found |= inside
    return found


def shifted(n: Node, by: int) -> Node:
    return build("add", n, const(by))


ENDS = [const(0), const(4), const(9), Q, shifted(Q, 1), shifted(Q, -2), shifted(Q, 5), TABLE]
ENDS += [build("add", Q, H), build("min", Q, const(5)), build("max", shifted(Q, 1), TABLE)]
GATES = [THIRDS, negate(THIRDS), LATE, negate(LATE), build("lt", Q, const(3))]


@st.composite
def unions(draw: st.DrawFn) -> Spans:
    """Draw a union of at most two spans."""

    def some(nodes: list[Node]) -> tuple[Node, ...]:
        return tuple(draw(st.lists(st.sampled_from(nodes), max_size=2, unique=True)))

    return tuple(Span(some(ENDS), some(ENDS), some(GATES)) for _ in range(draw(st.integers(0, 2))))


@given(unions(), unions())
def test_intersections_and_unions_are_those_of_the_positions(a: Spans, b: Spans) -> None:
    algebra = SpanAlgebra(Sides())
    assert torch.equal(kept(algebra.meet(a, b)), kept(a) & kept(b))
    assert torch.equal(kept(algebra.join(a, b)), kept(a) | kept(b))
    for span in (*a, *b):
        low, high = ends(span)
        assert torch.equal(kept((Span((low,), (high,)),)), kept((span,)))
    assert len(algebra.join(a, b)) <= len(a) + len(b)


def span(low: Node | None = None, high: Node | None = None, *gates: Node) -> Span:
    return Span(() if low is None else (low,), () if high is None else (high,), gates)


FIVE, NEXT = const(5), shifted(Q, 1)
JOINED: dict[str, tuple[Span, Span, Spans]] = {
    "one inside the other": (span(Q, FIVE), span(None, FIVE), (span(None, FIVE),)),
    "that touch": (span(None, Q), span(Q, NEXT), (span(None, build("max", Q, NEXT)),)),
    "of equal starts": (span(Q, NEXT), span(Q, shifted(Q, 5)), (span(Q, shifted(Q, 5)),)),
    "that overlap, with other starts": (
        span(Q, shifted(Q, 5)), span(NEXT, shifted(Q, 6)),
        (span(build("min", Q, NEXT), build("max", shifted(Q, 5), shifted(Q, 6))),),
    ),
    "of equal ends": (
        span(Q, NEXT), span(Q, TABLE), (span(Q, build("max", NEXT, TABLE)),),
    ),
    "of equal starts without ends": (span(Q), span(Q, TABLE), (span(Q),)),
    "in opposite rows": (
        span(None, Q, THIRDS), span(Q, None, negate(THIRDS)),
        (span(build("where", THIRDS, ZERO, Q), build("where", THIRDS, Q, UNLIMITED)),),
    ),
    "with whole rows": (
        span(None, None, LATE), span(None, NEXT),
        (span(None, build("where", LATE, UNLIMITED, NEXT)),),
    ),
    "that may lie apart": (
        span(None, Q), span(TABLE, FIVE), (span(None, Q), span(TABLE, FIVE)),
    ),
    "in other rows": (
        span(None, Q, THIRDS), span(None, FIVE, LATE),
        (span(None, Q, THIRDS), span(None, FIVE, LATE)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_unions_of_spans(name: str) -> None:
    a, b, expected = JOINED[name]
    algebra = SpanAlgebra(Sides())
    for pair in ((a, b), (b, a)):
        found = algebra.join((pair[0],), (pair[1],))
        assert len(found) == len(expected)
        assert torch.equal(kept(found), kept((a,)) | kept((b,)))
    assert set(algebra.join((a,), (b,))) == set(expected)


def test_intersections_keep_the_ends_that_matter() -> None:
    algebra = SpanAlgebra(Sides())

    def meet(a: Span, b: Span) -> Spans:
        return algebra.meet((a,), (b,))

    assert meet(span(Q, FIVE), span(NEXT, const(4))) == (span(NEXT, const(4)),)
    assert meet(span(Q, FIVE), span(TABLE, NEXT)) == (Span((Q, TABLE), (FIVE, NEXT)),)
    assert meet(span(ZERO, FIVE), span(const(-2))) == (span(None, FIVE),)
    assert meet(span(None, None, LATE), span(None, Q, THIRDS)) == (span(None, Q, LATE, THIRDS),)
    assert meet(span(None, None, LATE), span(None, None, LATE)) == (span(None, None, LATE),)
    assert meet(span(None, Q), span(Q)) == NOTHING
    assert meet(span(None, Q), span(NEXT)) == NOTHING
    assert meet(span(None, ZERO), span(None, Q)) == NOTHING
    assert meet(span(None, None, LATE), span(None, None, negate(LATE))) == NOTHING
    assert algebra.meet(EVERYTHING, (span(Q), span(None, TABLE))) == (span(Q), span(None, TABLE))
    assert algebra.meet(NOTHING, EVERYTHING) == NOTHING


def test_rows_of_a_gate() -> None:
    assert rows_where(TRUE) == EVERYTHING
    assert rows_where(FALSE) == NOTHING
    assert rows_where(LATE) == (span(None, None, LATE),)
    assert ends(Span()) == (ZERO, UNLIMITED)
    assert ends(span(Q, FIVE)) == (Q, FIVE)
    assert ends(span(Q, None, LATE)) == (Q, build("where", LATE, UNLIMITED, ZERO))


def test_order_of_lesser_and_greater_rows_is_proven_where_it_holds() -> None:
    """`at_most` decides any min and max of rows, as these are in one order for all rows."""
    algebra = SpanAlgebra(Sides())
    rows = [shifted(Q, by) for by in (-1, 0, 2)]
    pairs = [ir.node(op, *p) for op in ("min", "max") for p in itertools.permutations(rows, 2)]
    nested = [ir.node(op, a, rows[1]) for op in ("min", "max") for a in pairs]
    for a, b in itertools.product([*rows, *pairs, *nested], repeat=2):
        assert algebra.at_most(a, b) == bool((at_rows(a) <= at_rows(b)).all()), (str(a), str(b))


def test_order_of_other_ends() -> None:
    algebra = SpanAlgebra(Sides())
    assert algebra.at_most(Q, UNLIMITED)
    assert algebra.at_most(ZERO, Q)
    assert algebra.at_most(Q, build("add", Q, H))
    assert algebra.at_most(TABLE, shifted(TABLE, 3))
    assert not algebra.at_most(build("add", Q, H), Q)
    assert not algebra.at_most(ZERO, TABLE)  # a table may hold negative numbers
    assert not algebra.at_most(Q, FIVE)
    assert not algebra.at_most(const(1), Q)
    assert not algebra.at_most(TABLE, Q)


@pytest.mark.parametrize(
    ("terms", "offset", "text"),
    [
        ((), 7, "7"),
        ((), -7, "-7"),
        (((Q, 1),), 0, "q"),
        (((Q, 1),), 3, "q + 3"),
        (((Q, 1),), -5, "q - 5"),
        (((Q, -1),), 0, "-q"),
        (((Q, -1),), 4, "4 - q"),
        (((Q, -2),), 4, "4 - q * 2"),
        (((Q, 3),), -1, "q * 3 - 1"),
        (((H, -1), (Q, 1)), 0, "q - h"),
        (((H, -2), (Q, 1), (TABLE, 4)), 2, "q + t0[q] * 4 - h * 2 + 2"),
        (((H, -1), (Q, -3)), -2, "-h - q * 3 - 2"),
    ],
)
def test_sums_read_as_a_person_writes_them(
    terms: tuple[tuple[Node, int], ...], offset: int, text: str
) -> None:
    n = to_node(Affine(terms, offset))
    form = Sides().affine(n)
    assert (dict(form.terms), form.offset) == (dict(terms), offset)
    assert ir.formula(n) == text

"""Compute spans from data: evaluate a function of kv at every position, and search the values.

`doc[q] == doc[kv]` with sorted ids keeps one span per row, but there is no formula for its ends. A
search in the evaluated values finds the ends, and tables store them. The ends of the span are then
loads from these tables. Computing a table takes O(n log n) time for n = q_len + kv_len, for any
expression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attnkit.errors import BoundsError
from attnkit.graph import ir
from attnkit.graph.affine import Q, Side, Terms
from attnkit.graph.eval_torch import evaluate, indices
from attnkit.graph.ir import I32, Node, arg, const, load
from attnkit.graph.simplify import build
from attnkit.sparsity.index_bounds import check_bounds
from attnkit.sparsity.index_ranges import set_known_range
from attnkit.sparsity.intervals.search import (
    AscendingPieces,
    Ends,
    TrueRuns,
    ValueIndex,
    compact,
    equal_in_order,
    search_in_passes,
)
from attnkit.sparsity.intervals.spans import EVERYTHING, Span, SpanAlgebra, Spans, ends
from attnkit.sparsity.ranges.tables import Domain, Key, key_of

# Spans per row of one condition: in whole rows, and inside the window that other conditions leave.
_MAX_ALONE, _MAX_WITHIN = 4, 16
_MAX_ENTRIES = 1 << 24
_MAX_SEARCHES = 100


class Refusal(Exception):
    """Raised if a mask has no interval form. The message says why."""


class RowTables:
    """Computes tables of interval ends for one domain.

    Attributes:
        tensors, names: the captured tensors, then the tables of ends, by slot.
        captured: number of captured tensors.
    """

    def __init__(
        self,
        domain: Domain,
        names: Sequence[str],
        algebra: SpanAlgebra,
        proven: frozenset[Node],
        *,
        search: bool,
    ) -> None:
        """Create an object without tables.

        Args:
            domain: positions and captured tensors of the mask.
            names: names of the captured tensors.
            algebra: intersects and unites spans.
            proven: expressions over the captured tensors that are proven to stay in bounds.
            search: if False, every condition that needs a table raises a Refusal.
        """
        self.tensors = list(domain.tensors)
        self.captured = len(self.tensors)
        self.names = list(names)
        self._domain = domain
        self._algebra = algebra
        self._proven = proven
        self._values: dict[Key, Tensor] = {}
        self._left = _MAX_SEARCHES if search else 0

    # --- searches

    def _count(self) -> None:
        if not self._left:
            raise Refusal("it has too many conditions that need a search")
        self._left -= 1

    def equal(self, terms: Terms, target: Node, window: Spans) -> Spans:
        """Return the part of the window where a sum of kv terms equals the row's `target`.

        Raises:
            Refusal: the sum takes the value in too many places.
        """
        self._count()
        (value,) = self._at_rows([target])
        values, rows = self._kv_values(terms), value[..., None]
        row_ends = equal_in_order(values, rows) if values.device.type != "cpu" else None
        if row_ends is not None:
            row_ends = compact(*row_ends, self._domain.kv_len)
        else:
            index = ValueIndex(values)
            row_ends = search_in_passes(
                lambda x: index.equal(x, _MAX_ALONE), [rows], self._domain.kv_len
            )
        if row_ends is None:
            stop = build("add", target, const(1))
            return self.between(terms, target, stop, window)
        sources = [*(n for n, _ in terms), target]
        return self._algebra.meet(window, self.store(row_ends, sources))

    def between(self, terms: Terms, low: Node | None, high: Node | None, window: Spans) -> Spans:
        """Return the part of the window where `low <= sum of kv terms < high`.

        Raises:
            Refusal: the sum increases and decreases too often.
        """
        limits = [n for n in (low, high) if n is not None]
        at = dict(zip(limits, self._at_rows(limits), strict=True))
        first, stop = (None if n is None else at[n][..., None] for n in (low, high))
        sources = [*(n for n, _ in terms), *limits]
        for sign in (1, -1):
            self._count()
            if sign < 0:  # low <= f < high  is  1 - high <= -f < 1 - low
                first, stop = (None if x is None else 1 - x for x in (stop, first))
            pieces = AscendingPieces(self._kv_values(terms) * sign)
            spans = self._search_window(pieces.between, [first, stop], sources, window)
            if spans is not None:
                return spans
        shown = " + ".join(self.formula(n) for n, _ in terms)
        raise Refusal(f"`{shown}` is not in order along kv")

    def where_kv(self, n: Node, keep: bool, window: Spans) -> Spans:
        """Return the part of the window where a bool expression of kv equals `keep`.

        Raises:
            Refusal: the expression equals `keep` in too many separate intervals.
        """
        self._count()
        runs = TrueRuns(self._domain.all_values(key_of(n, Side.KV)) == keep)
        spans = self._search_window(runs.within, [], [n], window)
        if spans is None:
            shown = self.formula(n if keep else build("not", n))
            raise Refusal(f"`{shown}` holds in too many stretches of kv")
        return spans

    def where_diagonal(self, n: Node, keep: bool, window: Spans) -> Spans:
        """Return the part of the window where a bool expression of q - kv equals `keep`.

        Raises:
            Refusal: the expression equals `keep` in too many separate intervals.
        """
        self._count()
        mask = self._domain.all_values(key_of(n, Side.DIAGONAL)) == keep
        points, before = mask.shape[-1], self._domain.kv_len - 1
        runs = TrueRuns(mask).within(*_same_ends(0, points, mask), _MAX_ALONE)
        if runs is None:
            shown = self.formula(n if keep else build("not", n))
            raise Refusal(f"`{shown}` holds in too many stretches of q - kv")
        low, high = runs
        spans: list[Span] = []
        for first, stop in zip(low.unbind(-1), high.unbind(-1), strict=True):
            # first <= q - kv + before < stop
            below = [self._table(first - 1 - before, [n], "first")] if (first > 0).any() else []
            above = [self._table(stop - 1 - before, [n], "last")] if (stop < points).any() else []
            lows = tuple(build("sub", Q, x) for x in above)
            spans.append(Span(lows, tuple(build("sub", Q, x) for x in below)))
        return self._algebra.meet(window, self._algebra.join((), tuple(spans)))

    def _search_window(
        self,
        search: Callable[..., Ends | None],
        limits: Sequence[Tensor | None],
        sources: Sequence[Node],
        window: Spans,
    ) -> Spans | None:
        """Run a search in whole rows, or only in the window if whole rows have too many results.

        After a search in whole rows, the ends of the window stay symbolic.

        Returns:
            The spans inside the window; None if a row needs too many.
        """
        points = self._domain.kv_len
        inside = [n for s in window for n in (*s.lows, *s.highs, *s.gates)]
        if all(slot < self.captured for slot in ir.slots(*inside)):
            ends = _same_ends(0, points, self._domain.b)
            row_ends = search_in_passes(lambda *x: search(*x, _MAX_ALONE), [*limits, *ends], points)
            if row_ends is not None:
                return self._algebra.meet(window, self.store(row_ends, sources))
        if window == EVERYTHING:
            return None
        ends = self.ends_of(window)
        row_ends = search_in_passes(lambda *x: search(*x, _MAX_WITHIN), [*limits, *ends], points)
        return None if row_ends is None else self.store(row_ends, [*sources, *inside])

    # --- evaluation

    def ends_of(self, spans: Spans) -> Ends:
        """Return the ends of spans in every row, int64 [b, h, rows, spans], clipped to kv_len.

        Raises:
            Refusal: an end may leave int32, or there are too many to hold in memory.
        """
        pairs = [ends(s) for s in spans]
        values = self._at_rows([n for pair in pairs for n in pair])
        values = [v.clamp(0, self._domain.kv_len) for v in values]
        stacked = torch.stack(torch.broadcast_tensors(*values), -1)
        return stacked[..., ::2], stacked[..., 1::2]

    def check(self, nodes: Sequence[Node]) -> None:
        """Check that row-level expressions stay in int32 and inside their tensors.

        Raises:
            Refusal: an expression may leave int32, or an index may leave its tensor.
        """
        if self._proven.issuperset(nodes):
            return
        domain = self._domain
        try:
            unproven = check_bounds(
                nodes,
                self.tensors,
                self.names,
                q_len=domain.q_len,
                kv_len=domain.kv_len,
                batch=domain.b.numel(),
                heads=domain.h.numel(),
                dtype=domain.dtype,
            )
        except BoundsError as error:
            raise Refusal(f"the ends of its intervals cannot be computed: {error}") from None
        if unproven:
            raise Refusal(f"the index in `{self.formula(next(iter(unproven)))}` is not proven")

    def _at_rows(self, nodes: Sequence[Node]) -> list[Tensor]:
        """Evaluate row-level integers in every row: int64 [b, h, rows] each."""
        self.check(nodes)
        domain = self._domain
        env = {"b": domain.b.view(-1, 1, 1), "h": domain.h.view(-1, 1)}
        env["q"] = indices(domain.q_len, domain.device)
        entries = len(nodes)
        for name in ir.reads(*nodes):
            entries *= env[name].numel()
        if entries > _MAX_ENTRIES:
            raise Refusal(f"its ends in all rows are {entries} numbers, too many to hold")
        values = evaluate(nodes, env, self.tensors, domain.dtype)
        values = [v.to(domain.device, torch.int64) for v in values]
        return [v.view((1,) * (3 - v.dim()) + v.shape) for v in values]

    def _kv_values(self, terms: Terms) -> Tensor:
        key = Key(Side.KV, terms)
        if key not in self._values:
            self._values[key] = self._domain.all_values(key).to(torch.int64)
        return self._values[key]

    def formula(self, n: Node) -> str:
        """Format an expression as text, with the names of its tensors."""
        return ir.formula(n, self.names)

    # --- tables

    def store(self, row_ends: Ends, sources: Sequence[Node]) -> Spans:
        """Store the ends of spans in new tables, and return spans that load the ends from them.

        Args:
            row_ends: int64 [b, h, rows, spans] each.
            sources: the expressions that the ends depend on; they give the tables their names.
        """
        low, high = row_ends
        spans = []
        for first, stop in zip(low.unbind(-1), high.unbind(-1), strict=True):
            needed = torch.stack((first.any(), (stop != self._domain.kv_len).any()))
            needs_low, needs_high = needed.tolist()
            lows = (self._table(first, sources, "start"),) if needs_low else ()
            highs = (self._table(stop, sources, "end"),) if needs_high else ()
            spans.append(Span(lows, highs))
        return tuple(spans)

    def _table(self, values: Tensor, sources: Sequence[Node], what: str) -> Node:
        """Store values [b, h, rows] in a table and return a load from it.

        A single value that does not depend on data needs no table. The result is then a constant.
        """
        loaded = ir.slots(*sources)
        if values.numel() == 1 and not loaded:
            return const(int(values))
        kept = [(arg(n), size) for n, size in zip("bhq", values.shape, strict=True) if size > 1]
        base = self.names[loaded[0]] if loaded and loaded[0] < self.captured else "row"
        name, number = f"{base}_{what}", 2
        while name in self.names:
            name, number = f"{base}_{what}{number}", number + 1
        table = values.reshape([size for _, size in kept]).to(torch.int32)
        set_known_range(table, -self._domain.kv_len - 1, self._domain.q_len + self._domain.kv_len)
        self.names.append(name)
        self.tensors.append(table)
        return load(len(self.tensors) - 1, I32, [n for n, _ in kept])


def _same_ends(low: int, high: int, like: Tensor) -> Ends:
    """Return the ends of one interval as tensors that broadcast to all rows."""
    both = torch.tensor([[[[low, high]]]], device=like.device)
    return both[..., :1], both[..., 1:]

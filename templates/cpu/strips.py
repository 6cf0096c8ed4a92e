"""Convert block runs to strips of query rows.

A strip lists the kv positions that its rows touch, and those where the mask has to be evaluated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from attnkit.sparsity.block_runs import FULL, PARTIAL, BlockRuns, Runs


@dataclass(frozen=True, slots=True)
class Span:
    """Describes a range [start, stop) of kv positions that a strip touches.

    Attributes:
        start: first kv position.
        stop: one past the last kv position.
        partial: the ranges [start, stop) of kv positions where the mask has to be evaluated.
    """

    start: int
    stop: int
    partial: tuple[tuple[int, int], ...] = ()

    def cut(self, start: int, stop: int) -> Span:
        """Return the part of the span inside [start, stop)."""
        inside = ((max(a, start), min(b, stop)) for a, b in self.partial)
        return Span(
            max(self.start, start), min(self.stop, stop), tuple(p for p in inside if p[0] < p[1])
        )


@dataclass(frozen=True, slots=True)
class Patch:
    """Describes positions of a strip where the block runs decide instead of the mask function.

    A strip of several q blocks evaluates the mask wherever one of them is partial. Where another
    one is full or empty, block runs that a user built may contradict the mask function. The block
    runs take precedence.

    Attributes:
        rows: rows, counted from the strip's first row.
        start: first kv position.
        stop: one past the last kv position.
        keep: whether the block runs keep the positions or leave them out.
    """

    rows: slice
    start: int
    stop: int
    keep: bool


@dataclass(frozen=True, slots=True)
class Strip:
    """Describes query rows [start, stop) and the spans of kv positions that they touch."""

    start: int
    stop: int
    spans: tuple[Span, ...]  # ascending in kv, as are the patches
    patches: tuple[Patch, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Describes a part of a strip that is computed at once: all rows, some of the kv positions.

    Attributes:
        strip: the strip.
        spans: the kv positions in order, which are the columns of the chunk; empty if the strip has
            none.
        first: whether this is the strip's first chunk.
        last: whether this is the strip's last chunk.
    """

    strip: Strip
    spans: tuple[Span, ...]
    first: bool
    last: bool

    @property
    def height(self) -> int:
        """Return the number of query rows."""
        return self.strip.stop - self.strip.start

    @property
    def rows(self) -> slice:
        """Return the slice of query rows."""
        return slice(self.strip.start, self.strip.stop)

    def places(self) -> Iterator[tuple[Span, slice]]:
        """Yield each span with the slice of the chunk's columns that it fills."""
        at = 0
        for span in self.spans:
            end = at + span.stop - span.start
            yield span, slice(at, end)
            at = end


def chunks(strip: Strip, limit: int) -> Iterator[Chunk]:
    """Split a strip into chunks of nearly equal width, at most `limit` columns each."""
    width = sum(span.stop - span.start for span in strip.spans)
    if width <= limit:
        yield Chunk(strip, strip.spans, first=True, last=True)
        return
    size = -(-width // -(-width // limit))
    spans: list[Span] = []
    done = 0
    for span in strip.spans:
        at = span.start
        while at < span.stop:
            end = min(span.stop, at + size - done % size)
            spans.append(span.cut(at, end))
            done += end - at
            at = end
            if done % size == 0 or done == width:
                yield Chunk(strip, tuple(spans), first=done <= size, last=done == width)
                spans = []


Plan = tuple[tuple[Strip, ...], ...]

_plans: weakref.WeakKeyDictionary[BlockRuns, dict[int, Plan]] = weakref.WeakKeyDictionary()


def plan(runs: BlockRuns, rows: int) -> Plan:
    """Return the strips of every (b, h) of the block runs, in the order b * heads + h.

    A strip has about `rows` queries: several q blocks, one q block, or a part of one. It leaves out
    kv blocks that are empty in all its q blocks, and evaluates no mask where all are full. The
    result is cached as long as `runs` exists, so that its tensors are copied to the host once.
    """
    known = _plans.setdefault(runs, {})
    if rows not in known:
        known[rows] = tuple(_build(runs, rows))
    return known[rows]


def dense(q_len: int, kv_len: int, rows: int) -> Plan:
    """Return the strips of a call without a mask, in the form of `plan`."""
    spans = (Span(0, kv_len),) if kv_len else ()
    return (tuple(Strip(q, min(q + rows, q_len), spans) for q in range(0, q_len, rows)),)


_Csr = tuple[list[int], list[int], list[int]]
_Range = tuple[int, int, tuple[int, ...]]  # first kv block, one past the last, state of each row


def _build(runs: BlockRuns, rows: int) -> Iterator[tuple[Strip, ...]]:
    height = runs.block[0]
    if height <= rows:
        step = rows // height * height
    else:
        step = -(-height // -(-height // rows))  # a block in equal parts
    full, partial = _lists(runs.full), _lists(runs.partial)
    for first in range(0, runs.batch * runs.heads * runs.q_blocks, runs.q_blocks):
        strips = []
        for q in range(0, runs.q_len, step):
            stop = min(q + step, runs.q_len)
            blocks = range(q // height, (stop - 1) // height + 1)
            ranges = list(_sweep(full, partial, range(first + blocks[0], first + blocks[-1] + 1)))
            bounds = [slice(max(b * height - q, 0), (b + 1) * height - q) for b in blocks]
            patches = _patches(ranges, runs, bounds) if len(blocks) > 1 else ()
            strips.append(Strip(q, stop, _spans(ranges, runs), tuple(patches)))
        yield tuple(strips)


def _lists(runs: Runs) -> _Csr:
    return runs.row_ptr.tolist(), runs.start.tolist(), runs.length.tolist()


def _sweep(full: _Csr, partial: _Csr, rows: range) -> Iterator[_Range]:
    """Yield the ranges of kv blocks that `rows` touch, split where a row's state changes."""
    change: dict[int, list[tuple[int, int]]] = {}  # kv block -> (row, change of its state) there
    for state, (row_ptr, start, length) in ((FULL, full), (PARTIAL, partial)):
        for at, row in enumerate(rows):
            for run in range(row_ptr[row], row_ptr[row + 1]):
                change.setdefault(start[run], []).append((at, state))
                change.setdefault(start[run] + length[run], []).append((at, -state))
    states = [0] * len(rows)
    before = 0
    for block in sorted(change):
        if any(states):
            yield before, block, tuple(states)
        before = block
        for at, delta in change[block]:
            states[at] += delta


def _spans(ranges: list[_Range], runs: BlockRuns) -> tuple[Span, ...]:
    """Convert ranges of kv blocks to spans of kv positions, and join adjacent ones."""
    spans: list[list[int]] = []
    partial: list[list[list[int]]] = []
    for first, last, states in ranges:
        start, stop = first * runs.block[1], min(last * runs.block[1], runs.kv_len)
        if spans and spans[-1][1] == start:
            spans[-1][1] = stop
        else:
            spans.append([start, stop])
            partial.append([])
        if all(state == FULL for state in states):
            continue
        if partial[-1] and partial[-1][-1][1] == start:
            partial[-1][-1][1] = stop
        else:
            partial[-1].append([start, stop])
    return tuple(
        Span(start, stop, tuple((a, b) for a, b in parts))
        for (start, stop), parts in zip(spans, partial, strict=True)
    )


def _patches(ranges: list[_Range], runs: BlockRuns, bounds: list[slice]) -> Iterator[Patch]:
    for first, last, states in ranges:
        if all(state == FULL for state in states):
            continue
        for rows, state in zip(bounds, states, strict=True):
            if state != PARTIAL:
                yield Patch(rows, first * runs.block[1], last * runs.block[1], state == FULL)

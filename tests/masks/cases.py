"""Draw random instances of every mask, each with its definition in plain Python.

A definition says whether query q keeps key kv. It follows the words of the docstring with sets,
lists and loops, and shares no arithmetic with the mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from attnkit import Mask, masks

LONGEST = 20


class Case(NamedTuple):
    mask: Mask
    keep: Callable[[int, int, int, int], bool]  # keep(b, h, q, kv)
    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 1


Draw = Callable[[st.SearchStrategy], object]
CASES: dict[str, st.SearchStrategy[Case]] = {}


def case(function: Callable[[Draw], Case]) -> Callable[[Draw], Case]:
    """Register a strategy under the function's name, which is the name of the mask."""
    CASES[function.__name__] = st.composite(function)()
    return function


lengths = st.integers(1, LONGEST)
near = st.integers(0, LONGEST)
blocks = st.integers(1, 7)


def ints(draw: Draw, low: int, high: int, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    values = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(values, dtype=dtype).reshape(shape)


def bools(draw: Draw, *shape: int) -> torch.Tensor:
    return ints(draw, 0, 1, *shape).bool()


# --- patterns of distance ---------------------------------------------------------------------


def alignment(draw):
    """Draw an alignment: arguments, q_len, kv_len per batch entry, and a position function.

    The function maps (b, q) to the key position of a query, which may be negative.
    """
    q_len, kv_len = draw(lengths), draw(lengths)
    if draw(st.booleans()):
        return {}, q_len, [kv_len], lambda b, q: q
    own = [kv_len]
    given = kv_len
    if draw(st.booleans()):
        own = [kv_len, *ints(draw, 0, kv_len, 1).tolist()]
        given = torch.tensor(own)

    def place(b, q):
        after = q_len - 1 - q  # number of queries after this one; the last query is at the last key
        return own[b] - 1 - after

    return {"align": "bottom-right", "q_len": q_len, "kv_len": given}, q_len, own, place


@case
def causal(draw):
    given, q_len, own, place = alignment(draw)
    keep = lambda b, h, q, kv: kv in range(place(b, q) + 1)
    return Case(masks.causal(**given), keep, q_len, own[0], len(own))


@case
def sliding_window(draw):
    left, right = draw(st.one_of(st.none(), near)), draw(st.one_of(st.none(), near))
    if left is None and right is None:
        left = 0
    given, q_len, own, place = alignment(draw)

    def keep(b, h, q, kv):
        at = place(b, q)
        first = 0 if left is None else at - left
        last = LONGEST if right is None else at + right
        return first <= kv <= last and kv in range(own[b])

    by_size = left is not None and draw(st.booleans())  # Hugging Face's count of keys
    window = {"size": left + 1} if by_size else {"left": left}
    return Case(masks.sliding_window(**window, right=right, **given), keep, q_len, own[0], len(own))


@case
def dilated(draw):
    left, dilation, right = draw(near), draw(blocks), draw(near)
    given, q_len, own, place = alignment(draw)

    def keep(b, h, q, kv):
        at = place(b, q)
        before = range(at, at - left - 1, -dilation)
        after = range(at, at + right + 1, dilation)
        return (kv in before or kv in after) and kv in range(own[b])

    return Case(masks.dilated(left, dilation, right, **given), keep, q_len, own[0], len(own))


@case
def chunked(draw):
    size = draw(blocks)
    given, q_len, own, place = alignment(draw)
    kind = draw(st.integers(0, 2))
    start = [0, draw(near), ints(draw, 0, LONGEST, len(own) if len(own) > 1 else 2)][kind]
    starts = start.tolist() if kind == 2 else [start] * len(own)
    batch = max(len(own), len(starts))

    def keep(b, h, q, kv):
        at = place(b % len(own), q)
        if kv >= own[b % len(own)]:
            return False
        for first in range(starts[b], 3 * LONGEST, size):
            if at in range(first, first + size):
                return kv in range(first, at + 1)
        return False

    mask = masks.chunked(size, start=start, **given)
    return Case(mask, keep, q_len, own[0], batch)


@case
def strided(draw):
    stride = draw(blocks)

    def keep(b, h, q, kv):
        return kv in range(q - stride, q + 1) or kv in range(q, -1, -stride)

    return Case(masks.strided(stride), keep, draw(lengths), draw(lengths))


@case
def fixed(draw):
    block = draw(blocks)
    summary = draw(st.integers(1, block))

    def keep(b, h, q, kv):
        starts = range(0, LONGEST, block)
        own = max(start for start in starts if start <= q)
        ends = {start + block - i for start in starts for i in range(1, summary + 1)}
        return kv <= q and (own <= kv < own + block or kv in ends)

    return Case(masks.fixed(block, summary), keep, draw(lengths), draw(lengths))


@case
def prefix(draw):
    own = ints(draw, 0, LONGEST, 2)
    length, q_len, kv_len = own, draw(lengths), draw(lengths)
    if draw(st.booleans()):
        length = int(own[0])
        own = own[:1]
    keep = lambda b, h, q, kv: kv in range(own[b])
    return Case(masks.prefix(length), keep, q_len, kv_len, len(own))


@case
def prefix_lm(draw):
    own = ints(draw, 0, LONGEST, 2)
    length, q_len, kv_len = own, draw(lengths), draw(lengths)
    if draw(st.booleans()):
        length = int(own[0])
        own = own[:1]
    keep = lambda b, h, q, kv: kv in range(own[b]) or kv in range(q + 1)
    return Case(masks.prefix_lm(length), keep, q_len, kv_len, len(own))


@case
def streaming_llm(draw):
    window, sinks = draw(near), draw(near)
    given, q_len, own, place = alignment(draw)

    def keep(b, h, q, kv):
        at = place(b, q)
        return kv in [*range(min(sinks, at + 1)), *range(at - window, at + 1)]

    return Case(masks.streaming_llm(window, sinks, **given), keep, q_len, own[0], len(own))


@case
def longformer(draw):
    length, window = draw(lengths), draw(near)
    kind = draw(st.integers(0, 2))
    if kind == 0:
        count = draw(near)
        tokens, marked = count, [[i < count for i in range(length)]]
    else:
        tokens = bools(draw, *([length] if kind == 1 else [2, length]))
        marked = tokens.reshape(-1, length).tolist()

    def keep(b, h, q, kv):
        return marked[b][q] or marked[b][kv] or kv in range(q - window, q + window + 1)

    return Case(masks.longformer(window, tokens), keep, length, length, len(marked))


# --- blocks -----------------------------------------------------------------------------------


def block_of(position: int, size: int) -> int:
    return next(n for n in itertools.count() if position < (n + 1) * size)


@case
def block_diagonal(draw):
    size, other = draw(blocks), draw(st.one_of(st.none(), blocks))
    keep = lambda b, h, q, kv: block_of(q, size) == block_of(kv, other or size)
    return Case(masks.block_diagonal(size, other), keep, draw(lengths), draw(lengths))


@case
def block_diffusion(draw):
    length, block = draw(st.integers(1, 10)), draw(blocks)
    copies = [("noisy", block_of(i, block)) for i in range(length)]
    copies += [("clean", n) for _, n in copies]

    def keep(b, h, q, kv):
        (row, i), (column, j) = copies[q], copies[kv]
        if row == column == "noisy":
            return i == j
        if row == "noisy":
            return j < i
        return column == "clean" and j <= i

    return Case(masks.block_diffusion(length, block), keep, 2 * length, 2 * length)


def selection(draw, q_len, kv_len, q_block, kv_block, leading):
    rows, columns = block_of(q_len - 1, q_block) + 1, block_of(kv_len - 1, kv_block) + 1
    return ints(draw, -1, columns - 1, *leading, rows, draw(st.integers(1, 3))), columns


@case
def topk_blocks(draw):
    q_len, kv_len, q_block, kv_block = (draw(s) for s in (lengths, lengths, blocks, blocks))
    leading = draw(st.sampled_from([(), (2,), (2, 2)]))
    selected, columns = selection(draw, q_len, kv_len, q_block, kv_block, leading)
    if draw(st.booleans()):  # the same choice as marks
        choice = selected.long()[..., None] == torch.arange(columns)
        given = choice.any(-2)
    else:
        given = selected
    full = selected.expand(2, 2, *selected.shape[-2:]).tolist()
    heads, batch = 2 if leading else 1, 2 if len(leading) == 2 else 1

    def keep(b, h, q, kv):
        return block_of(kv, kv_block) in full[b][h][block_of(q, q_block)]

    mask = masks.topk_blocks(given, q_block, kv_block)
    return Case(mask, keep, q_len, kv_len, batch, heads)


@case
def bigbird(draw):
    length, block = draw(lengths), draw(blocks)
    reach, first = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    leading = draw(st.sampled_from([(), (2,)]))
    random, _ = selection(draw, length, length, block, block, leading)
    full = random.expand(2, *random.shape[-2:]).tolist()

    def keep(b, h, q, kv):
        row, column = block_of(q, block), block_of(kv, block)
        near = column in range(row - reach, row + reach + 1)
        return near or row < first or column < first or column in full[h][row]

    mask = masks.bigbird(random, block, window_blocks=reach, global_blocks=first)
    return Case(mask, keep, length, length, 1, 2 if leading else 1)

"""Random instances of every mask, each with its definition in plain Python.

A definition says whether query q keeps key kv, from the words of the docstring alone: sets, lists
and loops, none of the arithmetic of the mask.
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
    """Register a way to draw a case under the function's name, that of the mask."""
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


@case
def causal(draw):
    q_len, kv_len = draw(lengths), draw(lengths)
    if draw(st.booleans()):
        return Case(masks.causal(), lambda b, h, q, kv: kv in range(q + 1), q_len, kv_len)
    own = [kv_len, *ints(draw, 0, kv_len, 1).tolist()]
    if draw(st.booleans()):
        own = own[:1]
        mask = masks.causal("bottom-right", q_len=q_len, kv_len=kv_len)
    else:
        mask = masks.causal("bottom-right", q_len=q_len, kv_len=torch.tensor(own))

    def keep(b, h, q, kv):
        after = q_len - 1 - q  # queries after this one, each sees one key more
        return kv in range(own[b] - after)

    return Case(mask, keep, q_len, kv_len, len(own))


@case
def sliding_window(draw):
    left, right = draw(st.one_of(st.none(), near)), draw(st.one_of(st.none(), near))
    if left is None and right is None:
        left = 0

    def keep(b, h, q, kv):
        first = 0 if left is None else q - left
        last = LONGEST if right is None else q + right
        return first <= kv <= last

    return Case(masks.sliding_window(left, right), keep, draw(lengths), draw(lengths))


@case
def dilated(draw):
    left, dilation, right = draw(near), draw(blocks), draw(near)

    def keep(b, h, q, kv):
        before = range(q, q - left - 1, -dilation)
        after = range(q, q + right + 1, dilation)
        return kv in before or kv in after

    return Case(masks.dilated(left, dilation, right), keep, draw(lengths), draw(lengths))


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

    def keep(b, h, q, kv):
        return kv in [*range(min(sinks, q + 1)), *range(q - window, q + 1)]

    return Case(masks.streaming_llm(window, sinks), keep, draw(lengths), draw(lengths))


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

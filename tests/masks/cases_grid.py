"""Draw cases of masks over token grids (see `cases`)."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

from attnkit import masks
from tests.masks.cases import Case, case


def places(shape, tile=None) -> list[tuple[int, ...]]:
    """Return the coordinates of each token in order, row by row or tile by tile."""
    if tile is None:
        return list(itertools.product(*(range(n) for n in shape)))
    corners = itertools.product(*(range(0, n, t) for n, t in zip(shape, tile, strict=True)))
    inside = list(itertools.product(*(range(t) for t in tile)))
    return [
        tuple(c + i for c, i in zip(corner, offset, strict=True))
        for corner in corners
        for offset in inside
    ]


def neighbours(at, length, kernel, stride, dilation, causal) -> set[int]:
    """Return the positions that `at` sees along one axis, found by moving a window over a list."""
    line = [i for i in range(length) if i % dilation == at % dilation]
    own = line.index(at)
    group = [i for i in range(len(line)) if i // stride == own // stride]
    if causal:
        leader = group[-1]
        return set(line[max(0, leader - kernel + 1) : own + 1])
    # a group cut short by the border is led by its last member, unless the centre is there
    leader = group[min(stride // 2, len(group) - 1)]
    start = leader - kernel // 2
    while start < 0:
        start += 1
    while start + kernel > len(line):
        start -= 1
    return set(line[start : start + kernel])


@case
def natten(draw):
    axes = draw(st.integers(1, 3))
    tile = [draw(st.integers(1, 3)) for _ in range(axes)]
    most = {1: 20, 2: 6, 3: 3}[axes]
    shape = [t * draw(st.integers(1, max(1, most // t))) for t in tile]
    dilation = [draw(st.integers(1, min(3, n))) for n in shape]
    kernel = [draw(st.integers(1, n // d)) for n, d in zip(shape, dilation, strict=True)]
    stride = [draw(st.integers(1, k)) for k in kernel]
    direction = [draw(st.booleans()) for _ in shape]
    tiled = draw(st.booleans())
    layout = places(shape, tile if tiled else None)
    axis = list(zip(shape, kernel, stride, dilation, direction, strict=True))

    def keep(b, h, q, kv):
        pairs = zip(layout[q], layout[kv], axis, strict=True)
        return all(key in neighbours(at, *rest) for at, key, rest in pairs)

    mask = masks.natten(
        shape,
        kernel,
        stride=stride,
        dilation=dilation,
        causal=direction,
        tile=tile if tiled else None,
    )
    return Case(mask, keep, math.prod(shape), math.prod(shape))


@case
def sliding_tile(draw):
    axes = draw(st.integers(1, 3))
    tile = [draw(st.integers(1, 2)) for _ in range(axes)]
    count = [draw(st.integers(1, {1: 8, 2: 4, 3: 2}[axes])) for _ in range(axes)]
    kernel = [draw(st.sampled_from(range(1, n + 1, 2))) for n in count]
    shape = [t * n for t, n in zip(tile, count, strict=True)]
    text = draw(st.integers(0, 3))
    layout = [tuple(c // t for c, t in zip(at, tile, strict=True)) for at in places(shape, tile)]

    def keep(b, h, q, kv):
        if max(q, kv) >= len(layout):
            return True
        pairs = zip(layout[q], layout[kv], count, kernel, strict=True)
        return all(key in neighbours(at, n, k, 1, 1, False) for at, key, n, k in pairs)

    mask = masks.sliding_tile(shape, tile, kernel, text=text)
    return Case(mask, keep, len(layout) + text, len(layout) + text)

"""Draw random instances of every mod, each with its formula written out for one score.

A formula takes a 0-d float64 score and Python ints and indexes learned tables with them, so
autograd gives the reference gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from attnkit import mods

LENGTH, HEADS, BATCH = 5, 3, 2


class Case(NamedTuple):
    mod: Callable
    formula: Callable[[Tensor, int, int, int, int], Tensor]  # formula(score, b, h, q, kv)
    learned: tuple[Tensor, ...] = ()
    q_len: int = LENGTH
    kv_len: int = LENGTH


CASES: dict[str, st.SearchStrategy[Case]] = {}


def case(function):
    """Register a strategy under the function's name, which is the name of the mod."""
    CASES[function.__name__] = st.composite(function)()
    return function


def learned(draw, *shape, low=-2.0, high=2.0):
    """Draw a float64 table that requires grad, from torch's generator seeded by hypothesis."""
    draw(st.integers(0, 3))  # another example, other numbers
    return (low + (high - low) * torch.rand(shape, dtype=torch.float64)).requires_grad_()


positive = st.floats(0.25, 8.0)


@case
def softcap(draw):
    cap = draw(positive)
    return Case(mods.softcap(cap), lambda s, b, h, q, kv: cap * torch.tanh(s / cap))


def paper_slopes(heads):
    """Compute ALiBi's slopes recursively, as the paper does."""
    start = 2 ** (-8 / heads)
    if math.log2(heads).is_integer():
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return paper_slopes(closest) + paper_slopes(2 * closest)[0::2][: heads - closest]


@case
def alibi(draw):
    symmetric = draw(st.booleans())
    kind = draw(st.sampled_from(["paper", "learned", "by batch"]))
    if kind == "paper":
        given, tables = draw(st.integers(HEADS, 40)), ()
        slopes = [paper_slopes(given)] * BATCH
    else:
        given = learned(draw, *((BATCH,) if kind == "by batch" else ()), HEADS)
        slopes, tables = given.expand(BATCH, HEADS), (given,)

    def formula(s, b, h, q, kv):
        return s - slopes[b][h] * (abs(q - kv) if symmetric else q - kv)

    return Case(mods.alibi(given, symmetric=symmetric), formula, tables)


def t5_bucket(distance, count, max_distance):
    """Compute T5's bucket, exact + floor(log(d / exact) / log(max / exact) * rough), exactly."""
    exact = count // 2
    rough = count - exact
    if distance < exact:
        return distance
    reached = [
        k for k in range(rough + 1) if distance**rough * exact**k >= exact**rough * max_distance**k
    ]
    return min(exact + max(reached), count - 1)


@case
def t5_bias(draw):
    both = draw(st.booleans())
    count = draw(st.integers(2, 12))
    far = draw(st.integers(count // 2 + 1, 60))
    bias = learned(draw, HEADS, 2 * count if both else count)

    def formula(s, b, h, q, kv):
        if both:
            side = count if kv > q else 0
            return s + bias[h, side + t5_bucket(abs(kv - q), count, far)]
        return s + bias[h, t5_bucket(max(q - kv, 0), count, far)]

    mod = mods.t5_bias(bias, bidirectional=both, max_distance=far)
    return Case(mod, formula, (bias,), draw(st.integers(1, 8)), draw(st.integers(1, 70)))


@case
def relative_bias(draw):
    reach = draw(st.integers(0, 6))
    bias = learned(draw, HEADS, 2 * reach + 1)

    def formula(s, b, h, q, kv):
        return s + bias[h, reach + max(-reach, min(reach, kv - q))]

    return Case(mods.relative_bias(bias), formula, (bias,), kv_len=7)


@case
def bias_2d(draw):
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    bias = learned(draw, HEADS, 2 * rows - 1, 2 * columns - 1)
    grid = [(r, c) for r in range(rows) for c in range(columns)]

    def formula(s, b, h, q, kv):
        (r, c), (row, column) = grid[q], grid[kv]
        return s + bias[h, rows - 1 + r - row, columns - 1 + c - column]

    return Case(mods.bias_2d(bias), formula, (bias,), len(grid), len(grid))


@case
def full_bias(draw):
    rank = draw(st.integers(2, 4))
    shape = [n if draw(st.booleans()) else 1 for n in (BATCH, HEADS, LENGTH, LENGTH)][4 - rank :]
    bias = learned(draw, *shape)

    def formula(s, b, h, q, kv):
        return s + bias.expand(BATCH, HEADS, LENGTH, LENGTH)[b, h, q, kv]

    return Case(mods.full_bias(bias), formula, (bias,))


@case
def head_scale(draw):
    scale = learned(draw, HEADS)
    return Case(mods.head_scale(scale), lambda s, b, h, q, kv: s * scale[h], (scale,))


@case
def head_gate(draw):
    gate = learned(draw, HEADS)
    formula = lambda s, b, h, q, kv: s / (1 + torch.exp(-gate[h]))
    return Case(mods.head_gate(gate), formula, (gate,))


def row_lengths(draw):
    """Draw the number of keys per row, as an argument of the mod and as a function of (b, q)."""
    kind = draw(st.sampled_from(["causal", "constant", "batch"]))
    if kind == "causal":
        return None, lambda b, q: q + 1
    if kind == "constant":
        length = draw(st.integers(1, 100))
        return length, lambda b, q: length
    own = draw(st.lists(st.integers(1, 100), min_size=BATCH, max_size=BATCH))
    return torch.tensor(own, dtype=torch.int32), lambda b, q: own[b]


@case
def log_length(draw):
    trained = draw(st.integers(2, 50))
    length, keys = row_lengths(draw)

    def formula(s, b, h, q, kv):
        return s * max(1.0, math.log(keys(b, q)) / math.log(trained))

    return Case(mods.log_length(trained, length), formula)


@case
def scalable_softmax(draw):
    scale = learned(draw, HEADS)
    length, keys = row_lengths(draw)
    formula = lambda s, b, h, q, kv: s * scale[h] * math.log(keys(b, q))
    return Case(mods.scalable_softmax(scale, length), formula, (scale,))


@case
def distance_decay(draw):
    rate, power = learned(draw, HEADS), draw(st.sampled_from([1.0, 2.0, 0.5, 1.7]))
    formula = lambda s, b, h, q, kv: s - rate[h] * float(abs(q - kv)) ** power
    return Case(mods.distance_decay(rate, power), formula, (rate,))


@case
def kerple(draw):
    rate, scale = learned(draw, HEADS, low=0.1), learned(draw, HEADS, low=0.1)
    formula = lambda s, b, h, q, kv: s - rate[h] * torch.log(1 + scale[h] * abs(q - kv))
    return Case(mods.kerple(rate, scale), formula, (rate, scale))


@case
def sandwich(draw):
    heads, dims = draw(st.integers(HEADS, 16)), 2 * draw(st.integers(1, 20))

    def formula(s, b, h, q, kv):
        waves = [math.cos((q - kv) / 10000 ** (2 * i / dims)) for i in range(1, dims // 2 + 1)]
        bias = torch.tensor(sum(waves) - dims / 2).float().double()  # the table is float32
        return s + bias * heads / (8 * (h + 1))

    return Case(mods.sandwich(heads, 7, dims=dims), formula, kv_len=7)


@case
def graphormer(draw):
    count = draw(st.integers(1, 5))
    bias = learned(draw, HEADS, count)
    distance = torch.randint(0, count, (BATCH, LENGTH, LENGTH))
    if draw(st.booleans()):
        mod = mods.graphormer(bias, distance)
    else:
        mod = mods.graphormer(bias, distance[0])
        distance = distance[:1].expand(BATCH, -1, -1)
    table = distance.tolist()
    return Case(mod, lambda s, b, h, q, kv: s + bias[h, table[b][q][kv]], (bias,))


@case
def forgetting_gate(draw):
    if draw(st.booleans()):
        sums = learned(draw, HEADS, LENGTH)
        own = lambda b: sums
    else:
        sums = learned(draw, BATCH, HEADS, LENGTH)
        own = lambda b: sums[b]
    formula = lambda s, b, h, q, kv: s + own(b)[h, q] - own(b)[h, kv]
    return Case(mods.forgetting_gate(sums), formula, (sums,))


@case
def log_sigmoid(draw):
    bias = draw(st.floats(-3, 3))
    formula = lambda s, b, h, q, kv: torch.log(1 / (1 + torch.exp(-(s + bias))))
    return Case(mods.log_sigmoid(bias), formula)


@case
def log_relu(draw):
    power = draw(positive)

    def formula(s, b, h, q, kv):
        return power * torch.log(s) if s > 0 else torch.tensor(-math.inf, dtype=torch.float64)

    return Case(mods.log_relu(power), formula)


@case
def compose(draw):
    for_these_heads = CASES["alibi"].filter(lambda case: case.mod.axes[0].shape[-1] == HEADS)
    parts = [
        draw(st.one_of(CASES["softcap"], for_these_heads, CASES["head_scale"], CASES["kerple"]))
        for _ in range(draw(st.integers(0, 3)))
    ]

    def formula(s, b, h, q, kv):
        for part in parts:
            s = part.formula(s, b, h, q, kv)
        return s

    tables = tuple(table for part in parts for table in part.learned)
    return Case(mods.compose(*(part.mod for part in parts)), formula, tables)

"""Check lazy rescaling in a model of the kernels' recurrence: how often, and exactness."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

BLOCK = 128
WARP = 32  # rows that decide together
GROWTH = 8.0  # log2
LN2 = 0.6931471805599453
BFLOAT16 = 2.0**-8  # the largest relative error of a rounding to bfloat16
ROUNDINGS = 64 * 2.0**-24  # float32: sums in pairs, then over 32 blocks, and a few products


@dataclass(frozen=True)
class Result:
    """Holds output and LSE of the recurrence, and how many rescales it did of how many."""

    out: Tensor
    lse: Tensor
    done: int
    most: int


def recurrence(scores: Tensor, value: Tensor, growth: float | None, mended: bool = True) -> Result:
    """Compute online softmax over blocks of kv, float32, scores [rows, kv] in log2 units.

    The reference of a row moves only when a block's maximum is more than `growth` above it (None:
    whenever it is above); then a warp rescales all of its rows. With `mended`, the output is divided
    by a sum in which the largest weight of each block is rounded.
    """
    rows = scores.shape[0]
    reference = torch.full((rows,), -torch.inf)
    total, gap, out = torch.zeros(rows), torch.zeros(rows), torch.zeros(rows, value.shape[1])
    done = most = 0
    blocks = zip(scores.split(BLOCK, 1), value.split(BLOCK), strict=True)
    for number, (block, values) in enumerate(blocks):
        peak = torch.maximum(reference, block.amax(1))
        moved = peak > reference
        if growth is not None:
            moved &= peak - reference > growth
        after = torch.where(moved, peak, reference)
        safe = after.nan_to_num(neginf=0.0)
        scale = torch.where(moved, torch.exp2(reference - safe), 1.0)
        if number:
            done += int(moved.view(-1, WARP).any(1).sum())
            most += rows // WARP
        p = torch.exp2(block - safe[:, None])
        total = total * scale + p.sum(1)
        gap = gap * scale + p.amax(1).bfloat16().float() - p.amax(1)
        out = out * scale[:, None] + p.bfloat16().float() @ values
        reference = after
    lse = torch.log2(total) + reference
    return Result(out / (total + mended * gap)[:, None], lse, done, most)


def inputs(length: int, dim: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(length, dim, generator=random).bfloat16() for _ in range(3))
    scores = query.float() @ key.float().T * (dim**-0.5 / LN2)
    return scores, value.float()


def deviation(result: Result, scores: Tensor, value: Tensor) -> Tensor:
    return (result.out - torch.softmax(scores.double() * LN2, 1) @ value.double()).abs()


def allowed(scores: Tensor, value: Tensor) -> Tensor:
    """A weight's rounding moves the output by as much of its value; that of a block's largest, which
    is in the sum as well, by as much of what its value differs from the output."""
    p, value = torch.softmax(scores.double() * LN2, 1), value.double()
    out, moved = p @ value, p @ value.abs()
    for weights, values in zip(p.split(BLOCK, 1), value.split(BLOCK), strict=True):
        top, at = weights.max(1)
        moved += top[:, None] * ((values[at] - out).abs() - values[at].abs())
    # a sum with rounded weights is smaller by one more rounding at most
    return BFLOAT16 * (1 + BFLOAT16) * moved + ROUNDINGS * (p @ value.abs())


def check(result: Result, scores: Tensor, value: Tensor) -> None:
    """Check the error, element by element, against rounding of P to bfloat16 and float32 sums."""
    natural = scores.double() * LN2
    assert bool((deviation(result, scores, value) <= allowed(scores, value)).all())
    lse = torch.logsumexp(natural, 1) / LN2
    assert bool(((result.lse - lse).abs() <= ROUNDINGS * (1 + lse.abs())).all())


@pytest.mark.parametrize("dim", [64, 128])
def test_most_rescales_are_skipped(dim: int) -> None:
    scores, value = inputs(4096, dim)
    lazy, eager = (recurrence(scores, value, growth) for growth in (GROWTH, None))
    assert eager.done > 0.5 * eager.most  # a warp of 32 rows nearly always has one that grew
    assert lazy.done <= 0.15 * eager.done
    for result in (lazy, eager):
        check(result, scores, value)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.floats(0, 60), st.floats(0, 40), st.floats(0, 16))
def test_the_output_is_the_same_for_any_scores(
    seed: int, slope: float, spread: float, growth: float
) -> None:
    """Scores climb by any amount per block, with any growth that bfloat16 holds."""
    scores, value = inputs(512, 64, seed)
    climb = torch.arange(512) // BLOCK * slope
    scores = scores * (1 + spread) + climb
    check(recurrence(scores, value, growth), scores, value)


def test_a_row_of_nearly_one_weight_is_its_value() -> None:
    """A block before has the reference: the weight is 2**7.9, and is rounded."""
    scores = torch.full((WARP, 256), -40.0)
    scores[:, 0], scores[:, 200] = 0.0, 7.9
    _, value = inputs(256)
    off = {}
    for mended in (False, True):
        result = recurrence(scores, value, GROWTH, mended)
        off[mended] = float((deviation(result, scores, value) / allowed(scores, value)).max())
    assert off[True] <= 1 < off[False]

"""Check lazy rescaling in the Blackwell forward: when a maximum moves, and what rounding costs.

The kernel, executed on the CPU, is compared with float64 under an error bound that accounts for
each rounding of P. It is also compared with a model of its recurrence, which tells the maximum that
each block is relative to.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnkit import emulator

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.templates.common.constants import RESCALE_THRESHOLD
from tests.templates import sm100_kit as kit

BLOCK = 128
LN2 = math.log(2.0)
BFLOAT16 = 2.0**-8  # largest relative error of a rounding to bfloat16
EXP2 = 2.0**-20  # the kernel's exponentials, relative; and sums in float32


def run(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and LSE (log2) of the kernel for scores [rows, kv] in log2 units.

    All rows of `scores` must be equal, because a score is the first element of its key.
    """
    rows, length = scores.shape
    key, query = torch.zeros(length, 64), torch.zeros(rows, 64)
    query[:, 0], query[:, 1] = 1.0, 1.0
    high = scores[0].bfloat16()  # bfloat16 has 8 bits: the rest goes into the second element
    key[:, 0], key[:, 1] = high, scores[0] - high
    qkv = tuple(t[None, None].bfloat16() for t in (query, key, value))
    case = kit.case((qkv[0], qkv[1], qkv[2]), scale=LN2)
    report = emulator.run(case.exe, *case.marked(), raises=False)
    assert report.ok, str(report)
    out, lse, _ = case.results()
    return out[0, 0].double(), lse[0, 0].double() / LN2


def rows_of(columns: Tensor) -> Tensor:
    """Return scores with 8 equal rows."""
    return columns.expand(8, -1)


def stepped(*peaks: float, seed: int = 0) -> Tensor:
    """Return scores with one block per peak; a block's other scores are 6 to 12 below its peak."""
    random = torch.Generator().manual_seed(seed)
    blocks = []
    for peak in peaks:
        block = peak - 6 - 6 * torch.rand(BLOCK, generator=random)
        block[int(torch.randint(BLOCK, (1,), generator=random))] = peak
        blocks.append(block)
    return rows_of(halves(torch.cat(blocks)))


def halves(columns: Tensor) -> Tensor:
    """Round scores to sums of two bfloat16 numbers, which `run` passes exactly."""
    high = columns.bfloat16().float()
    return high + (columns - high).bfloat16().float()


def values(length: int, seed: int = 1) -> Tensor:
    return torch.randn(length, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def allowed(scores: Tensor, value: Tensor) -> Tensor:
    """Return a bound of the output's error before the output itself is rounded.

    Rounding a weight moves the output by the same fraction of the weight's value. The largest
    weight of a block is also rounded in the row sum, so it moves the output by a fraction of the
    difference between its value and the output.
    """
    p, value = torch.softmax(scores.double() * LN2, 1), value.double()
    out, moved = p @ value, p @ value.abs()
    for weights, part in zip(p.split(BLOCK, 1), value.split(BLOCK), strict=True):
        top, at = weights.max(1)
        moved += top[:, None] * ((part[at] - out).abs() - part[at].abs())
    return BFLOAT16 * (1 + BFLOAT16) * moved + EXP2 * (p @ value.abs())


def check(scores: Tensor, value: Tensor) -> Tensor:
    """Check the kernel against float64 element by element; return its output."""
    out, lse = run(scores, value)
    exact = torch.softmax(scores.double() * LN2, 1) @ value.double()
    rounding = torch.exp2(exact.abs().log2().floor() - 8)  # of the output itself: half a unit
    worst = ((out - exact).abs() / (allowed(scores, value) * (1 + BFLOAT16) + rounding)).max()
    assert worst <= 1, f"error {worst:.3f} of what is allowed"
    true_lse = torch.logsumexp(scores.double() * LN2, 1) / LN2
    assert bool(((lse - true_lse).abs() <= EXP2 * (1 + true_lse.abs())).all())
    return out


def model(scores: Tensor, value: Tensor, growth: float, mended: bool = True) -> Tensor:
    """Compute online softmax over kv blocks whose maximum moves only if it grows by > `growth`.

    The last block comes first, as in the kernel.

    With `mended`, the output is divided by a sum in which the largest P of each block is rounded.
    """
    rows = scores.shape[0]
    reference = torch.full((rows,), -math.inf)
    total, gap, out = torch.zeros(rows), torch.zeros(rows), torch.zeros(rows, value.shape[1])
    for block, part in reversed(list(zip(scores.split(BLOCK, 1), value.split(BLOCK), strict=True))):
        peak = torch.maximum(reference, block.amax(1))
        after = torch.where(peak - reference > growth, peak, reference)
        scale = torch.exp2(reference - after)
        p = torch.exp2(block - after[:, None])
        top = p.amax(1)
        total = total * scale + p.sum(1)
        gap = gap * scale + top.bfloat16().float() - top
        out = out * scale[:, None] + p.bfloat16().float() @ part
        reference = after
    return out / (total + mended * gap)[:, None]


@pytest.mark.parametrize(
    "peaks",
    [
        (0.0, 7.9, 0.0),
        (0.0, 8.1, 16.3),
        (-30.0, 20.0, 27.7),
        (3.0, -60.0, 10.7),
        (90.0, 0.0, -90.0),
        (0.0, 7.0, 14.5),
        # Blocks are read from the right. The maximum stays at the second, whose P of 128.52 rounds
        # to 129, and moves at the third: the 0.48 must then shrink as the sum does.
        (8.5, math.log2(128.52), 0.0),
        (20.0, math.log2(128.52), 0.0),
    ],
    ids=str,
)
def test_the_output_is_that_of_float64(peaks: tuple[float, ...]) -> None:
    """The output is within the bound for maxima that grow by more or less than the threshold."""
    check(stepped(*peaks), values(BLOCK * len(peaks)))


def test_a_row_of_nearly_one_weight_is_its_value() -> None:
    """A row with nearly one weight equals that weight's value, although the weight is rounded.

    The block before it sets the maximum. The weight is 128.52, and bfloat16 has only 128 and 129
    nearby.
    """
    columns = torch.full((2 * BLOCK,), -40.0)
    columns[60], columns[200] = math.log2(128.52), 0.0
    scores, value = rows_of(halves(columns)), values(2 * BLOCK)
    off = (model(scores, value, RESCALE_THRESHOLD, mended=False) - value[60]).abs()
    assert bool((off > 2 * allowed(scores, value)).any())  # without the correction it would show
    check(scores, value)


@pytest.mark.parametrize("growth", [7.9, 8.1])
def test_a_maximum_moves_where_it_grows_by_more_than_the_threshold(growth: float) -> None:
    """The maximum moves exactly if it grows by more than the threshold.

    The rounding of P in the middle block shows which maximum P is relative to.
    """
    assert RESCALE_THRESHOLD == 8.0
    scores = stepped(-4.0, 0.25 + growth, 0.25)
    value = values(3 * BLOCK)
    # outputs near 0, so that their own rounding does not hide the roundings of P
    value = (value - torch.softmax(scores[0] * LN2, 0) @ value).bfloat16().float()
    found, _ = run(scores, value)
    moved, stays = model(scores, value, -math.inf), model(scores, value, 1e9)
    wanted, other = (stays, moved) if growth <= RESCALE_THRESHOLD else (moved, stays)
    near, far = (float((found - x.double()).abs().mean()) for x in (wanted, other))
    assert near < far / 4

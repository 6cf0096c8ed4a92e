"""Compare the Blackwell forward kernel, executed on the CPU, with the dense float64 oracle.

Each kernel runs in program order, in adversarial orders and under the race detector, all from the
same inputs. Outputs hold NaN before it runs, and reading them is a fault. Nothing here has run on a
GPU. The tests cover a sample of variants, because each variant takes a compilation.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import emulator, masks, mods

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.templates.sm100.config import ForwardConfig
from tests.sampling import diagonal, first_of, sampled
from tests.templates import sm100_kit as kit
from tests.templates.test_sm90_forward import (
    MASKS,
    MODS,
    Result,
    attend,
    close,
    draw,
    listed,
    row_term,
    stairs,
)

BF16, FP16 = torch.bfloat16, torch.float16


def check(
    qkv: tuple[Tensor, Tensor, Tensor],
    score: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    top: bool = False,
    mode: str = "check",
    split: bool = False,
    **settings: Any,
) -> Result:
    """Run the kernel in all orders and compare it with the oracle; return its results."""
    case = kit.case(qkv, score, mask, scale=scale, need_max=top, split=split, **settings)
    assert case.stack == 0
    report: Any
    if mode == "check":
        report = emulator.check(case.exe, *case.marked(), seeds=1)
    else:
        report = emulator.run(case.exe, *case.marked(), mode=mode, raises=False)
    assert report.ok, str(report)
    out, lse, most = case.results()
    assert not case.counter.any()  # the next launch of the stream finds it so
    assert (case.work.slots > 0) == split
    kit.join_parts(case)
    result = Result(out, lse, most if top else None)
    wide = (qkv[0].double(), qkv[1].double(), qkv[2].double())
    expected = attend(wide, score, mask, backend="eager", top=top, scale=scale)
    dense = attend(qkv, score, mask, backend="eager", top=top, scale=scale)
    close("out", result.out, expected.out, dense.out)
    close("lse", result.lse, expected.lse, dense.lse)
    if top:
        assert result.top is not None
        assert expected.top is not None
        assert dense.top is not None
        close("max scores", result.top, expected.top, dense.top)
    return result


@pytest.mark.parametrize(
    ("dims", "dtype", "score", "mask"),
    sampled(
        [
            ((128, 128), BF16, None, "causal"),
            ((64, 64), FP16, None, None),
            ((72, 96), BF16, "softcap", "window"),
            ((192, 128), FP16, None, "documents"),
            ((256, 256), BF16, None, "causal"),
            ((64, 64), BF16, "alibi", "two intervals"),
            ((128, 128), BF16, "relative bias", "no intervals"),
            ((64, 64), BF16, "all parts", "by head and batch"),
        ],
        5,
    ),
)
def test_variants(dims: tuple[int, int], dtype: torch.dtype, score: str, mask: str) -> None:
    """Variants are exact with several tiles per CTA, laps of all rings, ragged ends and GQA."""
    batch = (2, 2) if mask == "by head and batch" else (1, 1)
    qkv = draw(300, 310, dims=dims, dtype=dtype, batch=batch)
    if score is None and mask in (None, "causal") and max(dims) <= 128:
        qkv = draw(600, 640, dims=dims, dtype=dtype)
    mod = MODS[score]() if score else None
    chosen = masks.causal() if mask == "causal" else MASKS[mask]() if mask else None
    check(qkv, mod, chosen)


@pytest.mark.parametrize(
    "settings",
    first_of(
        [
            ({"q_tiles": 1, "block_kv": 64},),
            ({"q_tiles": 1},),
            ({"halves": True, "alias": True, "poly": 4},),
        ]
    ),
    ids=str,
)
def test_settings(settings: dict[str, Any]) -> None:
    """All settings that the plan may choose are exact."""
    check(draw(300), None, masks.causal(), **settings)


def test_cluster_launch_control() -> None:
    """Results are exact if work tiles are taken by cluster launch control.

    Each work tile has a CTA, and running CTAs take over tiles of CTAs that were not launched yet.
    """
    check(draw(300, 64, heads=(6, 1)), work="clc")


@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (1, 300), (7, 129), (129, 7), (193, 128), (513, 600)]
)
def test_lengths(q_len: int, kv_len: int) -> None:
    check(draw(q_len, kv_len), mode="adversarial")


def test_fully_masked_rows_give_zero_and_minus_infinity() -> None:
    """Fully masked rows and tiles give output 0, LSE -inf and row maximum -inf."""
    result = check(draw(600), None, lambda b, h, q, kv: (q >= kv + 290) | (q == 3), top=True)
    masked = torch.arange(600) < 290
    masked[3] = False
    assert bool((result.out[:, :, masked] == 0).all())
    assert bool((result.lse[:, :, masked] == -math.inf).all())
    assert result.top is not None
    assert bool((result.top[:, :, masked] == -math.inf).all())


def test_row_terms_that_are_not_finite() -> None:
    result = check(draw(200), row_term, lambda b, h, q, kv: q >= kv, top=True, mode="eager")
    assert bool((result.out[:, :, 3] == 0).all())
    assert bool(result.out[:, :, 70:72].isnan().all())
    assert bool(result.out[:, :, [2, 72, 150]].isfinite().all())


@pytest.mark.parametrize(
    ("stair", "score"), diagonal([(16.0, True), (2.0, True), (16.0, False)], ["plain", "alibi"])
)
def test_maxima_that_move_from_block_to_block(stair: tuple[float, bool], score: str) -> None:
    """Results are exact for row maxima that move from block to block.

    If a maximum grew little, P absorbs the difference; otherwise O is rescaled.
    """
    mod = mods.alibi(2) if score == "alibi" else None
    step, rising = stair
    check(stairs(step, (64, 64), 3, rising), mod, scale=1.0, mode="adversarial")


def test_exponentials_on_the_fma_units_pass_infinities_and_nan() -> None:
    query, key, value = draw(300)
    query[:, :, 5, 0] = math.nan
    key[:, :, 250:254, 1] = math.nan  # reaches the rows that keep it, and no other
    mask = lambda b, h, q, kv: q >= kv
    result = check((query, key, value), None, mask, top=True, poly=2, mode="eager")
    assert bool(result.out[:, :, 5].isnan().all())
    assert bool(result.out[:, :, 250:].isnan().all())
    assert bool(result.out[:, :, 6:250].isfinite().all())


def test_rows_that_are_split_along_kv() -> None:
    """Rows split along kv are exact, also if the first part is fully masked."""
    check(draw(150, 1400, heads=(1, 1)), None, lambda b, h, q, kv: kv >= q * 9, split=True)


def test_block_lists_overrule_the_mask() -> None:
    """Block lists override the mask: FULL blocks are kept, also at a ragged end, EMPTY skipped."""
    grid = [[2, 0, 2], [1, 2, 1]]
    blocks = listed(grid, (400, 300), lambda b, h, q, kv: q >= kv)
    check(draw(400, 300), None, blocks, q_tiles=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_dim_v": 256}, "take 768 columns of tensor memory, there are 512: take q_tiles=1"),
        ({"head_dim": 256, "head_dim_v": 128}, "take alias=True, q_tiles=1 or block_kv=64"),
        ({"head_dim_v": 192, "q_tiles": 1, "alias": True}, "alias=True with head_dim_v=192"),
        ({"head_dim": 100}, "head_dim=100: expected a multiple of 32"),
        ({"dtype": "float32"}, "expected 'bfloat16' or 'float16'"),
        ({"q_tiles": 3}, "expected 1 or 2"),
        ({"head_dim": 512}, "q_tiles=2 with head_dim=512 and value_parts=1: expected q_tiles=1"),
        ({"value_parts": 3}, "value_parts=3: expected 1 or 2"),
        ({"q_tiles": 1, "halves": True}, "halves=True with q_tiles=1 and block_kv=128"),
    ],
)
def test_what_cannot_be_built_says_why(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ForwardConfig(**settings)

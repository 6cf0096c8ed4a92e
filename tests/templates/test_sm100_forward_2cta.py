"""Compare the Blackwell forward with CTA pairs, in the emulator, with the float64 oracle."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import AuxRequest, flex_attention, masks, mods
from attnkit.jit import emulation

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit.kernel import kernel, requested_sources
from attnkit.schedule.kernel_table import Kernel, kernels
from attnkit.templates.sm100.config import ForwardConfig
from tests.sampling import first_of, sampled
from tests.templates.test_sm90_forward import MASKS, MODS, close, draw, stairs
from tests.templates.test_sm100_forward import check

TWO_CTA = {"two_cta": True, "work": "clc"}
BACKEND = "emulate:sm_100a"
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("dims", "dtype", "score", "mask"),
    first_of(
        [
            ((128, 128), BF16, None, None),
            ((192, 128), FP16, None, "documents"),
            ((72, 96), BF16, "softcap", "window"),
            ((128, 128), BF16, "relative bias", "no intervals"),
            ((64, 64), BF16, "alibi", "by head and batch"),
        ]
    ),
)
def test_variants(dims: tuple[int, int], dtype: torch.dtype, score: str, mask: str) -> None:
    """Variants are exact with several tiles per pair, laps of all rings, ragged ends and GQA."""
    batch = (2, 2) if mask == "by head and batch" else (1, 1)
    long = score is None and mask is None
    qkv = draw(*(600, 640) if long else (300, 310), dims=dims, dtype=dtype, batch=batch)
    check(qkv, MODS[score]() if score else None, MASKS[mask]() if mask else None, **TWO_CTA)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings", sampled([({"alias": True, "poly": 2},), ({"halves": True},)], 2), ids=str
)
def test_settings(settings: dict[str, Any]) -> None:
    check(draw(600, 300), None, masks.causal(), **TWO_CTA | settings)


@pytest.mark.parametrize(
    ("q_len", "kv_len"), sampled([(1, 1), (7, 129), (129, 7), (257, 128), (513, 600)], 4)
)
def test_lengths(q_len: int, kv_len: int) -> None:
    """Results are exact whether a pair has query tiles for both CTAs, for one, or for none."""
    check(draw(q_len, kv_len), mode="adversarial", **TWO_CTA)


def test_maxima_that_move_from_block_to_block() -> None:
    check(stairs(16.0, (64, 64), 3, True), scale=1.0, **TWO_CTA)


def test_rows_that_are_split_along_kv() -> None:
    check(
        draw(150, 1400, heads=(1, 1)), None, lambda b, h, q, kv: kv >= q * 9, split=True, **TWO_CTA
    )


def attend(
    qkv: tuple[Tensor, ...], mask: Any = None, backend: str = BACKEND, score: Any = None
) -> tuple[Any, str]:
    """Return (out, LSE) and the PTX of the kernel; the emulator must report nothing."""
    with emulation.session(ctas=4) as session, requested_sources() as sources:
        result = flex_attention(*qkv, score, mask, backend=backend, return_lse=True)
    if backend != BACKEND:
        return result, ""
    assert session.ok, session.reports
    (source,) = (s for s in sources if s.name.startswith("forward"))
    return result, kernel(source).ptx


FEW = lambda b, h, q, kv: kv < 700


@pytest.mark.parametrize(
    ("q_len", "score", "mask", "pairs"),
    sampled(
        [
            (600, None, None, True),
            (512, mods.softcap(5.0), None, True),
            (200, None, None, False),
            (600, None, masks.causal() & masks.sliding_window(200), False),
            (500, mods.alibi(1), FEW, True),
        ],
        2,
    ),
    ids=["long", "softcap", "short", "window", "columns"],
)
def test_an_operator_takes_pairs_where_they_are_predicted_better(
    q_len: int, score: Any, mask: Any, pairs: bool
) -> None:
    """The operator chooses CTA pairs where they are predicted to be faster, and stays exact.

    Two pairs share the work; rows are split along kv and combined.
    """
    qkv = draw(q_len, 900, heads=(1, 1), dims=(128, 128))
    (out, lse), ptx = attend(qkv, mask, score=score)
    assert ("cta_group::2" in ptx) == pairs
    assert ("clusterlaunchcontrol.try_cancel" in ptx) == pairs
    wide = tuple(x.double() for x in qkv)
    (exact, exact_lse), _ = attend(wide, mask, "eager", score)
    (dense, dense_lse), _ = attend(qkv, mask, "eager", score)
    close("out", out, exact, dense)
    close("lse", lse, exact_lse, dense_lse)


def test_maxima_of_pairs_are_exact() -> None:
    qkv = draw(520, 300, heads=(1, 1), dims=(128, 128))
    options: dict[str, Any] = {"return_aux": AuxRequest(max_scores=True)}
    _, result = flex_attention(*qkv, mods.alibi(1), FEW, backend=BACKEND, **options)
    wide = tuple(x.double() for x in qkv)
    _, exact = flex_attention(*wide, mods.alibi(1), FEW, backend="eager", **options)
    torch.testing.assert_close(result.max_scores, exact.max_scores.float())


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
def test_the_table_prefers_pairs_for_long_queries(dims: tuple[int, int]) -> None:
    def first(**call: Any) -> Kernel:
        return kernels(*dims, template="sm100", **call)[0]

    for call in ({}, {"q_len": 257}, {"modded": True}):
        assert first(**call).ctas == 2
    assert first(q_len=256).ctas == 1
    assert first(q_len=256).block[0] == 256
    assert first(q_len=128).block[0] == first(q_len=1, modded=True).block[0] == 128


@pytest.mark.parametrize("other", [{"q_tiles": 1}, {"block_kv": 64}, {"work": "counter"}])
def test_what_cannot_be_built_says_why(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape("expected 2, 128 and 'clc'")):
        ForwardConfig(**(TWO_CTA | other))

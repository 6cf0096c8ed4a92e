"""The Blackwell forward with pairs of CTAs, executed on the CPU, against the float64 oracle."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import emulation, flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.compiled import asked, kernel
from attnkit.kernel_table import Kernel, kernels
from attnkit.templates.sm100.config import ForwardConfig
from tests.templates.test_sm90_forward import MASKS, MODS, close, draw, stairs
from tests.templates.test_sm100_forward import check

PAIR = {"pair": True, "dynamic": False}
BACKEND = "emulate:sm_100a"
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("dims", "dtype", "score", "mask"),
    [
        ((128, 128), BF16, None, None),
        ((192, 128), FP16, None, "documents"),
        ((72, 96), BF16, "softcap", "window"),
        ((128, 128), BF16, "relative bias", "no intervals"),
        ((64, 64), BF16, "alibi", "by head and batch"),
    ],
)
def test_variants(dims: tuple[int, int], dtype: torch.dtype, score: str, mask: str) -> None:
    """Several tiles a pair, laps of every ring, ragged ends, heads that share K and V."""
    batch = (2, 2) if mask == "by head and batch" else (1, 1)
    long = score is None and mask is None
    qkv = draw(*(600, 640) if long else (300, 310), dims=dims, dtype=dtype, batch=batch)
    check(qkv, MODS[score]() if score else None, MASKS[mask]() if mask else None, **PAIR)


@pytest.mark.parametrize("settings", [{"halves": True}, {"alias": True, "poly": 2}], ids=str)
def test_settings(settings: dict[str, Any]) -> None:
    check(draw(600, 300), None, masks.causal(), **PAIR, **settings)


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (7, 129), (129, 7), (257, 128), (513, 600)])
def test_lengths(q_len: int, kv_len: int) -> None:
    """Query tiles of one CTA, of both, of none."""
    check(draw(q_len, kv_len), mode="adversarial", **PAIR)


def test_maxima_that_move_from_block_to_block() -> None:
    check(stairs(16.0, (64, 64), 3, True), scale=1.0, **PAIR)


def test_rows_that_are_split_along_kv() -> None:
    check(draw(150, 1400, heads=(1, 1)), None, lambda b, h, q, kv: kv >= q * 9, split=True, **PAIR)


def attend(qkv: tuple[Tensor, ...], mask: Any = None, backend: str = BACKEND) -> tuple[Any, str]:
    """Output and LSE, and the PTX of the kernel; the emulator finds nothing wrong."""
    with emulation.session(ctas=4) as session, asked() as sources:
        found = flex_attention(*qkv, None, mask, backend=backend, return_lse=True, enable_gqa=True)
    if backend != BACKEND:
        return found, ""
    assert session.ok, session.reports
    (source,) = (s for s in sources if s.name.startswith("forward"))
    return found, kernel(source).ptx


@pytest.mark.parametrize(
    ("q_len", "mask", "pairs"), [(600, None, True), (200, None, False), (600, "causal", False)]
)
def test_an_operator_takes_pairs_where_nothing_is_masked(
    q_len: int, mask: Any, pairs: bool
) -> None:
    """Two pairs share the work; rows are split along kv, and joined."""
    qkv = draw(q_len, 900, heads=(1, 1), dims=(128, 128))
    chosen = masks.causal() if mask else None
    (out, lse), ptx = attend(qkv, chosen)
    assert ("cta_group::2" in ptx) == pairs
    wide = tuple(x.double() for x in qkv)
    (exact, exact_lse), _ = attend(wide, chosen, "eager")
    (dense, dense_lse), _ = attend(qkv, chosen, "eager")
    close("out", out, exact, dense)
    close("lse", lse, exact_lse, dense_lse)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
def test_the_table_prefers_pairs_for_long_queries_without_a_mask(dims: tuple[int, int]) -> None:
    def first(**call: Any) -> Kernel:
        return kernels(*dims, template="sm100", **call)[0]

    assert first(masked=False).ctas == first(q_len=257, masked=False).ctas == 2
    others: list[dict[str, Any]] = [
        {"q_len": 256, "masked": False},
        {"modded": True, "masked": False},
        {"q_len": 8192},
        {},
    ]
    for call in others:
        assert first(**call).ctas == 1
        assert first(**call).block[0] == 256
    assert first(q_len=128).block[0] == first(q_len=1, masked=False).block[0] == 128


@pytest.mark.parametrize("other", [{"q_tiles": 1}, {"block_kv": 64}, {"dynamic": True}])
def test_what_cannot_be_built_says_why(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape("expected 2, 128, False and False")):
        ForwardConfig(**(PAIR | other))

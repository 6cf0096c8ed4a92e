"""Check the forward kernel for every mod and mask, all shapes, strides and dtypes.

A kernel is compiled for each variant, head dim and dtype, which takes a second or two. Therefore
many variants are tested at one shape, and many shapes with one variant. `-n 8` compiles in
parallel.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import AuxRequest, UnsupportedError, create_block_mask, flex_attention, masks, mods
from attnkit.runtime.variant import Variant
from attnkit.testing import LAYOUTS, Case
from tests.gpu import cute_kit as kit

LENGTH = 300  # three tiles of 128, the last one ragged
BF16, FP16 = torch.bfloat16, torch.float16


def wide(q_len: int, kv_len: int, **sizes: Any) -> Case:
    return Case(
        q_len, kv_len, **{"heads": 2, "kv_heads": 2, "dtype": BF16, "head_dim": 64,
                          "value_dim": 64} | sizes
    )  # fmt: skip


def band(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Mask a window around the diagonal; rows beyond the end of the keys are fully masked."""
    return (q - kv < 200) & (kv - q < 90)


def alibi(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score - (h + 1) * 0.1 * (q - kv).abs()


BAND = Variant(alibi, band)
PLAIN = Variant()
CAUSAL = Variant(None, masks.causal())


# --- the libraries


@pytest.mark.parametrize("name", masks.examples(48))
def test_mask(name: str) -> None:
    example = masks.examples(LENGTH, device=kit.DEVICE)[name]
    heads = max(2, example.heads)
    case = wide(
        example.q_len, example.kv_len, batch=example.batch, heads=heads, kv_heads=heads,
        kv_batch=example.batch,
    )  # fmt: skip
    kit.check(Variant(None, example.mask), case)


@pytest.mark.parametrize("name", mods.examples(48))
def test_mod(name: str) -> None:
    example = mods.examples(LENGTH, device=kit.DEVICE)[name]
    case = wide(
        example.q_len, example.kv_len, batch=example.batch, heads=example.heads, kv_heads=2,
        kv_batch=example.batch,
    )  # fmt: skip
    kit.check(Variant(example.mod), case)


# --- shapes


LENGTHS = (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300,
           383, 384, 385, 511, 512, 513, 640, 641, 700)  # fmt: skip


@pytest.mark.parametrize("variant", [PLAIN, CAUSAL, BAND], ids=["plain", "causal", "band"])
def test_lengths(variant: Variant) -> None:
    shifted = LENGTHS[7:] + LENGTHS[:7]
    pairs = [*zip(LENGTHS, LENGTHS, strict=True), *zip(LENGTHS, shifted, strict=True)]
    for q_len, kv_len in [*pairs, *zip(shifted, reversed(LENGTHS), strict=True)]:
        kit.check(variant, wide(q_len, kv_len, seed=q_len))


@pytest.mark.parametrize("dead", ["none", "some", "all"])
def test_rows_that_keep_nothing(dead: str) -> None:
    kept = {
        "none": lambda b, h, q, kv: kv <= q,
        "some": lambda b, h, q, kv: (q % 3 > 0) & (q // 128 != 1) & (kv > 200) & (kv <= q),
        "all": lambda b, h, q, kv: kv < 0,
    }[dead]
    found = kit.check(Variant(None, kept), wide(515, 515, heads=3, kv_heads=3))
    share = float((found["lse"] == -math.inf).double().mean())
    assert {"none": share == 0, "some": 0.3 < share < 1, "all": share == 1}[dead]


@pytest.mark.parametrize(
    "heads", [(1, 1), (4, 2), (4, 1), (6, 3), (7, 7), (8, 1), (5, 1), (20, 4)], ids=str
)
def test_heads_and_batches(heads: tuple[int, int]) -> None:
    for batch, kv_batch in ((1, 1), (3, 3), (3, 1)):
        sizes = {"heads": heads[0], "kv_heads": heads[1], "batch": batch, "kv_batch": kv_batch}
        kit.check(BAND, wide(200, 260, **sizes))


MIXED = (
    ("transposed", "contiguous", "expanded"), ("sliced", "transposed", "columns"),
    ("contiguous", "stepped", "sliced"), ("expanded", "sliced", "transposed"),
)  # fmt: skip


@pytest.mark.parametrize("layouts", [*((name,) * 3 for name in LAYOUTS), *MIXED], ids="/".join)
def test_strides(layouts: tuple[str, str, str]) -> None:
    case = wide(200, 260, batch=2, kv_batch=2, heads=4, layouts=layouts)
    out = kit.check(BAND, case)["out"]
    if layouts[0] in ("contiguous", "transposed"):
        query = case.inputs(kit.DEVICE)[0]
        assert out.stride() == query.stride()  # the output has the strides of the query


DIMS = (64, 96, 128, 192, 256, 512, (192, 128), (576, 512), (264, 392), 72, 40)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: int | tuple[int, int]) -> None:
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    for q_len, kv_len in ((300, 420), (65, 33)):
        sizes = {"head_dim": head_dim, "value_dim": value_dim}
        kit.check(BAND, wide(q_len, kv_len, heads=4, **sizes))


@pytest.mark.parametrize("dims", [64, 128])
@pytest.mark.parametrize("variant", [CAUSAL, BAND], ids=["causal", "band"])
def test_float16(variant: Variant, dims: int) -> None:
    case = wide(300, 420, dtype=FP16, head_dim=dims, value_dim=dims)
    kit.check(variant, case)
    kit.check(variant, dataclasses.replace(case, spread=3.0, seed=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_that_no_kernel_takes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=str(dtype).removeprefix("torch.")):
        kit.forward(PLAIN, wide(64, 64, dtype=dtype))


# --- values


@pytest.mark.parametrize("data", kit.DATA)
@pytest.mark.parametrize("dims", [64, 128])
def test_scores_of_every_kind(data: str, dims: int) -> None:
    sizes = {"dtype": BF16, "head_dim": dims, "value_dim": dims, "heads": 2, "kv_heads": 2}
    for variant, seed in itertools.product((PLAIN, CAUSAL, BAND), range(2)):
        kit.check(variant, kit.Shaped(700, 700, data=data, seed=seed, **sizes))


@pytest.mark.parametrize("scale", [0.5, -1.0, 0.0, 3.0])
def test_scale(scale: float) -> None:
    for variant in (PLAIN, BAND):
        kit.check(variant, wide(300, 300, scale=scale))


def test_score_mod_that_masks() -> None:
    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where((q >= kv) & (kv % 5 > 0), score, -math.inf)

    kit.check(Variant(mod), wide(300, 300))


def test_nan_reaches_the_rows_that_see_it() -> None:
    case = wide(256, 256)
    query, key, value = (t.detach() for t in case.inputs(kit.DEVICE))
    key[0, 0, 200] = math.nan
    found = flex_attention(query, key, value, None, masks.causal(), backend=kit.BACKEND)
    spoiled = found.isnan().any(-1)[0]
    assert spoiled[0, 200:].all()  # rows that see the key
    assert not spoiled[0, :200].any()
    assert not spoiled[1].any()


def test_largest_scores_are_right_or_refused() -> None:
    case = wide(300, 420)
    inputs = [t.detach() for t in case.inputs(kit.DEVICE)]
    asked = {"return_aux": AuxRequest(lse=True, max_scores=True)}
    try:
        _, aux = BAND(*inputs, **asked, backend=kit.BACKEND)
    except UnsupportedError as refusal:
        assert "max_scores" in str(refusal)  # noqa: PT017 (either outcome is right)
        return
    wide_inputs = [t.double() for t in inputs]
    gold, rough = (BAND(*i, **asked, backend="eager")[1] for i in (wide_inputs, inputs))
    dead = gold.max_scores == -math.inf
    assert torch.equal(aux.max_scores == -math.inf, dead)
    errors = [(t.max_scores.double() - gold.max_scores)[~dead].abs().max() for t in (aux, rough)]
    assert errors[0] <= 2 * errors[1]


# --- captured tensors


def tables() -> dict[str, Tensor]:
    """Return one tensor of each dtype and layout that a mod may read, by name."""
    random = torch.Generator(kit.DEVICE).manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=kit.DEVICE)

    return {
        "wide": draw(LENGTH).double(),
        "half": draw(4, LENGTH).to(BF16),
        "stepped": draw(2 * LENGTH)[::2],
        "expanded": draw(1, LENGTH).expand(4, LENGTH),
        "turned": draw(LENGTH, 4).T,
        "ids": torch.arange(LENGTH, device=kit.DEVICE) // 70,
        "bytes": (torch.arange(LENGTH, device=kit.DEVICE) % 3).to(torch.uint8),
        "marks": draw(LENGTH) > -1,
        "scalar": draw(1)[0],
        "window": torch.tensor(150, device=kit.DEVICE),
        "shift": torch.tensor(-3),
        "left": torch.tensor(0.5),  # a 0-d tensor may stay on the CPU
    }


def reading(t: dict[str, Tensor]) -> Variant:
    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        score = score * t["left"] + t["wide"][q] + t["half"][h, kv] + t["stepped"][kv]
        score = score + t["expanded"][h, q] * t["scalar"] + t["turned"][h, q - kv]
        return score + t["wide"][kv + t["shift"]]

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = (q - kv).abs() < t["window"]
        return (t["ids"][q] >= t["ids"][kv]) & near & t["marks"][kv] & (t["bytes"][q] != 1)

    return Variant(mod, mask)


def test_captured_tensors_of_every_kind() -> None:
    kit.check(reading(tables()), wide(LENGTH, LENGTH, batch=2, kv_batch=2, heads=4))


def test_edited_captured_tensors_are_read_again() -> None:
    own = tables()
    variant, case = reading(own), wide(LENGTH, LENGTH, heads=4)
    before = kit.check(variant, case)
    own["half"].neg_()
    own["ids"].fill_(0)  # all one document: other tiles
    after = kit.check(variant, case)
    assert not torch.equal(before["out"], after["out"])


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (128, 64), (256, 128)], ids=str)
def test_block_mask(block: tuple[int, int]) -> None:
    """An attnkit BlockMask is exact or its tile sizes are refused; 128 x 128 is never refused."""
    case = wide(515, 515)
    sizes = {"device": kit.DEVICE, "BLOCK_SIZE": block}
    mask = create_block_mask(band, None, None, 515, 515, **sizes)
    try:
        found = kit.forward(Variant(None, mask), case)
    except UnsupportedError as refusal:
        assert block != (128, 128)
        assert str(block[0]) in str(refusal)  # noqa: PT017 (either outcome is right)
        return
    assert not kit.wrong(found, kit.dense(Variant(None, band), case), case)


def test_block_mask_of_pytorch() -> None:
    from torch.nn.attention import flex_attention as flex

    case = wide(515, 515)
    mask = flex.create_block_mask(band, None, None, 515, 515, kit.DEVICE)
    found = kit.forward(Variant(None, mask), case)
    assert not kit.wrong(found, kit.dense(Variant(None, band), case), case)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("size", [-math.inf, -1e30, -1e9, 1e4])
def test_terms_of_columns_of_all_sizes(dim: int, size: float) -> None:
    """A padded column has a very low term. The sums of a forgetting gate grow with the length."""
    random = torch.Generator().manual_seed(dim)
    sums = torch.randn(2, 1000, generator=random).abs().cumsum(1).to(kit.DEVICE)
    padded = sums.clone()
    padded[:, 300:420] = -size
    case = wide(1000, 1000, head_dim=dim, value_dim=dim)
    for table in (sums, padded):
        mod = lambda s, b, h, q, kv, table=table: s + sums[h, q] - table[h, kv]
        kit.check(Variant(mod, masks.causal()), case)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("columns", [1000, 1003])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_full_bias_with_rows_of_any_alignment(dim: int, columns: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(columns)
    bias = torch.randn(2, 1000, columns, generator=random).to(kit.DEVICE, dtype)
    case = wide(1000, columns, batch=2, kv_batch=2, head_dim=dim, value_dim=dim)
    for mask in (None, masks.causal(), masks.sliding_window(200)):
        kit.check(Variant(lambda s, b, h, q, kv: s + bias[h, q, kv], mask), case)

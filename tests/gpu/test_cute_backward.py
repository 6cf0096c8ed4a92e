"""Check the backward kernels' gradients for every mod and mask, all shapes and dtypes.

Captured tensors require grad, and the LSE has a gradient of its own. As in `test_cute_forward`,
many variants are tested at one shape and many shapes with one variant, because a kernel takes
seconds to compile.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import create_block_mask, flex_attention, masks, mods
from attnkit.runtime.variant import Variant
from attnkit.testing import LAYOUTS, Case
from tests.gpu import backward_kit
from tests.gpu import cute_kit as kit

LENGTH = 300  # five tiles of 64 rows, three of 128 keys, the last ones ragged
BF16, FP16 = torch.bfloat16, torch.float16


def wide(q_len: int, kv_len: int, **sizes: Any) -> Case:
    return Case(
        q_len, kv_len, **{"heads": 2, "kv_heads": 2, "dtype": BF16, "head_dim": 64,
                          "value_dim": 64} | sizes
    )  # fmt: skip


def band(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Mask a window around the diagonal; rows beyond the end of the keys are fully masked."""
    return (q - kv < 200) & (kv - q < 90)


def decaying(heads: int) -> Any:
    """Return a mod with a learned slope and a learned gain for each head."""
    random = torch.Generator().manual_seed(5)
    slopes, gains = (
        torch.rand(heads, generator=random).add_(0.1).to(kit.DEVICE).requires_grad_()
        for _ in range(2)
    )
    return lambda s, b, h, q, kv: s * gains[h] - slopes[h] * 0.1 * (q - kv).abs()


PLAIN = Variant()
CAUSAL = Variant(None, masks.causal())
BAND = Variant(None, band)


# --- the libraries


# one mask of each kind; the others differ in their tiles only, which the forward's tests compare
MASKS = [name for name in masks.examples(48) if "/" not in name]


@pytest.mark.parametrize("name", MASKS)
def test_mask(name: str) -> None:
    example = masks.examples(LENGTH, device=kit.DEVICE)[name]
    heads = max(2, example.heads)
    case = wide(
        example.q_len, example.kv_len, batch=example.batch, heads=heads, kv_heads=heads,
        kv_batch=example.batch,
    )  # fmt: skip
    backward_kit.check(Variant(None, example.mask), case)


@pytest.mark.parametrize("name", mods.examples(48))
def test_mod(name: str) -> None:
    example = mods.examples(LENGTH, device=kit.DEVICE, requires_grad=True)[name]
    case = wide(
        example.q_len, example.kv_len, batch=example.batch, heads=example.heads,
        kv_heads=example.heads, kv_batch=example.batch,
    )  # fmt: skip
    found = backward_kit.check(Variant(example.mod), case)
    # out, lse and, twice, dquery, dkey, dvalue
    assert len(found) - 8 == 2 * len(example.learned)


# --- shapes


LENGTHS = (1, 2, 7, 9, 17, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257, 300, 384, 385, 513)


@pytest.mark.parametrize("variant", [PLAIN, CAUSAL, BAND], ids=["plain", "causal", "band"])
def test_lengths(variant: Variant) -> None:
    for shift in (0, 5, 12):
        others = LENGTHS[shift:] + LENGTHS[:shift]
        for q_len, kv_len in zip(LENGTHS, others, strict=True):
            backward_kit.check(variant, wide(q_len, kv_len, seed=q_len))


@pytest.mark.parametrize(
    "heads",
    [(1, 1), (4, 2), (6, 1), (7, 7), (20, 4)],
    ids=lambda heads: f"{heads[0]}over{heads[1]}",
)
def test_heads_and_batches(heads: tuple[int, int]) -> None:
    variant = Variant(decaying(heads[0]), band)
    for batch, kv_batch in ((1, 1), (3, 3), (3, 1)):
        sizes = {"heads": heads[0], "kv_heads": heads[1], "batch": batch, "kv_batch": kv_batch}
        backward_kit.check(variant, wide(200, 260, **sizes))


MIXED = (
    ("transposed", "contiguous", "expanded"), ("sliced", "transposed", "columns"),
    ("contiguous", "stepped", "sliced"), ("expanded", "sliced", "transposed"),
)  # fmt: skip


@pytest.mark.parametrize("layouts", [*((name,) * 3 for name in LAYOUTS), *MIXED], ids="/".join)
def test_strides(layouts: tuple[str, str, str]) -> None:
    case = wide(200, 260, batch=2, kv_batch=2, heads=4, layouts=layouts)
    backward_kit.check(BAND, case)


def test_strides_of_what_arrives() -> None:
    """The output's gradient may be expanded, transposed, stepped or misaligned."""
    case = wide(200, 260)
    inputs = case.inputs(kit.DEVICE)
    out = CAUSAL(*inputs, backend=kit.BACKEND)
    flat = torch.randn(out.numel() + 1, device=kit.DEVICE).to(out.dtype)
    grads = {
        "sum": torch.ones((), dtype=out.dtype, device=kit.DEVICE).expand(out.shape),
        "transposed": torch.randn_like(out.transpose(1, 2)).transpose(1, 2),
        "stepped": torch.randn(*out.shape, 2, device=kit.DEVICE).to(out.dtype)[..., 1],
        "shifted": flat[1:].view(out.shape),
    }
    for name, grad in grads.items():
        found, same = (
            torch.autograd.grad(out, inputs, g, retain_graph=True)
            for g in (grad, grad.contiguous().clone())
        )
        for a, b in zip(found, same, strict=True):
            # sums of dQ are formed in any order
            assert (a - b).abs().max() <= 4 * torch.finfo(a.dtype).eps * b.abs().max(), name


DIMS = (128, 96, 40, (64, 128), (128, 64))


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_head_dims(dims: int | tuple[int, int], dtype: torch.dtype) -> None:
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    sizes: dict[str, Any] = {"head_dim": head_dim, "value_dim": value_dim, "dtype": dtype}
    for q_len, kv_len in ((300, 420), (65, 33)):
        backward_kit.check(BAND, wide(q_len, kv_len, **sizes))


@pytest.mark.parametrize("dims", [192, 256, (192, 128)], ids=str)
def test_wide_head_dims(dims: int | tuple[int, int]) -> None:
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    sizes: dict[str, Any] = {"head_dim": head_dim, "value_dim": value_dim}
    for heads in ((2, 2), (4, 2)):
        own = sizes | {"heads": heads[0], "kv_heads": heads[1]}
        backward_kit.check(CAUSAL, wide(300, 420, **own))


@pytest.mark.parametrize("dims", [512, 384, (264, 512)], ids=str)
@pytest.mark.parametrize("score_mod", ["none", "learned"])
def test_head_dims_above_256(dims: int | tuple[int, int], score_mod: str) -> None:
    head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
    sizes: dict[str, Any] = {"head_dim": head_dim, "value_dim": value_dim}
    for heads in ((2, 2), (4, 2)):
        mod = decaying(heads[0]) if score_mod == "learned" else None
        case = wide(700, 820, **sizes, heads=heads[0], kv_heads=heads[1])
        backward_kit.check(Variant(mod, masks.causal()), case)


def test_a_mod_at_a_wide_head_dim() -> None:
    case = wide(300, 420, head_dim=256, value_dim=256, dtype=FP16)
    backward_kit.check(Variant(decaying(2), masks.causal()), case)


def test_a_mod_at_the_larger_head_dim() -> None:
    sizes = {"head_dim": 128, "value_dim": 128, "heads": 4, "kv_heads": 2}
    backward_kit.check(Variant(decaying(4), masks.causal()), wide(300, 420, **sizes))


def test_float16() -> None:
    variant = Variant(decaying(2), masks.causal())
    for spread in (1.0, 3.0):
        backward_kit.check(variant, wide(300, 420, dtype=FP16, spread=spread))


# --- values


@pytest.mark.parametrize("data", kit.DATA)
def test_scores_of_every_kind(data: str) -> None:
    sizes = {"dtype": BF16, "head_dim": 64, "value_dim": 64, "heads": 2, "kv_heads": 2}
    for variant in (PLAIN, CAUSAL):
        backward_kit.check(variant, kit.Shaped(400, 400, data=data, **sizes))


@pytest.mark.parametrize("scale", [0.5, -1.0, 0.0, 3.0])
def test_scale(scale: float) -> None:
    backward_kit.check(CAUSAL, wide(300, 300, scale=scale))


@pytest.mark.parametrize("dead", ["some", "all"])
def test_rows_that_keep_nothing(dead: str) -> None:
    kept = {
        "some": lambda b, h, q, kv: (q % 3 > 0) & (q // 128 != 1) & (kv > 200) & (kv <= q),
        "all": lambda b, h, q, kv: kv < 0,
    }[dead]
    backward_kit.check(Variant(None, kept), wide(515, 515))


def test_score_mod_that_masks() -> None:
    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where((q >= kv) & (kv % 5 > 0), score, -math.inf)

    backward_kit.check(Variant(mod), wide(300, 300))


def test_nan_reaches_the_gradients_that_see_it() -> None:
    bias = torch.zeros(384, device=kit.DEVICE)
    bias[150] = math.nan
    bias.requires_grad_()
    inputs = wide(384, 384).inputs(kit.DEVICE)
    out = flex_attention(
        *inputs, lambda s, b, h, q, kv: s + bias[q], masks.causal(), backend=kit.BACKEND
    )
    dquery, dkey, dvalue, dbias = torch.autograd.grad(out, (*inputs, bias), torch.ones_like(out))
    assert dbias.isnan().nonzero().flatten().tolist() == [150]
    for t in (out, dquery):
        assert t.isnan().all(-1)[:, :, 150].all()
        assert t.isnan().any(-1).sum() == 2  # that row in both heads
    for grad in (dkey, dvalue):
        assert grad.isnan().all(-1)[:, :, :151].all()  # the keys that the row sees
        assert not grad[:, :, 256:].isnan().any()  # tiles that it does not see


# --- masks with lists of their own, captured tensors of every kind


def test_block_mask_of_pytorch() -> None:
    from torch.nn.attention import flex_attention as flex

    case = wide(515, 515)
    theirs = flex.create_block_mask(band, None, None, 515, 515, kit.DEVICE)
    ours = create_block_mask(band, None, None, 515, 515, device=kit.DEVICE)
    for mask in (theirs, ours):
        found = backward_kit.gradients(Variant(None, mask), case)
        assert not backward_kit.wrong(found, BAND, case)


def test_captured_tensors_of_every_kind() -> None:
    random = torch.Generator(kit.DEVICE).manual_seed(3)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        drawn = torch.randn(shape, generator=random, device=kit.DEVICE)
        return drawn.to(dtype).requires_grad_()

    half, turned, number, gain = draw(4, LENGTH, dtype=BF16), draw(LENGTH, 4), draw(1), draw()
    left = torch.tensor(0.5)  # a 0-d tensor may stay on the CPU
    ids = torch.arange(LENGTH, device=kit.DEVICE) // 70

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        score = score * left * gain + half[h, kv] * number[0]
        return score + turned.T[h, q - kv]

    variant = Variant(mod, lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]))
    backward_kit.check(variant, wide(LENGTH, LENGTH, batch=2, kv_batch=2, heads=4, kv_heads=4))


@pytest.mark.parametrize("dims", [64, 128, 256])
def test_learned_tables_at_ragged_ends(dims: int) -> None:
    """Gradients of learned tables are exact where tiles reach beyond the lengths."""
    random = torch.Generator(kit.DEVICE).manual_seed(1)
    along, rows, columns = (
        torch.randn(700, generator=random, device=kit.DEVICE).requires_grad_() for _ in range(3)
    )

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * (1 + rows[q] / 4) + along[q - kv] + columns[kv]

    sizes = {"head_dim": dims, "value_dim": dims}
    for q_len, kv_len in ((13, 49), (64, 1), (130, 145), (200, 259), (300, 70), (333, 333)):
        for mask in (None, band):
            backward_kit.check(Variant(mod, mask), wide(q_len, kv_len, **sizes))


@pytest.mark.parametrize("length", [300, 512, 331])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "frozen"])
def test_full_bias_of_several_batch_elements(length: int, learned: bool) -> None:
    random = torch.Generator().manual_seed(length)
    bias = torch.randn(2, length, length, generator=random).to(kit.DEVICE).requires_grad_(learned)
    case = wide(length, length, batch=3, kv_batch=3, head_dim=128, value_dim=128)
    mod = lambda s, b, h, q, kv: s + bias[h, q, kv]
    backward_kit.check(Variant(mod, masks.causal()), case)


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
def test_full_bias_that_is_copied(dim: int, dtype: torch.dtype, learned: bool) -> None:
    """Each CTA computes several work tiles, long ones and short ones."""
    length = 1192  # rows of a multiple of 16 bytes, and an incomplete last block
    random = torch.Generator().manual_seed(dim)
    bias = torch.randn(8, length, length, generator=random).to(kit.DEVICE, dtype)
    bias.requires_grad_(learned)
    sizes = {"heads": 8, "kv_heads": 8, "head_dim": dim, "value_dim": dim}
    case = wide(length, length, batch=4, kv_batch=4, **sizes)
    mod = lambda s, b, h, q, kv: s + bias[h, q, kv]
    for mask in (masks.causal(), masks.sliding_window(70)):
        backward_kit.check(Variant(mod, mask), case)


@pytest.mark.parametrize("length", [300, 1100])
@pytest.mark.parametrize("dim", [64, 128])
def test_full_bias_with_an_element_for_each_score(length: int, dim: int) -> None:
    """The table is larger than the lengths; what no score reads has a gradient of zero."""
    random = torch.Generator().manual_seed(length)
    shape = (2, 3, length + 20, length + 84)
    bias = torch.randn(shape, generator=random).to(kit.DEVICE).requires_grad_()
    sizes = {"heads": 3, "kv_heads": 3, "head_dim": dim, "value_dim": dim}
    case = wide(length, length, batch=2, kv_batch=2, **sizes)
    mod = lambda s, b, h, q, kv: s + bias[b, h, q, kv]
    for mask in (None, masks.causal(), masks.sliding_window(200)):
        backward_kit.check(Variant(mod, mask), case)


def test_one_tensor_as_query_and_key() -> None:
    shared = torch.randn(1, 2, 200, 64, device=kit.DEVICE).to(BF16).requires_grad_()
    value = torch.randn_like(shared)
    grad = torch.randn_like(shared)
    with backward_kit.counted() as seen:
        (both,) = torch.autograd.grad(
            CAUSAL(shared, shared, value, backend=kit.BACKEND), shared, grad
        )
    assert len(seen) == 1
    apart = [shared.detach().clone().requires_grad_() for _ in range(2)]
    out = CAUSAL(*apart, value, backend=kit.BACKEND)
    parts = torch.autograd.grad(out, apart, grad)
    expected = parts[0].float() + parts[1].float()
    assert (both - expected).abs().max() <= 4 * torch.finfo(BF16).eps * expected.abs().max()

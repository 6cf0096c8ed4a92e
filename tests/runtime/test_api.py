"""Check the public operator: PyTorch's semantics, shapes and strides, and exactness per backend."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import attnkit
import attnkit.runtime.reference
from attnkit import AuxRequest, create_block_mask, flex_attention

TABLE = torch.randn(4, 300)
DOCUMENTS = torch.arange(150) // 40


def inputs(
    shape: tuple[int, int, int, int] = (2, 4, 150, 16),
    *,
    kv_len: int | None = None,
    kv_heads: int | None = None,
    kv_batch: int | None = None,
    width: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, dim = shape
    kv = (kv_batch or batch, kv_heads or heads, kv_len or length)
    shapes = (shape, (*kv, dim), (*kv, width or dim))
    q, k, v = (torch.randn(s).to(dtype).requires_grad_() for s in shapes)
    return q, k, v


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def document(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (DOCUMENTS[q] == DOCUMENTS[kv])


def relative(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s + TABLE[h, q - kv + 150]


def softcap(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 5 * torch.tanh(s / 5)


def gradients(out: Tensor, lse: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator) for x in (out, lse)]
    alive = torch.where(lse == -math.inf, 0.0, lse)
    total = (out.double() * weights[0]).sum() + (alive.double() * weights[1]).sum()
    return torch.autograd.grad(total, tensors)


def assert_exact(
    tensors: tuple[Tensor, Tensor, Tensor], score_mod: Any = None, mask: Any = None, **options: Any
) -> None:
    """Check that output, LSE and gradients have at most twice the error of dense attention."""
    results = []
    for backend, dtype in (("auto", None), ("eager", None), ("eager", torch.float64)):
        own = tuple(t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors)
        out, lse = flex_attention(
            *own, score_mod, mask, return_lse=True, backend=backend, **options
        )
        results.append((out, lse, *gradients(out, lse, own)))
    for ours, dense, exact in zip(*results, strict=True):
        finite = exact.isfinite()
        assert torch.equal(ours.isfinite(), finite)
        assert torch.equal(ours[~finite].double(), exact[~finite])
        error = (ours.double() - exact)[finite].abs().max()
        allowed = (dense.double() - exact)[finite].abs().max()
        # the oracle itself is float64: there, allow it and us some roundings each
        roundings = 64 if ours.dtype == torch.float64 else 4
        floor = roundings * torch.finfo(ours.dtype).eps * exact[finite].abs().max()
        assert error <= 2 * allowed + floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mod", [None, relative, softcap])
@pytest.mark.parametrize("mask", [None, causal, document])
def test_exact(mod: Any, mask: Any, dtype: torch.dtype) -> None:
    assert_exact(inputs(dtype=dtype), mod, mask)


def test_shapes() -> None:
    assert_exact(inputs((1, 2, 1, 8)))
    assert_exact(inputs((1, 1, 130, 8), kv_len=1))
    assert_exact(inputs((2, 4, 33, 8), kv_len=150, width=5), relative, causal)
    assert_exact(inputs((2, 4, 150, 8), kv_heads=2), relative, document, enable_gqa=True)
    assert_exact(inputs((2, 4, 150, 8), kv_heads=1, kv_batch=1), softcap, causal, enable_gqa=True)
    assert_exact(inputs((1, 4, 150, 8)), None, lambda b, h, q, kv: (q - kv).abs() <= h * 10)
    assert_exact(inputs((3, 1, 150, 8)), None, lambda b, h, q, kv: q + kv >= b * 100)
    assert_exact(inputs((1, 1, 150, 8)), softcap, lambda b, h, q, kv: (q > 60) & (kv < 70))
    assert_exact(inputs((1, 2, 150, 8)), None, causal, scale=0.3)
    assert_exact(inputs((1, 2, 150, 8)), relative, causal, kernel_options={"BLOCK_M": 32})


def test_strides() -> None:
    q, k, v = inputs()
    order = (0, 2, 1, 3)
    for permuted in itertools.product([False, True], repeat=3):
        own = tuple(
            t.transpose(1, 2).contiguous().transpose(1, 2) if p else t
            for t, p in zip((q, k, v), permuted, strict=True)
        )
        out = flex_attention(*own, block_mask=causal)
        torch.testing.assert_close(out, flex_attention(q, k, v, block_mask=causal))
        expected = flex.flex_attention(
            *(t.detach() for t in own),
            block_mask=flex.create_block_mask(causal, None, None, 150, 150, device="cpu"),
        )
        assert out.stride() == expected.stride()
    wide = torch.randn(2, 4, 150, 48)[..., 8:24]
    assert_exact((wide, torch.randn(2, 1, 150, 16).expand(2, 4, 150, 16), v), None, causal)
    assert out.permute(order).shape == (2, 150, 4, 16)


def test_results() -> None:
    q, k, v = inputs((1, 2, 40, 8))
    out = flex_attention(q, k, v, relative, causal)
    both = flex_attention(q, k, v, relative, causal, return_lse=True)
    assert len(both) == 2
    assert torch.equal(both[0], out)
    same, aux = flex_attention(
        q, k, v, relative, causal, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    dense = flex_attention(
        *(q, k, v, relative, causal),
        return_aux=AuxRequest(lse=True, max_scores=True),
        backend="eager",
    )
    torch.testing.assert_close((same, *aux), (dense[0], *dense[1]))
    expected, lse = flex.flex_attention(
        *(t.detach() for t in (q, k, v)),
        relative,
        flex.create_block_mask(causal, None, None, 40, 40, device="cpu"),
        return_lse=True,
    )
    torch.testing.assert_close((same, aux.lse), (expected, lse))
    assert aux.lse.dtype == aux.max_scores.dtype == torch.float32
    _, only = flex_attention(q, k, v, return_aux=flex.AuxRequest(max_scores=True))
    assert only.lse is None
    assert not only.max_scores.requires_grad
    _, none = flex_attention(q, k, v, return_aux=AuxRequest())
    assert not any(t is not None for t in none)


@pytest.mark.parametrize("backend", ["auto", "cpu", "eager"])
def test_block_masks_of_all_kinds(backend: str) -> None:
    q, k, v = inputs()
    theirs = flex.create_block_mask(document, None, None, 150, 150, device="cpu", BLOCK_SIZE=32)
    ours = create_block_mask(document, None, None, 150, 150, BLOCK_SIZE=(64, 32))
    expected = flex_attention(q, k, v, relative, document, backend=backend)
    for mask in (theirs, ours, attnkit.Mask(document), ours.to_flex()):
        out = flex_attention(q, k, v, relative, mask, backend=backend)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_block_lists_of_pytorch_are_honoured(backend: str) -> None:
    q, k, v = inputs((1, 1, 64, 8))
    count = torch.tensor([[[1, 1, 0, 2]]], dtype=torch.int32)
    index = torch.tensor([[[[2, 0, 0, 0], [3, 0, 0, 0], [1, 1, 1, 1], [0, 3, 0, 0]]]])
    lists = flex.BlockMask.from_kv_blocks(
        count, index.int(), BLOCK_SIZE=16, mask_mod=lambda b, h, q, kv: kv % 3 > 0
    )
    tiles = torch.zeros(4, 4, dtype=torch.bool)
    tiles[0, 2] = tiles[1, 3] = tiles[3, 0] = tiles[3, 3] = True
    kept = tiles.repeat_interleave(16, 0).repeat_interleave(16, 1) & (torch.arange(64) % 3 > 0)
    out = flex_attention(q, k, v, block_mask=lists, backend=backend)
    expected = attnkit.runtime.reference.attention(q, k, v, allowed=kept)[0]
    torch.testing.assert_close(out, expected)


def test_edited_document_table_is_honoured() -> None:
    table = torch.arange(150) // 40
    mask = attnkit.Mask(lambda b, h, q, kv: table[q] == table[kv])
    block = create_block_mask(mask, None, None, 150, 150)
    q, k, v = inputs()
    variant = attnkit.Variant(None, mask)
    for divisor in (40, 70, 13):
        table.copy_(torch.arange(150) // divisor)
        expected = flex_attention(q, k, v, block_mask=mask, backend="eager")
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=block), expected)
        torch.testing.assert_close(variant(q, k, v), expected)


def test_captured_gradients_of_every_kind() -> None:
    head = torch.randn(4, requires_grad=True)
    row = torch.randn(4, 150, requires_grad=True)
    column = torch.randn(150, requires_grad=True)
    shifted = torch.randn(4, 299, requires_grad=True)
    pair = torch.randn(10, 10, dtype=torch.bfloat16, requires_grad=True)
    gain = torch.tensor(0.7, requires_grad=True)
    captured = (head, row, column, shifted, pair, gain)

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        bias = row[h, q] * column[kv] + shifted[h, q - kv + 149] + pair[q % 10, -1 - kv % 10]
        return torch.tanh(s * head[h]) * gain + bias

    tensors = inputs()
    found = gradients(*flex_attention(*tensors, mod, document, return_lse=True), captured)
    dense = flex_attention(*tensors, mod, document, return_lse=True, backend="eager")
    for ours, expected, t in zip(found, gradients(*dense, captured), captured, strict=True):
        assert ours.dtype == t.dtype
        tolerance = 2e-2 if t.dtype == torch.bfloat16 else 1e-5
        scale = float(expected.abs().max())
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance * scale)


def test_parts_of_captured_tensors() -> None:
    """An index into a slice of a captured tensor wraps at the slice's ends, not the tensor's."""
    q, k, v = (t.detach() for t in inputs((1, 2, 60, 8)))
    table = torch.randn(60)
    at = torch.arange(60)
    found = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[5:][j - 5])
    expected = torch.softmax(q @ k.mT / math.sqrt(8) + table[5:][at - 5], -1) @ v
    torch.testing.assert_close(found, expected)
    with pytest.raises(attnkit.BoundsError, match="50 entries"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + table[:50][j])
    with pytest.raises(attnkit.TraceError, match="index the part first"):
        flex_attention(q, k, v, lambda s, b, h, i, j: s + (table[5:] * s)[j - 5])


def test_gradcheck() -> None:
    q, k, v = (t.detach().double().requires_grad_() for t in inputs((1, 2, 9, 3)))
    bias = torch.randn(2, 17, dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        mod = lambda s, b, h, i, j: torch.tanh(s) + bias[h, i - j + 8]
        found: tuple[Tensor, Tensor] = flex_attention(
            q, k, v, mod, causal, return_lse=True, kernel_options={"BLOCK_M": 4, "BLOCK_N": 2}
        )
        return found

    assert torch.autograd.gradcheck(run, (q, k, v, bias))


def test_nan_reaches_exactly_its_row() -> None:
    q, k, v = (t.detach() for t in inputs((1, 2, 150, 8)))
    bias = torch.zeros(150)
    bias[77] = math.nan
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i], causal)
    assert out[:, :, 77].isnan().all()
    assert out.isnan().any(-1).sum() == 2


def test_garbage_behind_the_mask_does_not_leak() -> None:
    q, k, v = (t.detach() for t in inputs((1, 2, 150, 8)))
    clean = flex_attention(q, k, v, block_mask=lambda b, h, i, j: j < 100)
    k[:, :, 100:] = math.nan
    torch.testing.assert_close(
        flex_attention(q, k, v, block_mask=lambda b, h, i, j: j < 100), clean
    )


def test_runs_are_the_same_bits() -> None:
    tensors = inputs()
    first = gradients(*flex_attention(*tensors, relative, document, return_lse=True), tensors)
    again = gradients(*flex_attention(*tensors, relative, document, return_lse=True), tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("return_lse", [False, True])
def test_out_may_be_edited_in_place(return_lse: bool) -> None:
    """The output may be edited in place, as FlexAttention's may.

    A backward that needs the original output then raises torch's own error.
    """
    q, k, v = (t.requires_grad_() for t in inputs())
    for query in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
        for _ in range(3):
            made = flex_attention(query, k, v, softcap, causal, return_lse=return_lse)
            out = made[0] if return_lse else made
            assert torch.equal(out.clone().mul_(2), out.mul_(2))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
            assert not flex_attention(query, k, v, softcap, causal).detach_().requires_grad


def test_second_derivative_is_refused() -> None:
    q, k, v = inputs((1, 1, 20, 4))
    (first,) = torch.autograd.grad(flex_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(attnkit.UnsupportedError, match="no second derivative"):
        first.sum().backward()


def test_variant() -> None:
    variant = attnkit.Variant(softcap, attnkit.Mask(causal))
    q, k, v = inputs()
    assert torch.equal(variant(q, k, v), flex_attention(q, k, v, softcap, causal))
    assert hash(variant) == hash(attnkit.Variant(softcap, variant.mask))
    assert variant == attnkit.Variant(softcap, variant.mask)
    assert variant != attnkit.Variant(softcap)
    assert str(variant) == (
        "score(score, b, h, q, kv) = tanh(score / 5.0) * 5.0\nmask(b, h, q, kv) = kv <= q"
    )
    assert str(attnkit.Variant()) == "softmax attention"


def test_a_mask_of_floats_is_classified_in_the_dtype_of_the_scores() -> None:
    # 1/3 + tiny is above the float64 threshold, and equal to it in float32
    edge = torch.full((150,), 1 / 3 + 1e-12, dtype=torch.float64)
    mask = lambda b, h, q, kv: edge[kv] > 1 / 3
    wide = inputs((1, 1, 150, 8), dtype=torch.float64)
    ours = flex_attention(*wide, block_mask=mask, return_lse=True)
    dense = flex_attention(*wide, block_mask=mask, return_lse=True, backend="eager")
    torch.testing.assert_close(ours, dense)
    assert torch.isfinite(ours[1]).all()

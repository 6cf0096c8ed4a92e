"""Check which Blackwell kernels the operator runs, with emulated kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit import AuxRequest, UnsupportedError, Variant, flex_attention, masks, mods
from attnkit.jit import emulation
from attnkit.testing.kernels import compare

BACKEND = "emulate:sm_100a"
CAUSAL = lambda b, h, q, kv: q >= kv


def draw(
    length: int, dim: int = 64, heads: tuple[int, int] = (2, 1), dtype: Any = torch.bfloat16
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, h, length, dim) for h in (heads[0], heads[1], heads[1])]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def agree(variant: Variant, qkv: list[Tensor], backward: bool = False) -> list[str]:
    """Compare with the oracle and return the names of the kernels that ran."""
    with emulation.session() as session:
        errors = compare(variant, qkv, backend=BACKEND, backward=backward)
    assert session.ok, [str(report) for _, report in session.reports]
    assert all(error.ok for error in errors), errors
    return [name.split()[0] for name, _ in session.reports]


def test_block_lists_of_128_rows_take_single_query_tiles() -> None:
    lists = flex.create_block_mask(CAUSAL, None, None, 400, 400, device="cpu", BLOCK_SIZE=128)
    assert agree(Variant(None, lists), draw(400)) == ["forward"]


@pytest.mark.exhaustive
def test_few_long_rows_are_split() -> None:
    qkv = [draw(2048, heads=(1, 1))[0][:, :, :200], *draw(2048, heads=(1, 1))[1:]]
    assert agree(Variant(), qkv) == ["forward", "combine"]


def test_strides_and_float16() -> None:
    qkv = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in draw(300, dtype=torch.float16)]
    out = flex_attention(*qkv, None, CAUSAL, enable_gqa=True, backend=BACKEND)
    assert out.stride() == qkv[0].stride()
    agree(Variant(mods.alibi(2), masks.causal()), qkv)


def test_maxima() -> None:
    qkv = draw(300)
    given: dict[str, Any] = {
        "enable_gqa": True,
        "return_aux": AuxRequest(lse=True, max_scores=True),
    }
    _, found = flex_attention(*qkv, None, CAUSAL, backend=BACKEND, **given)
    wide = [t.double() for t in qkv]
    _, expected = flex_attention(*wide, None, CAUSAL, backend="eager", **given)
    torch.testing.assert_close(found.max_scores, expected.max_scores.float())
    # the relative error of exponentials on the FMA units is an absolute error of the LSE
    assert float((found.lse - expected.lse).abs().max()) < 8.6e-5 + 1e-5


@pytest.mark.exhaustive
def test_gradients_in_a_fixed_order() -> None:
    """Deterministic gradients are bit-identical in any order of execution, with GQA."""
    found = []
    for mode, ctas in (("eager", 2), ("adversarial", 3)):
        qkv = [t.requires_grad_() for t in draw(300)]
        with emulation.session(mode=mode, ctas=ctas) as session:
            out = flex_attention(
                *qkv, None, CAUSAL, enable_gqa=True, backend=BACKEND, deterministic=True
            )
            found.append(torch.autograd.grad(out.float().sum(), qkv))
        assert session.ok
        assert [name.split()[0] for name, _ in session.reports] == [
            "forward", "prepare", "backward", "finish", "finish", "finish",
        ]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_wide_heads_have_kernels() -> None:
    names = agree(Variant(None, CAUSAL), draw(140, 256), backward=True)
    assert set(names) == {"forward", "prepare", "backward", "finish"}


def test_what_no_kernel_takes_is_refused() -> None:
    wide = [torch.randn(1, 1, 64, 64) for _ in range(3)]
    with pytest.raises(UnsupportedError, match="the Blackwell kernel computes bfloat16 and float"):
        flex_attention(*wide, backend=BACKEND)

"""List calls of attnkit with the types that their results have, for mypy (`make lint`) to check.

Nothing here is executed. An `assert_type` that does not hold is an error of mypy, and so is a
`type: ignore` at a mistake that mypy does not find.
"""

from __future__ import annotations

from typing import assert_type

from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput as TorchAuxOutput
from torch.nn.attention.flex_attention import AuxRequest as TorchAuxRequest

import attnkit
from attnkit import AuxOutput, AuxRequest, BlockMask, Mask, Variant, flex, masks
from attnkit.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from attnkit.integrations.torch_attention import varlen_attn


def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + (i - j)


def results(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, flag: bool) -> None:
    """Call each function with the arguments that decide about the type of its result."""
    mask = masks.causal() & masks.sliding_window(8)
    assert_type(mask, Mask)
    assert_type(attnkit.create_block_mask(mask, None, None, 64, 64), BlockMask)

    call = attnkit.flex_attention
    assert_type(call(q, k, v), Tensor)
    assert_type(call(q, k, v, mod, mask, scale=0.5, enable_gqa=flag, backend="cpu"), Tensor)
    assert_type(call(q, k, v, return_lse=False, return_aux=None), Tensor)
    assert_type(call(q, k, v, mod, return_lse=True, sink=None), tuple[Tensor, Tensor])
    assert_type(call(q, k, v, mod, mask, None, False, True), tuple[Tensor, Tensor])
    assert_type(call(q, k, v, return_aux=AuxRequest(lse=True)), tuple[Tensor, AuxOutput])
    assert_type(
        call(q, k, v, return_lse=flag), Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]
    )

    theirs = flex.flex_attention
    assert_type(theirs(q, k, v, mod, scale=q.sum()), Tensor)
    assert_type(theirs(q, k, v, return_lse=True, deterministic=True), tuple[Tensor, Tensor])
    assert_type(theirs(q, k, v, mod, mask, None, False, True), tuple[Tensor, Tensor])
    assert_type(
        theirs(q, k, v, return_aux=TorchAuxRequest(lse=True)), tuple[Tensor, TorchAuxOutput]
    )

    variant = Variant(mod, mask)
    assert_type(variant(q, k, v, scale=0.5, normalization="softmax1"), Tensor)
    assert_type(variant(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(variant(q, k, v, return_aux=AuxRequest(lse=True)), tuple[Tensor, AuxOutput])

    assert_type(flash_attn_func(q, k, v, causal=True, mask=mask), Tensor)
    assert_type(flash_attn_func(q, k, v, return_softmax_lse=True), tuple[Tensor, Tensor])
    assert_type(flash_attn_func(q, k, v, return_attn_probs=True), tuple[Tensor, Tensor, None])
    assert_type(
        flash_attn_varlen_func(q, k, v, lengths, lengths, 64, 64, return_softmax_lse=True),
        tuple[Tensor, Tensor],
    )
    assert_type(varlen_attn(q, k, v, lengths, lengths, 64, 64, scale=0.5), Tensor)

    # mistakes
    call(q, k, v, backend=3)  # type: ignore[call-overload]
    call(q, k, v, bakend="cpu")  # type: ignore[call-overload]
    variant(q, k, v, return_lse=1)  # type: ignore[call-overload]
    _ = call(q, k, v, return_lse=True).shape  # type: ignore[attr-defined]

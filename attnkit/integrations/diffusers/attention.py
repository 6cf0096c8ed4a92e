"""Define `attention`, which diffusers' dispatcher calls in every attention layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnkit import ArgumentError, DTypeError, OptionError, ShapeError, UnsupportedError, flex
from attnkit import mods as score_mods
from attnkit.util.arguments import check_flag, shown


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Callable[..., Any] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    score_mod: Callable[..., Any] | None = None,
    _parallel_config: Any = None,
    *,
    backend: str = "auto",
) -> Any:
    """Compute the attention of one layer, as diffusers' dispatcher asks for it.

    Args:
        query: [B, Sq, Hq, D] float16, bfloat16, float32 or float64, any strides.
        key: [B, Skv, Hkv, D].
        value: [B, Skv, Hkv, Dv].
        attn_mask: a tensor that broadcasts to [B, Hq, Sq, Skv], or [B, Skv]; bool: True is kept,
            float: added to the scores, with gradient. Or a `BlockMask`, a `Mask` or a `mask_mod`.
        dropout_p: probability of dropping an element of the softmax, see `attnkit.flex_attention`.
        is_causal: whether query i keeps keys 0 to i; not together with `attn_mask`.
        scale: factor on q k^T; None for 1 / sqrt(D).
        enable_gqa: whether Hkv may be a divisor of Hq.
        window_size: must be (-1, -1); a window is a mask.
        return_lse: whether to return (out, LSE).
        score_mod: `score_mod(score, b, h, q, kv) -> score`, or None; before a float `attn_mask`.
        _parallel_config: must be None.
        backend: backend of `attnkit.flex_attention`.

    Returns:
        out [B, Sq, Hq, Dv]; with LSE [B, Hq, Sq], float32, natural logarithm. A row without a key
        has output 0 and LSE -inf.

    Raises:
        OptionError: a window, `is_causal` together with `attn_mask`, or a wrong `dropout_p`.
        UnsupportedError: the call belongs to a model with context parallelism.
        ShapeError, DTypeError, ArgumentError: an argument is not as described.
        TraceError, BoundsError, StaleDataError: see `attnkit.flex_attention`.
    """
    check_flag("is_causal", is_causal)
    check_flag("return_lse", return_lse)
    _refuse(attn_mask, is_causal, window_size, _parallel_config)
    _check_tensors(query, key, value)
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    block_mask: Any = _causal if is_causal else None
    if isinstance(attn_mask, Tensor):
        table = _broadcastable(attn_mask, query, key)
        if table.is_floating_point():
            bias = score_mods.full_bias(table)
            score_mod = bias if score_mod is None else score_mods.compose(score_mod, bias)
        else:
            block_mask = _keep(table)
    elif attn_mask is not None:
        block_mask = attn_mask
    result: Any = flex.flex_attention(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=enable_gqa,
        return_lse=return_lse,
        backend=backend,
        dropout_p=dropout_p,
    )
    out, *lse = result if return_lse else (result,)
    return (out.transpose(1, 2), *lse) if return_lse else out.transpose(1, 2)


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def _keep(table: Tensor) -> Callable[..., Tensor]:
    """Return the mask_mod that reads a bool table of four axes, those of size 1 shared."""
    shared = tuple(size == 1 for size in table.shape)

    def attn_mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        at = zip(shared, (b, h, q, kv), strict=True)
        return table[tuple(0 if one else i for one, i in at)]

    return attn_mask


def _refuse(attn_mask: Any, is_causal: bool, window_size: Any, parallel: Any) -> None:
    """Raise an error if a call asks for what attnkit does not compute."""
    if parallel is not None:
        raise UnsupportedError(
            "attnkit has no context parallelism in diffusers: each device would attend to its own "
            "part of the keys alone; leave out enable_parallelism, or use another backend with it"
        )
    if tuple(window_size) != (-1, -1):
        raise OptionError(
            f"window_size must be (-1, -1), got {shown(window_size)}; pass "
            "attn_mask=attnkit.masks.sliding_window(...)"
        )
    if is_causal and attn_mask is not None:
        raise OptionError(
            "is_causal=True together with attn_mask; pass one mask that has both, "
            "attnkit.masks.causal() & mask"
        )


def _check_tensors(*tensors: Any) -> None:
    for name, t in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(t, Tensor):
            raise ArgumentError(f"{name} must be a tensor, got {type(t).__name__}")
        if t.ndim != 4:
            raise ShapeError(f"{name} must be [B, S, H, D], got {list(t.shape)}")


def _broadcastable(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Check a mask and give it four axes, each of the size of the call or 1.

    Raises:
        DTypeError: the mask is neither bool nor float.
        ShapeError: the mask does not fit the call.
    """
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        raise DTypeError(f"attn_mask must be bool or float, got {mask.dtype}")
    wanted = (*query.shape[:3], key.shape[2])
    shape = tuple(mask.shape)
    if shape == (wanted[0], wanted[3]):  # a padding mask, as diffusers' native backend reads it
        return mask[:, None, None]
    fits = len(shape) <= 4 and all(
        size in (1, n) for size, n in zip(reversed(shape), reversed(wanted), strict=False)
    )
    if not fits:
        raise ShapeError(
            f"attn_mask must broadcast to [B, H, Sq, Skv] = {list(wanted)}, or be [B, Skv], got "
            f"{list(shape)}"
        )
    return mask.view((1,) * (4 - len(shape)) + shape)

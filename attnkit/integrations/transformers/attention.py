"""Define `attention`, which transformers calls in every attention layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnkit import Mask, OptionError, ScoreMod, ShapeError, UnsupportedError, flex_attention
from attnkit import mods as score_mods
from attnkit.integrations.transformers.layer_mask import LayerMask
from attnkit.masks import causal

_CAUSAL = causal()
_INSTEAD = 'use attn_implementation="eager" or "sdpa" for this model'
# Arguments that change the result and that attnkit does not take, with what they ask for.
_REFUSED = {
    "head_mask": "head masks are",
    "cache": "the paged cache of continuous batching is",
    "indices": "keys that the model selects at run time are",
    "block_indices": "blocks that the model selects at run time are",
    "sinks": "sinks that differ from token to token are",
}
# Models that build a mask of their own and leave out the layer's mask if it is a BlockMask, so that
# every query would see every key.
_DROP_MASKS = {"doge"}


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, as transformers' `AttentionInterface` asks for it.

    Args:
        module: the layer; its `is_causal` decides where the model passes no mask.
        query: [B, Hq, Sq, D].
        key, value: [B, Hkv, Skv, D]; Hkv divides Hq, and heads are not repeated.
        attention_mask: what `attention_mask` of this package returned; or a mask that the user
            prepared, [B or 1, 1 or Hq, Sq, Skv]: bool, or float to be added to the scores; or None.
        scaling: factor on q k^T; None for 1 / sqrt(D).
        dropout: probability of dropping an element of the softmax, see `attnkit.flex_attention`.
        softcap: limit on scores, cap * tanh(score / cap).
        s_aux: attention sinks, [Hq], any float dtype.
        position_bias: float [B or 1, Hq, Sq, Skv], added to the scores.
        is_causal: whether a call without a mask is causal; None for the module's `is_causal`.
        backend: backend of `attnkit.flex_attention`.
        options: what other implementations need. `deterministic=True` is followed.

    Returns:
        out [B, Sq, Hq, D], contiguous, and None in place of the attention weights.

    Raises:
        OptionError: attention weights are asked for, or `dropout` is not in [0, 1).
        UnsupportedError: an argument asks for what attnkit does not compute.
        ShapeError: the mask was made for another number of queries or keys.
    """
    _refuse(module, options)
    mods: list[Callable[..., Any]] = []
    if softcap is not None:
        mods.append(_softcap(float(softcap)))
    mask: Mask | None = None
    if isinstance(attention_mask, LayerMask):
        _check_lengths(attention_mask.shape, query, key)
        mask = attention_mask.on(query.device)
        start, stop = attention_mask.start, attention_mask.stop
        if stop - start != key.shape[2]:
            key, value = key[:, :, start:stop], value[:, :, start:stop]
            if position_bias is not None and position_bias.shape[-1] != 1:
                position_bias = position_bias[..., start:stop]
    elif attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            mask = _dense_mask(attention_mask, query, key)
        else:
            mods.append(score_mods.full_bias(_dense(attention_mask, query, key)))
    elif _module_is_causal(module, is_causal) and query.shape[2] > 1:
        mask = _CAUSAL
    if position_bias is not None:
        mods.append(score_mods.full_bias(position_bias))
    out = flex_attention(
        query,
        key,
        value,
        score_mod=mods[0] if len(mods) == 1 else score_mods.compose(*mods) if mods else None,
        block_mask=mask,
        scale=None if scaling is None else float(scaling),
        enable_gqa=key.shape[1] != query.shape[1],
        backend=backend,
        deterministic=bool(options.get("deterministic")),
        sink=None if s_aux is None else _sink(s_aux, query),
        dropout_p=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Raise an error if a call asks for what attnkit does not compute."""
    model = getattr(getattr(module, "config", None), "model_type", None)
    if model in _DROP_MASKS:
        raise UnsupportedError(
            f"{model} models leave out masks that are no tensors, also those of flex_attention in "
            f"transformers; {_INSTEAD}"
        )
    if options.get("output_attentions"):
        raise OptionError(
            "attnkit never holds the attention weights, got output_attentions=True; use "
            'attn_implementation="eager" to see them'
        )
    for name, what in _REFUSED.items():
        if options.get(name) is not None:
            raise UnsupportedError(f"{what} not supported by attnkit, got {name}=; {_INSTEAD}")


@functools.cache
def _softcap(cap: float) -> ScoreMod:
    """Return one score_mod for each cap, so that attnkit finds what it prepared for it."""
    return score_mods.softcap(cap)


def _module_is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _sink(s_aux: Tensor, query: Tensor) -> Tensor:
    """Return the sinks of a layer in the dtype that `flex_attention` takes, [Hq]."""
    return s_aux.to(torch.float64 if query.dtype == torch.float64 else torch.float32)


def _check_lengths(shape: tuple[int, ...], query: Tensor, key: Tensor) -> None:
    wanted = query.shape[2], key.shape[2]
    if shape[2:] != wanted:
        raise ShapeError(
            f"the attention mask was made for {shape[2]} queries and {shape[3]} keys, and the "
            f"layer has {wanted[0]} and {wanted[1]}; {_INSTEAD}"
        )


def _dense(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Check a mask that the user prepared and cut it to the keys, as transformers does.

    Raises:
        ShapeError: the mask does not fit the call.
    """
    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    fits = mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    if (
        not fits
        or mask.shape[2] not in (1, q_len)
        or (mask.shape[3] < kv_len and mask.shape[3] > 1)
    ):
        raise ShapeError(
            f"attention_mask must be [B or 1, 1 or Hq, Sq, Skv] = [{batch} or 1, 1 or {heads}, "
            f"{q_len}, {kv_len}] in a layer, got {list(mask.shape)}"
        )
    return mask[..., :kv_len]


def _dense_mask(mask: Tensor, query: Tensor, key: Tensor) -> Mask:
    table = _dense(mask, query, key)
    shared = tuple(size == 1 for size in table.shape)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        at = zip(shared, (b, h, q, kv), strict=True)
        return table[tuple(0 if one else i for one, i in at)]

    return Mask(keep, f"attention_mask({list(table.shape)})")

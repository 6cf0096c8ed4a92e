"""Run FlashAttention's calls: of packed sequences, and of batches with unequal lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attnkit
from attnkit import ArgumentError, Mask, ScoreMod, ShapeError, UnsupportedError, masks
from attnkit.integrations.packed.identity_cache import IdentityCache
from attnkit.integrations.packed.offsets import Names, find_packing
from attnkit.integrations.packed.options import Function, Window
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.gradients import gradients
from attnkit.util import caches

_masks: IdentityCache[Mask] = IdentityCache(64)
_score_mods: IdentityCache[ScoreMod] = IdentityCache(32)
caches.register(_masks.clear)
caches.register(_score_mods.clear)


def packed_attention(
    names: Names,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_offsets: Any,
    k_offsets: Any,
    longest_q: Any,
    longest_k: Any,
    *,
    used: Any = None,
    grouped: bool = True,
    window: Window,
    score_mod: Function | None,
    mask: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention inside each of several packed sequences.

    The functions see b as the number of the sequence, kv as the position of the key in its
    sequence, and q as the place of the query among these keys: the last query is at the last key.

    Args:
        names: names of the arguments, for messages.
        query: [total_q, Hq, D].
        key: [total_k, Hkv, D]; Hkv divides Hq.
        value: [total_k, Hkv, Dv].
        q_offsets, k_offsets, longest_q, longest_k, used: see `offsets.find_packing`.
        grouped: whether the key may have fewer heads than the query.
        window: keys before and after the place of its query that a row keeps.
        score_mod: a score_mod, or None.
        mask: a mask_mod besides the window, or None.
        options: further arguments of `attnkit.flex_attention`.

    Returns:
        out [total_q, Hq, Dv] and LSE [Hq, total_q], the natural logarithm in float32. Both are
        differentiable. A query without a key has output 0 and LSE -inf.

    Raises:
        The errors of `offsets.find_packing` and of `attnkit.flex_attention`.
    """
    _check_rank(names, (query, key, value), "[total, heads, head dim]", grouped)
    rows = [t.transpose(0, 1)[None] for t in (query, key, value)]
    while True:
        packing = find_packing(names, query, key, q_offsets, k_offsets, longest_q, longest_k, used)
        functions = packing.score_mod(score_mod, query.shape[1]), packing.mask(window, mask)
        out, lse = _attend(rows[0], rows[1], rows[2], *functions, options)
        # A call that is prepared anew compares data on a GPU, which the search for a packing does
        # not wait for. If that finds an edit, the tables were those of the old data.
        if packing.is_current():
            return out[0].transpose(0, 1), lse[0]


def aligned_attention(
    names: Names,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: Window,
    score_mod: Function | None,
    mask: Any,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention of a batch, with the last query at the last key.

    The functions see q as the place of the query among the keys.

    Args:
        names: names of the arguments, for messages.
        query: [B, Sq, Hq, D].
        key: [B, Skv, Hkv, D]; Hkv divides Hq.
        value: [B, Skv, Hkv, Dv].
        window, score_mod, mask, options: see `packed_attention`.

    Returns:
        out [B, Sq, Hq, Dv] and LSE [B, Hq, Sq].

    Raises:
        The errors of `attnkit.flex_attention`.
    """
    _check_rank(names, (query, key, value), "[batch, length, heads, head dim]")
    if mask is not None and not callable(mask):
        raise ArgumentError(
            f"mask must be a function mask_mod(b, h, q, kv) or None, got {type(mask).__name__}"
        )
    shift = _shift(query, key)
    rows = [t.transpose(1, 2) for t in (query, key, value)]
    functions = _shifted(score_mod, shift), _aligned_mask(window, shift, mask)
    out, lse = _attend(rows[0], rows[1], rows[2], *functions, options)
    return out.transpose(1, 2), lse


def packed_gradients(
    names: Names,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    q_offsets: Any,
    k_offsets: Any,
    longest_q: Any,
    longest_k: Any,
    *,
    window: Window,
    scale: float | None,
    backend: str,
    dropout: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of a `packed_attention` without functions.

    Args:
        out, lse: its results.
        grad_out: gradient of `out`, [total_q, Hq, Dv].
        names, query, key, value, q_offsets, k_offsets, longest_q, longest_k, window: its arguments.
        scale, backend: arguments of `attnkit.flex_attention`.
        dropout: the state of its dropout; None without dropout.
    """
    packing = find_packing(names, query, key, q_offsets, k_offsets, longest_q, longest_k)
    rows = [t.transpose(0, 1)[None] for t in (query, key, value, out, grad_out)]
    mask = packing.mask(window, None)
    found = _differentiate(rows, lse[None], mask, scale, backend, dropout)
    return tuple(t[0].transpose(0, 1) for t in found)  # type: ignore[return-value]


def aligned_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    window: Window,
    scale: float | None,
    backend: str,
    dropout: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of an `aligned_attention` without functions.

    Args:
        out, lse: its results.
        grad_out: gradient of `out`, [B, Sq, Hq, Dv].
        query, key, value, window: its arguments.
        scale, backend: arguments of `attnkit.flex_attention`.
        dropout: the state of its dropout; None without dropout.
    """
    rows = [t.transpose(1, 2) for t in (query, key, value, out, grad_out)]
    mask = _aligned_mask(window, _shift(query, key), None)
    found = _differentiate(rows, lse, mask, scale, backend, dropout)
    return tuple(t.transpose(1, 2) for t in found)  # type: ignore[return-value]


def _differentiate(
    rows: list[Tensor],
    lse: Tensor,
    mask: Mask | None,
    scale: float | None,
    backend: str,
    dropout: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a call; `rows` are query, key, value, out and gradient of out."""
    query, key, value, out, grad_out = rows
    if 0 in (query.shape[0], query.shape[2], key.shape[2]):
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    grouped = key.shape[1] != query.shape[1]
    call = AttentionCall(
        query, key, value, None, mask, scale, enable_gqa=grouped, return_lse=True,
        backend=backend, dropout=dropout,
    )  # fmt: skip
    return gradients(call, out, lse, grad_out)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function | None,
    mask: Mask | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Call `attnkit.flex_attention`, or for tensors without a token what takes these."""
    run: Any = attnkit.flex_attention
    if 0 in (query.shape[0], query.shape[2], key.shape[2]):
        run = attnkit.flex.flex_attention
    grouped = key.shape[1] != query.shape[1]
    found: tuple[Tensor, Tensor] = run(
        query, key, value, score_mod, mask, enable_gqa=grouped, return_lse=True, **options
    )
    return found


def _shift(query: Tensor, key: Tensor) -> int | Tensor | None:
    """Return what turns the position of a query into its place among the keys; None for nothing.

    In torch.compile it is a tensor, so that one graph serves all lengths.
    """
    shift = key.shape[1] - query.shape[1]
    if shift == 0:
        return None
    if torch.compiler.is_compiling():
        return torch.full((), shift, dtype=torch.int32, device=query.device)
    return shift


def _shifted(score_mod: Function | None, shift: int | Tensor | None) -> Function | None:
    """Return a score_mod whose query positions are moved by `shift`, one object for each."""
    if score_mod is None or shift is None:
        return score_mod
    given = score_mod

    def make() -> ScoreMod:
        own = given if isinstance(given, ScoreMod) else ScoreMod(given)

        def moved(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
            return given(score, b, h, q + shift, kv)

        axes = [table.shifted(shift, None) for table in own.axes]
        return ScoreMod(moved, f"{own.label}, aligned", axes=axes)

    return _score_mods.get(shift, (given,), make)


def _aligned_mask(window: Window, shift: int | Tensor | None, mask: Function | None) -> Mask | None:
    """Return the mask of a window around queries that are moved by `shift`, one object for each."""
    if window == (None, None) and mask is None:
        return None

    def make() -> Mask:
        parts: list[Any] = [] if window == (None, None) else [_window(window)]
        if mask is not None:
            parts.append(mask if isinstance(mask, Mask) else Mask(mask))
        own = parts[0] if len(parts) == 1 else attnkit.and_masks(*parts)
        return own if shift is None else _moved(own, shift)

    return _masks.get((window, shift), (mask,), make)


def _window(window: Window) -> Mask:
    left, right = window
    return masks.causal() if window == (None, 0) else masks.sliding_window(left, right)


def _moved(mask: Mask, shift: int | Tensor) -> Mask:
    """Return a mask whose query positions are moved by `shift`; they may be negative."""

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        kept: Tensor = mask(b, h, q + shift, kv)
        return kept

    axes = [table.shifted(shift, None) for table in mask.axes]
    return Mask(keep, f"({mask.label}), aligned", axes=axes)


def _check_rank(names: Names, tensors: tuple[Any, ...], layout: str, grouped: bool = True) -> None:
    """Raise unless query, key and value are tensors of a layout; the call checks the rest."""
    rank = layout.count(",") + 1
    for name, t in zip(names[:3], tensors, strict=True):
        if not isinstance(t, Tensor):
            raise ArgumentError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
        if t.is_nested:
            raise UnsupportedError(
                f"{name} is a nested tensor; pass its tokens {layout} and offsets: {name}.values(), "
                f"{name}.offsets()"
            )
        if t.ndim != rank:
            raise ShapeError(f"{name} must have shape {layout}, got {list(t.shape)}")
    heads, kv_heads = (t.shape[-2] for t in tensors[:2])
    if not grouped and kv_heads != heads:
        raise ShapeError(
            f"{names.query} has {heads} heads, {names.key} has {kv_heads}; for grouped-query "
            "attention set enable_gqa=True"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            f"{names.query} has {heads} heads, which is no multiple of the {kv_heads} heads of "
            f"{names.key}; expected {layout}"
        )

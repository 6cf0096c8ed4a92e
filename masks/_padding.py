"""Build padding masks for a batch of sequences that are padded to one length."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from attnkit import ArgumentError, Axes, DTypeError, Mask, OptionError, ShapeError, picklable
from attnkit.masks._check import (
    FLOATS,
    INTS,
    flag,
    float_tensor,
    has_data,
    per_batch,
    same_device,
    shape_text,
    tensor,
    text,
    whole,
)


@picklable
def padding(
    kv_lengths: Tensor,
    q_lengths: Tensor | None = None,
    *,
    side: Literal["right", "left"] = "right",
    q_len: int | None = None,
    kv_len: int | None = None,
) -> Mask:
    """Build a padding mask, which keeps the first `kv_lengths[b]` keys of each batch entry.

    By default the padding is on the right, as with FlashAttention's `cache_seqlens`. Hugging Face
    pads on the left for generation: `padding(lengths, side="left", kv_len=S)` keeps the last
    `kv_lengths[b]` of S keys. For Hugging Face's attention mask [B, S], see `padding_from_mask`.

    Padding on the left moves every token of a sequence by the same number of places. So masks and
    mods that compare `q` with `kv`, such as `causal`, `sliding_window` and `alibi`, need no change.
    Those that count from the first token need its position: `start=` in `chunked`, and
    `.shift(q=-start, kv=-start)` for others, with `start = S - lengths`.

    The mask does not remove NaN or infinity in padded keys and values, see `zero_padding`.

    Args:
        kv_lengths: int [B], number of keys that are not padding.
        q_lengths: int [B], number of queries that are not padding. Padded rows are fully masked, so
            their output and gradients are 0. None if no row is padding.
        side: side of the padding, "right" or "left".
        q_len, kv_len: query and kv length; only for side="left" (`q_len` only with `q_lengths`).

    Returns:
        The mask, for any lengths; with side="left", only for `q_len` and `kv_len`.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    >>> import torch
    >>> from attnkit import create_mask
    >>> create_mask(padding(torch.tensor([2, 3])), 2, None, 2, 4).int()[:, 0]
    tensor([[[1, 1, 0, 0],
             [1, 1, 0, 0]],
    <BLANKLINE>
            [[1, 1, 1, 0],
             [1, 1, 1, 0]]], dtype=torch.int32)
    """
    per_batch("kv_lengths", kv_lengths)
    axes = [Axes("kv_lengths", kv_lengths, "b")]
    if q_lengths is not None:
        per_batch("q_lengths", q_lengths)
        if q_lengths.shape != kv_lengths.shape:
            raise ShapeError(
                f"q_lengths and kv_lengths must have one entry per batch entry, got shapes "
                f"{tuple(q_lengths.shape)} and {tuple(kv_lengths.shape)}"
            )
        axes.append(Axes("q_lengths", q_lengths, "b"))
    shown = "[B]" if q_lengths is None else "[B], [B]"
    if _is_left(side, q_len, kv_len, q_lengths):
        return _left(kv_lengths, q_lengths, q_len, kv_len, f"padding({shown}, side='left')", axes)
    if q_lengths is None:

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv < kv_lengths[b]

        return Mask(keep, f"padding({shown})", axes=axes)
    queries = q_lengths

    def keep_both(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < kv_lengths[b]) & (q < queries[b])

    return Mask(keep_both, f"padding({shown})", axes=axes)


@picklable
def padding_from_mask(attention_mask: Tensor, *, rows: bool = False) -> Mask:
    """Build a padding mask from a 0/1 tensor, which keeps the keys whose entry is 1.

    This is Hugging Face's `attention_mask` [B, S]: 1 for tokens, 0 for padding, which may be on
    either side or between tokens. PyTorch's `key_padding_mask` has True for padding; pass its
    inverse. FlashAttention has no such argument: it packs the tokens, which is
    `document_from_cu_seqlens`.

    In a cache the mask has one entry for each key, those of earlier calls included. The positions
    of tokens, which rotary embeddings need, are
    `(attention_mask.long().cumsum(-1) - 1).clamp(min=0)`; for masks and mods that count from the
    first token, see `padding`.

    The mask reads `attention_mask` when it is used, so the next call sees in-place edits. That ints
    and floats are 0 and 1 is checked once, which waits for a GPU; bools need no check. The mask
    does not remove NaN or infinity in padded keys and values, see `zero_padding`.

    Args:
        attention_mask: [B, S], bool, int or float, with 1 (True) for tokens and 0 for padding.
        rows: whether queries that are padding see nothing, so that their output and gradients are
            0. `attention_mask` then has one entry for each query, too. Hugging Face computes
            numbers without a meaning in these rows.

    Returns:
        The mask, for a kv length up to S (with `rows` also a query length up to S).

    Raises:
        ArgumentError, ShapeError, DTypeError: `attention_mask` is not such a tensor.
        OptionError: an entry is neither 0 nor 1.

    >>> import torch
    >>> from attnkit import create_mask
    >>> attention_mask = torch.tensor([[0, 1, 1], [1, 0, 1]])
    >>> create_mask(padding_from_mask(attention_mask), 2, None, 2, 3).int()[:, 0]
    tensor([[[0, 1, 1],
             [0, 1, 1]],
    <BLANKLINE>
            [[1, 0, 1],
             [1, 0, 1]]], dtype=torch.int32)
    """
    flag("rows", rows)
    table = _zeros_and_ones(attention_mask)
    axes = [Axes("attention_mask", table, "b", "len" if rows else "kv")]
    label = f"padding_from_mask({shape_text(table)}{', rows=True' if rows else ''})"

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[b, kv] != 0

    def keep_both(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (table[b, kv] != 0) & (table[b, q] != 0)

    return Mask(keep_both if rows else keep, label, axes=axes)


def _zeros_and_ones(attention_mask: Any) -> Tensor:
    """Check that a tensor is [B, S] and holds 0 and 1 as far as its data can be read; return it."""
    table = tensor("attention_mask", attention_mask, "[B, S]", (2,))
    if table.dtype not in (torch.bool, *INTS, *FLOATS):
        raise DTypeError(f"attention_mask must hold bools, ints or floats, got {table.dtype}")
    if table.dtype == torch.bool or not has_data(table):
        return table
    wrong = (table != 0) & (table != 1)
    if bool(wrong.any()):
        raise OptionError(
            f"attention_mask must hold 0 for padding and 1 for tokens, got "
            f"{table[wrong][0].item()}; of an additive mask of 0 and -inf, pass `mask == 0`"
        )
    return table


def zero_padding(
    tensor: Tensor, lengths: Tensor, *, side: Literal["right", "left"] = "right"
) -> Tensor:
    """Return a copy of `tensor` with zeros in the padded rows, to remove NaN and infinity there.

    A mask gives padded keys the weight 0, and 0 times NaN is NaN. NaN or infinity in padding
    therefore reaches the output rows of its tile, as in FlexAttention and in dense attention. This
    function is not needed if the padding is finite. Apply it to the value for a correct output, and
    to query, key and value for correct gradients. The gradient of a padded row is 0.

    Args:
        tensor: [B, H, S, D], any float dtype.
        lengths: int [B], number of rows of each batch entry that are not padding.
        side: side of the padding, "right" or "left".

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    >>> import torch
    >>> value = torch.tensor([[1.0], [2.0], [float("nan")]])[None, None]
    >>> zero_padding(value, torch.tensor([2])).flatten()
    tensor([1., 2., 0.])
    """
    float_tensor("tensor", tensor, "[B, H, S, D]", (4,))
    per_batch("lengths", lengths)
    if len(lengths) != len(tensor):
        raise ShapeError(
            f"lengths must have one entry per batch entry of tensor, {len(tensor)}, got "
            f"{len(lengths)}"
        )
    same_device("tensor", tensor, "lengths", lengths)
    check_side(side)
    size = tensor.shape[2]
    positions = torch.arange(size, device=tensor.device)
    own = lengths.long()[:, None]
    padded = positions >= own if side == "right" else positions < size - own
    return tensor.masked_fill(padded[:, None, :, None], 0)


def check_side(side: Any) -> None:
    """Check that `side` is "right" or "left"."""
    if not isinstance(side, str) or side not in ("right", "left"):
        raise OptionError(f'side must be "right" or "left", got {text(side)}')


def _is_left(side: Any, q_len: Any, kv_len: Any, q_lengths: Tensor | None) -> bool:
    """Return whether `side` is "left"; check `side` and the lengths that "left" requires."""
    check_side(side)
    if side == "right":
        if q_len is not None or kv_len is not None:
            raise ArgumentError('q_len and kv_len have a meaning with side="left" only')
        return False
    if kv_len is None or (q_len is None) != (q_lengths is None):
        raise ArgumentError(
            'side="left" needs kv_len, and q_len where q_lengths is given, got '
            f"{kv_len=} and {q_len=}"
        )
    return True


def _left(
    kv_lengths: Tensor,
    q_lengths: Tensor | None,
    q_len: Any,
    kv_len: Any,
    label: str,
    axes: list[Axes],
) -> Mask:
    """Return the mask for padding on the left, which keeps the last `kv_lengths[b]` keys."""
    keys = whole("kv_len", kv_len, least=1)
    if q_lengths is None:

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv >= keys - kv_lengths[b]

        return Mask(keep, label, lengths=(None, keys), axes=axes)
    rows, queries = whole("q_len", q_len, least=1), q_lengths

    def keep_both(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv >= keys - kv_lengths[b]) & (q >= rows - queries[b])

    return Mask(keep_both, label, lengths=(rows, keys), axes=axes)

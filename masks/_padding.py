"""Padding mask for a batch of sequences that are padded to one length."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from attnkit import ArgumentError, Axes, Mask, OptionError, ShapeError, picklable
from attnkit.masks._check import float_tensor, per_batch, same_device, text, whole


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
    `kv_lengths[b]` of S keys. For an attention mask [B, S], the lengths are
    `attention_mask.sum(-1)`.

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

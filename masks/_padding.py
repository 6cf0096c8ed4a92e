"""Define the mask of a batch of sequences that are padded to one length."""

from __future__ import annotations

from torch import Tensor

from attnkit import Mask, ShapeError
from attnkit.masks._check import per_batch


def padding(kv_lengths: Tensor, q_lengths: Tensor | None = None) -> Mask:
    """Keeps the first `kv_lengths[b]` keys of each batch entry.

    Args:
        kv_lengths: int [B], keys that are not padding.
        q_lengths: int [B], queries that are not padding: rows after them are fully masked, so their
            output and gradients are 0. None: no row is padding.

    Returns:
        The mask, for any lengths.

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
    if q_lengths is None:

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv < kv_lengths[b]

        return Mask(keep, "padding([B])")
    queries = per_batch("q_lengths", q_lengths)
    if queries.shape != kv_lengths.shape:
        raise ShapeError(
            f"q_lengths and kv_lengths must have one entry per batch entry, got shapes "
            f"{tuple(queries.shape)} and {tuple(kv_lengths.shape)}"
        )

    def keep_both(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < kv_lengths[b]) & (q < queries[b])

    return Mask(keep_both, "padding([B], [B])")

"""Build the sliding window mask."""

from __future__ import annotations

from types import EllipsisType

from torch import Tensor

from attnkit import ArgumentError, Mask, picklable
from attnkit.masks._align import Align, aligned, keyword_arguments
from attnkit.masks._check import keys_before, limit, number_text


@picklable
def sliding_window(
    left: int | EllipsisType | None = ...,
    right: int | None = 0,
    *,
    size: int | None = None,
    align: Align = "top-left",
    q_len: int | None = None,
    kv_len: int | Tensor | None = None,
) -> Mask:
    """Build a window mask, which keeps `left` keys before and `right` keys after the query.

    The query's own key is kept too. Both ends are inclusive, as in FlashAttention's
    `window_size=(left, right)`: a row keeps up to `left + 1 + right` keys. Hugging Face's
    `sliding_window=W` (Mistral, Gemma) counts the query's own key; it corresponds to
    `sliding_window(size=W)`, or `sliding_window(W - 1)`. Pass None for FlashAttention's -1.
    FlashAttention uses bottom-right alignment. With the default `right=0` the mask is causal.

    Args:
        left: keys before the query, or None for all of them.
        right: keys after the query, or None for all of them.
        size: keys up to and including the query's own, `left + 1`; alternative to `left`.
        align: "top-left", or "bottom-right" to place the last query at the last key, see `causal`.
        q_len: query length; only for "bottom-right".
        kv_len: kv length, an int, or int [B] with one length per batch entry (keys from
            `kv_len[b]` on are not kept); only for "bottom-right".

    Returns:
        The mask, for any lengths; with align="bottom-right", only for `q_len` and `kv_len`.

    Raises:
        ArgumentError, OptionError: an argument is not an int or is negative, `left` and `right` are
            both None, or `left` and `size` are both given.
        ShapeError, DTypeError: `kv_len` is a tensor of another shape or dtype.

    Source: Beltagy et al. 2020 (Longformer), arXiv:2004.05150; Jiang et al. 2023 (Mistral),
    arXiv:2310.06825.

    >>> from attnkit import create_mask
    >>> create_mask(sliding_window(2, 1), None, None, 6, 6).int()[0, 0]
    tensor([[1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [0, 1, 1, 1, 1, 0],
            [0, 0, 1, 1, 1, 1],
            [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    before, after = keys_before("left", left, size), limit("right", right)
    if before is None and after is None:
        raise ArgumentError("left and right are both None, which keeps everything; use noop_mask")
    aligned_at = aligned(align, q_len, kv_len)
    position, exists = aligned_at.position, aligned_at.exists

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        at = position(b, q)
        sides = ((at - kv, before), (kv - at, after))
        near = [distance <= most for distance, most in sides if most is not None]
        return near[0] & near[1] if len(near) == 2 else near[0]

    def keep_existing(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return keep(b, h, q, kv) & exists(b, kv)

    given = [str(before) if before is None else number_text(before)]
    if after != 0:
        given.append(str(after) if after is None else number_text(after))
    label = f"sliding_window({', '.join([*given, *keyword_arguments(aligned_at.arguments)])})"
    chosen = keep_existing if aligned_at.padded and after != 0 else keep
    return Mask(chosen, label, lengths=aligned_at.lengths, axes=aligned_at.axes, frame="common")

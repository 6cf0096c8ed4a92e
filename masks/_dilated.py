"""Build the dilated sliding window mask."""

from __future__ import annotations

from torch import Tensor

from attnkit import Mask, picklable
from attnkit.masks._align import Align, aligned, keyword_arguments
from attnkit.masks._check import number_text, whole


@picklable
def dilated(
    left: int,
    dilation: int,
    right: int = 0,
    *,
    align: Align = "top-left",
    q_len: int | None = None,
    kv_len: int | Tensor | None = None,
) -> Mask:
    """Build a dilated window mask, which keeps every `dilation`-th key counted from the query.

    `left` and `right` are inclusive and count positions, not keys: a row keeps up to
    `left // dilation + 1 + right // dilation` keys. Longformer counts keys: its w keys on each side
    are `dilated(w * dilation, dilation, w * dilation)`. FlashAttention has no dilation. NATTEN's
    dilated neighborhood keeps as many keys at the ends of the sequence as elsewhere; that is
    `natten(..., dilation=...)`.

    Args:
        left: positions of the window before the query.
        dilation: distance between neighbouring kept keys, at least 1 (1 gives `sliding_window`).
        right: positions of the window after the query.
        align: "top-left", or "bottom-right" to place the last query at the last key, see `causal`.
        q_len: query length; only for "bottom-right".
        kv_len: kv length, an int, or int [B] with one length per batch entry (keys from
            `kv_len[b]` on are not kept); only for "bottom-right".

    Returns:
        The mask, for any lengths; with align="bottom-right", only for `q_len` and `kv_len`.

    Raises:
        ArgumentError, OptionError: an argument is not an int, is negative, or `dilation` is 0.
        ShapeError, DTypeError: `kv_len` is a tensor of another shape or dtype.

    Source: Beltagy et al. 2020 (Longformer), arXiv:2004.05150, section 3.1.

    >>> from attnkit import create_mask
    >>> create_mask(dilated(4, 2), None, None, 6, 6).int()[0, 0]
    tensor([[1, 0, 0, 0, 0, 0],
            [0, 1, 0, 0, 0, 0],
            [1, 0, 1, 0, 0, 0],
            [0, 1, 0, 1, 0, 0],
            [1, 0, 1, 0, 1, 0],
            [0, 1, 0, 1, 0, 1]], dtype=torch.int32)
    """
    whole("left", left)
    whole("right", right)
    whole("dilation", dilation, least=1)

    at = aligned(align, q_len, kv_len)
    position, exists = at.position, at.exists

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        distance = position(b, q) - kv
        return (distance <= left) & (distance >= -right) & (distance % dilation == 0)

    def keep_existing(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return keep(b, h, q, kv) & exists(b, kv)

    sizes = (left, dilation) if right == 0 else (left, dilation, right)
    label = f"dilated({', '.join((*map(number_text, sizes), *keyword_arguments(at.arguments)))})"
    chosen = keep_existing if at.padded and right else keep
    return Mask(chosen, label, lengths=at.lengths, axes=at.axes, frame="common")

"""Define the causal mask, with queries aligned at the first or at the last key."""

from __future__ import annotations

from torch import Tensor

from attnkit import Mask
from attnkit.masks._align import Align, aligned


def causal(
    align: Align = "top-left",
    *,
    q_len: int | None = None,
    kv_len: int | Tensor | None = None,
) -> Mask:
    """Keeps the keys that are not after the query.

    Aligned at the top left, query `q` sees keys `0 .. q`, as `is_causal` of PyTorch's SDPA. Aligned
    at the bottom right, the last query sees the last key, as FlashAttention (from 2.1 on) and
    Hugging Face with a cache. For equal lengths both are the same. For documents with different
    numbers of queries and keys, FlashAttention aligns each document by itself. That is
    `document_from_cu_seqlens(q, kv, within=causal(), align="bottom-right")`; `&` is refused there.

    Args:
        align: "top-left" or "bottom-right".
        q_len: query length; only for "bottom-right".
        kv_len: kv length, an int, or int [B] with one length per batch entry (keys from
            `kv_len[b]` on are after every query, so they are masked); only for "bottom-right".

    Returns:
        The mask, for any lengths; with align="bottom-right", for `q_len` and `kv_len` only.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    Source: Vaswani et al. 2017, arXiv:1706.03762.

    >>> from attnkit import create_mask
    >>> create_mask(causal(), None, None, 3, 5).int()[0, 0]
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0]], dtype=torch.int32)
    >>> create_mask(causal("bottom-right", q_len=3, kv_len=5), None, None, 3, 5).int()[0, 0]
    tensor([[1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    at = aligned(align, q_len, kv_len)
    position = at.position

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= position(b, q)

    label = f"causal({', '.join(at.arguments)})"
    return Mask(keep, label, lengths=at.lengths, axes=at.axes, frame="common")

"""Build the causal mask, with top-left or bottom-right alignment."""

from __future__ import annotations

from torch import Tensor

from attnkit import Mask, picklable
from attnkit.masks._align import Align, aligned


@picklable
def causal(
    align: Align = "top-left",
    *,
    q_len: int | None = None,
    kv_len: int | Tensor | None = None,
) -> Mask:
    """Build a causal mask, which keeps the keys that are not after the query.

    With `align="top-left"` query `q` sees keys `0 .. q`, as with `is_causal` of PyTorch's SDPA.
    With `align="bottom-right"` the last query sees all keys, as in FlashAttention (since 2.1) and
    in Hugging Face with a cache. For equal lengths both alignments are the same. If documents have
    different numbers of queries and keys, FlashAttention aligns each document separately. Use
    `document_from_cu_seqlens(q, kv, within=causal(), align="bottom-right")` for that; `&` is
    refused for such documents.

    Args:
        align: "top-left" or "bottom-right".
        q_len: query length; only for "bottom-right".
        kv_len: kv length, an int, or int [B] with one length per batch entry (keys from
            `kv_len[b]` on are after every query, so they are masked); only for "bottom-right".

    Returns:
        The mask, for any lengths; with align="bottom-right", only for `q_len` and `kv_len`.

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

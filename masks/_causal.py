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

    Aligned at the top left, query `q` sees keys `0 .. q` (as `is_causal` of PyTorch's SDPA).
    Aligned at the bottom right, the last query sees the last key (as in FlashAttention). A KV cache
    needs this: its `q_len` new queries are the last of `kv_len` positions.

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
    position, _, _, lengths, arguments = aligned(align, q_len, kv_len)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= position(b, q)

    return Mask(keep, f"causal({', '.join(arguments)})", lengths=lengths)

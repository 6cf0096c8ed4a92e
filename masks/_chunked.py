"""Build the causal mask within chunks of a fixed number of tokens."""

from __future__ import annotations

from torch import Tensor

from attnkit import Axes, Mask, picklable
from attnkit.masks._align import Align, aligned, keyword_arguments
from attnkit.masks._check import number_text, per_batch, whole


@picklable
def chunked(
    size: int,
    *,
    start: int | Tensor = 0,
    align: Align = "top-left",
    q_len: int | None = None,
    kv_len: int | Tensor | None = None,
) -> Mask:
    """Build a chunked mask, which keeps the keys of the query's chunk that are not after the query.

    Chunks are `size` consecutive tokens; the last one may be shorter. This is the attention of
    Llama 4's local layers, Hugging Face's `attention_chunk_size`; FlashAttention has no argument for
    it. For chunks without the causal order, use `block_diagonal`.

    Args:
        size: tokens of a chunk.
        start: position of the first token, where the first chunk starts: an int, or int [B] with
            one position per batch entry. With padding on the left it is the number of padded
            places, `(attention_mask == 0).sum(-1)` in Hugging Face's layout. Queries and keys
            before `start` are fully masked.
        align: "top-left", or "bottom-right" to place the last query at the last key, see `causal`.
        q_len: query length; only for "bottom-right".
        kv_len: kv length, an int, or int [B] with one length per batch entry (keys from
            `kv_len[b]` on are not kept); only for "bottom-right".

    Returns:
        The mask, for any lengths; with align="bottom-right", only for `q_len` and `kv_len`.

    Raises:
        ArgumentError, OptionError: an argument is not an int, is negative, or `size` is 0.
        ShapeError, DTypeError: `start` or `kv_len` is a tensor of another shape or dtype.

    Source: Llama 4 (Meta 2025), `attention_chunk_size` in Hugging Face transformers.

    >>> from attnkit import create_mask
    >>> create_mask(chunked(3), None, None, 6, 6).int()[0, 0]
    tensor([[1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 0, 0, 1, 0, 0],
            [0, 0, 0, 1, 1, 0],
            [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    whole("size", size, least=1)
    starts = per_batch("start", start) if isinstance(start, Tensor) else None
    axes = [] if starts is None else [Axes("start", starts, "b")]
    begin = 0 if isinstance(start, Tensor) else whole("start", start)
    at = aligned(align, q_len, kv_len)
    position = at.position

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        here = position(b, q)
        if starts is None and begin == 0:
            return (kv <= here) & (kv >= here - here % size)
        first = begin if starts is None else starts[b]
        return (kv <= here) & (kv >= here - (here - first) % size) & (kv >= first)

    shown = "[B]" if isinstance(start, Tensor) else number_text(start)
    starting = [] if shown == "0" else [f"start={shown}"]
    label = ", ".join([number_text(size), *starting, *keyword_arguments(at.arguments)])
    return Mask(
        keep, f"chunked({label})", lengths=at.lengths, axes=[*axes, *at.axes], frame="common"
    )

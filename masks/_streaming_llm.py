"""Build StreamingLLM's mask: attention sinks plus a causal window."""

from __future__ import annotations

from types import EllipsisType

from torch import Tensor

from attnkit import Mask, picklable
from attnkit.masks._align import Align, aligned, keyword_arguments
from attnkit.masks._check import keys_before, number_text, whole


@picklable
def streaming_llm(
    window: int | EllipsisType = ...,
    sinks: int = 4,
    *,
    size: int | None = None,
    align: Align = "top-left",
    q_len: int | None = None,
    kv_len: int | Tensor | None = None,
) -> Mask:
    """Build StreamingLLM's mask, which keeps the first `sinks` keys and a causal window.

    A row keeps up to `window + 1` local keys. The `recent_size` of StreamingLLM's code counts the
    query's own key, so pass `streaming_llm(size=recent_size)`. These sinks are keys. The sinks of
    gpt-oss are different: they are learned terms of the softmax.

    Args:
        window: keys of the window before the query.
        sinks: keys at the start that every later query sees.
        size: keys of the window including the query's own, `window + 1`; alternative to `window`.
        align: "top-left", or "bottom-right" to place the last query at the last key, see `causal`.
        q_len: query length; only for "bottom-right".
        kv_len: kv length, an int, or int [B] with one length per batch entry (keys from
            `kv_len[b]` on are not kept); only for "bottom-right".

    Returns:
        The mask, for any lengths; with align="bottom-right", only for `q_len` and `kv_len`.

    Raises:
        ArgumentError, OptionError: an argument is not an int or is negative, or `window` and `size`
            are both given.
        ShapeError, DTypeError: `kv_len` is a tensor of another shape or dtype.

    Source: Xiao et al. 2023 (StreamingLLM), arXiv:2309.17453.

    >>> from attnkit import create_mask
    >>> create_mask(streaming_llm(1, sinks=2), None, None, 6, 6).int()[0, 0]
    tensor([[1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 1, 0, 1, 1, 0],
            [1, 1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    before = keys_before("window", window if window is ... else whole("window", window), size) or 0
    whole("sinks", sinks)
    aligned_at = aligned(align, q_len, kv_len)
    position = aligned_at.position

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        at = position(b, q)
        return (kv <= at) & ((at - kv <= before) | (kv < sinks))

    arguments = (number_text(before), number_text(sinks), *keyword_arguments(aligned_at.arguments))
    label = f"streaming_llm({', '.join(arguments)})"
    return Mask(keep, label, lengths=aligned_at.lengths, axes=aligned_at.axes, frame="common")

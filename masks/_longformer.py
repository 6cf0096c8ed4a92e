"""Build Longformer's mask: global tokens and a sliding window."""

from __future__ import annotations

from torch import Tensor

from attnkit import Axes, Mask, picklable
from attnkit.masks._check import bool_tensor, number_text, shape_text, whole


@picklable
def longformer(window: int, global_tokens: int | Tensor) -> Mask:
    """Build Longformer's mask, which keeps a two-sided window and all pairs with a global token.

    `window` counts the keys on one side, and both ends are inclusive: a row keeps up to
    `2 * window + 1` local keys. Hugging Face's `attention_window` counts both sides, so pass
    `attention_window // 2`.

    Args:
        window: keys on each side of the query.
        global_tokens: number of global tokens at the start, or bool [S] or [B, S] that is True for
            global tokens.

    Returns:
        The mask, for any lengths, or up to S if `global_tokens` is a tensor.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    Source: Beltagy et al. 2020 (Longformer), arXiv:2004.05150, section 3.1.

    >>> from attnkit import create_mask
    >>> create_mask(longformer(1, global_tokens=1), None, None, 6, 6).int()[0, 0]
    tensor([[1, 1, 1, 1, 1, 1],
            [1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 0, 1, 1, 1, 0],
            [1, 0, 0, 1, 1, 1],
            [1, 0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    whole("window", window)
    if not isinstance(global_tokens, Tensor):
        whole("global_tokens", global_tokens)

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            near = (q - kv <= window) & (kv - q <= window)
            return near | (q < global_tokens) | (kv < global_tokens)

        return Mask(
            keep, f"longformer({number_text(window)}, {number_text(global_tokens)})", frame="common"
        )

    is_global = bool_tensor("global_tokens", global_tokens, "[S] or [B, S]", (1, 2))
    label = f"longformer({number_text(window)}, {shape_text(is_global)})"
    if is_global.ndim == 1:

        def keep_marked(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            near = (q - kv <= window) & (kv - q <= window)
            return near | is_global[q] | is_global[kv]

        axes = [Axes("global_tokens", is_global, "len")]
        return Mask(keep_marked, label, axes=axes, frame="common")

    def keep_batched(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        near = (q - kv <= window) & (kv - q <= window)
        return near | is_global[b, q] | is_global[b, kv]

    axes = [Axes("global_tokens", is_global, "b", "len")]
    return Mask(keep_batched, label, axes=axes, frame="common")

"""Build the causal mask with spans of tokens that see each other, such as those of an image."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit import Axes, DTypeError, Mask, picklable
from attnkit.masks._check import INT_MAX, INTS, number_text, shape_text, tensor, whole
from attnkit.masks._tables import readable


@picklable("ids")
def image_spans(ids: Tensor, *, text: int = 0, size: int | None = None) -> Mask:
    """Build a causal mask in which the tokens of an image also see the later tokens of that image.

    A span is a run of neighbouring tokens with the same id other than `text`. Every token keeps the
    keys up to itself, and all keys of its span. Hugging Face's `token_type_ids` can be passed as
    they are (0 text, 1 image): images with text between them are spans of their own. Images that
    touch need different ids. For ids that are -1 at text, pass `text=-1`. If the types mark other
    tokens too, pass `token_type_ids == 1`.

    This is the mask of Gemma 3, whose sliding layers have `size=sliding_window`. PaliGemma's mask,
    with images and a prompt before the answer, is `prefix_lm`. FlashAttention has no argument for
    either.

    Queries that follow a cache need `.shift(q=...)`; a token that is generated after the images
    needs `causal` alone. The mask reads `ids` once, when it is built.

    Args:
        ids: int or bool [S] or [B, S], for each token its span, or `text`.
        text: the id of tokens that belong to no span; bool tensors have False there.
        size: keys up to and including its own that a token keeps outside of its span, as in
            `sliding_window(size=...)`; None for all of them.

    Returns:
        The mask, for a query length up to S.

    Raises:
        ArgumentError, ShapeError, DTypeError: `ids` is not such a tensor.
        OptionError: `text` is no number of 32 bits, or not 0 for a bool tensor; `size` is below 1.

    Source: Gemma 3 (Google 2025), arXiv:2503.19786; Beyer et al. 2024 (PaliGemma),
    arXiv:2407.07726.

    >>> import torch
    >>> from attnkit import create_mask
    >>> create_mask(image_spans(torch.tensor([0, 1, 1, 1, 0, 0])), None, None, 6, 6).int()[0, 0]
    tensor([[1, 0, 0, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1, 0],
            [1, 1, 1, 1, 1, 1]], dtype=torch.int32)
    """
    shapes = "[S] or [B, S]"
    table = readable("ids", tensor("ids", ids, shapes, (1, 2)))
    if table.dtype not in (torch.bool, *INTS):
        raise DTypeError(f"ids must hold integers (torch.int32) or bools, got {table.dtype}")
    least, most = (0, 0) if table.dtype == torch.bool else (-INT_MAX - 1, INT_MAX)
    whole("text", text, least=least, most=most)
    before = None if size is None else whole("size", size, least=1) - 1
    first, last = _bounds(table, text)
    batched = table.ndim == 2

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        at = (b, q) if batched else (q,)
        near = kv <= last[at]
        return near if before is None else near & (kv >= (q - before).minimum(first[at]))

    options = {"text": text, "size": size}
    shown = [f"{name}={number_text(n)}" for name, n in options.items() if n]
    axes = [Axes("ids", last, *(("b", "q") if batched else ("q",)))]
    label = f"image_spans({', '.join([shape_text(table), *shown])})"
    return Mask(keep, label, axes=axes, frame="common")


def _bounds(ids: Tensor, text: int) -> tuple[Tensor, Tensor]:
    """Return the first and the last token of each token's span, int32, shaped as `ids`.

    Both are the token itself outside of spans.
    """
    length = ids.shape[-1]
    places = torch.arange(length, dtype=torch.int32, device=ids.device)
    ends = torch.ones_like(ids, dtype=torch.bool)
    ends[..., :-1] = (ids[..., 1:] != ids[..., :-1]) | (ids[..., :-1] == text)
    starts = torch.ones_like(ends)
    starts[..., 1:] = ends[..., :-1]
    # the nearest start at or before each token, and the nearest end at or after it
    first = torch.where(starts, places, 0).cummax(-1).values
    last = torch.where(ends, places, length).flip(-1).cummin(-1).values.flip(-1)
    return first.int(), last.int()

"""Build the prefix mask and the prefix-LM mask."""

from __future__ import annotations

from torch import Tensor

from attnkit import Axes, Mask, picklable
from attnkit.masks._causal import causal
from attnkit.masks._check import number_text, per_batch, whole


@picklable
def prefix(length: int | Tensor) -> Mask:
    """Build a prefix mask, which keeps the first `length` keys.

    Args:
        length: an int, or int [B] with one length per batch entry.

    Returns:
        The mask, for any lengths.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    >>> from attnkit import create_mask
    >>> create_mask(prefix(2), None, None, 3, 4).int()[0, 0]
    tensor([[1, 1, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 0, 0]], dtype=torch.int32)
    """
    if isinstance(length, Tensor):
        lengths = per_batch("length", length)

        def keep_batched(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return kv < lengths[b]

        return Mask(keep_batched, "prefix([B])", axes=[Axes("length", lengths, "b")])
    whole("length", length)

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv < length

    return Mask(keep, f"prefix({number_text(length)})")


@picklable
def prefix_lm(length: int | Tensor) -> Mask:
    """Build a prefix-LM mask, which keeps the first `length` keys and the keys up to the query.

    Args:
        length: an int, or int [B] with one length per batch entry.

    Returns:
        The mask, for any lengths.

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    Source: Raffel et al. 2020 (T5, "prefix LM"), arXiv:1910.10683, section 3.2.1.

    >>> from attnkit import create_mask
    >>> create_mask(prefix_lm(2), None, None, 4, 4).int()[0, 0]
    tensor([[1, 1, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 1]], dtype=torch.int32)
    """
    first = prefix(length)
    return Mask(causal() | first, first.label.replace("prefix", "prefix_lm"))

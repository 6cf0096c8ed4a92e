"""Build masks over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attnkit import ArgumentError, Axes, Mask, OptionError, ShapeError, picklable
from attnkit.masks._check import INT_MAX, int_tensor, number_text, per_batch, shape_text, whole
from attnkit.masks._tables import logical_pages, readable


@picklable("page_table")
def paged(
    mask: Callable[..., Tensor],
    page_table: Tensor,
    page_size: int,
    pages: int,
    lengths: Tensor | None = None,
) -> Mask:
    """Convert a mask over logical key positions to a mask over the pages of a paged KV cache.

    Key and value are one pool [1, H, pages * page_size, D] for all batch entries. Logical page `i`
    of entry `b` is stored in physical page `page_table[b, i]`. Keys in pages of other entries are
    masked. `page_table` corresponds to FlashAttention's `block_table`, and `lengths` to its
    `cache_seqlens`. vLLM fills the unused end of a row with 0 or old pages; replace these by -1.

    Args:
        mask: `mask_mod(b, h, q, kv)` or a Mask, over logical key positions.
        page_table: int [B, P], physical page of each logical page; -1 for a page that does not
            exist. The pages of an entry must be distinct. Entries may share pages (a common
            prefix).
        page_size: keys per page.
        pages: number of physical pages; kv length is `pages * page_size`.
        lengths: int [B], number of keys of each entry (later keys of its pages are masked); None if
            all pages are full.

    Returns:
        The mask, for kv length `pages * page_size` and the query lengths of `mask`.

    Raises:
        ArgumentError, ShapeError, DTypeError: an argument is not as described, or the mask was
            built for fewer keys than an entry's pages hold.
        OptionError: a page is out of range, or an entry has a page twice.

    Source: Kwon et al. 2023 (PagedAttention), arXiv:2309.06180.

    >>> import torch
    >>> from attnkit import create_mask
    >>> from attnkit.masks import causal
    >>> table = torch.tensor([[2, 0]])  # logical page 0 is stored in page 2, page 1 in page 0
    >>> create_mask(paged(causal(), table, page_size=2, pages=3), 1, None, 4, 6).int()[0, 0]
    tensor([[0, 0, 0, 0, 1, 0],
            [0, 0, 0, 0, 1, 1],
            [1, 0, 0, 0, 1, 1],
            [1, 1, 0, 0, 1, 1]], dtype=torch.int32)
    """
    if not callable(mask):
        raise ArgumentError(f"mask must be a mask or a mask_mod, got {type(mask).__name__}")
    whole("page_size", page_size, least=1)
    whole("pages", pages, least=1)
    if pages * page_size > INT_MAX:
        raise OptionError(f"pages * page_size must be at most {INT_MAX}, got {pages * page_size}")
    readable("page_table", int_tensor("page_table", page_table, "[B, P]", (2,)))
    logical_page = logical_pages(page_table, pages)
    name = mask.label if isinstance(mask, Mask) else getattr(mask, "__name__", "mask")
    sizes = _lengths(mask, name, page_table.shape[1] * page_size, pages * page_size, lengths)
    inner = mask if isinstance(mask, Mask) else None
    # The mask reads its tables at logical keys, whose number its own lengths and proofs limit.
    axes = [Axes("page_table", tuple(page_table.shape), "b", None)]
    axes += [table.without("kv") for table in inner.axes] if inner is not None else []
    frame = "" if inner is None else inner.frame
    label = (
        f"paged({name}, {shape_text(page_table)}, {number_text(page_size)}, {number_text(pages)})"
    )

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        page = logical_page[b, kv // page_size]
        return (page >= 0) & mask(b, h, q, page.clamp(min=0) * page_size + kv % page_size)

    if lengths is None:
        return Mask(keep, label, lengths=sizes, axes=axes, frame=frame)
    counts = per_batch("lengths", lengths)
    if len(counts) != len(page_table):
        raise ShapeError(
            "lengths must have one entry per row of page_table, "
            f"{len(page_table)}, got {len(counts)}"
        )

    def keep_existing(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        page = logical_page[b, kv // page_size]
        key = page.clamp(min=0) * page_size + kv % page_size
        return (page >= 0) & (key < counts[b]) & mask(b, h, q, key)

    own = Axes("lengths", counts, "b")
    return Mask(keep_existing, label, lengths=sizes, axes=[*axes, own], frame=frame)


def _lengths(
    mask: Callable[..., Tensor], name: str, capacity: int, pool: int, counts: Tensor | None
) -> tuple[Any, int]:
    """Return (query lengths that `mask` allows, keys of the pool), the lengths of a paged mask."""
    if not isinstance(mask, Mask):
        return None, pool
    most = mask.lengths.kv[1]
    if counts is None and most is not None and most < capacity:
        raise ShapeError(
            f"{name} was built for kv length {most}, and the pages of an entry hold {capacity} "
            "keys; give lengths, or build the mask for that length"
        )
    return mask.lengths.q, pool

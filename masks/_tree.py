"""Build masks for trees of draft tokens in speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from attnkit import Axes, Mask, picklable
from attnkit.masks._check import (
    bool_tensor,
    int_tensor,
    per_batch,
    shape_text,
    text,
    whole,
)
from attnkit.masks._tables import readable, tree_walks

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@picklable("parents")
def tree(parents: Tensor, context: int | Tensor = 0) -> Mask:
    """Build a tree attention mask: a draft token sees the context, its ancestors and itself.

    Queries are the N draft tokens; keys are the context followed by the N draft tokens. Ancestors
    are found by two comparisons of positions in a preorder walk, so no N x N table is stored.

    Args:
        parents: int [N] or [B, N], the parent of each token; -1 for a root. A parent must come
            before its children (as in Medusa's and EAGLE's trees).
        context: number of keys before the draft tokens, an int, or int [B] with the length of each
            KV cache. With a tensor, batch entry b has `context[b] + N` keys and later keys are
            masked.

    Returns:
        The mask, for query length N and kv length `context + N` (any kv length if `context` is a
        tensor).

    Raises:
        ArgumentError, ShapeError, DTypeError: an argument is not as described.
        OptionError: a parent is below -1, or does not come before its child.

    Source: Miao et al. 2023 (SpecInfer), arXiv:2305.09781; Cai et al. 2024 (Medusa),
    arXiv:2401.10774.

    >>> import torch
    >>> from attnkit import create_mask
    >>> create_mask(tree(torch.tensor([-1, 0, 0, 1]), context=2), None, None, 4, 6).int()[0, 0]
    tensor([[1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 1, 1, 0, 1, 0],
            [1, 1, 1, 1, 0, 1]], dtype=torch.int32)
    """
    readable("parents", int_tensor("parents", parents, "[N] or [B, N]", (1, 2)))
    first, last = tree_walks(parents).unbind()
    label = f"tree({shape_text(parents)}, context={_shown(context)})"

    if parents.ndim == 1:

        def keep(b: Tensor, h: Tensor, q: Tensor, token: Tensor) -> Tensor:
            return (first[token] <= first[q]) & (first[q] < last[token])

        return _after_context(keep, context, (parents.shape[-1],) * 2, label)

    axes = [Axes("parents", first, "b", None)]

    def keep_batched(b: Tensor, h: Tensor, q: Tensor, token: Tensor) -> Tensor:
        return (first[b, token] <= first[b, q]) & (first[b, q] < last[b, token])

    return _after_context(keep_batched, context, (parents.shape[-1],) * 2, label, axes)


@picklable
def tree_from_table(table: Tensor, context: int | Tensor = 0) -> Mask:
    """Build a tree attention mask from a bool table of the draft tokens that each query sees.

    Every query also sees the whole context. The mask reads `table` when it is used, so the next
    call sees in-place edits.

    Args:
        table: bool [N, M] or [B, N, M], True if query n sees draft token m.
        context: number of keys before the draft tokens, an int, or int [B] (see `tree`).

    Returns:
        The mask, for query length N and kv length `context + M` (any kv length if `context` is a
        tensor).

    Raises:
        ArgumentError, OptionError, ShapeError, DTypeError: an argument is not as described.

    >>> import torch
    >>> from attnkit import create_mask
    >>> table = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    >>> create_mask(tree_from_table(table, context=1), None, None, 3, 4).int()[0, 0]
    tensor([[1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    bool_tensor("table", table, "[N, M] or [B, N, M]", (2, 3))
    label = f"tree_from_table({shape_text(table)}, context={_shown(context)})"
    if table.ndim == 2:

        def keep(b: Tensor, h: Tensor, q: Tensor, token: Tensor) -> Tensor:
            return table[q, token]

        return _after_context(keep, context, (table.shape[-2], table.shape[-1]), label)

    def keep_batched(b: Tensor, h: Tensor, q: Tensor, token: Tensor) -> Tensor:
        return table[b, q, token]

    axes = [Axes("table", table, "b", None, None)]
    return _after_context(keep_batched, context, (table.shape[-2], table.shape[-1]), label, axes)


def _after_context(
    keep: MaskMod,
    context: int | Tensor,
    drafts: tuple[int, int],
    label: str,
    axes: Sequence[Axes] = (),
) -> Mask:
    """Return a mask over context and draft tokens from a mask_mod `keep` over draft tokens only.

    Every query sees the whole context. `drafts` is (number of queries, number of draft tokens).
    """
    rows, count = drafts
    if isinstance(context, Tensor):
        contexts = per_batch("context", context)

        def keep_cached(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            token = kv - contexts[b]
            draft = keep(b, h, q, token.clamp(0, count - 1))
            return (token < 0) | ((token < count) & draft)

        own = Axes("context", contexts, "b")
        return Mask(keep_cached, label, lengths=(rows, None), axes=[*axes, own])
    lengths = (rows, whole("context", context) + count)
    if context == 0:
        return Mask(keep, label, lengths=lengths, axes=axes)

    def keep_after(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv < context) | keep(b, h, q, (kv - context).clamp(min=0))

    return Mask(keep_after, label, lengths=lengths, axes=axes)


def _shown(context: int | Tensor) -> str:
    return "[B]" if isinstance(context, Tensor) else text(context)

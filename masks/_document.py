"""Define masks for documents packed into one sequence, from ids, lengths or offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from attnkit import Mask, OptionError, ShapeError
from attnkit.masks._check import at_least, int_tensor, shape_text, whole

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def document(ids: Tensor, kv_ids: Tensor | None = None, *, sorted_ids: bool = False) -> Mask:
    """Keeps the pairs whose document ids are equal.

    The mask reads `ids` when it is used: the next call sees edits in place.

    Args:
        ids: int [S] or [B, S], the document of each position (queries and keys alike, or queries
            only if `kv_ids` is given).
        kv_ids: int [Skv] or [B, Skv], the document of each key.
        sorted_ids: check that ids never decrease along the sequence.

    Returns:
        The mask, for lengths up to those of the ids.

    Raises:
        ArgumentError, ShapeError, DTypeError: not an integer tensor of that shape.
        OptionError: ids decrease, with `sorted_ids`.

    Source: Krell et al. 2021 (packing), arXiv:2107.02027.

    >>> import torch
    >>> from attnkit import create_mask
    >>> create_mask(document(torch.tensor([0, 0, 1, 1, 1])), None, None, 5, 5).int()[0, 0]
    tensor([[1, 1, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [0, 0, 1, 1, 1],
            [0, 0, 1, 1, 1],
            [0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    q_doc = _ids("ids", ids, sorted_ids)
    kv_doc = q_doc if kv_ids is None else _ids("kv_ids", kv_ids, sorted_ids)
    if q_doc.ndim != kv_doc.ndim or q_doc.shape[:-1] != kv_doc.shape[:-1]:
        raise ShapeError(
            "ids and kv_ids must both be [S] or both be [B, S] with the same B, got shapes "
            f"{tuple(q_doc.shape)} and {tuple(kv_doc.shape)}"
        )
    return Mask(_same(q_doc, kv_doc), f"document({_shown(q_doc, kv_ids)})")


def document_from_lengths(
    lengths: Tensor, kv_lengths: Tensor | None = None, *, total: int | None = None
) -> Mask:
    """Keeps the pairs in the same document; documents follow each other without gaps.

    Args:
        lengths: int [N], the length of each document.
        kv_lengths: int [N], the number of keys of each document, if it differs from the queries'.
        total: query length, to check the sum of the lengths.

    Returns:
        The mask, for the query and kv lengths that the documents sum to.

    Raises:
        ArgumentError, ShapeError, DTypeError: not an integer tensor of that shape.
        OptionError: a length is negative, or the lengths do not sum to `total`.

    >>> import torch
    >>> from attnkit import create_mask
    >>> create_mask(document_from_lengths(torch.tensor([1, 3])), None, None, 4, 4).int()[0, 0]
    tensor([[1, 0, 0, 0],
            [0, 1, 1, 1],
            [0, 1, 1, 1],
            [0, 1, 1, 1]], dtype=torch.int32)
    """
    q_doc = _from_lengths("lengths", lengths)
    if total is not None and whole("total", total, least=1) != q_doc.numel():
        raise OptionError(f"lengths must sum to total = {total}, got {q_doc.numel()}")
    kv_doc = q_doc
    if kv_lengths is not None:
        kv_doc = _from_lengths("kv_lengths", kv_lengths)
        _same_count("lengths", lengths, "kv_lengths", kv_lengths)
    label = f"document_from_lengths({_shown(lengths, kv_lengths)})"
    return Mask(_same(q_doc, kv_doc), label, lengths=(len(q_doc), len(kv_doc)))


def document_from_cu_seqlens(
    cu_seqlens: Tensor, kv_cu_seqlens: Tensor | None = None, *, total: int | None = None
) -> Mask:
    """Keeps the pairs in the same document; `cu_seqlens` says where documents start.

    Args:
        cu_seqlens: int [N + 1], 0 followed by the ends of the N documents, as FlashAttention's
            varlen interface takes them.
        kv_cu_seqlens: int [N + 1], the same for the keys, if they differ from the queries.
        total: query length, to check the last entry.

    Returns:
        The mask, for the query and kv lengths that the last entries give.

    Raises:
        ArgumentError, ShapeError, DTypeError: not an integer tensor of that shape.
        OptionError: the first entry is not 0, entries decrease (documents would overlap), or the
            last entry is not `total`.

    >>> import torch
    >>> from attnkit import create_mask
    >>> create_mask(document_from_cu_seqlens(torch.tensor([0, 2, 3])), None, None, 3, 3).int()[0, 0]
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    q_doc = _from_lengths("cu_seqlens", _differences("cu_seqlens", cu_seqlens))
    if total is not None and whole("total", total, least=1) != q_doc.numel():
        raise OptionError(f"cu_seqlens must end with total = {total}, got {q_doc.numel()}")
    kv_doc = q_doc
    if kv_cu_seqlens is not None:
        kv_doc = _from_lengths("kv_cu_seqlens", _differences("kv_cu_seqlens", kv_cu_seqlens))
        _same_count("cu_seqlens", cu_seqlens, "kv_cu_seqlens", kv_cu_seqlens)
    label = f"document_from_cu_seqlens({_shown(cu_seqlens, kv_cu_seqlens)})"
    return Mask(_same(q_doc, kv_doc), label, lengths=(len(q_doc), len(kv_doc)))


def _same(q_doc: Tensor, kv_doc: Tensor) -> MaskMod:
    if q_doc.ndim == 1:

        def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q_doc[q] == kv_doc[kv]

        return keep

    def keep_batched(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q_doc[b, q] == kv_doc[b, kv]

    return keep_batched


def _ids(name: str, ids: Tensor, sorted_ids: bool) -> Tensor:
    checked = int_tensor(name, ids, "[S] or [B, S]", (1, 2))
    if sorted_ids and bool((checked[..., 1:] < checked[..., :-1]).any()):
        raise OptionError(f"{name} must not decrease along the sequence (sorted_ids=True)")
    return checked


def _from_lengths(name: str, lengths: Tensor) -> Tensor:
    """Return the document id of each position, int32 [sum of lengths]."""
    at_least(name, int_tensor(name, lengths, "[N]", (1,)), 0)
    documents = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    ids = documents.repeat_interleave(lengths.long())
    if len(ids) == 0:
        raise OptionError(f"{name} must hold one document that is not empty, got zeros only")
    return ids


def _differences(name: str, cu_seqlens: Tensor) -> Tensor:
    ends = int_tensor(name, cu_seqlens, "[N + 1]", (1,)).long()
    if len(ends) < 2:
        raise ShapeError(f"{name} must have shape [N + 1] with N >= 1, got {tuple(ends.shape)}")
    lengths = ends.diff()
    first, shortest = torch.stack((ends[0], lengths.amin())).tolist()
    if first != 0:
        raise OptionError(f"{name} must begin with 0, got {first}")
    if shortest < 0:
        at = int(lengths.argmin())
        raise OptionError(
            f"{name} must not decrease, or documents would overlap; entry {at + 1} is "
            f"{int(ends[at + 1])} after {int(ends[at])}"
        )
    return lengths


def _same_count(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.shape != other.shape:
        raise ShapeError(
            f"{name} and {other_name} must have the same shape, got {tuple(value.shape)} and "
            f"{tuple(other.shape)}"
        )


def _shown(value: Tensor, other: Tensor | None) -> str:
    both = (value,) if other is None else (value, other)
    return ", ".join(shape_text(t) for t in both)

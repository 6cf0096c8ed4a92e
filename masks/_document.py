"""Build masks for documents packed into one sequence, given by ids, lengths or offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from attnkit import ArgumentError, Axes, Mask, OptionError, ShapeError, picklable
from attnkit.masks._align import Align, check_align
from attnkit.masks._check import INT_MAX, flag, has_data, int_tensor, number_text, shape_text, whole
from attnkit.masks._tables import document_ids, document_lengths, exact_lengths, readable

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@picklable
def document(
    ids: Tensor,
    kv_ids: Tensor | None = None,
    *,
    sorted_ids: bool = False,
    padding: int | None = None,
) -> Mask:
    """Build a document mask, which keeps the keys whose document id equals that of the query.

    By default every value is an id: positions with the id -1 (or 0) see each other, as with JAX's
    segment ids. If a value marks padding, as 0 does in Hugging Face's attention masks, pass
    `padding=0` (or `padding=-1`). Padding positions then see no key, and no query sees them. The
    mask does not remove NaN or infinity in padded rows of query, key and value, see `zero_padding`.

    The mask reads `ids` when it is used, so the next call sees in-place edits.

    Args:
        ids: int [S] or [B, S], document id of each position (of queries and keys, or only of
            queries if `kv_ids` is given).
        kv_ids: int [Skv] or [B, Skv], document id of each key.
        sorted_ids: whether to check that ids never decrease along the sequence.
        padding: the id of padding positions; None if there is no padding.

    Returns:
        The mask, for lengths up to those of the ids.

    Raises:
        ArgumentError, ShapeError, DTypeError: ids are not an integer tensor of that shape.
        OptionError: ids decrease and `sorted_ids` is True, or `padding` is out of the range of the
            dtype of the ids.

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
    flag("sorted_ids", sorted_ids)
    q_doc = _ids("ids", ids, sorted_ids)
    kv_doc = q_doc if kv_ids is None else _ids("kv_ids", kv_ids, sorted_ids)
    if q_doc.ndim != kv_doc.ndim or q_doc.shape[:-1] != kv_doc.shape[:-1]:
        raise ShapeError(
            "ids and kv_ids must both be [S] or both be [B, S] with the same B, got shapes "
            f"{tuple(q_doc.shape)} and {tuple(kv_doc.shape)}"
        )
    keep = _same(q_doc, kv_doc)
    leading = ("b",) if q_doc.ndim == 2 else ()
    if kv_ids is None:
        axes = [Axes("ids", q_doc, *leading, "len")]
    else:
        axes = [Axes("ids", q_doc, *leading, "q"), Axes("kv_ids", kv_doc, *leading, "kv")]
    if padding is None:
        return Mask(keep, f"document({_shown(q_doc, kv_ids)})", axes=axes)
    _check_padding(padding, q_doc, kv_doc)

    def keep_documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own = q_doc[b, q] if leading else q_doc[q]
        return keep(b, h, q, kv) & (own != padding)

    return Mask(
        keep_documents,
        f"document({_shown(q_doc, kv_ids)}, padding={number_text(padding)})",
        axes=axes,
    )


@picklable("lengths", "kv_lengths")
def document_from_lengths(
    lengths: Tensor,
    kv_lengths: Tensor | None = None,
    *,
    total: int | None = None,
    within: MaskMod | None = None,
    align: Align | None = None,
) -> Mask:
    """Build a document mask from the lengths of consecutive documents.

    With `kv_lengths` the queries and keys of a document start at different positions. `&` with
    `causal()` or a window is therefore refused; use `within` to apply such a mask inside each
    document. See `document_from_cu_seqlens`.

    Args:
        lengths: int [N], the length of each document.
        kv_lengths: int [N], number of keys of each document; None if equal to `lengths`.
        total: expected query length, which the sum of `lengths` is compared with.
        within, align: a mask inside each document, see `document_from_cu_seqlens`.

    Returns:
        The mask, for query and kv lengths equal to the sums of the lengths.

    Raises:
        ArgumentError, ShapeError, DTypeError: lengths are not an integer tensor of that shape.
        OptionError: a length is negative, the lengths do not sum to `total`, or `align` is unknown.

    >>> import torch
    >>> from attnkit import create_mask
    >>> create_mask(document_from_lengths(torch.tensor([1, 3])), None, None, 4, 4).int()[0, 0]
    tensor([[1, 0, 0, 0],
            [0, 1, 1, 1],
            [0, 1, 1, 1],
            [0, 1, 1, 1]], dtype=torch.int32)
    """
    readable("lengths", int_tensor("lengths", lengths, "[N]", (1,)))
    if kv_lengths is not None:
        readable("kv_lengths", int_tensor("kv_lengths", kv_lengths, "[N]", (1,)))
        _same_count("lengths", lengths, "kv_lengths", kv_lengths)
    q_doc = document_ids("lengths", lengths, _total(total), "sum to")
    label = f"document_from_lengths({_shown(lengths, kv_lengths)})"
    return _packed(label, q_doc, lengths, ("kv_lengths", kv_lengths), within, align)


@picklable("cu_seqlens", "kv_cu_seqlens")
def document_from_cu_seqlens(
    cu_seqlens: Tensor,
    kv_cu_seqlens: Tensor | None = None,
    *,
    total: int | None = None,
    within: MaskMod | None = None,
    align: Align | None = None,
) -> Mask:
    """Build a document mask from cumulative sequence lengths, as in FlashAttention's varlen API.

    FlashAttention's varlen functions align causal masks and windows at the bottom right of each
    document. If queries and keys have the same offsets, that is `causal() & mask`. With
    `kv_cu_seqlens` the queries and keys of a document start at different positions, and `&` with
    `causal()` or a window is refused. Pass `within=causal(), align="bottom-right"` instead.

    Args:
        cu_seqlens: int [N + 1], 0 followed by the end offsets of the N documents.
        kv_cu_seqlens: int [N + 1], the same for the keys; None if equal to `cu_seqlens`.
        total: expected query length, which the last entry is compared with.
        within: a mask or mask_mod that is applied inside each document, to positions counted from
            the start of the document. It must allow any lengths and read no table by position.
        align: only with `within`. "top-left" (the default) places the first query of a document at
            its first key, "bottom-right" places the last query at the last key.

    Returns:
        The mask, for query and kv lengths equal to the last entries.

    Raises:
        ArgumentError, ShapeError, DTypeError: an argument is not an integer tensor of that shape,
            or `within` is not such a mask.
        OptionError: the first entry is not 0, entries decrease (documents would overlap), the
            last entry is not `total`, or `align` is unknown.

    >>> import torch
    >>> from attnkit import create_mask
    >>> create_mask(document_from_cu_seqlens(torch.tensor([0, 2, 3])), None, None, 3, 3).int()[0, 0]
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    lengths = _differences("cu_seqlens", cu_seqlens)
    q_doc = document_ids("cu_seqlens", lengths, _total(total), "end with")
    kv_lengths = None
    if kv_cu_seqlens is not None:
        kv_lengths = _differences("kv_cu_seqlens", kv_cu_seqlens)
        _same_count("cu_seqlens", cu_seqlens, "kv_cu_seqlens", kv_cu_seqlens)
    label = f"document_from_cu_seqlens({_shown(cu_seqlens, kv_cu_seqlens)})"
    return _packed(label, q_doc, lengths, ("kv_cu_seqlens", kv_lengths), within, align)


def _packed(
    label: str,
    q_doc: Tensor,
    lengths: Tensor,
    keys: tuple[str, Tensor | None],
    within: MaskMod | None,
    align: Align | None,
) -> Mask:
    """Return the mask of consecutive documents with `lengths` queries each.

    Args:
        label: label of the mask, without `within`.
        q_doc: int32 [query length], document index of each query.
        lengths: int [N], number of queries of each document.
        keys: (argument name, number of keys of each document as int [N]). The numbers are None if
            they equal `lengths`.
        within, align: the arguments of the caller.
    """
    name, kv_lengths = keys
    ends = "end with" if name == "kv_cu_seqlens" else "sum to"
    kv_doc = q_doc if kv_lengths is None else document_ids(name, kv_lengths, None, ends)
    sizes, exact = exact_lengths(label, q_doc.shape[0], kv_doc.shape[0])
    apart = kv_lengths is not None and _start_apart(lengths, kv_lengths)
    frame: Literal["", "separate"] = "separate" if apart else ""
    if within is None:
        if align is not None:
            raise ArgumentError("align has a meaning with within=... only, got no within")
        return Mask(_same(q_doc, kv_doc), label, lengths=sizes, axes=exact, frame=frame)
    inner = _inner(within)
    check_align("top-left" if align is None else align)
    own = lengths.long()
    counts = own if kv_lengths is None else kv_lengths.long()
    # int32 tables by query: start and end of the document's keys, and the query's position in them
    start = (counts.cumsum(0) - counts)[q_doc].int()
    end = counts.cumsum(0)[q_doc].int()
    place = torch.arange(q_doc.shape[0], device=q_doc.device) - (own.cumsum(0) - own)[q_doc]
    if align == "bottom-right":
        place = place + (counts - own)[q_doc]
    place = place.int()

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        first = start[q]
        here: Tensor = inner(b, h, place[q], kv - first)
        return (kv >= first) & (kv < end[q]) & here

    axes = [*exact, *(table.without("q", "kv") for table in inner.axes)]
    shown = f"{label[:-1]}, within={inner.label}" + (f", align={align!r})" if align else ")")
    return Mask(keep, shown, lengths=sizes, axes=axes, frame=frame)


def _total(total: Any) -> int | None:
    return None if total is None else whole("total", total, least=1)


def _inner(within: Any) -> Mask:
    """Check the argument `within` and return it as a `Mask`."""
    if not callable(within):
        raise ArgumentError(f"within must be a mask or a mask_mod, got {type(within).__name__}")
    inner = within if isinstance(within, Mask) else Mask(within)
    if inner.lengths != Mask(_same_place).lengths:
        raise ShapeError(
            f"within must fit documents of any length; {inner.label} was built for {inner.lengths}"
        )
    return inner


def _same_place(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q == kv


def _start_apart(lengths: Tensor, kv_lengths: Tensor) -> bool:
    """Return whether some document's queries and keys start at different positions."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return not torch.equal(lengths[:-1].long().cpu(), kv_lengths[:-1].long().cpu())


def _check_padding(padding: Any, *ids: Tensor) -> None:
    for t in ids:
        limits = torch.iinfo(t.dtype)
        whole("padding", padding, least=max(limits.min, -(2**31)), most=min(limits.max, INT_MAX))


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
    if sorted_ids and has_data(checked) and bool((checked[..., 1:] < checked[..., :-1]).any()):
        raise OptionError(f"{name} must not decrease along the sequence (sorted_ids=True)")
    return checked


def _differences(name: str, cu_seqlens: Tensor) -> Tensor:
    ends = readable(name, int_tensor(name, cu_seqlens, "[N + 1]", (1,)))
    if len(ends) < 2:
        raise ShapeError(f"{name} must have shape [N + 1] with N >= 1, got {tuple(ends.shape)}")
    return document_lengths(name, ends)


def _same_count(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.shape != other.shape:
        raise ShapeError(
            f"{name} and {other_name} must have the same shape, got {tuple(value.shape)} and "
            f"{tuple(other.shape)}"
        )


def _shown(value: Tensor, other: Tensor | None) -> str:
    both = (value,) if other is None else (value, other)
    return ", ".join(shape_text(t) for t in both)

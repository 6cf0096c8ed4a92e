"""Compute the tables of masks from tensors whose data the masks read once, while they are built.

Inside torch.compile and torch.export these tensors have no data, so each computation is an operator
there. The operator checks the data when the compiled program runs, and raises the errors that the
mask raises outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnkit import Axes, OptionError
from attnkit.masks._check import at_least, extent, needs_data, total_length

torch.library.define(
    "attnkit::document_ids", "(Tensor lengths, SymInt? total, str name, str ends) -> Tensor"
)
torch.library.define("attnkit::document_lengths", "(Tensor cu_seqlens, str name) -> Tensor")
torch.library.define("attnkit::tree_walks", "(Tensor parents) -> Tensor")
torch.library.define("attnkit::logical_pages", "(Tensor page_table, SymInt pages) -> Tensor")


def readable(name: str, value: Tensor) -> Tensor:
    """Check that a tensor has data, or that torch compiles, and return it.

    Raises:
        ArgumentError: the tensor has no data (is meta or fake).
    """
    return value if torch.compiler.is_compiling() else needs_data(name, value)


def exact_lengths(label: str, q_len: int, kv_len: int) -> tuple[tuple[int, int] | None, list[Axes]]:
    """Return the arguments `lengths` and `axes` of a mask for one query length and one kv length.

    While torch compiles, the lengths are not known. They are declared as axes then, which are
    compared with those of the call when it runs.
    """
    if torch.compiler.is_compiling():
        return None, [Axes(label, q_len, "=q"), Axes(label, kv_len, "=kv")]
    return (q_len, kv_len), []


def document_ids(name: str, lengths: Tensor, total: int | None, ends: str) -> Tensor:
    """Return the document index of each position, int32 [sum of lengths].

    Args:
        name: the argument that the lengths come from, for messages.
        lengths: int [N], number of positions of each document.
        total: expected sum of the lengths; None to accept any.
        ends: "sum to" or "end with", how `name` gives the total, for messages.

    Raises:
        OptionError: a length is negative, all are 0, their sum is too large or not `total`.
    """
    if torch.compiler.is_compiling():
        ids: Tensor = torch.ops.attnkit.document_ids(lengths, total, name, ends)
        return ids
    return _document_ids(lengths, total, name, ends)


def document_lengths(name: str, cu_seqlens: Tensor) -> Tensor:
    """Return the lengths of documents, int64 [N], from their cumulative lengths, int [N + 1].

    Raises:
        OptionError: the first entry is not 0, or entries decrease.
    """
    if torch.compiler.is_compiling():
        lengths: Tensor = torch.ops.attnkit.document_lengths(cu_seqlens, name)
        return lengths
    return _document_lengths(cu_seqlens, name)


def tree_walks(parents: Tensor) -> Tensor:
    """Return where a preorder walk of each tree meets its nodes and leaves their subtrees.

    Args:
        parents: int [N] or [B, N], the parent of each node; -1 for a root.

    Returns:
        int32 [2, N] or [2, B, N]: the index of each node in the walk, and the end of the indices of
        its subtree.

    Raises:
        OptionError: a parent is below -1, or does not come before its child.
    """
    if torch.compiler.is_compiling():
        walks: Tensor = torch.ops.attnkit.tree_walks(parents)
        return walks
    return _tree_walks(parents)


def logical_pages(page_table: Tensor, pages: int) -> Tensor:
    """Return the inverse of `page_table`: int32 [B, pages], physical page -> logical page or -1.

    Raises:
        OptionError: a page is below -1, is not below `pages`, or is twice in one row.
    """
    if torch.compiler.is_compiling():
        logical: Tensor = torch.ops.attnkit.logical_pages(page_table, pages)
        return logical
    return _logical_pages(page_table, pages)


def _document_ids(lengths: Tensor, total: int | None, name: str, ends: str) -> Tensor:
    at_least(name, lengths, 0)
    count = total_length(name, lengths)
    if total is not None and total != count:
        raise OptionError(f"{name} must {ends} total = {total}, got {count}")
    if count == 0:
        raise OptionError(f"{name} must hold a length above 0, got zeros only")
    documents = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    return documents.repeat_interleave(lengths.long(), output_size=count)


def _document_lengths(cu_seqlens: Tensor, name: str) -> Tensor:
    ends = cu_seqlens.long()
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


def _tree_walks(parents: Tensor) -> Tensor:
    rows = parents.reshape(-1, parents.shape[-1]).tolist()
    walks = torch.tensor([_preorder(row) for row in rows], dtype=torch.int32, device=parents.device)
    return walks.transpose(0, 1).reshape(2, *parents.shape).contiguous()


def _logical_pages(page_table: Tensor, pages: int) -> Tensor:
    table = page_table.long()
    at_least("page_table", table, -1)
    if extent(table)[1] >= pages:
        raise OptionError(
            f"page_table must hold pages below pages = {pages}, got {extent(table)[1]}"
        )
    row, logical = (table >= 0).nonzero(as_tuple=True)
    physical = table[row, logical]
    if len((row * pages + physical).unique()) != len(physical):
        raise OptionError("page_table must hold distinct pages in each row, got one page twice")
    logical_page = torch.full((len(table), pages), -1, dtype=torch.int32, device=table.device)
    logical_page[row, physical] = logical.int()
    return logical_page


def _preorder(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return each node's index in a preorder walk, and the end of its subtree's indices."""
    size = [1] * len(parents)
    for node in reversed(range(len(parents))):
        parent = parents[node]
        if not -1 <= parent < node:
            raise OptionError(
                f"parents[{node}] must be -1 or stand before its child ({node}), got {parent}"
            )
        if parent >= 0:
            size[parent] += size[node]
    first = [0] * len(parents)
    free = [0] * (len(parents) + 1)  # next index below each node; the last entry is for roots
    for node, parent in enumerate(parents):
        first[node] = free[parent]
        free[parent] += size[node]
        free[node] = first[node] + 1
    return first, [place + count for place, count in zip(first, size, strict=True)]


for _function in (_document_ids, _document_lengths, _tree_walks, _logical_pages):
    _name = f"attnkit::{_function.__name__.lstrip('_')}"
    torch.library.impl(_name, "CompositeExplicitAutograd", _function)


@torch.library.register_fake("attnkit::document_ids")  # type: ignore[untyped-decorator]
def _document_ids_fake(lengths: Tensor, total: Any, name: str, ends: str) -> Tensor:
    count = torch.library.get_ctx().new_dynamic_size(min=1) if total is None else total
    return lengths.new_empty(count, dtype=torch.int32)


@torch.library.register_fake("attnkit::document_lengths")  # type: ignore[untyped-decorator]
def _document_lengths_fake(cu_seqlens: Tensor, name: str) -> Tensor:
    return cu_seqlens.new_empty(cu_seqlens.shape[0] - 1, dtype=torch.int64)


@torch.library.register_fake("attnkit::tree_walks")  # type: ignore[untyped-decorator]
def _tree_walks_fake(parents: Tensor) -> Tensor:
    return parents.new_empty((2, *parents.shape), dtype=torch.int32)


@torch.library.register_fake("attnkit::logical_pages")  # type: ignore[untyped-decorator]
def _logical_pages_fake(page_table: Tensor, pages: Any) -> Tensor:
    return page_table.new_empty((page_table.shape[0], pages), dtype=torch.int32)

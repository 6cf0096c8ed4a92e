"""Mask for several continuations of one prompt in one sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit import ArgumentError, Mask, ShapeError, picklable
from attnkit.masks._check import at_least, int_tensor, number_text, same_device, shape_text, whole
from attnkit.masks._tables import document_ids, exact_lengths, readable


@picklable("prefixes", "suffixes")
def shared_prefix(prefixes: int | Tensor, suffixes: Tensor) -> Mask:
    """Build a causal mask for several suffixes (continuations) that share one prefix (prompt).

    The sequence is prefix, suffix 1, suffix 2, ..., or several such groups one after another. A
    query sees the earlier keys of its own suffix and of the prefix of its group.

    Args:
        prefixes: prefix length, or int [G] with the prefix length of each group.
        suffixes: suffix lengths, int [N] for a single group or int [G, N] for G groups; 0 for a
            suffix that does not exist.

    Returns:
        The mask, for query and kv length equal to the sum of all lengths.

    Raises:
        ArgumentError, ShapeError, DTypeError: an argument is not as described.
        OptionError: a length is negative, or all are 0.

    Source: Juravsky et al. 2024 (Hydragen), arXiv:2402.05099.

    >>> import torch
    >>> from attnkit import create_mask
    >>> create_mask(shared_prefix(2, torch.tensor([2, 1])), None, None, 5, 5).int()[0, 0]
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 0, 0, 1]], dtype=torch.int32)
    """
    lengths = _lengths(prefixes, suffixes)
    groups, width = lengths.shape
    part = document_ids("prefixes and suffixes", lengths.flatten(), None, "sum to")
    # part = group * width + (0 for the prefix, i for suffix i)
    is_prefix = part % width == 0
    label = f"shared_prefix({_shown(prefixes)}, {shape_text(suffixes)})"
    total, exact = exact_lengths(label, part.shape[0], part.shape[0])
    if groups == 1:
        length = int(lengths[0, 0])

        def keep_one(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (kv <= q) & ((kv < length) | (part[q] == part[kv]))

        return Mask(keep_one, label, lengths=total, axes=exact)
    group = part // width

    def keep(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (group[q] == group[kv]) & (is_prefix[kv] | (part[q] == part[kv]))

    return Mask(keep, label, lengths=total, axes=exact)


def _lengths(prefixes: int | Tensor, suffixes: Tensor) -> Tensor:
    """Return the lengths of the prefix and the suffixes of each group, int64 [G, 1 + N]."""
    readable("suffixes", int_tensor("suffixes", suffixes, "[N] or [G, N]", (1, 2)))
    at_least("suffixes", suffixes, 0)
    if not isinstance(prefixes, Tensor):
        if suffixes.ndim != 1:
            raise ArgumentError("prefixes must be int [G] where suffixes is [G, N], got an int")
        first = suffixes.new_tensor([[whole("prefixes", prefixes)]], dtype=torch.int64)
        return torch.cat((first, suffixes.long()[None]), dim=1)
    at_least("prefixes", readable("prefixes", int_tensor("prefixes", prefixes, "[G]", (1,))), 0)
    same_device("prefixes", prefixes, "suffixes", suffixes)
    if suffixes.ndim != 2 or len(suffixes) != len(prefixes):
        raise ShapeError(
            f"suffixes must have shape [G, N] with G = {len(prefixes)}, one row per prefix, got "
            f"{tuple(suffixes.shape)}"
        )
    return torch.cat((prefixes.long()[:, None], suffixes.long()), dim=1)


def _shown(prefixes: int | Tensor) -> str:
    return shape_text(prefixes) if isinstance(prefixes, Tensor) else number_text(prefixes)

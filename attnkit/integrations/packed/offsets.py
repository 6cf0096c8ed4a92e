"""Find the packing of a call by its offsets: the start of each sequence, in tensors.

The tables of a packing are made on the device of the offsets. The offsets are read on the host once
for each change of their data, to check them; calls that find the packing again wait for nothing.
Masks of a packing capture the offsets beside the tables, so that attnkit watches the data from which
the tables were made: where a change of the offsets is found, the packing is made again.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit import (
    ArgumentError,
    DeviceError,
    DTypeError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
from attnkit.integrations.packed.packing import Packing
from attnkit.util import caches
from attnkit.util.arguments import shown
from attnkit.util.data_state import state_of
from attnkit.util.tensor_cache import VersionedCache
from attnkit.util.torch_private import is_fake, is_stream_capturing


class Names(NamedTuple):
    """Holds the names that an interface gives to the arguments of a packed call, for messages."""

    query: str
    key: str
    value: str
    q_offsets: str
    k_offsets: str
    longest_q: str
    longest_k: str


_packings: VersionedCache[Packing] = VersionedCache(16)
caches.register(_packings.clear)


def find_packing(
    names: Names,
    query: Tensor,
    key: Tensor,
    q_offsets: Any,
    k_offsets: Any,
    longest_q: Any,
    longest_k: Any,
    used: Any = None,
) -> Packing:
    """Check the offsets of a call and return its packing, the same object for the same data.

    In torch.compile, and for tensors without data, the offsets are not read and not checked.

    Args:
        names: names of the arguments, for messages.
        query: [total_q, Hq, D].
        key: [total_k, Hkv, D].
        q_offsets, k_offsets: int32 or int64 [N + 1], the start of each sequence and the end of the
            last.
        longest_q, longest_k: bounds on the lengths of the sequences.
        used: int32 or int64 [N], how many keys of each sequence exist, from its start; or None.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError: an argument is not as described.
        OptionError: the offsets do not start at 0, decrease or leave the tokens; or a sequence is
            longer than its bound, or has fewer keys than it uses.
        UnsupportedError: the offsets are not known yet, and a CUDA graph is captured.
    """
    for name, offsets in ((names.q_offsets, q_offsets), (names.k_offsets, k_offsets)):
        _check_tensor(name, offsets, names.query, query)
    if q_offsets.shape != k_offsets.shape:
        raise ShapeError(
            f"{names.q_offsets} and {names.k_offsets} must have one entry for each sequence and one "
            f"more, got {list(q_offsets.shape)} and {list(k_offsets.shape)}"
        )
    if used is not None:
        _check_used(used, q_offsets)
    totals = query.shape[0], key.shape[0]
    if torch.compiler.is_compiling() or q_offsets.is_meta or is_fake(q_offsets):
        return Packing(q_offsets, k_offsets, *totals, used)
    sources = (q_offsets, k_offsets) if used is None else (q_offsets, k_offsets, used)

    def make() -> Packing:
        states = tuple(state_of(t) for t in sources)
        q_lengths = _read(names.q_offsets, q_offsets, names.query, totals[0])
        k_lengths = _read(names.k_offsets, k_offsets, names.key, totals[1])
        agree = used is None and q_lengths == k_lengths
        if used is not None:
            k_lengths = _read_used(used, k_lengths)
        longest = max(q_lengths), max(k_lengths)
        return Packing(q_offsets, k_offsets, *totals, used, *longest, agree, states)

    packing = _packings.get(totals, sources, make)
    _check_longest(names.longest_q, longest_q, packing.longest_q)
    _check_longest(names.longest_k, longest_k, packing.longest_k)
    return packing


def _check_longest(name: str, bound: Any, longest: int | None) -> None:
    if isinstance(bound, bool) or not isinstance(bound, int):
        raise ArgumentError(f"{name} must be an int, got {shown(bound)}")
    if longest is not None and bound < longest:
        raise OptionError(
            f"{name} must be at least the length of the longest sequence, {longest}, got {bound}"
        )


def _check_tensor(name: str, offsets: Any, query_name: str, query: Tensor) -> None:
    if not isinstance(offsets, Tensor):
        raise ArgumentError(
            f"{name} must be an int32 tensor [sequences + 1], got {type(offsets).__name__}"
        )
    if offsets.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"{name} must be int32, got {offsets.dtype}; pass {name}.int()")
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        raise ShapeError(
            f"{name} must have shape [sequences + 1], for at least one sequence, got "
            f"{list(offsets.shape)}"
        )
    if offsets.device != query.device:
        raise DeviceError(
            f"{name} is on {offsets.device}, {query_name} is on {query.device}; move it with "
            f"{name}.to({str(query.device)!r})"
        )


def _check_used(used: Any, offsets: Tensor) -> None:
    if not isinstance(used, Tensor):
        raise ArgumentError(
            f"seqused_k must be an int32 tensor [sequences], got {type(used).__name__}"
        )
    if used.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"seqused_k must be int32, got {used.dtype}; pass seqused_k.int()")
    if tuple(used.shape) != (offsets.shape[0] - 1,):
        raise ShapeError(
            f"seqused_k must have one entry for each of the {offsets.shape[0] - 1} sequences, got "
            f"shape {list(used.shape)}"
        )
    if used.device != offsets.device:
        raise DeviceError(f"seqused_k is on {used.device}, the query is on {offsets.device}")


def _read_used(used: Tensor, lengths: list[int]) -> list[int]:
    """Check the data of `seqused_k`, and return it."""
    counts: list[int] = used.tolist()
    for at, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if not 0 <= count <= length:
            raise OptionError(
                f"seqused_k must be from 0 to the number of keys of each sequence, got {count} for "
                f"sequence {at}, which has {length}"
            )
    return counts


def _read(name: str, offsets: Tensor, tokens: str, total: int) -> list[int]:
    """Check the data of offsets, and return the lengths of the sequences."""
    if offsets.is_cuda and is_stream_capturing():
        raise UnsupportedError(
            f"{name} has data that no earlier call has seen, and reading it waits for the GPU, which "
            "a CUDA graph cannot capture; call the function once before the capture"
        )
    ends: list[int] = offsets.tolist()
    if ends[0] != 0:
        raise OptionError(f"{name} must begin with 0, got {ends[0]}")
    lengths = [stop - start for start, stop in pairwise(ends)]
    shortest = min(lengths)
    if shortest < 0:
        at = lengths.index(shortest)
        raise OptionError(
            f"{name} must not decrease, or sequences would overlap; entry {at + 1} is "
            f"{ends[at + 1]} after {ends[at]}"
        )
    if ends[-1] > total:
        raise OptionError(
            f"{name} must end with the number of tokens of {tokens}, {total}, or less, got {ends[-1]}"
        )
    return lengths

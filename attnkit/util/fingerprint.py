"""Compute fingerprints of tensors: 64 bits for each KiB, equal only if the data is equal.

A tensor is read as 32-bit words w[0], w[1], ... in the order of its memory. A chunk of `CHUNK` words
has two sums of 32 bits, over its words: of `mix_a(w[i] + key[i])` and of `mix_b(w[i] ^ key[i])`, where
i counts within the chunk. Both functions are bijections, so a change of one word always changes both
sums; for changes of several words 64 bits agree by chance. `mix_a` is the finalizer of MurmurHash3
(Appleby 2011), `mix_b` is "lowbias32" (Wellons 2018). `attnkit.templates.common.fingerprint` computes
the same sums in a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 256  # words; a kernel reads one by 8 loads of a warp, all in flight at once
# key[i] = (i + 1) * KEY
KEY = 0x9E3779B9
# (shift, factor), (shift, factor), last shift
MIX_A = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), 16)
MIX_B = ((16, 0x7FEB352D), (15, 0x846CA68B), 16)

_PIECE = 1 << 14  # chunks that are computed at once, which bounds the memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def words_of(tensor: Tensor) -> Tensor:
    """View a tensor as integers: those of which its fingerprint is computed.

    Returns:
        int32 [n] without gaps where that is possible. Else a view with gaps: int32, or int8 or
        int16 for elements so narrow, whose axes are sorted by their strides and merged, and which
        has no axis along which data repeats. Narrow integers count as words with their sign.
    """
    t = tensor.detach()
    item = t.element_size()
    axes = [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and s != 0]
    axes = _merged(sorted(axes, key=lambda axis: -axis[1])) if t.numel() else [(0, 1)]
    shape, stride = [n for n, _ in axes], [s for _, s in axes]
    flat = t.as_strided(shape, stride, t.storage_offset())
    if flat.ndim == 0:
        flat = flat.view(1)
    if flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    dense = flat.ndim == 1 and (flat.stride(0) == 1 or flat.numel() <= 1)
    if not dense and item == 8:
        return flat.unsqueeze(-1).view(torch.int32)
    whole = dense and not (flat.numel() * item % 4 or flat.data_ptr() % 4)
    return flat.view(torch.int32 if whole else _INTEGERS[item])


def _merged(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge axes, outermost first, whose elements follow one another in memory."""
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def fingerprint(tensor: Tensor) -> Tensor:
    """Compute the fingerprint of a tensor on its device, without waiting for it.

    Args:
        tensor: any shape, strides and dtype of at most 8 bytes.

    Returns:
        int32 [chunks, 2], equal for tensors with equal `words_of`.
    """
    with torch.no_grad():
        words = words_of(tensor).reshape(-1).to(torch.int32)
        key = torch.arange(1, CHUNK + 1, dtype=torch.int64, device=tensor.device)
        key = (key * KEY).to(torch.int32)
        chunks = -(-words.numel() // CHUNK)
        sums = torch.empty((chunks, 2), dtype=torch.int32, device=tensor.device)
        for first in range(0, chunks, _PIECE):
            piece = words[first * CHUNK : (first + _PIECE) * CHUNK]
            whole = piece.numel() // CHUNK
            sums[first : first + whole] = _sums(piece[: whole * CHUNK].view(-1, CHUNK), key)
            rest = piece[whole * CHUNK :]
            if rest.numel():
                sums[first + whole] = _sums(rest, key[: rest.numel()])
        return sums


def _sums(words: Tensor, key: Tensor) -> Tensor:
    parts = [_mix(words + key, MIX_A), _mix(words ^ key, MIX_B)]
    return torch.stack([p.sum(-1, dtype=torch.int64) for p in parts], -1).to(torch.int32)


def _mix(x: Tensor, how: tuple[tuple[int, int], tuple[int, int], int]) -> Tensor:
    first, second, last = how
    for shift, factor in (first, second):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, last)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Shift the 32 bits of a word to the right and fill with zeros."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def _signed(factor: int) -> int:
    """Return the int32 with the bits of an unsigned number."""
    return factor - (1 << 32) if factor >> 31 else factor

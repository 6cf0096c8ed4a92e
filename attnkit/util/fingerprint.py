"""Compute fingerprints of tensors: a 64-bit checksum for each KiB of data.

A tensor is read as 32-bit words w[0], w[1], ... in memory order. Each chunk of `CHUNK` words has
two 32-bit sums: of `mix_a(w[i] + key[i])` and of `mix_b(w[i] ^ key[i])` over its words, where i is
the index within the chunk. Both functions are bijections, so a change of one word always changes
both sums. After changes of several words the 64 bits are equal only by chance. `mix_a` is the
finalizer of MurmurHash3 (Appleby 2011), `mix_b` is "lowbias32" (Wellons 2018).
`attnkit.templates.common.fingerprint` computes the same sums in a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 256  # words; one warp of the kernel reads a chunk by 8 loads, all in flight at once
# key[i] = (i + 1) * KEY
KEY = 0x9E3779B9
# (shift, factor), (shift, factor), last shift
MIX_A = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), 16)
MIX_B = ((16, 0x7FEB352D), (15, 0x846CA68B), 16)

_PIECE = 1 << 14  # chunks that are computed at once, to bound temporary memory
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def words_of(tensor: Tensor) -> Tensor:
    """Return the integer view of `tensor` over which `fingerprint` computes its sums.

    Returns:
        A contiguous int32 [n] if the data is contiguous and aligned to 4 bytes. Else a strided view
        whose axes are sorted by stride and merged, without axes of stride 0. Its dtype is int32, or
        int8 or int16 for elements of 1 or 2 bytes. `fingerprint` sign-extends these to words.
    """
    t = tensor.detach()
    item = t.element_size()
    axes = [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and s != 0]
    axes = _merged(sorted(axes, key=lambda axis: -axis[1])) if t.numel() else [(0, 1)]
    shape, stride = [n for n, _ in axes], [s for _, s in axes]
    flat = t.as_strided(shape, stride)
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
    """Merge neighboring (size, stride) axes, outermost first, that one axis can describe."""
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


def fingerprint(tensor: Tensor) -> Tensor:
    """Compute the fingerprint of `tensor` on its device, without a synchronization.

    Args:
        tensor: any shape and strides; elements of at most 8 bytes.

    Returns:
        int32 [chunks, 2], two sums for each chunk. Tensors with equal `words_of` have equal sums.
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
    """Return the logical (zero-filled) right shift of int32 words by `count` bits."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def _signed(factor: int) -> int:
    """Return the signed 32-bit integer that has the bits of the unsigned `factor`."""
    return factor - (1 << 32) if factor >> 31 else factor

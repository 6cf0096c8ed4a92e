"""Define the masks of `masks.py` as plain functions, the same for attnkit and FlexAttention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """Hold a mask, its captured tensors, and its batch and heads (1 if it does not read b or h)."""

    mask_mod: MaskMod
    tensors: tuple[Tensor, ...] = ()
    batch: int = 1
    heads: int = 1


Make = Callable[[int, torch.device], Case]


def causal(length: int, device: torch.device) -> Case:
    return Case(lambda b, h, q, kv: q >= kv)


def window(length: int, device: torch.device) -> Case:
    return Case(lambda b, h, q, kv: (q >= kv) & (q - kv < 512))


def sinks(length: int, device: torch.device) -> Case:
    """Return a causal window of 1024 keys, plus the first 4 keys."""
    return Case(lambda b, h, q, kv: (q >= kv) & ((q - kv < 1024) | (kv < 4)))


def image(length: int, device: torch.device) -> Case:
    """Return a mask that keeps the 13 x 13 neighbours of each token of an image.

    The image is square or twice as wide as high.
    """
    width = 1 << (length.bit_length() // 2)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        near_row = (q // width - kv // width).abs() <= 6
        return near_row & ((q % width - kv % width).abs() <= 6)

    return Case(mask_mod)


def diffusion(length: int, device: torch.device) -> Case:
    """Return the training mask of block diffusion: a noisy copy of a text, then the text."""
    text = length // 2

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        q_block, kv_block = q % text // 32, kv % text // 32
        own = (q_block == kv_block) & ((q >= text) == (kv >= text))
        return own | ((kv >= text) & (kv_block < q_block))

    return Case(mask_mod)


def document_ids(length: int, mean: int, seed: int) -> Tensor:
    """Draw document ids, int32 [length]; documents have 1 to 2 * mean - 1 positions."""
    sizes = torch.randint(1, 2 * mean, (length,), generator=torch.Generator().manual_seed(seed))
    ids = torch.searchsorted(sizes.cumsum(0), torch.arange(length), right=True)
    return ids.to(torch.int32)


def documents(length: int, device: torch.device) -> Case:
    """Return a causal mask within documents of 1500 positions on average."""
    ids = document_ids(length, 1500, 0).to(device)
    return Case(lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]), (ids,))


def documents_batch(length: int, device: torch.device) -> Case:
    """Return a causal mask within documents, for 4 sequences with different documents."""
    ids = torch.stack([document_ids(length, 1500, seed) for seed in range(4)]).to(device)
    return Case(lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv]), (ids,), batch=4)


def windows_by_head(length: int, device: torch.device) -> Case:
    """Return a causal window of a different size for each of 8 heads."""
    sizes = (128 * 2 ** torch.arange(8, dtype=torch.int32)).to(device)
    return Case(lambda b, h, q, kv: (q >= kv) & (q - kv < sizes[h]), (sizes,), heads=8)


def selected(length: int, device: torch.device) -> Case:
    """Return a causal mask that keeps a random eighth of the 64 x 64 blocks."""
    rows = math.ceil(length / 64)
    random = torch.Generator().manual_seed(0)
    marks = (torch.rand(rows, rows, generator=random) < 1 / 8).to(device)
    return Case(lambda b, h, q, kv: (q >= kv) & marks[q // 64, kv // 64], (marks,))


CASES: dict[str, Make] = {
    "causal": causal,
    "window 512": window,
    "sinks and window": sinks,
    "image neighbours": image,
    "block diffusion": diffusion,
    "causal documents": documents,
    "documents, B=4": documents_batch,
    "windows, H=8": windows_by_head,
    "selected blocks": selected,
}

"""Build example instances of every mask of the library, for tests and benchmarks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit import DeviceError, Mask
from attnkit.masks._bigbird import bigbird
from attnkit.masks._block_diagonal import block_diagonal
from attnkit.masks._block_diffusion import block_diffusion
from attnkit.masks._causal import causal
from attnkit.masks._check import own_device, whole
from attnkit.masks._chunked import chunked
from attnkit.masks._dilated import dilated
from attnkit.masks._document import document, document_from_cu_seqlens, document_from_lengths
from attnkit.masks._image_spans import image_spans
from attnkit.masks._longformer import longformer
from attnkit.masks._natten import natten
from attnkit.masks._padding import padding, padding_from_mask
from attnkit.masks._paged import paged
from attnkit.masks._prefix import prefix, prefix_lm
from attnkit.masks._shared_prefix import shared_prefix
from attnkit.masks._sliding_tile import sliding_tile
from attnkit.masks._sliding_window import sliding_window
from attnkit.masks._streaming_llm import streaming_llm
from attnkit.masks._strided import fixed, strided
from attnkit.masks._topk_blocks import topk_blocks
from attnkit.masks._tree import tree, tree_from_table


class Example(NamedTuple):
    """Holds a mask and sizes of a call that the mask allows.

    `batch` and `heads` are 1 if the mask does not depend on them.
    """

    mask: Mask
    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 1


class _Draw:
    """Draws random tensors on the CPU and moves them to `device`; results depend only on `seed`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw an int32 tensor of `shape` with values from `low` to `high - 1`."""
        drawn = torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)
        return drawn.to(self.device)

    def marks(self, rate: float, *shape: int) -> Tensor:
        """Draw a bool tensor of `shape` whose entries are True with probability `rate`."""
        return (torch.rand(shape, generator=self.generator) < rate).to(self.device)

    def order(self, count: int) -> Tensor:
        """Draw a random permutation of the ints below `count`, int64 [count]."""
        return torch.randperm(count, generator=self.generator).to(self.device)

    def lengths(self, total: int, parts: int) -> Tensor:
        """Draw nonnegative lengths that sum to `total`, int32 [parts]."""
        cuts = self.ints(0, total + 1, parts - 1).sort().values.cpu()
        ends = torch.cat((cuts, torch.tensor([total], dtype=torch.int32)))
        return ends.diff(prepend=ends.new_zeros(1)).to(self.device)


def examples(
    length: int = 128, *, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Example]:
    """Build at least one instance of every mask of the library, for tests and benchmarks.

    Args:
        length: query and kv length, at least 32. Masks over grids use the largest smaller grid that
            fits. A few masks have other lengths, see `Example.q_len` and `Example.kv_len`.
        device: device of the captured tensors.
        seed: seed of the random ids, lengths and blocks; equal seeds give equal masks.

    Returns:
        Examples by name. A name is that of the mask, or "mask/variant".

    >>> examples()["sliding_window"]
    Example(mask=sliding_window(16), q_len=128, kv_len=128, batch=1, heads=1)
    """
    whole("length", length, least=32)
    whole("seed", seed, most=2**63 - 1)
    place = own_device("device", device)
    if place.type == "meta":
        raise DeviceError("device must hold data, which some masks read once, got 'meta'")
    draw = _Draw(seed, place)
    instances = _patterns(length)
    instances |= _documents(length, draw)
    instances |= _batches(length, draw)
    instances |= _blocks(length, draw)
    instances |= _grids(length)
    return instances | _decoding(length, draw)


def _patterns(length: int) -> dict[str, Example]:
    near = max(2, length // 8)
    half = length // 2
    end: dict[str, Any] = {"align": "bottom-right", "q_len": half, "kv_len": length}
    square = {
        "causal": causal(),
        "sliding_window": sliding_window(near),
        "sliding_window/both": sliding_window(near, near // 2),
        "sliding_window/right": sliding_window(None, near),
        "prefix_lm": prefix_lm(near + 1),
        "dilated": dilated(2 * near, 3),
        "dilated/both": dilated(near, 2, near),
        "chunked": chunked(near + 3),
        "strided": strided(near - 1),
        "fixed": fixed(near, 2),
        "longformer": longformer(near, 3),
        "streaming_llm": streaming_llm(near, 4),
        "block_diagonal": block_diagonal(near + 3),
    }
    instances = {name: Example(mask, length, length) for name, mask in square.items()}
    instances["causal/bottom-right"] = Example(causal(**end), half, length)
    instances["sliding_window/bottom-right"] = Example(sliding_window(near, 3, **end), half, length)
    instances["dilated/bottom-right"] = Example(dilated(2 * near, 3, **end), half, length)
    instances["chunked/bottom-right"] = Example(chunked(near, start=5, **end), half, length)
    instances["streaming_llm/bottom-right"] = Example(streaming_llm(near, **end), half, length)
    instances["prefix"] = Example(prefix(near), length, length + 5)
    instances["block_diagonal/cross"] = Example(block_diagonal(7, 11), length, 2 * length)
    instances["block_diffusion"] = Example(
        block_diffusion(half, max(2, near // 2)), 2 * half, 2 * half
    )
    return instances


def _documents(length: int, draw: _Draw) -> dict[str, Example]:
    count = max(3, min(length // 24, 1500))
    lengths = draw.lengths(length, count)
    ends = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
    ids = torch.arange(count, device=draw.device).repeat_interleave(lengths.long())
    groups = draw.lengths(length, 6).reshape(2, 3)
    return {
        "document": Example(document(ids, sorted_ids=True), length, length),
        "document/causal": Example(causal() & document(ids), length, length),
        "document/unsorted": Example(document(draw.ints(0, 4, length)), length, length),
        "document/batch": Example(document(draw.ints(0, 3, 2, length)), length, length, batch=2),
        "document/cross": Example(
            document(ids, draw.ints(0, count, length + 9).sort().values), length, length + 9
        ),
        "document_from_lengths": Example(
            document_from_lengths(lengths, total=length), length, length
        ),
        "document_from_cu_seqlens": Example(document_from_cu_seqlens(ends), length, length),
        "document_from_lengths/within": Example(
            document_from_lengths(
                lengths, lengths + 1, within=sliding_window(9), align="bottom-right"
            ),
            length,
            length + count,
        ),
        "shared_prefix": Example(
            shared_prefix(length // 4, draw.lengths(length - length // 4, 3)), length, length
        ),
        "shared_prefix/groups": Example(
            shared_prefix(groups[:, 0], groups[:, 1:].contiguous()), length, length
        ),
    }


def _batches(length: int, draw: _Draw) -> dict[str, Example]:
    keys, queries = draw.ints(1, length + 1, 2), draw.ints(1, length + 1, 2)
    start = draw.ints(length // 2, length + 1, 2)
    cached: dict[str, Any] = {"align": "bottom-right", "q_len": length // 4, "kv_len": start}
    marked = longformer(length // 16, draw.marks(4 / length, 2, length))
    left = torch.arange(length, device=draw.device) >= draw.ints(0, length // 2, 2)[:, None]
    return {
        "padding": Example(padding(keys), length, length, batch=2),
        "padding/rows": Example(padding(keys, queries), length, length, batch=2),
        "padding_from_mask": Example(padding_from_mask(left.long()), length, length, batch=2),
        "padding_from_mask/holes": Example(
            padding_from_mask(draw.marks(0.7, 2, length), rows=True), length, length, batch=2
        ),
        "chunked/batch": Example(
            chunked(length // 4, start=draw.ints(0, length // 2, 2)), length, length, batch=2
        ),
        "chunked/cached": Example(chunked(length // 4, **cached), length // 4, length, batch=2),
        "image_spans": Example(
            image_spans(draw.marks(0.9, 2, length).long()), length, length, batch=2
        ),
        "image_spans/size": Example(
            image_spans(draw.ints(-1, 1, length), text=-1, size=length // 8), length, length
        ),
        "prefix_lm/batch": Example(prefix_lm(keys), length, length, batch=2),
        "causal/cached": Example(causal(**cached), length // 4, length, batch=2),
        "sliding_window/cached": Example(
            sliding_window(length // 8, 1, **cached), length // 4, length, batch=2
        ),
        "longformer/marked": Example(
            longformer(length // 16, draw.marks(4 / length, length)), length, length
        ),
        "longformer/batch": Example(marked, length, length, batch=2),
    }


def _blocks(length: int, draw: _Draw) -> dict[str, Example]:
    size = 8 if length < 1024 else 64
    rows = -(-length // size)
    picked = draw.ints(-1, rows, 2, rows, 3)
    each = draw.ints(0, rows, length, 4)
    marks = draw.marks(0.3, 2, 2, -(-length // (2 * size)), rows)
    random = draw.ints(-1, rows, rows, 2)
    by_head = draw.ints(0, rows, 2, rows, 2)
    return {
        "topk_blocks": Example(topk_blocks(picked, size, size), length, length, heads=2),
        "topk_blocks/causal": Example(topk_blocks(each, 1, size) & causal(), length, length),
        "topk_blocks/marked": Example(
            topk_blocks(marks, 2 * size, size), length, length, batch=2, heads=2
        ),
        "bigbird": Example(bigbird(random, size), length, length),
        "bigbird/heads": Example(bigbird(by_head, size, global_blocks=0), length, length, heads=2),
    }


def _grids(length: int) -> dict[str, Example]:
    side = math.isqrt(length) // 2 * 2
    depth = math.isqrt(length // 4) // 2 * 2
    image, video = (side, side), (4, depth, depth)
    small = (3, min(3, depth), min(3, depth))
    odd = [1 if size // 2 < 3 else 3 for size in video]
    masks = {
        "natten": ((length,), natten((length,), 7)),
        "natten/dilated": ((length,), natten((length,), (6,), dilation=3, causal=True)),
        "natten/2d": (image, natten(image, 3)),
        "natten/2d-dilated": (image, natten(image, 2, dilation=(2, 1))),
        "natten/2d-tiled": (image, natten(image, (4, 3), stride=(2, 1), tile=2)),
        "natten/3d": (video, natten(video, small, causal=(True, False, False))),
        "natten/3d-tiled": (video, natten(video, small, tile=2)),
        "sliding_tile/2d": (image, sliding_tile(image, 2, 1 if side < 6 else 3)),
        "sliding_tile/3d": (video, sliding_tile(video, 2, odd)),
    }
    instances = {n: Example(mask, math.prod(s), math.prod(s)) for n, (s, mask) in masks.items()}
    tokens = math.prod(image) + 5
    instances["sliding_tile"] = Example(sliding_tile(image, 2, 1, text=5), tokens, tokens)
    return instances


def _decoding(length: int, draw: _Draw) -> dict[str, Example]:
    drafts = min(length // 4, 64)
    parents = [draw.ints(-1, max(i, 1), 1) if i else draw.ints(-1, 0, 1) for i in range(drafts)]
    parent = torch.cat(parents)
    context = draw.ints(1, length - drafts + 1, 2)
    table = draw.marks(0.4, drafts, drafts)
    size = 8 if length < 1024 else 64
    held = -(-length // size)
    pages = draw.order(2 * held).reshape(2, held)
    pages[1, -1] = -1
    ids = draw.ints(0, 3, held * size)
    pool = 2 * held * size
    lengths = torch.tensor([length, length - size], dtype=torch.int32, device=draw.device)
    return {
        "tree": Example(tree(parent, length - drafts), drafts, length),
        "tree/batch": Example(
            tree(torch.stack((parent, parent)), context), drafts, length, batch=2
        ),
        "tree_from_table": Example(tree_from_table(table, length - drafts), drafts, length),
        "paged": Example(paged(causal(), pages, size, 2 * held), length, pool, batch=2),
        "paged/lengths": Example(
            paged(document(ids), pages, size, 2 * held, lengths), length, pool, batch=2
        ),
    }

"""List the forward kernels of each template by head dims, with their tile sizes and switches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from attnkit.schedule.targets import SM90, SM100

# Head dims that GPU kernels compute; others are padded with zeros.
HEAD_DIMS = (64, 96, 128, 192, 256)
# Head dims of query and key where a kernel for head dims above 256 computes them.
_WIDE_HEAD_DIMS = (128, 256, 384, 512, 576)


@dataclass(frozen=True)
class Kernel:
    """Describes a forward kernel's tile sizes and switches; see its template's `ForwardConfig`.

    Attributes:
        block: query and kv tile size.
        lacks_o_smem: whether shared memory has no room for both the output tile and the query tile.
        softmax, double_buffer_p: see the `ForwardConfig` of the Hopper template.
        ctas: CTAs that share the products of a query tile.
        value_parts: CTAs, on Blackwell work tiles, that each compute one part of the value columns of a
            query tile.
        bias_first, bias_stages, bias_bytes: see the `ForwardConfig` of the Hopper template.
    """

    block: tuple[int, int]
    lacks_o_smem: bool = False
    softmax: str = "delayed-max"
    double_buffer_p: bool = True
    ctas: int = 1
    value_parts: int = 1
    bias_first: bool = False
    bias_stages: int = 0
    bias_bytes: int = 4


Table: TypeAlias = tuple[tuple[int, int, tuple[Kernel, ...]], ...]

_LATE: dict[str, Any] = {"softmax": "online", "double_buffer_p": False}

# By padded head dims (query, value), best kernel first. Later kernels serve block lists whose tiles
# the first kernel's tiles do not divide. Measured on one H200, see benchmarks/results.
_SM90: Table = (
    (64, 64, (Kernel((192, 128), **_LATE), Kernel((128, 128)), Kernel((128, 64)))),
    (128, 128, (Kernel((128, 128)), Kernel((128, 64)))),
    (192, 128, (Kernel((128, 128), lacks_o_smem=True), Kernel((128, 64), lacks_o_smem=True))),
    (192, 192, (Kernel((128, 96), lacks_o_smem=True), Kernel((128, 64), lacks_o_smem=True))),
    (
        256,
        256,
        (Kernel((128, 80), lacks_o_smem=True), Kernel((128, 64), lacks_o_smem=True, **_LATE)),
    ),
    (576, 256, (Kernel((128, 64), lacks_o_smem=True),)),
    (576, 512, (Kernel((128, 64), lacks_o_smem=True, value_parts=2),)),
)
# A score_mod needs registers for its own values, so the largest tiles would spill.
_SM90_MODDED: Table = (
    (64, 64, (Kernel((128, 128)), Kernel((128, 64)))),
    *_SM90[1:4],
    (256, 256, (Kernel((128, 64), lacks_o_smem=True, **_LATE),)),
    (576, 256, (Kernel((128, 64), lacks_o_smem=True, **_LATE),)),
    (576, 512, (Kernel((128, 64), lacks_o_smem=True, value_parts=2, **_LATE),)),
)

# A CTA takes two query tiles of 128 rows where tensor memory holds S and O of both. Pairs of CTAs
# serve where shared memory would be the limit. For a mask, `splice.sm100_tiles` chooses. Predicted
# by the emulator's timeline, not measured on a GPU (docs/blackwell.md).
_SINGLE = Kernel((128, 128)), Kernel((128, 64))
_NARROW = Kernel((128, 64)), Kernel((128, 128))
_NARROW_NO_O_SMEM = Kernel((128, 64), lacks_o_smem=True), Kernel((128, 128), lacks_o_smem=True)
_PAIR = Kernel((512, 128), ctas=2)
_SM100: Table = (
    (64, 64, (Kernel((256, 128)), *_SINGLE)),
    (96, 96, (Kernel((256, 128)), _PAIR, *_SINGLE)),
    (128, 128, (_PAIR, Kernel((256, 128)), *_SINGLE)),
    (192, 128, (_PAIR, Kernel((256, 64), lacks_o_smem=True), *_NARROW)),
    (192, 192, _NARROW_NO_O_SMEM),
    (256, 256, _NARROW_NO_O_SMEM),
    (576, 256, _NARROW_NO_O_SMEM[:1]),
    (576, 512, (Kernel((128, 64), lacks_o_smem=True, value_parts=2),)),
)
_LONG = 256  # query lengths above this prefer pairs of CTAs

# Tiles of 192 rows are faster for each score than tiles of 128 rows, but they visit more scores at
# the edges of a mask and at the end of the query. Up to this ratio of visited scores they win, on
# one H200 at head dim 64 (benchmarks/results/hopper_steps.jsonl, "rows of a tile").
TALL_TILE_ROWS = 192
TALL_TILE_LIMIT = 1.12

# By template: (table without a score_mod, table with a score_mod).
_TABLES = {SM90.template: (_SM90, _SM90_MODDED), SM100.template: (_SM100, _SM100)}


def padded_head_dim(head_dim: int) -> int:
    """Return the smallest of `HEAD_DIMS` that is at least `head_dim`, to which kernels pad."""
    return next(w for w in HEAD_DIMS if head_dim <= w)


def padded_head_dims(head_dims: tuple[int, int], value_parts: int = 1) -> tuple[int, int]:
    """Return the head dims as a kernel computes them: of query and key, and of a value part.

    Args:
        head_dims: head dims of query and key, and of value.
        value_parts: see `Kernel`.
    """
    head_dim, value_dim = head_dims
    part = padded_head_dim(-(-value_dim // value_parts))
    if max(head_dims) <= HEAD_DIMS[-1]:
        return padded_head_dim(head_dim), part
    return next(w for w in _WIDE_HEAD_DIMS if head_dim <= w), part


def kernels(
    head_dim: int,
    value_dim: int,
    modded: bool = False,
    template: str = SM90.template,
    *,
    only_slope: bool = False,
    dropout: bool = False,
    q_len: int | None = None,
) -> tuple[Kernel, ...]:
    """Return the forward kernels for these head dims, best first, or () if the dims are too large.

    Args:
        head_dim, value_dim: head dim of query and key, and of value.
        modded: whether there is a score_mod.
        only_slope: whether it adds a slope times kv and no statistics or dropout need registers. At
            head dims up to 64 a Hopper kernel then takes the tiles of raw scores: its products add
            the slope, see `templates.sm90.slope_in_mma`.
        template: name of the template, such as "sm90".
        dropout: whether elements of the softmax are dropped, which needs registers too.
        q_len: length of the query, None for a long one.
    """
    widest = max(head_dim, value_dim)
    if only_slope and not dropout and template == SM90.template and widest <= 64:
        modded = False
    table = _TABLES[template][modded or (dropout and widest > 192)]
    rows = (candidates for d, dv, candidates in table if head_dim <= d and value_dim <= dv)
    return tuple(sorted(next(rows, ()), key=lambda k: _is_too_tall(k, q_len)))


def _is_too_tall(kernel: Kernel, q_len: int | None) -> bool:
    """Return whether a kernel's tiles have too many rows for a query of this length."""
    if q_len is None:
        return False
    rows = kernel.block[0]
    if rows == TALL_TILE_ROWS:
        visited, needed = -(-q_len // rows) * rows, -(-q_len // 128) * 128
        return visited > TALL_TILE_LIMIT * needed
    return q_len <= (_LONG if kernel.ctas > 1 else 128) and rows > TALL_TILE_ROWS


def mask_tiles(candidates: Sequence[Kernel]) -> tuple[int, int]:
    """Return the (query, kv) tile size at which to classify a mask for these kernels.

    If the best kernel uses pairs of CTAs, tiles of this size can be joined to the tiles of a pair
    and to those of a single CTA. If its rows are not a multiple of another kernel's, tiles of this
    size can be joined to those of both.
    """
    best = candidates[0]
    rows, columns = best.block
    if best.ctas == 1:
        lower = (k.block[0] for k in candidates if k.block[1] == columns and k.block[0] < rows)
        other = next((r for r in lower if rows % r), rows)
        return math.gcd(rows, other), columns
    single = next(k for k in candidates if k.ctas == 1)
    return 128, math.gcd(columns, single.block[1])


def fitting_kernel(
    candidates: Sequence[Kernel], block: tuple[int, int], lists_override_mask: bool
) -> Kernel:
    """Return the kernel with tiles of size `block`, or else the best whose tiles divide `block`.

    Args:
        candidates: kernels, best first.
        block: tile sizes of a mask.
        lists_override_mask: whether block lists override the mask; then exact tiles are not
            preferred.
    """
    same = () if lists_override_mask else (k for k in candidates if k.block == block)
    fits = (k for k in candidates if all(b % s == 0 for b, s in zip(block, k.block, strict=True)))
    return next(iter(same), None) or next(fits)


def widest(template: str) -> tuple[int, int]:
    """Return the largest head dims of query and of value that a template computes."""
    table = _TABLES[template][0]
    return max(d for d, _, _ in table), max(dv for _, dv, _ in table)

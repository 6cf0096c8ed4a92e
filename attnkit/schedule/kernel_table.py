"""List the forward kernels of each template by head dims, with their tile sizes and switches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from attnkit.schedule.targets import SM90, SM100

# head dims as GPU kernels compute them; others are padded with zeros
HEAD_DIMS = (64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Kernel:
    """The sizes and switches of a forward kernel; see the `ForwardConfig` of its template.

    Attributes:
        block: query and kv tile.
        ctas: CTAs that share the products of a query tile.
        alias: shared memory has no room for both the output tile and the query tile.
        softmax, early, pingpong: `softmax`, `double_buffer_p`, `pingpong` there, for Hopper.
    """

    block: tuple[int, int]
    alias: bool = False
    softmax: str = "delayed-max"
    early: bool = True
    pingpong: bool = True
    ctas: int = 1


Table: TypeAlias = tuple[tuple[int, int, tuple[Kernel, ...]], ...]

_LATE: dict[str, Any] = {"softmax": "online", "early": False}

# By head dims (query's, value's) as computed, best first. A later one serves block lists whose
# tiles the first does not divide. Measured on one H200; rows in benchmarks/results.
_SM90: Table = (
    (64, 64, (Kernel((192, 128), **_LATE), Kernel((128, 128)), Kernel((128, 64)))),
    (128, 128, (Kernel((128, 128)), Kernel((128, 64)))),
    (192, 128, (Kernel((128, 128), alias=True), Kernel((128, 64), alias=True))),
    (192, 192, (Kernel((128, 96), alias=True), Kernel((128, 64), alias=True))),
    (256, 256, (Kernel((128, 80), alias=True), Kernel((128, 64), alias=True, **_LATE))),
)
# A score_mod needs registers for its own values: the largest tiles would spill.
_SM90_MODDED: Table = (
    (64, 64, (Kernel((128, 128)), Kernel((128, 64)))),
    *_SM90[1:4],
    (256, 256, (Kernel((128, 64), alias=True, **_LATE),)),
)

# Two query tiles of 128 rows where tensor memory holds S and O of both, and pairs of CTAs where
# shared memory would limit; for a mask, `splice.sm100_tiles` chooses. Not measured: nobody had the
# card; this is what the timeline of the emulator prefers (docs/blackwell.md).
_SINGLE = Kernel((128, 128)), Kernel((128, 64))
_NARROW = Kernel((128, 64)), Kernel((128, 128))
_NARROW_ALIAS = Kernel((128, 64), alias=True), Kernel((128, 128), alias=True)
_PAIR = Kernel((512, 128), ctas=2)
_SM100: Table = (
    (64, 64, (Kernel((256, 128)), *_SINGLE)),
    (96, 96, (Kernel((256, 128)), _PAIR, *_SINGLE)),
    (128, 128, (_PAIR, Kernel((256, 128)), *_SINGLE)),
    (192, 128, (_PAIR, Kernel((256, 64), alias=True), *_NARROW)),
    (192, 192, _NARROW_ALIAS),
    (256, 256, _NARROW_ALIAS),
)
_LONG = 256  # query lengths above this prefer pairs of CTAs

# By template: without a score_mod, with one.
_TABLES = {SM90.template: (_SM90, _SM90_MODDED), SM100.template: (_SM100, _SM100)}


def padded_head_dim(head_dim: int) -> int:
    """Return the head dim as a GPU kernel computes it: padded to the next of `HEAD_DIMS`."""
    return next(w for w in HEAD_DIMS if head_dim <= w)


def kernels(
    head_dim: int,
    value_dim: int,
    modded: bool = False,
    template: str = SM90.template,
    *,
    q_len: int | None = None,
) -> tuple[Kernel, ...]:
    """Return the forward kernels for these head dims, best first; none if they are too wide.

    Args:
        head_dim, value_dim: of query and key, and of value.
        modded: whether there is a score_mod.
        template: name of the template, as "sm90".
        q_len: length of the query, None for a long one.
    """
    table = _TABLES[template][modded]
    rows = (candidates for d, dv, candidates in table if head_dim <= d and value_dim <= dv)
    return tuple(sorted(next(rows, ()), key=lambda k: _is_too_tall(k, q_len)))


def _is_too_tall(kernel: Kernel, q_len: int | None) -> bool:
    """Return whether a kernel's tiles have more rows than suit the query; others come first then."""
    if q_len is None:
        return False
    return q_len <= (_LONG if kernel.ctas > 1 else 128) and kernel.block[0] > 192


def mask_tiles(candidates: Sequence[Kernel]) -> tuple[int, int]:
    """Return the tile sizes in which to classify a mask for these kernels.

    If the best kernel uses pairs of CTAs, the tiles of a pair and of a single CTA can both be joined
    from these.
    """
    if candidates[0].ctas == 1:
        return candidates[0].block
    other = next(k for k in candidates if k.ctas == 1)
    return 128, math.gcd(candidates[0].block[1], other.block[1])


def fitting_kernel(
    candidates: Sequence[Kernel], block: tuple[int, int], lists_override_mask: bool
) -> Kernel:
    """Return the kernel with exactly these tiles, or else the best one whose tiles divide them.

    Args:
        candidates: kernels, best first.
        block: tiles of a mask.
        lists_override_mask: whether block lists override the mask; then the best one that divides, in any case.
    """
    same = () if lists_override_mask else (k for k in candidates if k.block == block)
    fits = (k for k in candidates if all(b % s == 0 for b, s in zip(block, k.block, strict=True)))
    return next(iter(same), None) or next(fits)


def widest(template: str) -> tuple[int, int]:
    """Return the largest head dims of query and of value."""
    table = _TABLES[template][0]
    return max(d for d, _, _ in table), max(dv for _, dv, _ in table)

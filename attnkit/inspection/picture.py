"""Draw masks: which tiles are empty, partial or full, and the runs of tiles.

`show` returns text for a terminal. `save` writes a PNG or SVG file, and needs matplotlib.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attnkit.errors import ArgumentError, OptionError
from attnkit.inspection.figure_files import checked_path, write
from attnkit.inspection.mask_cells import tile_shares
from attnkit.inspection.mask_figure import mask_figure
from attnkit.inspection.summary import label_of, tile_counts
from attnkit.sparsity.block_mask import BlockMask, create_block_mask
from attnkit.sparsity.block_runs import BLOCK, BlockRuns
from attnkit.util.arguments import check_flag, check_size, shown

# Text: characters by the share of their area that the mask keeps, from nothing to everything.
_SHADES = "·░▒▓█"
_PLAIN_SHADES = ".-+*#"


def show(
    mask: Callable[..., Any] | BlockMask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    at: tuple[int, int] = (0, 0),
    block: int | tuple[int, int] = BLOCK,
    device: torch.device | str | None = None,
    width: int = 64,
    plain: bool = False,
) -> str:
    """Draw the tiles of a mask as text, with counts of tiles and runs.

    >>> from attnkit import masks
    >>> print(show(masks.causal(), 512, 768, plain=True))
    causal()
    512 queries x 768 keys in tiles of 128 x 128
         0        767 kv
      0 |++..........|
        |##++........|
        |####++......|
    511 |######++....|
    . empty  + partial  # full
    tiles: 6 full, 4 partial, 14 empty; 41.7% computed
    runs: 3 full, 4 partial; at most 2 in a row of tiles

    If a character stands for several tiles, its shade shows the share that these tiles keep, where
    a partial tile counts as half.

    Args:
        mask: a mask_mod, a Mask, or a BlockMask, whose own sizes are used.
        q_len: query length.
        kv_len: kv length; q_len if None.
        batch, heads: batch size and query heads, for masks that read b or h.
        at: the batch entry and the head to show.
        block: tile size, or (q, kv) tile sizes.
        device: of the captured tensors; None to read it from them.
        width: the largest number of characters in a line of the map.
        plain: use ASCII only.

    Returns:
        The text, without a newline at its end.

    Raises:
        ArgumentError: a size is missing.
        OptionError: a size is not a positive int, or `at` is out of range.
        What `create_block_mask` raises for this mask.
    """
    check_size("width", width)
    check_flag("plain", plain)
    blocks = _block_mask(mask, q_len, kv_len, batch, heads, block, device)
    b, h = _checked_at(at, blocks)
    runs = blocks.runs
    cells = tile_shares(runs, b, h, *_text_size(runs, width))
    shades = _PLAIN_SHADES if plain else _SHADES
    lines = ["".join(shades[_level(x)] for x in row) for row in cells.tolist()]
    return "\n".join(
        [
            f"{_name(mask)}{label_of(runs, b, h)}",
            f"{runs.q_len} queries x {runs.kv_len} keys in tiles of "
            f"{runs.block[0]} x {runs.block[1]}",
            *_framed(lines, runs.q_len - 1, runs.kv_len - 1),
            _key(runs, cells.shape[0], cells.shape[1], shades),
            *tile_counts(runs, b, h),
        ]
    )


def save(
    path: str | os.PathLike[str],
    mask: Callable[..., Any] | BlockMask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    block: int | tuple[int, int] = BLOCK,
    device: torch.device | str | None = None,
    title: str | None = None,
) -> Path:
    """Draw the tiles of a mask into a file, one panel for each batch entry and head.

    Each run of tiles is a bar, and the positions that partial tiles keep are drawn on them. In a
    long mask a pixel stands for several positions, and the legend says how many: it then mixes the
    colours of all of them, so that nothing that is kept disappears. Where partial tiles have more
    than 2**25 positions, only tiles are drawn. The same mask gives the same file.

    Args:
        path: ends in .png, or in .svg for a file that stays sharp in print.
        mask, q_len, kv_len, batch, heads, block, device: see `show`.
        title: headline; the mask's own name if None.

    Returns:
        The path.

    Raises:
        UnsupportedError: matplotlib is not installed.
        OptionError: the path has another suffix.
        The errors of `show`.
    """
    target = checked_path(path)
    blocks = _block_mask(mask, q_len, kv_len, batch, heads, block, device)
    headline = _name(mask) if title is None else title
    instead = "use the text form, attnkit.inspection.picture.show"
    return write(target, lambda: mask_figure(blocks, headline), instead)


# --- what to draw


def _block_mask(
    mask: Callable[..., Any] | BlockMask,
    q_len: int | None,
    kv_len: int | None,
    batch: int,
    heads: int,
    block: int | tuple[int, int],
    device: torch.device | str | None,
) -> BlockMask:
    """Return `mask` if it is a BlockMask, and otherwise build a BlockMask from it."""
    if isinstance(mask, BlockMask):
        return mask
    if q_len is None:
        raise ArgumentError("q_len is missing: a mask has no length of its own")
    kv_len = q_len if kv_len is None else kv_len
    return create_block_mask(mask, batch, heads, q_len, kv_len, device, block)


def _checked_at(at: tuple[int, int], blocks: BlockMask) -> tuple[int, int]:
    """Check that the mask has the batch entry and head `at`, and return them."""
    if not isinstance(at, tuple | list) or [type(n) for n in at] != [int, int]:
        raise OptionError(f"at must be a pair (batch entry, head), got {shown(at)}")
    for name, index, size in zip(("batch entry", "head"), at, blocks.shape[:2], strict=True):
        if not 0 <= index < size:
            raise OptionError(f"at must name a {name} from 0 to {size - 1}, got {index}")
    return at[0], at[1]


def _name(mask: Callable[..., Any] | BlockMask) -> str:
    """Return the name of a mask for headlines."""
    mod = mask.mask_mod if isinstance(mask, BlockMask) else mask
    return str(getattr(mod, "label", None) or getattr(mod, "__name__", type(mod).__name__))


def _text_size(runs: BlockRuns, width: int) -> tuple[int, int]:
    """Choose the rows and columns of characters for the text map of a mask.

    A character is about twice as high as wide.
    """
    columns = runs.kv_blocks
    columns = 2 * columns if 2 * columns <= width else min(columns, width)
    rows = round(columns / 2 * runs.q_len / runs.kv_len)
    return max(1, min(rows, runs.q_blocks, width)), columns


def _framed(lines: list[str], last_q: int, last_kv: int) -> list[str]:
    """Frame the map, and label its sides with the first and the last position if there is room."""
    width, edge = len(lines[0]), len(str(last_q))
    ticks = ["0", *[""] * (len(lines) - 2), str(last_q)][: len(lines)]
    body = [f"{tick:>{edge}} |{line}|" for tick, line in zip(ticks, lines, strict=True)]
    if width < len(str(last_kv)) + 2:
        return body
    return [f"{'0'.rjust(edge + 3)}{str(last_kv).rjust(width - 1)} kv", *body]


def _key(runs: BlockRuns, rows: int, columns: int, shades: str) -> str:
    """Return the legend of the map's characters, one line of text."""
    if rows == runs.q_blocks and columns % runs.kv_blocks == 0:
        return f"{shades[0]} empty  {shades[2]} partial  {shades[4]} full"
    height, width = runs.q_blocks / rows, runs.kv_blocks / columns
    return (
        f"{shades[0]} nothing  {shades[1:4]} a part  {shades[4]} everything of "
        f"{height:.3g} x {width:.3g} tiles"
    )


def _level(share: float) -> int:
    """Return the shade index, 0 to 4, of a share. Only exactly 0 and 1 give 0 and 4."""
    if share in (0.0, 1.0):
        return 4 * int(share)
    return 1 if share < 1 / 3 else 2 if share < 2 / 3 else 3

"""Draw masks: which tiles are empty, partial or full, and the runs of tiles.

`show` returns text for a terminal. `save` writes a PNG or SVG file, and needs matplotlib.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnkit.errors import ArgumentError, OptionError
from attnkit.inspection.figure_files import checked_path, write
from attnkit.inspection.summary import label_of, runs_of, tile_counts
from attnkit.sparsity.block_mask import BlockMask, create_block_mask, create_mask
from attnkit.sparsity.block_runs import BLOCK, BlockRuns, Runs
from attnkit.util.arguments import check_flag, check_size, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Text: characters by the share of their area that the mask keeps, from nothing to everything.
_SHADES = "·░▒▓█"
_PLAIN_SHADES = ".-+*#"

# Image: colours, and limits on what is drawn.
_COLOURS = {"full": "#27548a", "partial": "#f6c28b", "kept": "#c8641b", "empty": "#f3f3f3"}
_MOST_BARS = 4000  # runs; above, an image of tiles is drawn instead of a bar for each run
_MOST_POSITIONS = 1 << 20  # above, the positions in partial tiles are not drawn
_MOST_CELLS = 1024  # rows or columns of the image of tiles
_MOST_PANELS = 8  # batch entries and heads


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

    Each run of tiles is a bar. Masks of up to a million positions also show which positions their
    partial tiles keep. The same mask gives the same file.

    Args:
        path: ends in .png or .svg.
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
    return write(target, lambda: _figure(blocks, headline), instead)


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


def tile_shares(runs: BlockRuns, b: int, h: int, rows: int, columns: int) -> Tensor:
    """Compute, for each cell of a grid, the share of its tiles that the mask keeps.

    A PARTIAL tile counts as half.

    Args:
        runs: the tiles of all batch entries and heads.
        b, h: the batch entry and the head.
        rows, columns: number of cells, which may be more or fewer than the tiles.

    Returns:
        float64 [rows, columns]. A share is 0 only if nothing is kept, 1 only if everything is.
    """
    cells = torch.zeros(rows, columns, dtype=torch.float64)
    tops = [(runs.q_blocks * i // rows, -(-runs.q_blocks * (i + 1) // rows)) for i in range(rows)]
    lefts = torch.arange(columns) * runs.kv_blocks // columns
    rights = -(-(torch.arange(columns) + 1) * runs.kv_blocks // columns)
    for weight, kind in ((1.0, runs.full), (0.5, runs.partial)):
        selected = runs_of(kind, runs, b, h)
        for i, (top, bottom) in enumerate(tops):
            first, last = int(selected.row_ptr[top]), int(selected.row_ptr[bottom])
            pointers = selected.row_ptr[top : bottom + 1] - first
            part = Runs(pointers, selected.start[first:last], selected.length[first:last])
            tiles = part.expanded(runs.kv_blocks).sum(0)
            before = pad(tiles.cumsum(0), (1, 0))
            area = (rights - lefts).double() * (bottom - top)
            cells[i] += weight * (before[rights] - before[lefts]) / area
    return cells


# --- images


def _figure(blocks: BlockMask, title: str) -> Figure:
    """Draw a panel for each of the first batch entries and heads, and a legend."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    runs = blocks.runs
    pairs = [(b, h) for b in range(runs.batch) for h in range(runs.heads)]
    panels = pairs[:_MOST_PANELS]
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    ratio = min(max(runs.q_len / runs.kv_len, 0.25), 2.5)
    size = 4.6 if len(panels) == 1 else 2.8
    figure = Figure(
        figsize=(max(4.6, columns * size), rows * ((size - 0.5) * ratio + 0.75) + 0.6),
        layout="constrained",
    )
    more = f" (first {len(panels)} of {len(pairs)})" if len(pairs) > len(panels) else ""
    figure.suptitle(_wrapped(title + more, 22 * max(3, columns)), fontsize=9)
    dense = _positions(blocks)
    for i, (b, h) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        _draw(axes, runs, b, h, dense)
    names = {"full": "full tile", "partial": "partial tile"}
    if dense is not None:
        names["kept"] = "kept in a partial tile"
    names["empty"] = "empty tile"
    handles = [Patch(facecolor=_COLOURS[k], edgecolor="#999999", label=n) for k, n in names.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=7)
    return figure


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width)[:3])


def _positions(blocks: BlockMask) -> Tensor | None:
    """Compute the dense mask, bool [b, h, q, kv] on the CPU, or None if it is too large to draw."""
    _, _, q_len, kv_len = blocks.shape
    runs = blocks.runs
    if q_len * kv_len * min(runs.batch * runs.heads, _MOST_PANELS) > _MOST_POSITIONS:
        return None
    shape = (runs.batch, runs.heads, q_len, kv_len)
    return create_mask(blocks.mask_mod, *shape, device=blocks.device).cpu()


def _draw(axes: Axes, runs: BlockRuns, b: int, h: int, dense: Tensor | None) -> None:
    """Draw one panel: bars for runs, or an image of tiles if there are too many runs."""
    from matplotlib.ticker import MultipleLocator

    ratio = runs.q_len / runs.kv_len
    axes.set_aspect("equal" if 0.25 <= ratio <= 2.5 else "auto")
    axes.set_facecolor(_COLOURS["empty"])
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("kv")
    axes.set_ylabel("q")
    axes.tick_params(length=2, labelsize=6)
    for axis, length in ((axes.xaxis, runs.kv_len), (axes.yaxis, runs.q_len)):
        axis.set_major_locator(MultipleLocator(1 << max(0, (length // 4).bit_length() - 1)))
    kinds = [runs_of(kind, runs, b, h) for kind in (runs.full, runs.partial)]
    if sum(kind.start.numel() for kind in kinds) <= _MOST_BARS:
        _bars(axes, runs, kinds)
    else:
        _image(axes, runs, b, h)
    if dense is not None:
        _draw_partial(
            axes, runs, dense[b if runs.batch > 1 else 0, h if runs.heads > 1 else 0], kinds[1]
        )
    axes.set_xlim(0, runs.kv_len)  # imshow sets other limits
    axes.set_ylim(runs.q_len, 0)
    caption = "\n".join(tile_counts(runs, b, h))
    which = label_of(runs, b, h).removeprefix(", ")
    axes.text(
        0.0, -0.02, f"{which}\n{caption}" if which else caption,
        transform=axes.transAxes, va="top", fontsize=5.5,
    )  # fmt: skip


def _bars(axes: Axes, runs: BlockRuns, kinds: list[Runs]) -> None:
    """Draw the full and the partial runs of one batch entry and head as bars."""
    from matplotlib.collections import PolyCollection

    height, width = runs.block
    gap = 0.06 * min(height, width)

    def inner(first: int, last: int, size: int, length: int) -> tuple[float, float]:
        """Return where the bar of tiles `first` to `last` begins and ends, with a gap around it.

        The gap is at most a quarter of the bar, so that a ragged last tile stays visible.
        """
        low, high = first * size, min(last * size, length)
        inset = min(gap, 0.25 * (high - low))
        return low + inset, high - inset

    for name, kind in zip(("full", "partial"), kinds, strict=True):
        rows = torch.arange(kind.rows).repeat_interleave(kind.row_ptr.diff())
        corners = []
        spans = zip(rows.tolist(), kind.start.tolist(), kind.length.tolist(), strict=True)
        for row, start, count in spans:
            left, right = inner(start, start + count, width, runs.kv_len)
            top, bottom = inner(row, row + 1, height, runs.q_len)
            corners.append([(left, top), (right, top), (right, bottom), (left, bottom)])
        axes.add_collection(PolyCollection(corners, facecolors=_COLOURS[name], linewidths=0))


def _image(axes: Axes, runs: BlockRuns, b: int, h: int) -> None:
    """Draw the shares that tiles keep as an image. A pixel may stand for several tiles."""
    from matplotlib.colors import LinearSegmentedColormap

    rows, columns = (min(n, _MOST_CELLS) for n in (runs.q_blocks, runs.kv_blocks))
    cells = tile_shares(runs, b, h, rows, columns)
    shades = [_COLOURS[name] for name in ("empty", "partial", "full")]
    axes.imshow(
        cells.numpy(),
        cmap=LinearSegmentedColormap.from_list("tiles", shades),
        vmin=0,
        vmax=1,
        extent=(0, runs.kv_blocks * runs.block[1], runs.q_blocks * runs.block[0], 0),
        aspect=axes.get_aspect(),
        interpolation="nearest",
    )


def _draw_partial(axes: Axes, runs: BlockRuns, dense: Tensor, partial: Runs) -> None:
    """Draw the positions that partial tiles keep."""
    from matplotlib.colors import to_rgb

    tiles = partial.expanded(runs.kv_blocks)
    inside = tiles.repeat_interleave(runs.block[0], 0)[: runs.q_len]
    inside = inside.repeat_interleave(runs.block[1], 1)[:, : runs.kv_len]
    pixels = torch.zeros(runs.q_len, runs.kv_len, 4)
    pixels[..., :3] = torch.tensor(to_rgb(_COLOURS["kept"]))
    pixels[..., 3] = (dense & inside).float()
    axes.imshow(
        pixels.numpy(), extent=(0, runs.kv_len, runs.q_len, 0), aspect=axes.get_aspect(),
        interpolation="nearest", zorder=3,
    )  # fmt: skip

"""Draw the tiles of a mask with matplotlib, one panel for each batch entry and head."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnkit.inspection.mask_cells import Cells, cells_of
from attnkit.inspection.summary import label_of, runs_of, tile_counts
from attnkit.sparsity.block_mask import BlockMask
from attnkit.sparsity.block_runs import BlockRuns, Runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"full": "#27548a", "partial": "#f6c28b", "kept": "#c8641b", "empty": "#f3f3f3"}
_MOST_BARS = 4000  # runs; above, an image of cells is drawn instead of a bar for each run
_MOST_TILES = 128  # rows or columns of tiles; above, bars would be too thin
_MOST_POSITIONS = 1 << 25  # above, the positions in partial tiles are not evaluated
_MOST_CELLS = 512  # rows or columns of cells in a panel, fewer than it has pixels
_MOST_CELLS_OF_MANY = 256  # the same, if there are several panels
_MOST_PANELS = 8  # batch entries and heads
# Shares of colours in a pixel that stands for several positions, so that rare ones show
_LEAST_SHARE = 0.35
_MOST_EMPTY = 0.2
_ROUNDING = 1e-9  # shares up to it are 0


def mask_figure(blocks: BlockMask, title: str) -> Figure:
    """Draw a panel for each of the first batch entries and heads, and a legend."""
    from matplotlib.figure import Figure

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
    wrapped = textwrap.wrap(title + more, 22 * max(3, columns))[:3]
    figure.suptitle("\n".join(wrapped), fontsize=9)
    most = _MOST_CELLS if len(panels) == 1 else _MOST_CELLS_OF_MANY
    grid = max(1, int(most * min(ratio, 1))), most
    cells = cells_of(blocks, len(panels), grid, _MOST_POSITIONS)
    as_bars = _has_bars(runs)
    for i, (pair, shares) in enumerate(zip(panels, cells, strict=True)):
        _draw(figure.add_subplot(rows, columns, i + 1), runs, pair, shares, as_bars)
    _add_legend(figure, runs, cells[0], as_bars)
    return figure


def _has_bars(runs: BlockRuns) -> bool:
    """Return whether runs are few and wide enough to draw each as a bar."""
    count = max(runs.full.start.numel(), runs.partial.start.numel())
    return count <= _MOST_BARS and max(runs.q_blocks, runs.kv_blocks) <= _MOST_TILES


def _add_legend(figure: Figure, runs: BlockRuns, cells: Cells, as_bars: bool) -> None:
    """Add what the colours mean, and what a pixel stands for where that is several positions."""
    from matplotlib.patches import Patch

    names = {"full": "full tile", "partial": "partial tile"}
    if cells.kept is not None:
        names["kept"] = "kept in a partial tile"
    names["empty"] = "empty tile"
    handles = [Patch(facecolor=_COLOURS[k], edgecolor="#999999", label=n) for k, n in names.items()]
    legend = figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=7,
        title=_pixel_text(runs, cells, as_bars), title_fontsize=6,
    )  # fmt: skip
    legend.get_title().set_multialignment("center")


def _pixel_text(runs: BlockRuns, cells: Cells, as_bars: bool) -> str | None:
    """Describe a pixel of the picture; None if it is a single position."""
    height, width = cells.size
    if height * width == 1:
        return None
    stands = f"a pixel stands for {height} x {width} positions (q x kv)"
    if not as_bars:
        return f"{stands} and mixes their colours;\nrare ones are strengthened"
    shows_kept = cells.kept is not None and runs.partial.start.numel() > 0
    return f"{stands}; the darker, the more are kept" if shows_kept else None


def _draw(axes: Axes, runs: BlockRuns, pair: tuple[int, int], cells: Cells, as_bars: bool) -> None:
    """Draw one panel: bars for runs and what partial tiles keep, or an image of cells."""
    from matplotlib.ticker import MultipleLocator, StrMethodFormatter

    ratio = runs.q_len / runs.kv_len
    axes.set_aspect("equal" if 0.25 <= ratio <= 2.5 else "auto")
    axes.set_facecolor(_COLOURS["empty"])
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("kv")
    axes.set_ylabel("q")
    axes.tick_params(length=2, labelsize=6)
    axes.spines[:].set_visible(False)  # a frame would cover half of the first row and column
    for axis, length in ((axes.xaxis, runs.kv_len), (axes.yaxis, runs.q_len)):
        axis.set_major_locator(MultipleLocator(1 << max(0, (length // 4).bit_length() - 1)))
        axis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    if as_bars:
        kinds = [runs_of(kind, runs, *pair) for kind in (runs.full, runs.partial)]
        _bars(axes, runs, kinds)
        if cells.kept is not None:
            _image(axes, cells, _kept_pixels(cells.partial, cells.kept))
    else:
        _image(axes, cells, _mixed_pixels(cells))
    axes.set_xlim(0, runs.kv_len)  # imshow sets other limits
    axes.set_ylim(runs.q_len, 0)
    caption = "\n".join(tile_counts(runs, *pair))
    which = label_of(runs, *pair).removeprefix(", ")
    axes.text(
        0.0, -0.02, f"{which}\n{caption}" if which else caption,
        transform=axes.transAxes, va="top", fontsize=5.5,
    )  # fmt: skip


def _bars(axes: Axes, runs: BlockRuns, kinds: list[Runs]) -> None:
    """Draw the full and the partial runs of one batch entry and head as bars, with fine borders.

    A bar covers its tiles exactly. What partial tiles keep is drawn above the borders.
    """
    from matplotlib.collections import LineCollection, PolyCollection

    height, width = runs.block
    outlines = []
    for name, kind in zip(("full", "partial"), kinds, strict=True):
        rows = torch.arange(kind.rows).repeat_interleave(kind.row_ptr.diff())
        corners = []
        spans = zip(rows.tolist(), kind.start.tolist(), kind.length.tolist(), strict=True)
        for row, start, count in spans:
            left, right = start * width, min((start + count) * width, runs.kv_len)
            top, bottom = row * height, min((row + 1) * height, runs.q_len)
            corners.append([(left, top), (right, top), (right, bottom), (left, bottom)])
        axes.add_collection(PolyCollection(corners, facecolors=_COLOURS[name], linewidths=0))
        outlines += [[*corner, corner[0]] for corner in corners]
    line = min(0.8, 24 / max(runs.q_blocks, runs.kv_blocks))  # points
    axes.add_collection(LineCollection(outlines, colors="white", linewidths=line, zorder=2))


def _image(axes: Axes, cells: Cells, pixels: Tensor) -> None:
    """Draw a pixel [rows, columns, red, green, blue, opacity] for each cell."""
    rows, columns = pixels.shape[:2]
    height, width = cells.size
    axes.imshow(
        pixels.numpy(), extent=(0, columns * width, rows * height, 0), aspect=axes.get_aspect(),
        interpolation="none", zorder=3,
    )  # fmt: skip


def _kept_pixels(partial: Tensor, kept: Tensor) -> Tensor:
    """Return pixels for what partial tiles keep, the darker, the larger the share; else nothing.

    They cover the borders of tiles. Where a cell reaches into other tiles, these shine through.
    """
    share = (kept / partial.clamp(min=_ROUNDING)).clamp(_LEAST_SHARE, 1)[..., None]
    colour = share * _rgb("kept") + (1 - share) * _rgb("partial")
    opacity = torch.where(kept > 0, partial, 0.0)
    return torch.cat([colour, opacity[..., None]], -1)


def _mixed_pixels(cells: Cells) -> Tensor:
    """Return pixels that mix the colours of what a cell holds, by their shares.

    A colour that occurs counts with `_LEAST_SHARE` at least, and what is empty with at most
    `_MOST_EMPTY` of a pixel that holds more.
    """
    kept = torch.zeros_like(cells.partial) if cells.kept is None else cells.kept
    empty = 1 - cells.full - cells.partial
    shares = torch.stack([cells.full, cells.partial - kept, kept, empty])
    shares = torch.where(shares > _ROUNDING, shares.clamp(min=_LEAST_SHARE), 0.0)
    drawn = shares[:3].sum(0)
    limit = torch.where(drawn > 0, drawn * (_MOST_EMPTY / (1 - _MOST_EMPTY)), 1.0)
    shares[3] = torch.minimum(shares[3], limit)
    colours = torch.stack([_rgb(name) for name in ("full", "partial", "kept", "empty")])
    colour = torch.einsum("nrc,nk->rck", shares / shares.sum(0), colours)
    return torch.cat([colour, torch.ones_like(colour[..., :1])], -1)


def _rgb(name: str) -> Tensor:
    from matplotlib.colors import to_rgb

    return torch.tensor(to_rgb(_COLOURS[name]), dtype=torch.float64)

"""Draw predicted schedules, with a row for each SM and a bar for each work tile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnkit.inspection.figure_files import checked_path, write
from attnkit.inspection.forecast import Direction, Forecast, cycles
from attnkit.schedule.scheduler import Schedule
from attnkit.schedule.simulator import Timeline
from attnkit.util.arguments import check_type

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHORT, _LONG, _SPLIT = "#b9d0e8", "#27548a", "#c8641b"
_FEW_ROWS = 48
_MOST_SHAPES = 4000  # if there are more bars, an SVG contains an image of them


def save_timeline(
    path: str | os.PathLike[str],
    forecast: Forecast,
    *,
    backward: bool = False,
    title: str | None = None,
) -> Path:
    """Draw a predicted schedule into a file: longest first above, grid order below.

    Each row is an SM. Each bar is a work tile, and longer work tiles are darker. Parts of a row
    that is split along KV are orange. The dashed line is the lower bound of any schedule. All times
    are predicted by the cost model, and nothing is measured.

    Args:
        path: ends in .png or .svg.
        forecast: result of `attnkit.inspection.forecast.forecast`.
        backward: draw the backward instead of the forward.
        title: headline; "forward" or "backward" if None.

    Returns:
        The path.

    Raises:
        UnsupportedError: matplotlib is not installed.
        ArgumentError: `forecast` is no `Forecast`, or `path` is no path.
        OptionError: the path has another suffix.
    """
    check_type("forecast", forecast, Forecast, "a Forecast, explain(...).forecast")
    direction = forecast.backward if backward else forecast.forward
    name = title or ("backward" if backward else "forward")
    headline = f"{name}\npredicted for {forecast.sms} SMs, not measured"
    return write(
        checked_path(path), lambda: _figure(direction, headline), "print the forecast instead"
    )


def bars(timeline: Timeline) -> Tensor:
    """Compute the corners of each work tile's bar, float64 [work tiles, 4, 2]: (cycle, SM).

    Corners are in clockwise order. Bars end a little early, so that a gap separates neighbours. If
    there are few rows, there is a gap between rows too.
    """
    left, right = timeline.start.double(), timeline.end.double()
    right = right - (0.2 * (right - left)).clamp(max=0.0015 * timeline.makespan)
    inset = 0.06 if timeline.workers <= _FEW_ROWS else 0.0
    top = timeline.worker.double() + inset
    bottom = top + 1 - 2 * inset
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    return torch.stack([torch.stack(corner, -1) for corner in corners], 1)


def colours(schedule: Schedule) -> list[tuple[float, float, float]]:
    """Return the colour of each work tile, RGB from 0 to 1."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    cost = schedule.cost.cpu().double()
    share = (cost - cost.min()) / max(1.0, float(cost.max() - cost.min()))
    shades = LinearSegmentedColormap.from_list("work tiles", [_SHORT, _LONG])(share.numpy())
    split = to_rgb(_SPLIT)
    parts = (schedule.slot >= 0).tolist()
    return [
        split if part else (float(rgba[0]), float(rgba[1]), float(rgba[2]))
        for part, rgba in zip(parts, shades, strict=True)
    ]


def _figure(direction: Direction, headline: str) -> Figure:
    """Draw both schedules of a forward or backward, one above the other."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8, 6.4), layout="constrained")
    figure.suptitle(headline, fontsize=9)
    both = (
        ("longest first", direction.schedule, direction.timeline),
        ("grid order", direction.grid, direction.grid_timeline),
    )
    last = max(timeline.makespan for _, _, timeline in both)
    for i, (name, schedule, timeline) in enumerate(both):
        axes = figure.add_subplot(2, 1, i + 1)
        _draw(axes, schedule, timeline, direction.bound)
        axes.set_xlim(0, 1.02 * last)
        axes.set_title(
            f"{name}: {cycles(timeline.makespan)} cycles, "
            f"{timeline.makespan / direction.bound:.3f} x the bound, idle {timeline.idle:.1%}",
            fontsize=8, loc="left",
        )  # fmt: skip
    handles = [
        Patch(facecolor=_SHORT, label="shortest work tile"),
        Patch(facecolor=_LONG, label="longest work tile"),
        Patch(facecolor=_SPLIT, label="part of a split row"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    return figure


def _draw(axes: Axes, schedule: Schedule, timeline: Timeline, bound: float) -> None:
    """Draw the bars of one schedule, and its bound."""
    from matplotlib.collections import PolyCollection
    from matplotlib.ticker import FuncFormatter

    many = schedule.work_tile_count > _MOST_SHAPES
    axes.add_collection(
        PolyCollection(
            list(bars(timeline).numpy()), facecolors=colours(schedule),
            linewidths=0, antialiaseds=False, rasterized=many,
        )
    )  # fmt: skip
    axes.axvline(bound, color="#444444", linewidth=0.8, linestyle="--")
    axes.set_ylim(timeline.workers, 0)
    axes.set_ylabel("SM")
    axes.set_xlabel("cycles, predicted")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: cycles(x)))
    axes.tick_params(length=2, labelsize=6)

"""Print saved GPU rows as tables: `python benchmarks/gpu_table.py [--chart FILE.svg]`.

With `--chart`, also draw them as a bar chart. Each case shows the rows of one run only, the newest
with peers if there is one: figures of different runs cannot be compared, because the GPU's clock
changes between runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parent / "results" / "gpu.jsonl"
OURS = "attnkit"
DIRECTIONS = "forward", "backward"
COLOURS = ("#1b6ca8", "#e07b39", "#7a9e4b", "#9467bd", "#8c8c8c", "#c9a227", "#5c5c5c")
Row = dict[str, Any]


def newest(rows: Sequence[Row], direction: str, mode: str) -> dict[str, dict[str, Row]]:
    """Return {case: {contender: row}} of one run of each case, in the order of `rows`.

    It is the newest of the runs that timed the most peers: the best peer of a run that lacks one
    may not be the best one.
    """
    wanted = [row for row in rows if (row.get("direction"), row.get("mode")) == (direction, mode)]
    runs: dict[str, dict[str, dict[str, Row]]] = {}
    for row in wanted:
        runs.setdefault(row["case"], {}).setdefault(row["run"], {})[row["contender"]] = row
    found: dict[str, dict[str, Row]] = {}
    for case, of_case in runs.items():
        # ratios of a run refer to our time in it
        timed = {run: own for run, own in of_case.items() if "ms" in own.get(OURS, {})}
        if timed:
            chosen = max(timed, key=lambda run: (_peers(timed[run]), run))
            found[case] = timed[chosen]
    return found


def _peers(rows: dict[str, Row]) -> int:
    """Return how many contenders other than attnkit were timed."""
    return sum("ms" in row for name, row in rows.items() if not name.startswith(OURS))


def contenders(cases: dict[str, dict[str, Row]]) -> list[str]:
    """Return the names of the contenders that were timed in any case, attnkit first."""
    timed = dict.fromkeys(
        name for rows in cases.values() for name, row in rows.items() if "ms" in row
    )
    return sorted(timed, key=lambda name: not name.startswith(OURS))


def cell(row: Row | None) -> str:
    """Format TFLOP/s, milliseconds, and the time as a multiple of attnkit's; "" without a time."""
    if row is None or "ms" not in row:
        return ""
    text = f"{row['tflops']:.0f} ({row['ms']:.3f})"
    if "ratio" in row and row["contender"] != OURS:
        text += f" {row['ratio']:.2f}x"
    return text


def best(rows: dict[str, Row]) -> str:
    """Format the time of the fastest peer as a multiple of attnkit's, with the peer's name."""
    ratios = [
        (row["ratio"], name)
        for name, row in rows.items()
        if "ratio" in row and not name.startswith(OURS)
    ]
    if not ratios:
        return ""
    ratio, name = min(ratios)
    return f"**{ratio:.2f}x** {name}"


def markdown(rows: Sequence[Row], direction: str, mode: str) -> str:
    """Format a Markdown table with one line per case and one column per contender.

    A cell shows useful TFLOP/s, milliseconds, and the time as a multiple of attnkit's.
    """
    cases = newest(rows, direction, mode)
    names = contenders(cases)
    titles = ["density", *names, "best peer"]
    lines = [f"| {direction}, {mode} | {' | '.join(titles)} |", "| --- |" + " --- |" * len(titles)]
    for case, own in cases.items():
        density = f"{next(iter(own.values()))['density']:.3g}"
        cells = [density, *(cell(own.get(name)) for name in names), best(own)]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def skips(rows: Sequence[Row], direction: str, mode: str) -> list[str]:
    """Return a Markdown list item for each skipped contender, with the reason."""
    return [
        f"- {case}, {name}: {row['skipped']}"
        for case, own in newest(rows, direction, mode).items()
        for name, row in own.items()
        if "skipped" in row
    ]


BAR, GAP, LEFT, WIDTH, TOP = 11, 12, 250, 560, 60


def chart(rows: Sequence[Row], direction: str, mode: str) -> str:
    """Draw an SVG bar chart of the useful TFLOP/s of every contender, grouped by case."""
    cases = newest(rows, direction, mode)
    names = contenders(cases)
    top = max((row.get("tflops", 0.0) for own in cases.values() for row in own.values()), default=0)
    top = top or 1.0
    parts, y = [], TOP
    for case, own in cases.items():
        timed = [(i, own[n]) for i, n in enumerate(names) if "ms" in own.get(n, {})]
        middle = y + BAR * len(timed) / 2
        parts.append(label(LEFT - 8, middle + 4, case, "end"))
        for i, row in timed:
            width = WIDTH * row["tflops"] / top
            colour = COLOURS[i % len(COLOURS)]
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 1}" fill="{colour}"/>'
            )
            parts.append(label(LEFT + width + 4, y + BAR - 2, f"{row['tflops']:.0f}", "start", 9))
            y += BAR
        y += GAP
    for i, name in enumerate(names):
        x = LEFT + i * 130
        parts.append(
            f'<rect x="{x}" y="30" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>'
        )
        parts.append(label(x + 14, 39, name, "start"))
    width = max(LEFT + WIDTH + 60, LEFT + 130 * len(names))
    title = label(LEFT, 18, f"Useful TFLOP/s, {direction}, {mode}", "start", 13)
    size = f'width="{width}" height="{y}" viewBox="0 0 {width} {y}"'
    white = f'<rect width="{width}" height="{y}" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, white, title, *parts, "</svg>"]) + "\n"


def label(x: float, y: float, content: str, anchor: str, size: int = 11) -> str:
    """Return an SVG text element at (`x`, `y`)."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(content)}</text>"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE")
    parser.add_argument("--direction", choices=DIRECTIONS, help="one direction (default: both)")
    parser.add_argument("--mode", choices=("burst", "sustained"), default="sustained")
    parser.add_argument(
        "--chart",
        type=Path,
        metavar="FILE.svg",
        help="also draw a bar chart, of the forward if both directions are shown",
    )
    parser.add_argument("--skips", action="store_true", help="also print why cells are empty")
    options = parser.parse_args(argv)
    text = options.rows.read_text() if options.rows.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    directions = [options.direction] if options.direction else list(DIRECTIONS)
    for direction in directions:
        if not newest(rows, direction, options.mode):
            print(f"{options.rows} has no rows of {direction}, {options.mode}", file=sys.stderr)
            return 2
        print(markdown(rows, direction, options.mode), end="\n\n")
        if options.skips:
            print(*skips(rows, direction, options.mode), sep="\n", end="\n\n")
    if options.chart:
        options.chart.write_text(chart(rows, directions[0], options.mode))
    return 0


if __name__ == "__main__":
    sys.exit(main())

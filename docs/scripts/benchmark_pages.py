"""Write the tables and plots of docs/benchmarks.md and README's plot from the committed rows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from measured import Row, cpu_table, gpu_table, load, newest_tiles

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "benchmarks.md"
CASES = DOCS.parent / "benchmarks" / "gpu_cases.toml"
IMAGES = DOCS / "images"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
COLOURS = {
    "attnkit": "#27548a",
    "attnkit deterministic": "#8fb0d3",
    "Flex FLASH": "#e0a45c",
    "FlashAttention-4": "#7a9e4b",
    "cuDNN": "#8c6bb1",
    "Flex Triton": "#c0504d",
    "FlashAttention-2": "#8c8c8c",
}
FIXED = "attnkit deterministic"
README_CASES = (
    *("full", "causal", "causal window 1024", "causal, 16 documents"),
    *("causal + ALiBi", "causal + softcap 20"),
)


def attention(direction: str) -> str:
    """Return the Markdown table of all GPU cases in one direction, one run each."""
    return gpu_table.markdown(load("gpu"), direction, "sustained")


def bursts(direction: str) -> str:
    """Return the table of the cases that were timed in bursts, of runs with a limit on noise.

    Rows of other cases than those of benchmarks/gpu_cases.toml are steps of the kernels, for which
    docs/notes has them.
    """
    named = {case["name"] for case in tomllib.loads(CASES.read_text())["case"]}
    rows = [row for row in load("gpu") if "uncertainty" in row or "skipped" in row]
    rows = [row for row in rows if row["case"] in named and row["contender"] != FIXED]
    return gpu_table.markdown(rows, direction, "burst")


def fixed_order() -> str:
    """Return the table of backwards in a fixed order beside those in any order, in bursts.

    Each case has its newest run with both.
    """
    lines = [
        "| backward, burst | any order, ms | fixed order, ms | time | cycles |",
        "| --- |" + " --- |" * 4,
    ]
    found: dict[str, tuple[Row, Row]] = {}
    pairs: dict[tuple[str, str], dict[str, Row]] = {}
    for row in load("gpu"):
        if row["mode"] == "burst" and row["direction"] == "backward" and "cycles" in row:
            pair = pairs.setdefault((row["run"], row["case"]), {})
            pair[row["contender"]] = row
            if "attnkit" in pair and FIXED in pair:
                found[row["case"]] = pair["attnkit"], pair[FIXED]
    for case, (plain, fixed) in found.items():
        ratios = " | ".join(f"{fixed[key] / plain[key]:.2f}x" for key in ("ms", "cycles"))
        lines.append(f"| {case} | {plain['ms']:.3f} | {fixed['ms']:.3f} | {ratios} |")
    return "\n".join(lines)


def runs() -> str:
    """Return the table of the runs behind the attention tables, with clocks and noise."""
    lines = [
        "| run | commit | direction | lines | rounds | SM clock, GHz | peers | noise |",
        "| --- |" + " --- |" * 7,
    ]
    by_run: dict[tuple[str, str], list[dict[str, Row]]] = {}
    for direction in gpu_table.DIRECTIONS:
        for case in gpu_table.newest(load("gpu"), direction, "sustained").values():
            by_run.setdefault((case["attnkit"]["run"], direction), []).append(case)
    for (run, direction), cases in sorted(by_run.items()):
        own = [case["attnkit"] for case in cases]
        clocks = [row["ghz"] for row in own]
        timed = [row for case in cases for row in case.values() if "ms" in row]
        peers = [row for row in timed if not row["contender"].startswith("attnkit")]
        swept = bool(peers) and all("setting" in row for row in peers)
        lines.append(
            f"| {run[:16].replace('T', ' ')} | {own[0]['commit']} | {direction} | {len(own)} | "
            f"{min(row['rounds'] for row in own)} | {min(clocks):.2f} to {max(clocks):.2f} | "
            f"{'best setting' if swept else 'default' if peers else 'none'} | {noise(timed)} |"
        )
    return "\n".join(lines)


def noise(rows: list[Row]) -> str:
    """Format the largest uncertainty of the rows' medians, of times and of ratios.

    Rows before that field have the spread (p90 - p10) / median. The oldest have neither; for them
    the result is the whole range of times over the median.
    """
    if all("uncertainty" in row for row in rows):
        most = max(max(row["uncertainty"], row.get("ratio_uncertainty", 0)) for row in rows)
        return f"±{100 * most:.1f} %"
    if all("spread" in row for row in rows):
        return f"{100 * max(max(row['spread'], row.get('ratio_spread', 0)) for row in rows):.0f} % spread"
    whole = max((row["ms_most"] - row["ms_least"]) / row["ms"] for row in rows)
    return f"{100 * whole:.0f} % from least to most"


def tiles() -> str:
    """Return the table of GPU times to find a mask's tiles: attnkit and `create_block_mask`."""
    lines = [
        "| mask, S, batch | attnkit, ms | create_block_mask, ms | ratio | attnkit, MB | "
        "create_block_mask, MB |",
        "| --- |" + " --- |" * 5,
    ]
    for (case, length, batch), row in newest_tiles().items():
        lines.append(
            f"| {case}, {length}, {batch} | {row['ours_ms']:.2f} | {row['peer_ms']:.1f} | "
            f"{row['ratio']:.1f}x | {row['ours_stored_bytes'] / 1e6:.2f} | "
            f"{row['peer_stored_bytes'] / 1e6:.1f} |"
        )
    return "\n".join(lines)


def lengths() -> str:
    """Return the table of times to find the tiles of a mask on one CPU thread, by length."""
    lines = ["| mask | S | ms | computed tiles | all tiles | MB stored |", "| --- |" + " --- |" * 5]
    for row in load("classify"):
        computed = row["partial"] + row["full"]
        lines.append(
            f"| {row['case']} | {row['length']} | {row['median_ms']:.1f} | {computed} | "
            f"{computed + row['empty']} | {row['stored_mb']:.3f} |"
        )
    return "\n".join(lines)


def gpt2_rows() -> dict[str, Row]:
    """Return the rows of the newest run of the GPT-2 training step, by contender."""
    rows = load("gpt2")
    newest = max(row["run"] for row in rows)
    return {row["contender"]: row for row in rows if row["run"] == newest}


def gpt2() -> str:
    """Return the table of GPT-2 step times and peak memory, one line for each attention."""
    lines = ["| attention | ms a step | peak memory, GiB |", "| --- | --- | --- |"]
    for name, row in gpt2_rows().items():
        lines.append(f"| {name} | {row['ms']:.1f} | {row['peak_bytes'] / 2**30:.2f} |")
    return "\n".join(lines)


def layers() -> str:
    """Return the table of the attention of whole models' layers: the newest run of each."""
    peers = ("flex_attention", "sdpa")
    lines = [
        f"| layer, direction, mode | attnkit | {' | '.join(peers)} |",
        "| --- |" + " --- |" * (1 + len(peers)),
    ]
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in load("gpu_layers"):
        own = found.setdefault((row["case"], row["direction"]), {})
        if own and row["run"] != next(iter(own.values()))["run"]:
            own.clear()
        own[row["contender"]] = row
    for (case, direction), own in sorted(found.items()):
        cells = [gpu_table.cell(own.get(name)) for name in ("attnkit", *peers)]
        lines.append(f"| {case}, {direction}, {own['attnkit']['mode']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """Return all tables of the page as Markdown, by name."""
    return {
        "runs": runs(),
        "forward": attention("forward"),
        "backward": attention("backward"),
        "bursts_forward": bursts("forward"),
        "bursts_backward": bursts("backward"),
        "fixed_order": fixed_order(),
        "layers": layers(),
        "tiles": tiles(),
        "lengths": lengths(),
        "gpt2": gpt2(),
        "cpu": cpu_table.markdown(cpu_table.saved()),
    }


def files() -> dict[Path, str]:
    """Return {path: text} of the page, with its tables filled in."""
    made = tables()
    return {PAGE: TABLE.sub(lambda m: f"{m[1]}\n{made[m[2]]}\n\n{m[3]}", PAGE.read_text())}


# --- plots


Bars = dict[str, dict[str, float]]  # case -> contender -> TFLOP/s


def bars(direction: str) -> Bars:
    """Return the TFLOP/s to plot for one direction, by case and contender."""
    cases = gpu_table.newest(load("gpu"), direction, "sustained")
    return {
        case: {name: rows[name]["tflops"] for name in COLOURS if "tflops" in rows.get(name, {})}
        for case, rows in cases.items()
    }


def draw() -> None:
    """Draw all plots and write them to docs/images."""
    for direction in gpu_table.DIRECTIONS:
        shown = bars(direction)
        figure = new_figure(8, 0.9 + 0.155 * sum(len(own) + 0.8 for own in shown.values()))
        draw_bars(figure.subplots(), shown)
        legend(figure, [shown])
        save(figure, IMAGES / f"{direction}.svg")
    draw_speed(IMAGES / "speed.svg")
    draw_tiles(IMAGES / "tiles.svg")


def draw_speed(path: Path) -> None:
    """Draw README's plot: the cases of `README_CASES` in both directions."""
    both = [bars(direction) for direction in gpu_table.DIRECTIONS]
    both = [{case: shown[case] for case in README_CASES} for shown in both]
    figure = new_figure(9, 4)
    for axes, shown, direction in zip(
        figure.subplots(1, 2), both, gpu_table.DIRECTIONS, strict=True
    ):
        draw_bars(axes, shown)
        axes.set_title(direction, fontsize=9)
    legend(figure, both)
    save(figure, path)


def draw_bars(axes: Any, shown: Bars) -> None:
    """Draw one horizontal bar for each contender, grouped by case."""
    middles, y = [], 0.0
    for own in shown.values():
        for i, (name, value) in enumerate(own.items()):
            axes.barh(y + i, value, 0.9, color=COLOURS[name])
            axes.text(value + 4, y + i, f"{value:.0f}", va="center", fontsize=7, color="#444444")
        middles.append(y + (len(own) - 1) / 2)
        y += len(own) + 0.8
    axes.set_yticks(middles, shown, fontsize=8)
    axes.set_ylim(y - 0.8, -1)
    axes.set_xlabel("TFLOP/s of the scores that the mask keeps", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure: Any, plots: list[Bars]) -> None:
    """Add a legend of the contenders that appear in any of `plots`."""
    from matplotlib.patches import Patch

    names = [n for n in COLOURS if any(n in own for shown in plots for own in shown.values())]
    handles = [Patch(color=COLOURS[name], label=name) for name in names]
    figure.legend(
        handles=handles, loc="outside upper right", ncols=min(4, len(names)), frameon=False
    )


def draw_tiles(path: Path) -> None:
    """Draw the times to find tiles: against `create_block_mask` (left), by length (right)."""
    figure = new_figure(8, 3.2)
    left, right = figure.subplots(1, 2)
    rows = newest_tiles()
    for i, row in enumerate(rows.values()):
        for shift, key, colour in ((-0.2, "ours_ms", "attnkit"), (0.2, "peer_ms", "Flex FLASH")):
            left.barh(i + shift, row[key], 0.36, color=COLOURS[colour])
            left.text(row[key] * 1.05, i + shift, f"{row[key]:.1f}", va="center", fontsize=7)
    left.set_yticks(range(len(rows)), [case for case, *_ in rows], fontsize=8)
    left.set(xscale="log", xlim=(0.5, 100), xlabel="ms on one H200, S=131072")
    left.set_title("attnkit (blue), create_block_mask (orange)", fontsize=9)
    left.invert_yaxis()
    by_case: dict[str, list[Row]] = {}
    for row in load("classify"):
        by_case.setdefault(row["case"], []).append(row)
    for case, own in by_case.items():
        points = [(row["length"], row["median_ms"]) for row in own]
        right.plot(*zip(*points, strict=True), marker="o", markersize=3, label=case)
    right.set(xscale="log", yscale="log", xlabel="S", ylabel="ms, one CPU thread")
    right.legend(fontsize=6, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def new_figure(width: float, height: float) -> Any:
    """Return a figure whose SVG keeps text as text, not as paths."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "attnkit",
            "font.size": 8,
            "font.family": "sans-serif",
        }
    )
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure: Any, path: Path) -> None:
    """Write the figure as SVG without dates, so that equal rows give equal files."""
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    lines = [line.rstrip() for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")

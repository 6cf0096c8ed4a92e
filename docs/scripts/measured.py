"""What the committed rows of benchmarks/results say about masks and mods, as Markdown."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))

gpu_table = import_module("gpu_table")
cpu_table = import_module("table")

Row = dict[str, Any]
NO_ROW = "Measured time: no row."


class Case(NamedTuple):
    """A measured case: its name in the rows, and the library's call for the same, in Markdown."""

    name: str
    call: str


def load(name: str) -> list[Row]:
    """The rows of one file, oldest first."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def attention_lines(cases: Sequence[Case]) -> list[str]:
    """One line for each case and direction that has a row of ours on the GPU."""
    rows, lines = load("gpu"), []
    for case in cases:
        for direction in gpu_table.DIRECTIONS:
            own = gpu_table.newest(rows, direction, "sustained").get(case.name, {}).get("attnkit")
            if own is not None and "ms" in own:
                lines.append(
                    f"- {case.call}, {direction}: {own['ms']:.3f} ms, {own['tflops']:.0f} TFLOP/s "
                    f"({own['gpu'].removeprefix('NVIDIA ')}, {own['dtype']}, {sizes(own['shape'])})"
                )
    return lines


def tile_lines(cases: Sequence[Case]) -> list[str]:
    """One line for each case whose tiles were timed."""
    lines = []
    for case in cases:
        for row in newest_tiles().values():
            if row["case"] == case.name and row["batch"] == 1:
                peer = f"; `create_block_mask` {row['peer_ms']:.1f} ms" if "peer_ms" in row else ""
                lines.append(
                    f"- {case.call}, tiles at S={row['length']} "
                    f"({row['gpu'].removeprefix('NVIDIA ')}): {row['ours_ms']:.2f} ms{peer}"
                )
        for row in load("classify"):
            if row["case"] == case.name and row["length"] == 2**20:
                lines.append(
                    f"- {case.call}, tiles at S={row['length']} (one CPU thread): "
                    f"{row['median_ms']:.0f} ms"
                )
    return lines


def newest_tiles() -> dict[tuple[str, int, int], Row]:
    """The newest row of tiles on the GPU that is not noisy, by case, length and batch."""
    rows = [row for row in load("masks") if row["device"] == "cuda" and not row["noisy"]]
    peers = [row for row in rows if "peer_ms" in row]
    return {(row["case"], row["length"], row["batch"]): row for row in peers}


def sizes(shape: Row) -> str:
    """B=2 H=16 S=8192 D=128, with what differs from it."""
    text = f"B={shape['batch']} H={shape['heads']} S={shape['length']} D={shape['head_dim']}"
    if shape["kv_heads"] != shape["heads"]:
        text += f", {shape['kv_heads']} kv heads"
    return text


def measured(attention: Sequence[Case], tiles: Sequence[Case] = ()) -> str:
    """The measured lines of a gallery entry, or that there are none."""
    lines = attention_lines(attention) + tile_lines(tiles)
    return "\n".join(["Measured:", "", *lines]) if lines else NO_ROW

"""Format the committed rows of benchmarks/results about a mask or mod as Markdown."""

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
    """Hold a measured case.

    Attributes:
        name: name of the case in the rows.
        call: the library call that builds the same mask or mod, in Markdown.
    """

    name: str
    call: str


def load(name: str) -> list[Row]:
    """Return the rows of results/`name`.jsonl, oldest first."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def attention_lines(cases: Sequence[Case]) -> list[str]:
    """Return one Markdown line per case and direction for which attnkit has a row on the GPU."""
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
    """Return one Markdown line per timed classification of the cases' tiles."""
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
    """Return the newest GPU row of tile times that is not noisy, by (case, length, batch)."""
    rows = [row for row in load("masks") if row["device"] == "cuda" and not row["noisy"]]
    peers = [row for row in rows if "peer_ms" in row]
    return {(row["case"], row["length"], row["batch"]): row for row in peers}


def sizes(shape: Row) -> str:
    """Format the sizes of a case, such as "B=2 H=16 S=8192 D=128"."""
    text = f"B={shape['batch']} H={shape['heads']} S={shape['length']} D={shape['head_dim']}"
    if shape["kv_heads"] != shape["heads"]:
        text += f", {shape['kv_heads']} kv heads"
    return text


def measured(attention: Sequence[Case], tiles: Sequence[Case] = ()) -> str:
    """Return the measured lines of a gallery entry, or `NO_ROW` if there are none."""
    lines = attention_lines(attention) + tile_lines(tiles)
    return "\n".join(["Measured:", "", *lines]) if lines else NO_ROW

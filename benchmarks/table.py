"""Print the newest saved rows of each case as a Markdown table: `python benchmarks/table.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parent / "results" / "attention.jsonl"
DTYPES = ("float32", "bfloat16")
COLUMNS = (  # title, direction, peer (None: our own time)
    ("forward", "forward", None),
    ("FlexAttention", "forward", "flex compiled"),
    ("SDPA dense", "forward", "sdpa dense"),
    ("SDPA causal", "forward", "sdpa is_causal"),
    ("backward", "backward", None),
    ("SDPA dense", "backward", "sdpa dense"),
    ("SDPA causal", "backward", "sdpa is_causal"),
)
Row = dict[str, Any]


def cell(rows: list[Row], direction: str, peer: str | None) -> str:
    """Format attnkit's time, or the peer's time as a multiple of it, for each measured dtype."""
    parts = []
    for dtype in DTYPES:
        own = [r for r in rows if (r["direction"], r["dtype"]) == (direction, dtype)]
        # all peers of one measurement share our time; ratios of an older one are to another time
        own = [r for r in own if r["ours_ms"] == own[-1]["ours_ms"]]
        compared = [r for r in own if "ratio" in r and peer in (None, r["peer"])]
        if peer is None and own:
            parts.append(f"{own[-1]['ours_ms']:.0f} ms")
        elif compared:
            parts.append(f"{compared[-1]['ratio']:.1f}x")
    return ", ".join(parts)


def markdown(rows: list[Row]) -> str:
    """Format a Markdown table, one line for each case; each cell shows float32, then bfloat16."""
    titles = [title for title, _, _ in COLUMNS]
    lines = [f"| float32, bfloat16 | {' | '.join(titles)} |", "| --- |" + " --- |" * len(titles)]
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        cells = [cell(own, direction, peer) for _, direction, peer in COLUMNS]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def saved() -> list[Row]:
    """Return the rows that `run.py --save` wrote, oldest first."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


if __name__ == "__main__":
    print(markdown(saved()))

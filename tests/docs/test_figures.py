"""Check that measured figures in the pages are those of rows, and each table line is one run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any

import benchmark_pages
import gpu_table
import pytest
from measured import RESULTS, ROOT, load

PAGES = ("README.md", "docs/benchmarks.md", "docs/hopper.md", "docs/index.md", "docs/support.md")
# unit -> how a field of a row ends, and what its value is divided by
FIELDS: dict[str, tuple[str, float]] = {
    "x": ("ratio", 1),
    "\u00d7": ("ratio", 1),
    "TFLOP/s": ("tflops", 1),
    "ms": ("ms", 1),
    "us": ("us", 1),
    "µs": ("us", 1),
    "s": ("_s", 1),
    "seconds": ("_s", 1),
    "GHz": ("ghz", 1),
    "GiB": ("bytes", 2**30),
    "MiB": ("bytes", 2**20),
    "KiB": ("bytes", 2**10),
    "GB": ("bytes", 1e9),
    "MB": ("bytes", 1e6),
    "bytes": ("bytes", 1),
    "tokens/s": ("tokens_a_second", 1),
    "%": ("share", 0.01),  # no row has such a field: each needs a reason
    "times": ("ratio", 1),
    "cycles": ("cycles", 1),
}
UNITS = "|".join(sorted(map(re.escape, FIELDS), key=len, reverse=True))
FIGURE = re.compile(rf"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)[ \u00a0]?({UNITS})(?!\w)(?! ?\d)")
WORDS = re.compile(r"\b(?:twice|thrice|half|double) (?:as|the time|the speed)\b")
NOT_MEASURED = {
    ("docs/benchmarks.md", "1.17x"): "shows how a cell is read",
    ("docs/benchmarks.md", "95 %"): "the confidence of an interval, benchmarks/timing.py",
    ("docs/benchmarks.md", "3 %"): "the limit of an interval, benchmarks/gpu_timing.py",
    ("docs/benchmarks.md", "40 ms"): "gpu_timing.MODES",
    ("docs/benchmarks.md", "4 ms"): "gpu_timing.MODES of older runs",
    ("docs/benchmarks.md", "80 %"): "the definition of the spread",
    ("docs/support.md", "264 bytes"): "the size of a sum in the code",
    ("docs/support.md", "64 MiB"): "a limit in the code",
}


@cache
def prose(page: str) -> str:
    """Return a page without its generated tables, which other tests compare as a whole."""
    text = (ROOT / page).read_text()
    return benchmark_pages.TABLE.sub("", text)


def claims(text: str) -> Iterator[tuple[str, str, str]]:
    for match in FIGURE.finditer(text):
        yield match[0], match[1], match[2]


def values(item: Any, ending: str) -> Iterator[float]:
    """Yield the numbers in a row whose field name ends with `ending`, including nested rows."""
    for name, value in item.items():
        if isinstance(value, dict):
            yield from values(value, ending)
        elif isinstance(value, int | float) and name.endswith(ending):
            yield value


@cache
def measured(ending: str) -> list[float]:
    rows = chain.from_iterable(load(path.stem) for path in RESULTS.glob("*.jsonl"))
    return [value for row in rows for value in values(row, ending)]


def is_a_row(number: str, unit: str) -> bool:
    ending, factor = FIELDS[unit]
    digits = len(number.partition(".")[2])
    plain = number.replace(",", "")
    return any(f"{value / factor:.{digits}f}" == plain for value in measured(ending))


@pytest.mark.parametrize("page", PAGES)
def test_a_figure_is_that_of_a_row_or_has_a_reason(page: str) -> None:
    text = prose(page)
    for figure, number, unit in claims(text):
        known = (page, figure) in NOT_MEASURED or is_a_row(number, unit)
        assert known, f"{page}: {figure!r} is no row of {RESULTS}"
    assert not WORDS.findall(text), "say the figure of a row"


def test_reasons_are_of_figures_that_are_there() -> None:
    found = {(page, figure) for page in PAGES for figure, *_ in claims(prose(page))}
    assert set(NOT_MEASURED) <= found


def test_claims_are_found() -> None:
    text = "1.3x faster, 63.3 ms, 1,024 MiB; 12\u00a0% and 700 TFLOP/s, tiles of 128 x 128 or 64x64"
    assert [figure for figure, *_ in claims(text)] == [
        *("1.3x", "63.3 ms", "1,024 MiB", "12\u00a0%", "700 TFLOP/s"),
    ]
    row = benchmark_pages.gpt2_rows()["attnkit"]
    assert is_a_row(f"{row['ms']:.1f}", "ms")
    assert is_a_row(f"{row['peak_bytes'] / 2**30:.2f}", "GiB")
    assert not is_a_row("98765.4", "ms")


# --- the two tables of attention


CELL = re.compile(r"(\d+) \((\d+\.\d+)\)(?: (\d+\.\d+)x)?")
BEST = re.compile(r"\*\*(\d+\.\d+)x\*\* (.+)")


def attention_lines(direction: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (case, {column: cell}) of each line in the page's attention table."""
    table = next(
        m[0] for m in benchmark_pages.TABLE.finditer(benchmark_pages.PAGE.read_text())
        if m[2] == direction
    )  # fmt: skip
    head, _, *lines = (line for line in table.splitlines() if line.startswith("| "))
    titles = [part.strip() for part in head.strip("|").split("|")]
    for line in lines:
        cells = [part.strip() for part in line.strip("|").split("|")]
        yield cells[0], dict(zip(titles[1:], cells[1:], strict=True))


@pytest.mark.parametrize("direction", gpu_table.DIRECTIONS)
def test_a_line_is_one_run_and_its_best_peer_one_of_it(direction: str) -> None:
    rows = [json.loads(line) for line in (RESULTS / "gpu.jsonl").read_text().splitlines()]
    lines = list(attention_lines(direction))
    assert lines
    for case, cells in lines:
        runs, ratios = [], {}
        for name, cell in cells.items():
            if (match := CELL.fullmatch(cell)) is None:
                assert not cell or name in ("density", "best peer"), (case, name)
                continue
            runs.append({
                row["run"] for row in rows
                if (row["case"], row["direction"], row["contender"]) == (case, direction, name)
                and (f"{row.get('tflops', 0):.0f}", f"{row.get('ms', 0):.3f}") == match.groups()[:2]
                and match[3] in (None, f"{row['ratio']:.2f}")
            })  # fmt: skip
            if not name.startswith("attnkit"):
                ratios[name] = match[3]
        assert set.intersection(*runs), case
        best = BEST.fullmatch(cells["best peer"])
        assert (best is None) == (not ratios), case
        if best is not None:
            assert best[1] == min(ratios.values(), key=float) == ratios[best[2]], case

"""Check that docs/benchmarks.md and README's plot show what the committed rows say."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import benchmark_pages
import gpu_table
import pytest

AGAIN = "run `python docs/scripts/write.py`"
PAGE = benchmark_pages.PAGE.read_text()


def texts(path: Path) -> list[str]:
    """Return the words of a plot, in the order in which they were drawn."""
    root = ElementTree.parse(path).getroot()
    return ["".join(e.itertext()).strip() for e in root.iter() if e.tag.endswith("text")]


@pytest.mark.parametrize("name", benchmark_pages.tables())
def test_tables_are_those_of_the_rows(name: str) -> None:
    table = benchmark_pages.tables()[name]
    assert f"<!-- table: {name} -->\n\n{table}\n\n<!-- end of table -->" in PAGE, AGAIN
    assert table.count("\n") >= 4


@pytest.mark.parametrize("direction", gpu_table.DIRECTIONS)
def test_plots_of_attention_show_the_rows(direction: str) -> None:
    shown = benchmark_pages.bars(direction)
    words = texts(benchmark_pages.IMAGES / f"{direction}.svg")
    assert set(shown) <= set(words), AGAIN
    figures = [f"{value:.0f}" for own in shown.values() for value in own.values()]
    assert figures == [word for word in words if word.isdigit()][-len(figures) :], AGAIN


def test_the_plot_of_readme_shows_the_rows() -> None:
    words = texts(benchmark_pages.IMAGES / "speed.svg")
    drawn = [word for word in words if word.isdigit()]
    for direction in gpu_table.DIRECTIONS:
        shown = benchmark_pages.bars(direction)
        figures = [
            f"{value:.0f}"
            for case in benchmark_pages.README_CASES
            for value in shown[case].values()
        ]
        assert " ".join(figures) in " ".join(drawn), AGAIN


def test_the_plot_of_tiles_shows_the_rows() -> None:
    words = texts(benchmark_pages.IMAGES / "tiles.svg")
    for (case, *_), row in benchmark_pages.newest_tiles().items():
        for wanted in (case, f"{row['ours_ms']:.1f}", f"{row['peer_ms']:.1f}"):
            assert wanted in words, AGAIN


def test_commands_and_rows_of_the_page_exist() -> None:
    root = benchmark_pages.DOCS.parent
    linked = re.findall(r"\]\(\.\./([\w./]+)\)", PAGE)
    called = re.findall(r"python ([\w/]+\.py)", PAGE)
    assert linked
    assert called
    assert not {path for path in linked + called if not (root / path).exists()}
    listed = set(re.findall(r"results/(\w+\.jsonl)", PAGE))
    committed = {path.name for path in (root / "benchmarks" / "results").glob("*.jsonl")}
    assert {name for name in committed if not name[0].isdigit()} == listed

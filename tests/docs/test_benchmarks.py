"""Check that docs/benchmarks.md and README's plot agree with the committed rows."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import benchmark_pages
import gpu_table
import pytest

AGAIN = "run `python docs/scripts/write.py`"
PAGE = benchmark_pages.PAGE.read_text()


def texts(path: Path) -> list[str]:
    """Return the texts in an SVG plot, in drawing order."""
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


def measured_in(run: str, case: str, **contenders: dict[str, float]) -> list[dict[str, Any]]:
    shared = {"benchmark": "gpu attention", "mode": "sustained", "direction": "forward"}
    shared |= {"run": run, "case": case, "commit": "0" * 12, "density": 0.5}
    timed = {"ms": 1.0, "ms_least": 0.9, "ms_most": 1.3, "rounds": 9, "ghz": 1.5, "ratio": 1.0}
    return [
        shared | timed | {"contender": name.replace("_", " "), "tflops": 100.0 + i} | own
        for i, (name, own) in enumerate(contenders.items())
    ]


def test_every_contender_has_a_column_and_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(import_module("gpu_contenders").CONTENDERS)
    assert set(benchmark_pages.COLOURS) == set(names)
    rows = measured_in("2026-12-01T10:00", "full", **{name: {} for name in names})
    monkeypatch.setattr(benchmark_pages, "load", lambda name: rows)
    assert set(benchmark_pages.bars("forward")["full"]) == set(names)
    head = benchmark_pages.attention("forward").splitlines()[0]
    assert all(f"| {name} |" in head for name in names)


def test_runs_say_how_peers_were_set_and_how_far_rounds_lie_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swept = {"setting": "max-autotune", "spread": 0.02, "ratio_spread": 0.07}
    sure = swept | {"uncertainty": 0.012, "ratio_uncertainty": 0.004}
    rows = measured_in("2026-12-01T10:00", "full", attnkit={}, cuDNN={"ms_most": 1.5})
    rows += measured_in("2026-12-02T10:00", "causal", attnkit=swept, cuDNN=swept)
    rows += measured_in("2026-12-03T10:00", "alibi", attnkit=sure, cuDNN=sure)
    monkeypatch.setattr(benchmark_pages, "load", lambda name: rows)
    old, new, newest = benchmark_pages.runs().splitlines()[2:]
    assert old.endswith("| default | 60 % from least to most |")
    assert new.endswith("| best setting | 7 % spread |")
    assert newest.endswith("| best setting | ±1.2 % |")

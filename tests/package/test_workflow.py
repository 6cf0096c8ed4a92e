"""Check that the make targets and files named in the workflow and contributor pages exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
PAGES = ("CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md", "SECURITY.md")


def targets(text: str) -> set[str]:
    """Return the make targets that `text` calls."""
    return set(re.findall(r"(?:run: |`)make ([a-z-]+)", text))


def test_the_workflow_calls_the_gates() -> None:
    called = targets(WORKFLOW)
    assert {"lint", "docs", "test", "test-assemblers", "demo"} <= called
    local = set(re.findall(r"^make ([a-z-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    assert local <= called


def test_make_targets_exist() -> None:
    called = targets("\n".join([WORKFLOW, *((ROOT / page).read_text() for page in PAGES)]))
    assert len(called) > 6
    assert called <= set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def test_the_workflow_tests_the_pythons_that_the_package_takes() -> None:
    least = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    versions = re.search(r"python: \[(.*)\]", WORKFLOW)
    assert least
    assert versions
    assert least[1] == re.findall(r'"([\d.]+)"', versions[1])[0]


def test_the_map_of_the_rooms_is_the_enforced_order() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["id"] == "rooms")
    section = (
        (ROOT / "CONTRIBUTING.md").read_text().partition("## The rooms")[2].partition("\n## ")[0]
    )
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == [
        set(re.findall(r"\w+", layer)) for layer in layers
    ]


def test_named_files_exist() -> None:
    paths = {
        path
        for page in PAGES
        for path in re.findall(
            r"`((?:attnkit|templates|tests|benchmarks|docs|masks|mods)/[\w./]+)`",
            (ROOT / page).read_text(),
        )
    }
    assert len(paths) > 20
    assert not {path for path in paths if not (ROOT / path).exists()}


def test_tables_that_an_operation_enters_are_where_the_page_says() -> None:
    named = re.findall(r"`([\w/]+\.py)`, `(\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 8
    for path, name in named:
        assert re.search(rf"^(def )?{name}\b", (ROOT / path).read_text(), re.MULTILINE), (
            path,
            name,
        )

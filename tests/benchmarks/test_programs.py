"""Check that every benchmark imports, prints whole lines, and describes its rows."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnkit.schedule.scheduler import schedule_forward
from attnkit.templates.sm90.config import ForwardConfig

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

# Some programs need libraries that are missing where there is no GPU or DSL.
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in ("cuda", "cutlass", "triton"):
            raise
"""


def test_every_program_imports() -> None:
    """Every benchmark can be imported.

    The benchmarks import internal modules of attnkit, which may move.
    """
    paths = os.pathsep.join([str(ROOT), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ablation" in names


def test_the_ablation_changes_existing_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """The changes of the ablation are fields of `ForwardConfig` or scheduler arguments."""
    pytest.importorskip("cutlass", reason="the DSL exists for Linux only")
    monkeypatch.syspath_prepend(BENCHMARKS)
    changes = importlib.import_module("ablation").CHANGES
    for name, change in changes.items():
        if name != "as it is":
            assert ForwardConfig(**change.settings) != ForwardConfig() or change.schedule, name
        assert change.schedule.keys() <= inspect.signature(schedule_forward).parameters.keys()


def test_no_program_redraws_a_line() -> None:
    """No benchmark prints progress bars, so output to a file has one line per measurement."""
    for path in BENCHMARKS.glob("*.py"):
        assert not re.search(r"tqdm|\\r", path.read_text()), path.name


def test_every_file_of_rows_is_described() -> None:
    page = (BENCHMARKS / "results" / "README.md").read_text()
    files = {path.name for path in (BENCHMARKS / "results").glob("*.jsonl")}
    described = {name for line in page.splitlines() if line.startswith("| `")
                 for name in re.findall(r"`([\w-]+\.jsonl)`", line.split("|")[1])}  # fmt: skip
    assert described == files
    programs = set(re.findall(r"`((?:benchmarks|tests)/[\w/]+\.py)`", page))
    assert len(programs) > 4
    assert not {program for program in programs if not (ROOT / program).exists()}

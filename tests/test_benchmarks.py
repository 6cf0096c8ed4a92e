"""The benchmark runner checks before it times, compares in turn, and tables what was saved."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TIMING = runpy.run_path(str(ROOT / "benchmarks" / "timing.py"))
TABLE = runpy.run_path(str(ROOT / "benchmarks" / "table.py"))


def test_functions_are_timed_in_turn() -> None:
    calls: list[str] = []
    functions = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = TIMING["in_turn"](functions, seconds=0, least_rounds=3, most_rounds=9)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(t.rounds) for name, t in times.items()} == {"a": 3, "b": 3}


def test_ratio_is_taken_within_rounds() -> None:
    # the machine is ten times slower in the last two rounds, for both
    ours, theirs = TIMING["Times"]((1.0, 10.0, 10.0)), TIMING["Times"]((3.0, 30.0, 30.0))
    assert theirs.over(ours) == pytest.approx(3)
    assert (ours.median, ours.least, ours.noisy) == (10, 1, True)
    assert not TIMING["Times"]((1.0, 1.1, 1.2)).noisy


def test_table_shows_the_newest_rows() -> None:
    row = {"case": "causal", "direction": "forward", "dtype": "float32", "peer": "flex compiled"}
    old, new = row | {"ours_ms": 9.0, "ratio": 0.5}, row | {"ours_ms": 5.0, "ratio": 1.5}
    refused = row | {"direction": "backward", "ours_ms": 7.0, "skipped": "no backward"}
    lines = TABLE["markdown"]([old, new, refused]).splitlines()
    assert lines[-1] == "| causal | 5 ms | 1.5x |  |  | 7 ms |  |  |"
    assert lines[0].count("|") == lines[-1].count("|")


def test_runner_measures_and_checks(tmp_path: Path) -> None:
    command = [
        sys.executable,
        ROOT / "benchmarks" / "run.py",
        "--only",
        "window",
        "--length",
        "512",
    ]
    command += ["--peer", "sdpa dense", "--threads", "1", "--seconds", "0", "--attempts", "1"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("window 512")]
    assert len(lines) == 4  # forward and backward, float32 and bfloat16
    assert all("sdpa dense" in line and "x (least times" in line for line in lines)

"""Run a sample of the library in the emulated GPU kernels (`make emulate-all` runs all)."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import sampled

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

ROOT = Path(__file__).parents[2]
SAVED = ROOT / "benchmarks" / "results" / "emulated.jsonl"

FORWARD = (
    "masks:document/causal",
    "mods:compose",
    "mods:t5_bias",
    "masks:natten/2d-tiled",
)
BACKWARD = ("masks:sliding_window/both", "mods:alibi/learned")


@pytest.fixture(scope="module")
def runner() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return runpy.run_path(str(ROOT / "benchmarks" / "emulate.py"))
    finally:
        sys.path.pop(0)


def test_the_samples_are_of_the_library(runner: dict[str, Any]) -> None:
    assert {*FORWARD, *BACKWARD} <= set(runner["library"](300))


@pytest.mark.parametrize("name", sampled([(name,) for name in FORWARD], 4))
def test_forward(name: str, runner: dict[str, Any]) -> None:
    job = runner["Job"](name, "sm_100a", 300, 64, "bfloat16", "check", 1, 1, None, False)
    row = runner["run"](job)
    assert row["ok"], row
    assert set(row["errors"]) == {"LSE", "output"}


@pytest.mark.parametrize("name", sampled([(name,) for name in BACKWARD], 2))
def test_backward(name: str, runner: dict[str, Any]) -> None:
    # as many draws as `make emulate-all` has: two say little of a gradient of two numbers
    job = runner["Job"](name, "sm_100a", 200, 64, "bfloat16", "check", 1, 8, None, True)
    row = runner["run"](job)
    assert row["ok"], row
    assert row["kernels"] >= 4  # forward, statistics, gradients, rounding
    expected = {"LSE", "output", "dquery", "dkey", "dvalue"}
    assert set(row["errors"]) - {"dcaptured 0"} == expected


def test_what_was_saved_is_right(runner: dict[str, Any]) -> None:
    """The saved rows cover the library in both directions, without errors or findings."""
    lines = [json.loads(line) for line in SAVED.read_text().splitlines()]
    heads = [line for line in lines if "benchmark" in line]
    rows = [line for line in lines if "benchmark" not in line]
    assert {head["benchmark"] for head in heads} == {"library in the emulator"}
    assert all(not row["findings"] for row in rows)
    assert [row["variant"] for row in rows if not row["ok"]] == []
    names = set(runner["library"](300))
    saved = {d: {r["variant"] for r in rows if r["direction"] == d} for d in runner["DIRECTIONS"]}
    assert saved["forward"] == names
    assert saved["backward"] == names
    masked = [r for r in rows if r["direction"] == "backward" and r["variant"].startswith("masks:")]
    assert {r["mode"] for r in masked} == {"check"}

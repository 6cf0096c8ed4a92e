"""Check the search for wrong results: it repeats, and prints a seed and a program per failure."""

from __future__ import annotations

import re
import runpy
import types
from pathlib import Path
from typing import Any

import pytest

from attnkit.splice import cpu
from attnkit.testing import CheckError

FUZZ = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> dict[str, Any]:
    return runpy.run_path(str(FUZZ))


def test_a_round_without_a_fault_passes(
    fuzz: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz["main"](["--only", "cpu", "--seed", "5"]) == 0
    assert re.fullmatch(r"no wrong result in \d+ calls\n", capsys.readouterr().out)


@pytest.mark.parametrize("target", ["cpu", "sm_90a", "sm_100a"])
def test_rounds_draw_calls_of_all_kinds(fuzz: dict[str, Any], target: str) -> None:
    """A round of one example would be the smallest call alone, whatever the seed."""
    drawn: list[Any] = []

    def record(variant: Any, case: Any, backends: Any) -> Any:
        drawn.append(case)
        return types.SimpleNamespace(rows=())

    run_round = fuzz["run_round"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run_round.__globals__, "check_case", record)
        for seed in range(12):
            run_round(fuzz["TARGETS"][target], seed)
    assert len(set(drawn)) > 12
    assert {"softmax", "sigmoid", "none"} <= {case.normalization for case in drawn}
    assert any(case.sink for case in drawn)
    assert any(case.dropout_p for case in drawn)
    assert any(case.statistics for case in drawn)


def test_the_time_is_shared_between_targets(fuzz: dict[str, Any]) -> None:
    search = fuzz["Search"](0, 1.0, 0.5)
    took = {"cpu": 1.0, "sm_90a": 4.0, "sm_100a": 4.0}
    for _ in range(100):
        name = search._next()
        search.spent[name] += took[name]
    shares = {name: spent / sum(search.spent.values()) for name, spent in search.spent.items()}
    assert shares == pytest.approx({"cpu": 0.5, "sm_90a": 0.25, "sm_100a": 0.25}, abs=0.05)
    only_cpu = fuzz["Search"](0, 1.0, 0.0)
    assert only_cpu._next() == "cpu"


def test_a_fault_is_printed_with_its_seed_and_a_program(
    fuzz: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cpu.CpuHooks.score

    def wrong(self: Any, score: Any, tile: Any) -> Any:
        return 1.01 * real(self, score, tile)

    monkeypatch.setattr(cpu.CpuHooks, "score", wrong)
    assert fuzz["main"](["--minutes", "1", "--emulated", "0", "--seed", "3"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    *_, last = printed.splitlines()
    seed = re.fullmatch(r"seed (\d+); this repeats the round: (.*)", last)
    assert seed is not None
    assert seed[2] == f"python benchmarks/fuzz.py --seed {seed[1]} --only cpu"
    program = printed.partition("run this to see it again:\n")[2].partition("\nseed ")[0]
    with pytest.raises(CheckError):
        exec(compile(program, "<failure>", "exec"), {"__name__": "again"})


def test_refuses_a_share_that_is_none(
    fuzz: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fuzz["main"](["--emulated", "2"])
    assert "--emulated must be from 0 to 1, got 2.0" in capsys.readouterr().err

"""Check that noisy cases of the GPU benchmark get more rounds, and are not saved if still noisy."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

committed = importlib.import_module("committed")
gpu = importlib.import_module("gpu")
gpu_timing = importlib.import_module("gpu_timing")
timing = importlib.import_module("timing")
CASES = Path(__file__).parents[2] / "benchmarks" / "gpu_cases.toml"


def series(*ms: float) -> Any:
    return gpu_timing.Series(tuple(gpu_timing.Reading(x, 1.5) for x in ms))


@given(st.lists(st.floats(0.01, 100), min_size=2), st.floats(0.1, 10))
def test_the_spread_is_relative_and_within_the_range(values: list[float], factor: float) -> None:
    found = timing.spread(values)
    middle = sorted(values)[len(values) // 2]
    assert 0 <= found <= (max(values) - min(values)) / min(middle, *values) + 1e-9
    assert timing.spread([factor * v for v in values]) == pytest.approx(found, abs=1e-9)
    assert timing.spread([values[0]] * 5) == timing.spread(values[:1]) == 0


def test_the_spread_leaves_out_a_tenth_at_each_end() -> None:
    assert timing.spread(range(100, 201)) == pytest.approx(80 / 150)
    assert timing.spread([1.0] * 20 + [9.0]) == 0  # one outlier of 21 rounds


def test_times_and_ratios_spread_on_their_own() -> None:
    ours = series(1.0, 2.0, 4.0)
    theirs = series(3.0, 6.0, 12.0)  # the machine slowed down for both
    found = theirs.spreads(ours)
    assert found["spread"] > 1
    assert found["ratio_spread"] == pytest.approx(0)
    apart = series(4.0, 2.0, 1.0).spreads(ours)
    assert apart["ratio_spread"] > apart["spread"] > 1
    assert set(theirs.spreads(None)) == {"spread"}


class Scripted:
    """Timer that takes the readings of each function from a list."""

    def __init__(self, **ms: Iterator[float]) -> None:
        self.ms, self.readings = ms, 0

    def prepare(self, function: str) -> str:
        return function

    def measure(self, function: str, prepared: str) -> Any:
        self.readings += 1
        return gpu_timing.Reading(next(self.ms[function]), 1.5)


def steady(rounds: int, **ms: list[float]) -> Any:
    timer = Scripted(**{name: iter(values) for name, values in ms.items()})
    found = gpu_timing.steady({name: name for name in ms}, timer, base="a", rounds=rounds)
    return found, timer


def test_the_first_round_does_not_count() -> None:
    found, _ = steady(6, a=[50.0, *[1.0] * 6], b=[70.0, *[2.0] * 6])
    assert (found.attempts, found.noisy) == (1, False)
    assert found.series["b"].times.rounds == (2.0,) * 6


def test_an_uncertain_case_gets_more_rounds_and_keeps_all() -> None:
    found, timer = steady(6, a=[1.0] * 14, b=[2.0, 2.2, *[2.0] * 12])
    assert (found.attempts, found.noisy, timer.readings) == (2, False, 28)
    assert found.series["b"].times.rounds == (2.2, *[2.0] * 11)


def test_a_case_that_stays_uncertain_says_so() -> None:
    found, _ = steady(6, a=[1.0] * 35, b=[2.0, 3.0] * 18)
    assert (found.attempts, found.noisy) == (5, True)


def test_ratios_count_where_times_drift_together() -> None:
    drift = [1.0 + 0.001 * i for i in range(7)]
    found, _ = steady(6, a=drift, b=[2 * x for x in drift])
    assert found.noisy is False
    apart, _ = steady(6, a=[1.0, *[1.0, 1.05] * 21], b=[2.0, *[2.1, 2.0] * 21])
    assert apart.attempts > 1  # each time is within its limit, and the ratio is not


def test_few_rounds_have_no_interval() -> None:
    assert timing.uncertainty([1.0] * 5) == math.inf
    assert timing.uncertainty([1.0] * 6) == 0


@pytest.mark.parametrize(
    ("n", "rank"), [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (25, 8)]
)
def test_the_interval_of_the_median_is_that_of_tables(n: int, rank: int) -> None:
    """Ranks of nonparametric confidence limits of the median, 95 %, from printed tables."""
    values = [float(100 + i) for i in range(1, n + 1)]
    middle = (values[(n - 1) // 2] + values[n // 2]) / 2
    half = (values[n - rank] - values[rank - 1]) / 2
    assert timing.uncertainty(values[::-1]) == pytest.approx(half / middle)


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**31))
def test_the_interval_covers_the_true_median(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    covered, samples = 0, 400
    for _ in range(samples):
        values = torch.randn(15, generator=random).exp() + 10  # skewed, with median 11
        low, high = sorted(values.tolist())[3], sorted(values.tolist())[11]
        found = timing.uncertainty(values.tolist()) * values.median().item()
        assert found == pytest.approx((high - low) / 2)
        covered += low <= 11 <= high
    assert covered / samples > 0.93


def test_nothing_to_time_is_not_noisy() -> None:
    assert gpu_timing.steady({}, Scripted(), base="a", rounds=3).noisy is False


def rows(noisy: bool, failed: bool = False) -> list[dict[str, Any]]:
    shared = {"noisy": noisy, "attempts": 3 if noisy else 1}
    timed = {"contender": "attnkit", "ms": 1.0, "ghz": 1.5, "cycles": 1e6, "tflops": 1.0}
    timed |= {"error": 0.0, "error_allowed": 0.0, "ratio": 1.0}
    timed |= {"spread": 0.01, "uncertainty": 0.01, "setting": "default"}
    away: dict[str, Any] = {"contender": "cuDNN", "skipped": "no kernel"}
    return [shared | timed, shared | away | ({"failed": True} if failed else {})]


@pytest.mark.parametrize(
    ("noisy", "failed", "status"), [((), "", 0), (("causal",), "", 3), (("causal",), "full", 1)]
)
def test_noisy_cases_are_printed_and_not_saved(
    noisy: tuple[str, ...], failed: str, status: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> None:  # fmt: skip
    def measure(case: Any, *rest: Any) -> Any:
        yield from (
            {"case": case["name"]} | row
            for row in rows(case["name"] in noisy, case["name"] == failed)
        )

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(committed, "committed", lambda given: "0" * 12)
    path = tmp_path / "rows.jsonl"
    options = gpu.arguments().parse_args(["--save", str(path)])
    cases = [{"name": "full"}, {"name": "causal"}, {"name": "causal S=2048"}]
    config = {"shape": {"batch": 1, "heads": 1, "length": 64, "head_dim": 64}}
    timer: Any = SimpleNamespace()
    assert gpu.run(config, cases, options, timer, torch.device("cpu")) == status
    saved = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [case["name"] for case in cases if case["name"] not in noisy]
    assert [row["case"] for row in saved] == [name for name in kept for _ in range(2)]
    assert {row["commit"] for row in saved} == {"0" * 12}
    printed = capsys.readouterr().out
    assert printed.count("no kernel") == len(cases)
    assert ("too noisy to save: causal" in printed) == bool(noisy)


@pytest.mark.parametrize(
    ("late", "attempts", "noisy"), [(0, 1, False), (1, 2, False), (9, 3, True)]
)
def test_host_times_that_spread_are_measured_again(
    late: int, attempts: int, noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host times are measured again while they spread, up to three times.

    The host is slow every other time in the first `late` attempts.
    """
    host = importlib.import_module("gpu_host")
    monkeypatch.setattr(host, "CALLS", 1)
    clock = SimpleNamespace(now=0.0, calls=0)

    def call() -> None:
        slow = clock.calls < late * (1 + host.REPEATS) and clock.calls % 2
        clock.now += 3e-5 if slow else 1e-5
        clock.calls += 1

    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    row = host.host_us(call, torch.device("cpu"))
    assert (row["attempts"], row["noisy"]) == (attempts, noisy)
    if not noisy:
        assert row["host_us"] == pytest.approx(10)


@pytest.mark.parametrize("noisy", [False, True])
def test_a_noisy_training_step_is_not_saved(
    noisy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2 = importlib.import_module("gpt2")
    row = {"contender": "attnkit", "noisy": noisy, "losses": [1.0], "ms": 1.0, "ratio": 1.0}
    row |= {"tokens_a_second": 1, "ghz": None}
    monkeypatch.setattr(gpt2, "measured", lambda *args: [row])
    monkeypatch.setattr(committed, "committed", lambda given: "0" * 12)
    path = tmp_path / "rows.jsonl"
    small = "--layers 1 --heads 1 --width 8 --vocabulary 8 --batch 1 --length 16 --document 8"
    status = gpt2.main([*small.split(), "--device", "cpu", "--save", str(path)])
    assert (status, path.exists()) == ((3, False) if noisy else (0, True))


def test_missing_cases_are_those_without_rows_of_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def measure(case: Any, *rest: Any) -> Any:
        seen.append(case["name"])
        shared = {"case": case["name"], "direction": "forward", "mode": "burst"}
        yield from (shared | row for row in rows(noisy=False))

    monkeypatch.setattr(gpu, "measure", measure)
    path = tmp_path / "rows.jsonl"
    cases = [{"name": "full"}, {"name": "causal"}]
    config = {"shape": {"batch": 1, "heads": 1, "length": 64, "head_dim": 64}}

    def run(commit: str, cases: list[Any], *words: str) -> list[str]:
        monkeypatch.setattr(committed, "committed", lambda given: commit)
        options = gpu.arguments().parse_args(["--save", str(path), "--missing", *words])
        timer: Any = SimpleNamespace()
        seen.clear()
        assert gpu.run(config, cases, options, timer, torch.device("cpu")) == 0
        return list(seen)

    assert run("a" * 12, cases[:1]) == ["full"]
    assert run("a" * 12, cases) == ["causal"]
    assert run("a" * 12, cases) == []
    assert run("a" * 12, cases, "--backward") == ["full", "causal"]
    assert run("a" * 12, cases, "--mode", "sustained") == ["full", "causal"]
    assert run("b" * 12, cases) == ["full", "causal"]
    assert gpu.main(["--missing"]) == 2


@pytest.mark.parametrize("words", ["--rounds 5", "--rounds x", "--rounds -3", "--attempts 0"])
def test_rounds_without_a_spread_are_refused(words: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.arguments().parse_args(words.split())
    assert ended.value.code == 2
    assert "expected a number from" in capsys.readouterr().err

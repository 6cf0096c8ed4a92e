"""Check the benchmark runners: check before timing, alternation, and tables of saved rows."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import runpy
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from attnkit import UnsupportedError

ROOT = Path(__file__).parents[2]
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


def test_table_does_not_mix_measurements() -> None:
    """A table line shows only ratios to the newest measurement of attnkit."""
    row = {"case": "causal", "direction": "forward", "dtype": "float32"}
    old, new = row | {"ours_ms": 9.0}, row | {"ours_ms": 5.0}
    rows = [
        old | {"peer": "flex compiled", "ratio": 0.5},
        old | {"peer": "sdpa dense", "ratio": 2.0},
    ]
    rows.append(new | {"peer": "sdpa dense", "ratio": 3.0})
    assert TABLE["markdown"](rows).splitlines()[-1] == "| causal | 5 ms |  | 3.0x |  |  |  |  |"


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


# --- the GPU benchmark, with contenders and a timer that need no GPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


class Clockwork:
    """Timer without a clock: each call takes 2 ms, or the time that the function states."""

    def __init__(self) -> None:
        self.measured: list[Any] = []

    def prepare(self, function: Any) -> float:
        return float(getattr(function, "ms", 2.0))

    def measure(self, function: Any, prepared: float) -> Any:
        self.measured.append(function)
        return sys.modules["gpu_timing"].Reading(prepared, 1.5)


GPU_CASES = tomllib.loads((ROOT / "benchmarks" / "gpu_cases.toml").read_text())


def small(gpu: Any, case: dict[str, Any], length: int | None = None) -> Any:
    """Return a case's shape with small sizes, and GQA if the case has it.

    Without a length, it is one that the case's mask cuts.
    """
    shape = gpu.shape_of(case, GPU_CASES)
    long = case.get("mask", "") in ("window", "prefix") or "blocks" in case.get("mask", "")
    length = length or (1200 if long else 300)
    group = 2 if shape.kv_heads != shape.heads else 1
    return replace(
        shape, batch=2, heads=2, kv_heads=2 // group, length=length, head_dim=16, value_dim=16
    )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", GPU_CASES["case"], ids=lambda case: case["name"])
def test_gpu_cases_are_checked_then_timed(gpu: Any, case: dict[str, Any], backward: bool) -> None:
    contenders = importlib.import_module("gpu_contenders")

    def absent(p: Any) -> Any:
        raise contenders.Unsuitable("is not here")

    def broken(p: Any) -> Any:
        run = contenders.attnkit_run(p, backend="cpu")
        return replace(run, call=lambda: 1.5 * run.call())

    builders = {
        "attnkit": {"default": lambda p: contenders.attnkit_run(p, backend="cpu")},
        "absent": {"default": absent},
        "broken": {"default": broken},
    }
    settings = gpu.Settings(backward, "burst", rounds=6, seconds=60)
    shape, timer = small(gpu, case), Clockwork()
    rows = list(gpu.measure(case, shape, builders, timer, settings, torch.device("cpu")))
    ours, gone, wrong = rows
    assert 0 < ours["error"] <= ours["error_allowed"] < 0.05
    assert (ours["ms"], ours["cycles"], ours["ratio"], ours["rounds"]) == (2.0, 3e6, 1.0, 6)
    assert gone["skipped"] == "is not here"
    if "dropout_p" in case:  # another contender drops other elements, and is not compared
        assert wrong["error"] is None
        assert "2.0000" in gpu.line(wrong)
    else:
        assert wrong["skipped"].startswith("wrong: ")
    timed = 2 if "dropout_p" in case else 1
    assert len(timer.measured) == timed * (1 + 6)  # the first round does not count
    json.dumps(rows)
    pairs = 4 * shape.length**2 * ours["density"]
    assert ours["tflops"] == pytest.approx((2.5 if backward else 1) * 64 * pairs / 2e9, rel=1e-3)
    assert "skipped: is not here" in gpu.line(gone)
    assert "2.0000" in gpu.line(ours)


def test_gpu_errors_of_ours_count(gpu: Any) -> None:
    contenders = importlib.import_module("gpu_contenders")
    refused = contenders.skipped("attnkit", UnsupportedError("no template yet"))
    assert refused == {"skipped": "no template yet"}
    raised = contenders.skipped("attnkit: ablation", ValueError("bad\nplan"))
    assert raised == {"skipped": "ValueError: bad", "failed": True}
    assert "FAILED: ValueError: bad" in gpu.line({"contender": "attnkit: ablation", **raised})
    assert contenders.skipped("Flex FLASH", ValueError("x")) == {"skipped": "ValueError: x"}


def test_gpu_ablations_are_contenders(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = importlib.import_module("gpu_contenders")
    seen = []
    monkeypatch.setattr(
        contenders.attnkit,
        "flex_attention",
        lambda *a, **k: seen.append((os.environ.get("SWITCH"), k["kernel_options"])),
    )
    config = GPU_CASES | {
        "ablation": [
            {"name": "slow", "cases": ["causal"], "kernel_options": {"BLOCK_N": 64}},
            {"name": "other", "cases": ["causal"], "environment": {"SWITCH": "1"}},
            {"name": "elsewhere", "cases": ["full"]},
        ]
    }
    options = gpu.arguments().parse_args(["--ablations"])
    found = gpu.chosen(config, "causal", options)
    assert list(found) == ["attnkit", "attnkit: slow", "attnkit: other"]
    problem = importlib.import_module("gpu_variants").problem
    case = {"name": "causal", "mask": "causal"}
    p = problem(case, small(gpu, case, 40), torch.device("cpu"), False)
    for settings in found.values():
        settings["default"](p).call()
    assert seen == [(None, None), (None, {"BLOCK_N": 64}), ("1", None)]
    assert "SWITCH" not in os.environ


def reference_varlen(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Compute `flash_attn_varlen_func` in plain torch, for causal packed sequences."""
    bounds = options["cu_seqlens_q"].tolist()
    assert options["causal"]
    assert options["max_seqlen_k"] == max(b - a for a, b in itertools.pairwise(bounds))
    parts = [
        reference_flash(*(t[None, a:b] for t in (q, k, v)), causal=True)[0][0]
        for a, b in itertools.pairwise(bounds)
    ]
    return torch.cat(parts), None


def reference_flash(
    q: Any, k: Any, v: Any, causal: bool = False, window_size: Any = (None, None), softcap: Any = 0
) -> Any:
    """Compute `flash_attn_func` in plain torch, for tensors [B, S, H, D]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    left, right = window_size
    if causal:
        right = 0
    if right is not None:
        scores = scores.masked_fill(j > i + right, -torch.inf)
    if left is not None:
        scores = scores.masked_fill(j < i - left, -torch.inf)
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2), None


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "name",
    [
        "full",
        "causal",
        "causal window 1024",
        "causal, 16 documents",
        "causal + softcap 20",
        "causal, 64 heads share 8",
    ],
)
def test_gpu_peer_is_asked_for_the_same(
    gpu: Any, name: str, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    contenders = importlib.import_module("gpu_contenders")
    interface = SimpleNamespace(
        flash_attn_func=reference_flash, flash_attn_varlen_func=reference_varlen
    )
    monkeypatch.setattr(contenders, "_flash_attention_4", lambda: interface)
    (case,) = (case for case in GPU_CASES["case"] if case["name"] == name)
    settings = gpu.Settings(backward, "burst", rounds=1, seconds=60)
    builders = {"FlashAttention-4": {"default": contenders.fa4_run}}
    device = torch.device("cpu")
    (row,) = gpu.measure(case, small(gpu, case), builders, Clockwork(), settings, device)
    assert row["error"] <= row["error_allowed"]
    assert "ms" in row


def test_gpu_peer_refuses_what_it_lacks(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = importlib.import_module("gpu_contenders")
    monkeypatch.setattr(contenders, "_flash_attention_4", SimpleNamespace)
    problem = importlib.import_module("gpu_variants").problem
    for case in ({"mask": "prefix"}, {"mask": "causal", "score": "alibi"}):
        p = problem({"name": "x"} | case, small(gpu, case, 40), torch.device("cpu"), False)
        with pytest.raises(contenders.Unsuitable, match="no such mask or score built in"):
            contenders.fa4_run(p)
        with pytest.raises(contenders.Unsuitable, match="no such mask or score"):
            contenders.default("cuDNN")(p)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "case",
    [
        {"mask": "window_128"},
        {"mask": "window_512", "sink": True},
        {"mask": "causal", "sink": True},
        {"sink": True},
    ],
    ids=lambda case: ", ".join(case),
)
def test_cudnn_is_asked_for_windows_and_sinks(
    gpu: Any, case: dict[str, Any], backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frontend's graphs get the bounds, sinks and shared heads, and gradients come back."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "benchmarks")
    frontend = importlib.import_module("frontend_stub")
    monkeypatch.setitem(sys.modules, "cudnn", frontend)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    frontend.GRAPHS.clear()
    contenders = importlib.import_module("gpu_contenders")
    shape = gpu.Shape(2, 4, 2, 600, 16, 8)
    settings = gpu.Settings(backward, "burst", rounds=1, seconds=60)
    builders = {"cuDNN": {"default": contenders.default("cuDNN")}}
    case = {"name": "x"} | case
    (row,) = gpu.measure(case, shape, builders, Clockwork(), settings, torch.device("cpu"))
    assert row["error"] <= row["error_allowed"]
    assert "ms" in row
    bounds = {
        (g.options["diagonal_band_left_bound"], g.options["diagonal_band_right_bound"])
        for g in frontend.GRAPHS
    }
    size = contenders.WINDOWS.get(case.get("mask", ""))
    assert bounds == {(size, 0 if "mask" in case else None)}
    assert [g.options.get("generate_stats") for g in frontend.GRAPHS][:1] == [backward]
    assert len(frontend.GRAPHS) == 1 + backward


def test_cudnn_needs_its_frontend_for_windows_and_sinks(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    contenders = importlib.import_module("gpu_contenders")
    monkeypatch.setitem(sys.modules, "cudnn", None)  # as if it were not installed
    problem = importlib.import_module("gpu_variants").problem
    for case in ({"mask": "window_128"}, {"mask": "causal", "sink": True}):
        p = problem({"name": "x"} | case, small(gpu, case, 40), torch.device("cpu"), False)
        with pytest.raises(contenders.Unsuitable, match="nvidia-cudnn-frontend is not installed"):
            contenders.default("cuDNN")(p)
    p = problem({"name": "x", "mask": "causal"}, small(gpu, {}, 40), torch.device("cpu"), False)
    assert contenders.default("cuDNN")(p).leaves == (p.query, p.key, p.value)  # by SDPA


def test_gpu_rounds_alternate_and_end(gpu: Any) -> None:
    timing = sys.modules["gpu_timing"]
    timer, a, b = Clockwork(), SimpleNamespace(ms=1.0), SimpleNamespace(ms=4.0)
    found = timing.in_turn({"a": a, "b": b}, timer, rounds=9, seconds=0)
    assert timer.measured == [a, b, *(a, b, b, a, a, b)]  # one to warm up, three at least
    assert found["b"].times.over(found["a"].times) == 4
    assert found["b"].cycles == pytest.approx(6e6)
    unknown = timing.Series((timing.Reading(1.0, None),))
    assert (unknown.ghz, unknown.cycles) == (None, None)


class Stream:
    """Stub of torch.cuda with simulated host and device clocks, in milliseconds."""

    def __init__(self, host_ms: float, device_ms: float) -> None:
        self.cost, self.host, self.device = (host_ms, device_ms), 0.0, 0.0

    def launch(self) -> None:
        self.host += self.cost[0]
        self.device = max(self.device, self.host) + self.cost[1]

    def synchronize(self, device: Any = None) -> None:
        self.host = self.device = max(self.host, self.device)

    def _sleep(self, cycles: int) -> None:
        self.device = max(self.device, self.host) + cycles / 2e6

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        stream, noted = self, SimpleNamespace(at=0.0)

        def record() -> None:
            noted.at = max(stream.device, stream.host)

        noted.record, noted.synchronize = record, self.synchronize
        noted.elapsed_time = lambda end: end.at - noted.at
        return noted


@pytest.mark.parametrize(
    ("host_ms", "device_ms", "timed", "settling"),
    [(0.05, 1.0, 10, 4), (0.3, 0.1, 30, 12), (0.1, 500.0, 1, 0)],
)
def test_gpu_time_is_that_of_the_device(
    gpu: Any,
    host_ms: float,
    device_ms: float,
    timed: int,
    settling: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timing, stream = sys.modules["gpu_timing"], Stream(host_ms, device_ms)
    stamps = SimpleNamespace(stamp=lambda device: torch.tensor([[0, 1, 1]]))
    monkeypatch.setitem(sys.modules, "gpu_clock", stamps)
    clock = SimpleNamespace(perf_counter=lambda: stream.host / 1000, sleep=lambda seconds: None)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(torch, "cuda", stream)
    timer = timing.CudaTimer(timing.MODES["burst"], torch.device("cuda"))
    prepared = timer.prepare(stream.launch)
    assert (prepared.timed, prepared.settling) == (timed, settling)
    assert (prepared.lead > 0) == (host_ms > device_ms)
    reading = timer.measure(stream.launch, prepared)
    assert reading.ms == pytest.approx(device_ms, rel=1e-3)
    assert reading.ghz is None


def test_gpu_clock_is_that_of_the_same_sm(gpu: Any) -> None:
    timing = sys.modules["gpu_timing"]
    before = torch.tensor([[0, 1000, 50], [1, 77, 60], [2, 10**12, 70]])
    after = torch.tensor([[1, 77 + 1800, 1060], [0, 1000 + 1600, 1050], [2, 5, 1070]])
    # SM 2 was reset; the median of the others
    assert timing.gigahertz(before, after) == pytest.approx((1.6 + 1.8) / 2)
    assert timing.gigahertz(before, before) is None


def test_gpu_table_keeps_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    table = runpy.run_path(str(ROOT / "benchmarks" / "gpu_table.py"))
    shared = {"case": "causal", "direction": "forward", "mode": "burst", "density": 0.5}
    old, new = shared | {"run": "1"}, shared | {"run": "2"}
    ours = {"contender": "attnkit", "ms": 1.0, "tflops": 700.0, "ratio": 1.0}
    peer = {"contender": "Flex FLASH", "ms": 1.5, "tflops": 466.7, "ratio": 1.5}
    slow = {"contender": "cuDNN", "ms": 2.0, "tflops": 350.0, "ratio": 2.0}
    rows = [old | ours, old | slow, new | ours, new | peer]
    rows.append(new | {"contender": "cuDNN", "skipped": "no kernel"})
    rows.append(rows[0] | {"direction": "backward"})
    # ratios refer to our time in the same run: a run without it makes no line
    rows += [shared | {"run": "3"} | slow, shared | {"run": "3", "case": "full"} | slow]
    rows.append(shared | {"run": "3", "contender": "attnkit", "skipped": "no kernel"})
    rows.append(shared | {"run": "4"} | ours | {"ms": 3.0})  # a run without peers replaces none
    lines = table["markdown"](rows, "forward", "burst").splitlines()
    assert lines[0] == "| forward, burst | density | attnkit | Flex FLASH | best peer |"
    assert lines[2:] == [
        "| causal | 0.5 | 700 (1.000) | 467 (1.500) 1.50x | **1.50x** Flex FLASH |"
    ]
    assert table["skips"](rows, "forward", "burst") == ["- causal, cuDNN: no kernel"]
    picture = ElementTree.fromstring(table["chart"](rows, "forward", "burst"))
    assert len(picture.findall("{*}rect")) == 1 + 2 + 2  # ground, bars, legend


def test_gpu_host_times(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = importlib.import_module("gpu_contenders")
    host = importlib.import_module("gpu_host")
    ours = lambda p: contenders.attnkit_run(p, backend="cpu")
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr(host, "REPEATS", 1)
    monkeypatch.setattr(host, "FIRST_SHAPE", host.SMALL)
    monkeypatch.setitem(contenders.CONTENDERS, "attnkit", {"default": ours})
    names, cpu = ["attnkit", "FlashAttention-2"], torch.device("cpu")
    rows = list(host.host_rows(GPU_CASES, "^causal", names, cpu))
    what = ("case", "contender", "direction")
    times = {tuple(row[name] for name in what): row.get("host_us") for row in rows}
    assert len(times) == len(rows) == 3 * 3 * 2 + 3
    assert all(time > 0 for (_, name, _), time in times.items() if name == "attnkit")
    assert all(times["causal", "SDPA", direction] > 0 for direction in host.DIRECTIONS)
    assert times["causal + ALiBi", "FlashAttention-2", "forward"] is None
    full = [row["contender"] for row in host.host_rows(GPU_CASES, "^full$", ["attnkit"], cpu)]
    assert [full.count(name) for name in ("attnkit", "SDPA", "torch.add")] == [3, 3, 1]
    cases = ROOT / "benchmarks" / "gpu_cases.toml"
    first = host.child("attnkit", cases, cpu)
    assert min(first["first_s"], first["other_s"], first["backward_s"]) > 0
    assert host.child("FlashAttention-2", cases, cpu)["other_s"] is None
    assert all(row["contender"] in host.line(row) for row in rows)
    assert "for a backward" in host.line(first | {"benchmark": "", "case": "", "contender": ""})


def test_gpu_host_tells_why_a_process_ended(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = importlib.import_module("gpu_host")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = host.first("attnkit", ROOT / "benchmarks" / "gpu_cases.toml", tmp_path)
    assert found["skipped"].startswith("its process ended with 1: ")


def test_gpu_benchmark_says_what_it_needs(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu.py"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "this benchmark needs a CUDA device, and torch.cuda sees none" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--only", "nothing"], "no case with 'nothing'"),
        (["--contenders", "cuDNN,other"], "no contender ['other']"),
    ],
)
def test_gpu_benchmark_names_what_is_unknown(
    words: list[str], expected: str, gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(words) == 2
    assert expected in capsys.readouterr().err


def test_masks_are_compared_and_timed(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "masks.py", "--length", "512"]
    command += ["--threads", "1", "--seconds", "0", "--attempts", "1"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "torch eager" in line]
    assert len(lines) == 9
    assert not [line for line in lines if "OTHER TILES" in line or "skipped" in line]


def test_saved_masks_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = runpy.run_path(str(ROOT / "benchmarks" / "masks.py"))
    row = {"device": "cuda", "case": "causal", "length": 8192, "peer": "torch eager"}
    rows = [
        row | {"ours_ms": 9.0, "ratio": 1.0},
        row | {"ours_ms": 9.0, "ratio": 7.0, "peer": "older run"},
        row | {"ours_ms": 2.0, "ratio": 3.2},
        row | {"ours_ms": 2.0, "ratio": 2.0, "peer": "torch compiled"},
        row | {"ours_ms": 4.0, "length": 1 << 17, "skipped": "needs 164 GiB"},
        row | {"ours_ms": 7.0, "case": "window", "length": 1 << 17, "ratio": 5.0},
        row | {"ours_ms": 1.0, "device": "cpu", "ratio": 5.0},
    ]
    assert script["markdown"](rows, "cuda").splitlines() == [
        "| attnkit (torch eager, older run, torch compiled) | 8192 | 131072 |",
        "| --- | --- | --- |",
        "| causal | 2.0 ms (3x, 2x) | 4.0 ms |",
        "| window |  | 7.0 ms (5x) |",
    ]


def test_what_does_not_fit_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = runpy.run_path(str(ROOT / "benchmarks" / "masks.py"))
    device = script["torch"].device("cpu")
    case = script["CASES"]["windows, H=8"](64, device)
    assert script["refusal"]("torch eager", case, 1 << 10, device) == ""
    assert "needs about 1312 GiB" in script["refusal"]("torch eager", case, 1 << 17, device)
    assert script["refusal"]("torch compiled", case, 1 << 17, device) == ""

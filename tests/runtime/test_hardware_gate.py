"""Check the hardware gate, which tests unproven kernels on the GPU in a subprocess before use."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")  # without it no call is planned for a kernel

import attnkit
from attnkit import explain, flex_attention
from attnkit.emulator import Undefined
from attnkit.jit.disk_cache import KernelCache
from attnkit.jit.kernel import full_key
from attnkit.runtime import hardware_gate
from attnkit.runtime.hardware_gate import Verdict
from attnkit.schedule.targets import SM90, SM100, Target
from attnkit.splice import forward, workers
from attnkit.testing import selfcheck
from attnkit.testing.selfcheck import EXAMPLES, Failure, examine
from attnkit.util import devices

CPU = torch.device("cpu")
CAUSAL = lambda b, h, q, kv: q >= kv


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hardware_gate, "_verdicts", {})
    attnkit.clear_caches()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a Blackwell card")


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the compute capability to 10.0, so that calls are planned for a Blackwell GPU."""
    monkeypatch.setattr(devices, "compute_capability", lambda device: (10, 0))


class SelfcheckStub:
    """Stub of the check in a subprocess that returns a given verdict and counts its calls."""

    def __init__(self, reason: str, in_numbers: bool = True) -> None:
        self.verdict, self.calls = Verdict(reason, in_numbers), 0

    def __call__(self, target: Target, device: torch.device, seconds: float) -> Verdict:
        assert 0 < seconds <= hardware_gate.TIMEOUT
        self.calls += 1
        return self.verdict


def test_proven_kernels_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_gate, "run_selfcheck", SelfcheckStub("never asked"))
    assert hardware_gate.reason_against(SM90, CPU) == ""


def test_the_test_runs_once_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = SelfcheckStub("")
    monkeypatch.setattr(hardware_gate, "run_selfcheck", tested)
    for _ in range(2):
        assert hardware_gate.reason_against(SM100, CPU) == ""
    hardware_gate._verdicts.clear()  # another process
    assert hardware_gate.reason_against(SM100, CPU) == ""
    assert tested.calls == 1
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another card")
    hardware_gate._verdicts.clear()
    assert hardware_gate.reason_against(SM100, CPU) == ""
    assert tested.calls == 2


def test_a_bad_verdict_is_a_warning_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        hardware_gate, "run_selfcheck", SelfcheckStub("full, D = 128: output: error 1")
    )
    with pytest.warns(RuntimeWarning, match=r"not use its Blackwell kernels here: full, D = 128"):
        assert "error 1" in hardware_gate.reason_against(SM100, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "error 1" in hardware_gate.reason_against(SM100, CPU)


@pytest.mark.usefixtures("blackwell")
def test_auto_falls_back_where_the_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hardware_gate,
        "run_selfcheck",
        SelfcheckStub("their test failed with status -11: crashed", in_numbers=False),
    )
    qkv = [torch.randn(1, 2, 200, 64, dtype=torch.bfloat16) for _ in range(3)]
    with pytest.warns(RuntimeWarning, match="failed with status -11"):
        out = flex_attention(*qkv, None, CAUSAL)
    assert torch.equal(out, flex_attention(*qkv, None, CAUSAL, backend="cpu"))
    plan = explain(None, CAUSAL, q_len=200, head_dim=64).plan
    assert plan.template == "cpu"
    assert "their test failed with status -11: crashed" in plan.reason


@pytest.mark.usefixtures("blackwell")
def test_auto_takes_the_kernel_where_the_test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_gate, "run_selfcheck", SelfcheckStub(""))
    sources = []

    def kernel(source: Any) -> Any:
        sources.append(source)
        raise LookupError  # no such GPU here

    monkeypatch.setattr(forward, "kernel", kernel)
    monkeypatch.setattr(workers, "sm_count", lambda device: 148)
    qkv = [torch.randn(1, 2, 200, 64, dtype=torch.bfloat16) for _ in range(3)]
    with pytest.raises(LookupError):
        flex_attention(*qkv, None, CAUSAL)
    assert [source.arch for source in sources] == ["sm_100a"]


@pytest.mark.usefixtures("blackwell")
def test_an_explicit_backend_skips_the_hardware_test(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = SelfcheckStub("wrong")
    monkeypatch.setattr(hardware_gate, "run_selfcheck", tested)
    assert explain(None, CAUSAL, q_len=200, backend="cute").plan.template == "sm100"
    assert tested.calls == 0


def test_another_driver_is_tested_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tested = SelfcheckStub("full, D = 128: output: error 1")
    monkeypatch.setattr(hardware_gate, "run_selfcheck", tested)
    driver = tmp_path / "version"
    monkeypatch.setattr(hardware_gate, "_DRIVER", driver)
    for version, calls in (("580.65.06", 1), ("580.65.06", 1), ("590.1", 2)):
        driver.write_text(f"NVRM version: NVIDIA UNIX  {version}\nGCC version: 12\n")
        hardware_gate._verdicts.clear()  # another process
        with pytest.warns(RuntimeWarning, match="error 1"):
            hardware_gate.reason_against(SM100, CPU)
        assert tested.calls == calls
    driver.unlink()
    hardware_gate._verdicts.clear()
    with pytest.warns(RuntimeWarning, match="delete .* to have them tested again"):
        hardware_gate.reason_against(SM100, CPU)


def test_a_failure_that_is_not_about_numbers_is_tested_again_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = SelfcheckStub("their test failed with status 11: out of memory", in_numbers=False)
    monkeypatch.setattr(hardware_gate, "run_selfcheck", busy)
    with pytest.warns(RuntimeWarning, match="out of memory.*start a new process"):
        hardware_gate.reason_against(SM100, CPU)
    assert "out of memory" in hardware_gate.reason_against(SM100, CPU)
    assert busy.calls == 1
    hardware_gate._verdicts.clear()  # another process
    monkeypatch.setattr(hardware_gate, "run_selfcheck", SelfcheckStub(""))
    assert hardware_gate.reason_against(SM100, CPU) == ""


def test_waiting_for_another_process_is_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Waiting for another process's check counts towards the time limit.

    Otherwise each of many waiting processes would run into the hanging kernel in turn.
    """
    started = []
    monkeypatch.setattr(hardware_gate, "TIMEOUT", 0.2)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: started.append(1))
    source = hardware_gate._cache_source(SM100, CPU)
    with KernelCache().lock(full_key(source)):  # as the process that hangs
        with pytest.warns(RuntimeWarning, match="did not end within"):
            hardware_gate.reason_against(SM100, CPU)
    assert started == []
    assert [p for p in tmp_path.iterdir() if p.suffix == ".kernel"] == []


def test_only_a_comparison_is_a_verdict_about_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert (hardware_gate._RIGHT, hardware_gate._WRONG) == (selfcheck.RIGHT, selfcheck.WRONG)
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    for script, reason, in_numbers in (
        ("exit 0", "", True),
        ("echo output: error 1; exit 10", "status 10: output: error 1", True),
        ("echo out of memory; exit 11", "status 11: out of memory", False),
        ("echo No module named attnkit >&2; exit 1", "status 1: No module named attnkit", False),
        ("kill -SEGV $$", "status -11: nothing was said", False),
        ("kill -INT $$", "status -2: nothing was said", False),
        ("printf '\\377'; exit 3", "status 3: \N{REPLACEMENT CHARACTER}", False),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        verdict = hardware_gate.run_selfcheck(SM100, CPU)
        assert verdict.reason.removeprefix("their test failed with ") == reason
        assert verdict.in_numbers is in_numbers
    for name in (str(tmp_path / "missing"), "", None):
        monkeypatch.setattr(sys, "executable", name)
        verdict = hardware_gate.run_selfcheck(SM100, CPU)
        assert verdict.reason.startswith("their test could not be started")
        assert not verdict.in_numbers


def test_a_test_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho $$ >"{tmp_path}/pid"\nexec sleep 600\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    verdict = hardware_gate.run_selfcheck(SM100, CPU, 1.0)
    assert verdict == (f"their test did not end within {hardware_gate.TIMEOUT:.0f} seconds", False)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# ------------------------------------------------------------------------------- the test itself


@pytest.mark.exhaustive  # the next test compiles the same kernels and finds a fault in their output
def test_right_kernels_pass() -> None:
    assert examine("emulate:sm_100a", CPU, EXAMPLES[1:2]) is None


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds a kernel whose second query tile is 5 % too large."""
    whole = forward._emulate

    def wrong(*given: Any) -> None:
        whole(*given)
        *_, arguments, _, _ = given
        if len(arguments) > 8:  # not the kernel that joins parts
            out = arguments[3].array if isinstance(arguments[3], Undefined) else arguments[3]
            out[:, :, 128:256] *= 1.05

    monkeypatch.setattr(forward, "_emulate", wrong)
    found = examine("emulate:sm_100a", CPU, EXAMPLES[1:2])
    assert found is not None
    assert found.in_numbers
    assert found.text.startswith("causal, shared kv heads, D = 64: output: error")


def test_a_call_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal instruction was encountered")

    monkeypatch.setattr(forward, "_emulate", broken)
    found = examine("emulate:sm_100a", CPU, EXAMPLES[1:2])
    assert found is not None
    assert not found.in_numbers
    assert found.text.endswith("RuntimeError: an illegal instruction was encountered")


def test_the_verdict_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for failure, status, said in (
        (None, selfcheck.RIGHT, "all is right"),
        (Failure("output: error 1", True), selfcheck.WRONG, "output: error 1"),
        (Failure("out of memory", False), selfcheck.FAILED, "out of memory"),
    ):
        monkeypatch.setattr(selfcheck, "examine", lambda *_, found=failure: found)
        assert selfcheck.main(["emulate:sm_100a", "cpu"]) == status
        assert capsys.readouterr().out.strip() == said

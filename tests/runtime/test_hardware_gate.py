"""Check the hardware gate: unproven kernels are tested on the GPU, in a subprocess, before use."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")  # without it no call is planned for a kernel

import attnkit
from attnkit import explain, flex_attention
from attnkit.emulator import Undefined
from attnkit.runtime import hardware_gate
from attnkit.schedule.targets import SM90, SM100, Target
from attnkit.splice import forward, workers
from attnkit.testing import selfcheck
from attnkit.testing.selfcheck import EXAMPLES, examine
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
    """Plan as for a GPU of compute capability 10.0."""
    monkeypatch.setattr(devices, "compute_capability", lambda device: (10, 0))


class Verdict:
    """Stands for the test that runs in a process of its own."""

    def __init__(self, verdict: str) -> None:
        self.verdict, self.calls = verdict, 0

    def __call__(self, target: Target, device: torch.device) -> str:
        self.calls += 1
        return self.verdict


def test_proven_kernels_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_gate, "run_selfcheck", Verdict("never asked"))
    assert hardware_gate.reason_against(SM90, CPU) == ""


def test_the_test_runs_once_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = Verdict("")
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
    monkeypatch.setattr(hardware_gate, "run_selfcheck", Verdict("full, D = 128: output: error 1"))
    with pytest.warns(RuntimeWarning, match=r"not use its Blackwell kernels here: full, D = 128"):
        assert "error 1" in hardware_gate.reason_against(SM100, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "error 1" in hardware_gate.reason_against(SM100, CPU)


@pytest.mark.usefixtures("blackwell")
def test_auto_falls_back_where_the_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hardware_gate, "run_selfcheck", Verdict("their test failed with status -11: crashed")
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
    monkeypatch.setattr(hardware_gate, "run_selfcheck", Verdict(""))
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
    tested = Verdict("wrong")
    monkeypatch.setattr(hardware_gate, "run_selfcheck", tested)
    assert explain(None, CAUSAL, q_len=200, backend="cute").plan.template == "sm100"
    assert tested.calls == 0


def test_a_process_that_fails_or_hangs_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    # this torch has no such device, or the device no such kernel
    assert "their test failed with status" in hardware_gate.run_selfcheck(
        SM100, torch.device("cuda:99")
    )
    monkeypatch.setattr(hardware_gate, "TIMEOUT", 0.01)
    assert "did not end within" in hardware_gate.run_selfcheck(SM100, CPU)


# ------------------------------------------------------------------------------- the test itself


def test_right_kernels_pass() -> None:
    assert examine("emulate:sm_100a", CPU, EXAMPLES[1:2]) == ""


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the second query tile are a little off."""
    whole = forward._emulate

    def wrong(
        layout: Any, work: Any, chosen: Any, source: Any, arguments: Sequence[Any], *rest: Any
    ) -> None:
        whole(layout, work, chosen, source, arguments, *rest)
        if len(arguments) > 6:  # not the kernel that joins parts
            out = arguments[3].array if isinstance(arguments[3], Undefined) else arguments[3]
            out[:, :, 128:256] *= 1.05

    monkeypatch.setattr(forward, "_emulate", wrong)
    found = examine("emulate:sm_100a", CPU, EXAMPLES[1:2])
    assert found.startswith("causal, shared kv heads, D = 64: output: error")


def test_a_call_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal instruction was encountered")

    monkeypatch.setattr(forward, "_emulate", broken)
    found = examine("emulate:sm_100a", CPU, EXAMPLES[1:2])
    assert found.endswith("RuntimeError: an illegal instruction was encountered")


def test_the_verdict_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for verdict, status, said in (
        ("", 0, "all is right"),
        ("output: error 1", 1, "output: error 1"),
    ):
        monkeypatch.setattr(selfcheck, "examine", lambda *_, found=verdict: found)
        assert selfcheck.main(["emulate:sm_100a", "cpu"]) == status
        assert capsys.readouterr().out.strip() == said

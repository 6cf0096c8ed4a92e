"""Check compiled kernels in the emulator: sessions, time limit, missing C compiler."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from attnkit import emulator
from attnkit.errors import OptionError, UnsupportedError
from attnkit.jit import emulation, emulator_runs
from attnkit.jit import kernel as jit_kernel
from attnkit.jit.emulated_kernel import EmulatedKernel
from attnkit.jit.emulator_runs import run_emulated
from tests.emulator.ptx_kit import kernel, per_thread, pointers


class Compiled:
    """Stub of a compiled kernel whose code is PTX text."""

    def __init__(self, text: str, name: str = "kernel", **launch: Any) -> None:
        self.name, self.builds = name, 0
        self._target = emulator.Ptx(text, **launch)

    def executable(self) -> Any:
        self.builds += 1
        return self._target


def doubling() -> tuple[Compiled, Any, Any]:
    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    text = per_thread("add.f32 {o}, {a0}, {a0};", [x], out)
    return Compiled(text, "doubling", block=(32, 1, 1)), x, out


def racing() -> Compiled:
    """Return a kernel in which two warps store to one shared-memory address without order."""
    body = "mov.u32 %r1, %tid.x; st.shared.u32 [dynamic], %r1;"
    return Compiled(kernel(body, pointers(0)), "racing", block=(64, 1, 1), shared=1024)


def test_a_kernel_runs_once_outside_of_a_session() -> None:
    compiled, x, out = doubling()
    report = run_emulated(compiled, (x, emulator.Undefined(out)))
    assert isinstance(report, emulator.Report)
    assert report.mode == "eager"
    np.testing.assert_array_equal(out, 2 * x)
    run_emulated(compiled, (x, out))
    assert compiled.builds == 1


def test_executables_go_with_their_kernels() -> None:
    compiled, x, out = doubling()
    run_emulated(compiled, (x, out))
    before = len(emulator_runs._executables)
    del compiled
    gc.collect()
    assert len(emulator_runs._executables) == before - 1


def test_a_session_keeps_reports() -> None:
    compiled, x, out = doubling()
    with emulation.session(mode="check", seeds=2) as session:
        run_emulated(compiled, (x, out))
        run_emulated(compiled, (x, out))
    names, reports = zip(*session.reports, strict=True)
    assert names == ("doubling", "doubling")
    assert all(isinstance(r, emulator.CheckReport) and len(r.runs) == 4 for r in reports)
    assert session.ok
    run_emulated(compiled, (x, out))
    assert len(session.reports) == 2


@pytest.mark.parametrize(
    ("mode", "ok"), [("eager", True), ("adversarial", True), ("race", False), ("check", False)]
)
def test_a_session_runs_the_mode_it_was_given(mode: str, ok: bool) -> None:
    with emulation.session(mode=mode) as session:
        run_emulated(racing(), ())
    assert session.ok is ok


def test_faults_are_raised_where_nothing_keeps_them() -> None:
    trap = Compiled(kernel("trap;", pointers(0)), "trap")
    with pytest.raises(emulator.KernelFault, match="trap"):
        run_emulated(trap, ())
    with emulation.session() as session:
        run_emulated(trap, ())
    assert not session.ok


def test_a_timeline_leaves_the_arguments_for_the_run() -> None:
    """Predicting a kernel's timeline does not modify its arguments.

    The kernel adds to its output, so a second execution would show.
    """
    x, out = np.ones(32, np.float32), np.zeros(32, np.float32)
    text = per_thread("add.f32 {o}, {a0}, {a0};", [x], out)
    text = text.replace("st.global.b32", "red.global.add.f32")
    with emulation.session(timeline=True) as session:
        run_emulated(Compiled(text, "adding", block=(32, 1, 1)), (x, out))
    np.testing.assert_array_equal(out, 2)
    ((name, timeline),) = session.timelines
    assert name == "adding"
    assert timeline.clocks > 0


def test_a_session_that_executes_nothing_compiles_nothing() -> None:
    """Kernels are requested, and a caller compiles those that it wants."""
    unbuilt = jit_kernel.Source("no such kernel", "sm_90a", lambda: pytest.fail("is compiled"))
    with emulation.session(execute=False) as session, jit_kernel.requested_sources() as sources:
        for _ in range(2):
            EmulatedKernel(unbuilt)(1, 2.0)
    assert sources == [unbuilt]
    assert not session.reports
    assert not jit_kernel.is_compiled(unbuilt)


def test_work_beyond_the_limit_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, x, out = doubling()
    work = emulation.RATES["eager"] * 60 * 15
    with pytest.raises(UnsupportedError) as error:
        run_emulated(compiled, (x, out), work=work)
    text = str(error.value)
    assert "doubling" in text
    assert "15.0 minutes" in text
    assert "limit is 10" in text
    assert emulation.LIMIT_VARIABLE in text
    assert not out.any()
    monkeypatch.setenv(emulation.LIMIT_VARIABLE, "16")
    run_emulated(compiled, (x, out), work=work)
    with (
        emulation.session(mode="check", minutes=20),
        pytest.raises(UnsupportedError, match="check mode"),
    ):
        run_emulated(compiled, (x, out), work=work)


def test_the_estimate_grows_with_what_is_computed() -> None:
    one = emulation.attention_work(1, 1)
    assert 5_000 < one < 20_000
    assert emulation.attention_work(10, 1) > 5 * one
    assert emulation.attention_work(1, 1, products=5) > 1.5 * one
    assert emulation.attention_work(1, 1, block=(64, 64)) < one
    eager, check = (emulation.Session(mode=m).runs for m in ("eager", "check"))
    assert emulation.seconds(one, check) > 5 * emulation.seconds(one, eager)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_a_limit_that_is_no_number_of_minutes(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(emulation.LIMIT_VARIABLE, text)
    with pytest.raises(OptionError, match=f"{emulation.LIMIT_VARIABLE}='{text}'"):
        emulation.limit()


def test_options_of_a_session() -> None:
    with pytest.raises(OptionError, match="mode='lazy': expected one of check, eager"):
        emulation.Session(mode="lazy")
    with pytest.raises(OptionError, match="seeds=0"):
        emulation.Session(seeds=0)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, x, out = doubling()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UnsupportedError, match="install gcc or clang"):
        run_emulated(compiled, (x, out))
    assert compiled.builds == 0


def test_kernels_have_line_numbers_unless_the_environment_says_no(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(emulation.LINES_VARIABLE, raising=False)
    assert emulation.with_lines()
    monkeypatch.setenv(emulation.LINES_VARIABLE, "0")
    assert not emulation.with_lines()
    monkeypatch.setenv(emulation.LINES_VARIABLE, "no")
    with pytest.raises(OptionError, match="ATTNKIT_EMULATE_LINES='no': expected 0 or 1"):
        emulation.with_lines()

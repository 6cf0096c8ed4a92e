"""Check that reports name warp roles, lines of PTX and source, barriers and their state."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

import attnkit
from attnkit.cli import main
from attnkit.emulator import Executable
from attnkit.emulator.ptx.barrier_names import barrier_name, mbarrier_name
from attnkit.emulator.ptx.kernel import Source
from attnkit.jit import emulator_runs, kernel
from tests.emulator.mutation import mutants

PROGRAM = """
    cute.arch.mbarrier_init(full + stage, 1)
    cute.arch.mbarrier_init(
        free,
        8,
    )
    cute.arch.barrier(barrier_id=TURN + wg, number_of_threads=256)
    x = 1
    cute.arch.mbarrier_init(late, 1)
"""


def test_barriers_are_called_what_the_program_calls_them(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text(PROGRAM)
    at = lambda line: Source(str(file), line)
    assert mbarrier_name(at(2)) == "full + stage"
    assert mbarrier_name(at(3)) == "free"
    assert barrier_name(at(7)) == "TURN + wg"
    assert mbarrier_name(at(8)) == ""  # the next line's call is another instruction
    assert mbarrier_name(at(99)) == mbarrier_name(None) == barrier_name(at(2)) == ""
    assert mbarrier_name(Source("no such file", 1)) == ""


WAITING = (
    r"CTA \(\d+, 0, 0\), warps? [\d-]+ \([\w +-]+\), PTX line \d+, \S+forward\w*\.py:\d+: waits for "
    r"parity \d of mbarrier [\w.]+( \+ \w+)? at smem\+0x[0-9a-f]+ of rank 0 \((?P<file>\S+forward\w*\.py):\d+\) "
    r"\(phase \d, pending \d+ of \d+, tx \d+, completed \d+ times\)"
)
SIZES = ["--q-len", "260", "--heads", "1", "--head-dim", "64", "--mode", "eager"]


@pytest.fixture(autouse=True)
def _lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile kernels with line numbers, which reports name."""
    monkeypatch.setenv("ATTNKIT_EMULATE_LINES", "1")


def faulty(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch compilation so that the forward kernel has one fault."""
    whole = kernel.CompiledKernel.executable

    def executable(self: kernel.CompiledKernel) -> Executable:
        exe = whole(self)
        text = next(m.text for m in mutants(exe.ptx) if m.fault == fault)
        return exe.with_ptx(text)

    monkeypatch.setattr(kernel.CompiledKernel, "executable", executable)
    # the cached executable must not outlive the fault
    monkeypatch.setattr(emulator_runs, "_executables", weakref.WeakKeyDictionary())


def test_the_command_names_role_line_source_and_barrier(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty("drop TMA load", monkeypatch)
    assert main(["emulate", "masks:causal()", *SIZES]) == 1
    out = capsys.readouterr().out
    assert "error: deadlock: all live warps wait:" in out
    assert re.search(WAITING, out), out


@pytest.mark.exhaustive
def test_a_kernel_of_another_copy_is_reported_by_the_files_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Path(attnkit.__file__).parent
    cache, copy = tmp_path / "cache", tmp_path / "copy"
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(cache))
    monkeypatch.setattr(kernel, "_kernels", {})
    shutil.copytree(here, copy / "attnkit", ignore=shutil.ignore_patterns("__pycache__"))
    whole = [sys.executable, "-m", "attnkit", "emulate", "masks:causal()", *SIZES]
    subprocess.run(whole, cwd=copy, check=True, capture_output=True)
    shutil.rmtree(copy)
    (entry,) = cache.iterdir()
    made = entry.stat().st_mtime_ns

    faulty("drop TMA load", monkeypatch)
    assert main(["emulate", "masks:causal()", *SIZES]) == 1
    out = capsys.readouterr().out
    assert [(p, p.stat().st_mtime_ns) for p in cache.iterdir()] == [(entry, made)]
    found = re.search(WAITING, out)
    assert found, out
    assert found["file"] == str(here / "templates" / "sm90" / "forward_barriers.py")

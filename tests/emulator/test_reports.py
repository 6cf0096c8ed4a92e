"""What a report names: role of the warps, line of the PTX and of the kernel, barrier and its state."""

from __future__ import annotations

import re
import weakref
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from attnkit import compiled, emulation
from attnkit.cli import main
from attnkit.emulator import Executable
from attnkit.emulator.ptx import Source
from attnkit.emulator.wording import barrier_name, mbarrier_name
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


SIZES = ["--q-len", "260", "--heads", "1", "--head-dim", "64", "--mode", "eager"]


def faulty(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward kernel gets one fault, wherever it comes from."""
    whole = compiled.Kernel.executable

    def executable(self: compiled.Kernel) -> Executable:
        exe = whole(self)
        text = next(m.text for m in mutants(exe.ptx) if m.fault == fault)
        return exe.with_ptx(text)

    monkeypatch.setattr(compiled.Kernel, "executable", executable)
    # what is kept of it must be gone with the fault
    monkeypatch.setattr(emulation, "_executables", weakref.WeakKeyDictionary())


def test_the_command_names_role_line_source_and_barrier(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty("drop TMA load", monkeypatch)
    assert main(["emulate", "masks:causal()", *SIZES]) == 1
    out = capsys.readouterr().out
    assert "error: deadlock: all live warps wait:" in out
    waiting = re.search(
        r"CTA \(\d+, 0, 0\), warps? [\d-]+ \([\w +-]+\), PTX line \d+, \S+forward\w*\.py:\d+: waits for "
        r"parity \d of mbarrier \w+( \+ \w+)? at smem\+0x[0-9a-f]+ of rank 0 \(\S+forward\.py:\d+\) "
        r"\(phase \d, pending \d+ of \d+, tx \d+, completed \d+ times\)",
        out,
    )
    assert waiting, out

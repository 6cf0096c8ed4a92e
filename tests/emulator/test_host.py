"""Check the host side: linking, capturing launches, and packing arguments."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Float32, Int32

from attnkit import emulator
from attnkit.emulator import Executable
from attnkit.emulator.faults import EmulatorError
from attnkit.emulator.host import host_function
from attnkit.emulator.machine.global_memory import GlobalMemory
from attnkit.errors import ArgumentError, OptionError, ShapeError, UnsupportedError
from tests.emulator.kernels import micro, simt
from tests.emulator.ptx_kit import kernel


@pytest.fixture(scope="module")
def exe() -> Executable:
    specs = (simt.vector(Int32), simt.vector(Int32))
    return emulator.compile(simt.BlockSum(), *specs, options="--gpu-arch sm_90a")


def test_the_generated_host_code_decides_the_launch(exe: Executable) -> None:
    memory = GlobalMemory()
    x, out = torch.zeros(700, dtype=torch.int32), np.zeros(1, np.int32)
    (launch,) = exe.captured((x, out), memory)
    assert launch.grid == (6, 1, 1)
    assert launch.block == (128, 1, 1)
    assert launch.cluster == (1, 1, 1)
    assert x.data_ptr().to_bytes(8, "little") in launch.params
    assert [b.data.size for b in memory.buffers] == [2800, 4]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_an_exception_in_a_launch_is_raised_after_the_call(
    exe: Executable, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in a launch callback is raised after the call.

    Without special handling, ctypes would print it and continue.
    """

    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr(host_function.HostFunction, "_captured", interrupted)
    x, out = torch.zeros(700, dtype=torch.int32), np.zeros(1, np.int32)
    with pytest.raises(error):
        exe.captured((x, out), GlobalMemory())


def test_no_room_for_the_host_code_is_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(EmulatorError, match=r"cannot be linked and loaded: .* Set TMPDIR"):
        host_function.HostFunction(b"object", "f", {})


def test_compilation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compilation leaves no file in the working directory, where the DSL would dump its PTX."""
    monkeypatch.chdir(tmp_path)
    exe = emulator.compile(micro.Ring(), *[simt.vector(Float32)] * 2, options="--gpu-arch sm_90a")
    assert "mbarrier" in exe.ptx
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_checked(exe: Executable) -> None:
    x = torch.zeros(7, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="1 arguments"):
        emulator.run(exe, x)
    with pytest.raises(ArgumentError, match="str"):
        emulator.run(exe, x, "out")
    with pytest.raises(ShapeError, match="argument 1"):
        emulator.run(exe, x, x[None])
    with pytest.raises(OptionError, match="mode='fast'"):
        emulator.run(exe, x, x, mode="fast")


def test_without_a_compiler_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UnsupportedError, match="C compiler"):
        host_function.compiler()


def test_without_ptx_the_error_says_so() -> None:
    compiled = SimpleNamespace(artifacts=SimpleNamespace(PTX=None))
    with pytest.raises(OptionError, match="--keep-ptx"):
        Executable(compiled, ())


def test_findings_name_the_source_of_the_kernel(exe: Executable) -> None:
    """The report of an out-of-bounds atomic names its PTX line and its line in the DSL source."""
    out = np.zeros(2, np.int32)[:0]
    with pytest.raises(emulator.KernelFault, match="bounds") as error:
        emulator.run(exe, torch.zeros(7, dtype=torch.int32), out)
    place = error.value.finding.place
    assert "atom.global.add" in exe.ptx.split("\n")[place.line - 1]
    file, line = place.source.rsplit(":", 1)
    assert Path(file).name == "simt.py"
    assert int(line) <= len(Path(file).read_text().split("\n"))


def test_a_copy_with_other_ptx_has_the_same_gpu(
    exe: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exe, "sms", 5)
    assert exe.with_ptx(exe.ptx).sms == 5


def test_a_launch_cannot_have_more_shared_memory_than_a_cta() -> None:
    emulator.run(emulator.Ptx(kernel("", ""), shared=227 * 1024))
    with pytest.raises(EmulatorError, match="expected at most 232448"):
        emulator.run(emulator.Ptx(kernel("", ""), shared=228 * 1024))

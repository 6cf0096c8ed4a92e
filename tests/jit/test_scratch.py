"""Check compilations without space for temporary files, and cleanup after killed processes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from attnkit.errors import LaunchError, UnsupportedError
from attnkit.jit import loader, scratch
from attnkit.jit.scratch import places, scratch_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files of each test."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(scratch, "_warned", set())
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set of folders; writes to files in them fail with ENOSPC."""
    folders: set[str] = set()
    reserve, write = os.posix_fallocate, scratch.write_file

    def refuse(path: str) -> None:
        if os.path.dirname(path) in folders:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def reserved(file: int, offset: int, length: int) -> None:
        refuse(os.readlink(f"/proc/self/fd/{file}"))
        reserve(file, offset, length)

    def written(data: bytes, suffix: str, place: str) -> str:
        refuse(f"{place}/file")
        return write(data, suffix, place)

    monkeypatch.setattr(os, "posix_fallocate", reserved)
    monkeypatch.setattr(loader, "write_file", written)
    return folders


linux = pytest.mark.skipif(sys.platform != "linux", reason="kernels are compiled on Linux only")


def test_a_scratch_folder_is_private_and_goes(temporary: Path) -> None:
    with scratch_folder(1000) as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").write_text("x")
        assert list(temporary.iterdir()) == [folder]
    assert list(temporary.iterdir()) == []


@linux
def test_a_full_folder_is_replaced_with_one_warning(temporary: Path, full: set[str]) -> None:
    full.add(str(temporary))

    def places_used() -> tuple[str, str]:
        with scratch_folder(1000) as folder:
            return str(folder.parent), tempfile.gettempdir()

    with pytest.warns(RuntimeWarning, match=r"no room \(.*No space left.*is used instead"):
        place, default = places_used()
    assert place == default != str(temporary)
    assert tempfile.gettempdir() == str(temporary)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert places_used() == (place, place)
    assert list(temporary.iterdir()) == []


@linux
def test_no_room_anywhere_is_an_error_of_ours(full: set[str]) -> None:
    full |= set(places())
    with pytest.raises(UnsupportedError, match=r"no folder has 1 MiB .*Set TMPDIR"):
        with scratch_folder(2**20):
            pass


@linux
def test_a_file_system_that_reserves_nothing_is_asked_for_its_room(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with scratch_folder(1000) as folder:
        assert folder.parent == temporary
    with pytest.raises(UnsupportedError), scratch_folder(2**60):
        pass


@pytest.mark.parametrize(("mode", "safe"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_a_folder_where_others_can_replace_files_is_not_used(
    temporary: Path, mode: int, safe: bool
) -> None:
    temporary.chmod(mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert (str(temporary) in places()) == safe
    assert [str(w.message).count("everybody may write to it") for w in caught] == [1][safe:]


def test_files_of_killed_processes_are_removed(temporary: Path) -> None:
    names = ["attnkit-scratch-a1b2c3_4", "attnkit-emulator-abcdefgh", "attnkit-scratch-12345678.so"]
    kept = ["attnkit-1000", "attnkit-scratch-notes", "attnkit-main", "other"]
    before = time.time() - 2 * 86400
    for name in (*names, *kept):
        if name.endswith(".so"):
            (temporary / name).write_text("x")
        else:
            (temporary / name).mkdir()
            (temporary / name / "module.o").write_text("x")
        os.utime(temporary / name, (before, before))
    recent = temporary / "attnkit-scratch-87654321"
    recent.mkdir()
    with scratch_folder(1):
        pass
    assert {p.name for p in temporary.iterdir()} == {*kept, recent.name}


# -- with kernels ---------------------------------------------------------------------------------

COMPILE = """
import sys, warnings
from attnkit.jit import kernel
from attnkit.jit.loader import Entry
from tests.jit import compiled_kernels
kernel._sources = lambda: "unchanged"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for key in "ab":
        a = kernel.kernel(kernel.Source(key, "sm_90a", compiled_kernels.affine)).artifact
        Entry(a.image, a.code, a.function, a.signature)
print(bool(a.image), len(a.ptx) > 1000)
for w in caught:
    print(w.message)
"""


def _small_folder(folder: Path) -> list[str]:
    """Return a command prefix that mounts 64 KiB at `folder`; skip the test if that fails."""
    mount = f'mount -t tmpfs -o size=64k none "{folder}" && head -c 60000 /dev/zero >"{folder}/x"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", f'{mount}; exec "$@"', "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], check=False).returncode
    ):
        pytest.skip("this user may not mount a small file system")
    return command


@linux
def test_a_first_compilation_with_a_full_temporary_folder(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(
        [*_small_folder(small), sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(small)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said, *warned = done.stdout.splitlines()
    assert said == "True True"
    assert len(warned) == 2, warned
    assert "no room" in warned[0]
    assert "cannot be loaded as a temporary file" in warned[1]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of an empty script that is used as C compiler; tests write its content."""
    script = tmp_path / "bin" / "cc"
    script.parent.mkdir()
    script.touch(0o755)
    monkeypatch.setenv("CC", str(script))
    return script


@linux
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\necho no such option >&2; exit 1\n", "no such option"),
        ("#!/bin/sh\nprintf '\\377' >&2; exit 3\n", "cannot link"),
        ("#!/bin/sh\nkill -INT $$\n", "exit status -2"),
        ("#!/bin/sh\nexit 0\n", "No such file"),
        ("not a program", "Exec format error"),
    ],
)
def test_a_link_that_fails_is_a_warning(compiler: Path, text: str, said: str) -> None:
    pytest.importorskip("cutlass")  # names the library to link with
    compiler.write_text(text)
    with pytest.warns(RuntimeWarning, match=f"(?s){said}.*the linker of the CuTe DSL is used"):
        assert loader.link(b"object") == b""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader.link(b"object") == b""


@linux
def test_a_link_runs_in_a_group_of_its_own(compiler: Path) -> None:
    """The linker runs in its own process group.

    Otherwise Ctrl-C in a terminal would end the linker in the middle of a compilation.
    """
    pytest.importorskip("cutlass")
    compiler.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        'cut -d " " -f 5 /proc/$$/stat >"$2"; echo "$TMPDIR" >>"$2"\n'
    )
    group, folder = loader.link(b"object").decode().splitlines()
    assert int(group) != os.getpgrp()
    assert "attnkit-scratch-" in folder


@linux
def test_a_kernel_that_loads_nowhere_is_an_error_of_ours(full: set[str]) -> None:
    with pytest.raises(LaunchError, match=r"cannot be loaded \(.*Set TMPDIR"):
        loader._load_library(b"no library")
    full |= set(places())
    with pytest.raises(LaunchError, match="No space left on device"):
        loader._load_library(b"no library")

"""Provide temporary folders with enough free space, and remove leftovers of killed processes.

The DSL's compiler ends the process if it cannot write a file. A compilation therefore first looks
for a folder with enough space. The order is: the folder for temporary files, memory (/dev/shm), the
cache folder, /var/tmp.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnkit.errors import UnsupportedError
from attnkit.jit.disk_cache import default_folder
from attnkit.jit.trusted_files import reason_to_distrust_place

_PREFIX = "attnkit-scratch-"
# Temporary folders and files of compilations, of kernels that are being loaded and of the emulator.
# A process removes its own unless it is killed. After a day they are no longer needed.
_LEFTOVER = re.compile(r"attnkit-(scratch|emulator)-[a-z0-9_]{8}(\.so)?")
_DAY = 86400.0
# Errors of `posix_fallocate` on file systems that cannot reserve space.
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}

_warned: set[str] = set()


def places() -> Iterator[str]:
    """Yield the folders in which temporary files may be written, in order of preference.

    A folder in which another user could replace a file is skipped with a warning, because the files
    are native code.
    """
    folders = ["/dev/shm", str(default_folder()), "/var/tmp"]
    with contextlib.suppress(FileNotFoundError):  # no folder for temporary files is writable
        folders.insert(0, tempfile.gettempdir())
    for folder in folders:
        if not os.path.isdir(folder):
            continue
        if reason := reason_to_distrust_place(folder):
            warn_once(
                f"kernels are not compiled in {folder}: {reason}, and could replace their code",
                "other folders are used instead. Set TMPDIR to a folder of yours",
            )
            continue
        yield folder


@contextmanager
def scratch_folder(room: int) -> Iterator[Path]:
    """Create a private temporary folder, yield its path and remove it after the `with` block.

    If the folder for temporary files is full, the new folder is created elsewhere, and
    `tempfile.tempdir` of the process is changed until the block ends. A warning is issued once.

    Args:
        room: required free space in bytes.

    Raises:
        UnsupportedError: no folder has enough space.
    """
    place = _place(room)
    _remove_leftovers(place)
    before = tempfile.tempdir
    if before != place:
        tempfile.tempdir = place  # the DSL writes its object file there
    try:
        with tempfile.TemporaryDirectory(
            prefix=_PREFIX, dir=place, ignore_cleanup_errors=True
        ) as name:
            yield Path(name)
    finally:
        tempfile.tempdir = before


def write_file(data: bytes, suffix: str, place: str) -> str:
    """Write `data` to a new private file with a unique name in the folder `place`; return its path.

    Raises:
        OSError: the file cannot be written; a partly written file is removed.
    """
    file, path = tempfile.mkstemp(prefix=_PREFIX, suffix=suffix, dir=place)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(data)
    except BaseException:
        os.unlink(path)
        raise
    return path


def warn_once(problem: str, instead: str) -> None:
    """Emit the RuntimeWarning "`problem`; `instead`", at most once for each `instead`."""
    if instead not in _warned:
        _warned.add(instead)
        warnings.warn(f"{problem}; {instead}", RuntimeWarning, stacklevel=3)


def _place(room: int) -> str:
    """Return the first folder of `places()` with `room` bytes of free space.

    Raises:
        UnsupportedError: no folder has enough space.
    """
    failures = []
    for place in places():
        try:
            _reserve(place, room)
        except OSError as error:
            failures.append(f"{place}: {error.strerror}")
            continue
        if failures:
            warn_once(
                f"kernels need {room >> 20} MiB for temporary files, and there is no room "
                f"({'; '.join(failures)})",
                f"{place} is used instead. Set TMPDIR to a folder with room",
            )
        return place
    raise UnsupportedError(
        f"a kernel cannot be compiled: no folder has {room >> 20} MiB for temporary files "
        f"({'; '.join(failures)}). Set TMPDIR to a folder with room"
    )


def _reserve(place: str, room: int) -> None:
    """Raise OSError unless a file of `room` bytes can be written in the folder `place`.

    Only a write also detects quotas and limits of the process.
    """
    file, path = tempfile.mkstemp(prefix=_PREFIX, dir=place)
    try:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file, 0, room)
                return
            except OSError as error:
                if error.errno not in _CANNOT_RESERVE:
                    raise
        if shutil.disk_usage(place).free < room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)
        os.unlink(path)


def _remove_leftovers(place: str) -> None:
    """Remove temporary files that killed processes of this user left in `place` over a day ago."""
    now = time.time()
    mine = os.geteuid() if hasattr(os, "geteuid") else 0
    try:
        entries = [e for e in os.scandir(place) if _LEFTOVER.fullmatch(e.name)]
    except OSError:  # a writable folder may not be listable
        return
    for entry in entries:
        with contextlib.suppress(OSError):  # another process may have removed it
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != mine or abs(now - status.st_mtime) < _DAY:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)

"""Choose a folder for temporary files that has room, and remove what killed processes left there.

The DSL's compiler ends the process if it cannot write a file. So a compilation first looks for a
folder in which as much as it may need can be written. The folder for temporary files comes first,
then memory (/dev/shm), the cache folder and /var/tmp.
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
# Folders and files that a process removes unless it is killed: of a compilation, of a kernel that
# is being loaded, of the emulator. Nothing needs them after a day.
_LEFTOVER = re.compile(r"attnkit-(scratch|emulator)-[a-z0-9_]{8}(\.so)?")
_DAY = 86400.0
# Errors of `posix_fallocate` on file systems that cannot reserve room.
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}

_warned: set[str] = set()


def places() -> Iterator[str]:
    """Yield the folders in which temporary files may be written, the preferred one first.

    A folder in which another user could replace a file is left out, with a warning: the files are
    native code.
    """
    folders = ["/dev/shm", str(default_folder()), "/var/tmp"]
    with contextlib.suppress(FileNotFoundError):  # none can be written
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
    """Create a private folder for temporary files, and remove it after the `with` block.

    If the folder for temporary files is full, the new one is elsewhere, and so are all temporary
    files of the process until the block ends. A warning says so once.

    Args:
        room: bytes that must fit.

    Raises:
        UnsupportedError: no folder has room.
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
    """Write a private file with a name of its own, and return its path.

    Raises:
        OSError: it cannot be written; nothing is left.
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
    """Warn that something optional failed and what is used instead, once for each `instead`."""
    if instead not in _warned:
        _warned.add(instead)
        warnings.warn(f"{problem}; {instead}", RuntimeWarning, stacklevel=3)


def _place(room: int) -> str:
    """Return the first folder with room.

    Raises:
        UnsupportedError: there is none.
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
    """Raise OSError unless a file of `room` bytes can be written in a folder.

    Writing is the only test that also sees quotas and limits of the process.
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
    """Remove old temporary files that killed processes of this user left in a folder."""
    now = time.time()
    mine = os.geteuid() if hasattr(os, "geteuid") else 0
    try:
        entries = [e for e in os.scandir(place) if _LEFTOVER.fullmatch(e.name)]
    except OSError:  # it may be written, but not listed
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

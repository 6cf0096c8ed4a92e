"""Store compiled kernels on disk, one file for each entry, and verify a file when it is read.

A file holds a magic number, the lengths of key and content, the sha256 of both, the full text of
the key, and the content. It is written under another name and renamed, so a reader sees all of it
or nothing. A file that fails the check counts as a miss and is overwritten. A process that compiles
an entry holds a lock on it, so that others wait instead of doing the same work. The operating
system releases the lock when the process ends, and nobody waits longer than `PATIENCE`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no locks; the last writer wins
    fcntl = None  # type: ignore[assignment]

_MAGIC = b"attnkit kernel\x00\x01"
_HEADER = struct.Struct(f"<{len(_MAGIC)}sQQ32s")
PATIENCE = 300.0  # seconds to wait for another process's compilation
LIMIT = 2**30  # bytes of all entries; the least recently used are removed first
_DAY = 86400.0
_TEMPORARY = "attnkit-new-"  # prefix of files that are being written

_warned: set[Path] = set()


def default_folder() -> Path:
    """Return the cache's folder: ATTNKIT_CACHE_DIR, or `attnkit` in the platform's cache folder.

    Without a home directory it is a folder for this user under the folder for temporary files.
    """
    if named := os.environ.get("ATTNKIT_CACHE_DIR"):
        return Path(named).expanduser()
    if sys.platform == "darwin":
        base = Path("~/Library/Caches")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return base.expanduser() / "attnkit"
    except RuntimeError:  # no home directory
        return Path(tempfile.gettempdir(), f"attnkit-{os.getuid()}")


class KernelCache:
    """Reads and writes entries of a folder, one for each key.

    Args:
        folder: the first write creates it; `default_folder()` if None.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder

    def path(self, key: str) -> Path:
        """Return the path of an entry's file."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.kernel"

    def get(self, key: str) -> bytes | None:
        """Read an entry; None if there is none, it is damaged, or another user wrote it."""
        path = self.path(key)
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if not _trusted(status):
                    return None
                data = file.read()
        except OSError:
            return None
        if time.time() - status.st_mtime > _DAY:
            with contextlib.suppress(OSError):  # the folder may be read-only
                os.utime(path)  # mark as used: `_trim` removes the oldest first
        return _checked(data, key.encode())

    def put(self, key: str, content: bytes) -> bool:
        """Write an entry; return whether that succeeded. Warns once for each folder if not."""
        text = key.encode()
        digest = hashlib.sha256(text + content).digest()
        header = _HEADER.pack(_MAGIC, len(text), len(content), digest)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file, name = tempfile.mkstemp(dir=self.folder, prefix=_TEMPORARY)
            try:
                with os.fdopen(file, "wb") as out:
                    out.write(header + text + content)
                os.replace(name, self.path(key))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            self._warn(error)
            return False
        self._trim()
        return True

    def _trim(self) -> None:
        """Remove the least recently used entries beyond the limit, and files of failed writes."""
        entries = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process may have removed it
                status = path.stat()
                if path.suffix == ".kernel":
                    entries.append((status.st_mtime, status.st_size, path))
                elif path.name.startswith(_TEMPORARY) and time.time() - status.st_mtime > _DAY:
                    path.unlink()
        excess = sum(size for _, size, _ in entries) - LIMIT
        for _, size, path in sorted(entries):
            if excess <= 0:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            excess -= size

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold the lock of an entry, so that one process at a time compiles it.

        If the folder allows no locks, or the wait exceeds `PATIENCE`, run the block without one.
        """
        file = self._open_lock(key)
        if file is None:
            yield
            return
        path = self.path(key).with_suffix(".lock")
        try:
            held = _acquire(file)
            try:
                yield
            finally:
                if held:
                    # Processes that wait on the removed file then find the entry; later ones create
                    # a new lock file.
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                    fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)

    def _open_lock(self, key: str) -> int | None:
        """Open the lock file of an entry; None if that is not possible."""
        if fcntl is None:
            return None
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.path(key).with_suffix(".lock")
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None

    def _warn(self, error: OSError) -> None:
        """Warn that the folder cannot be written, once for each folder."""
        if self.folder in _warned:
            return
        _warned.add(self.folder)
        warnings.warn(
            f"compiled kernels cannot be kept in {self.folder} ({error}): every process compiles "
            "its own. Set ATTNKIT_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )


def _trusted(status: os.stat_result) -> bool:
    """Return whether this user or root owns the file, or the user chose the folder."""
    if os.environ.get("ATTNKIT_CACHE_DIR") or not hasattr(os, "getuid"):
        return True
    return status.st_uid in (os.getuid(), 0)


def _checked(data: bytes, key: bytes) -> bytes | None:
    """Return the content of a file's bytes; None if they are damaged or have another key."""
    if len(data) < _HEADER.size:
        return None
    magic, key_length, length, digest = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if magic != _MAGIC or len(body) != key_length + length or key_length != len(key):
        return None
    if body[:key_length] != key or hashlib.sha256(body).digest() != digest:
        return None
    return body[key_length:]


def _acquire(file: int) -> bool:
    """Wait for a lock; return False after `PATIENCE`, or if the file system has no locks."""
    end = time.monotonic() + PATIENCE
    pause = 0.005
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
        except OSError:
            return False
        else:
            return True
        time.sleep(pause)
        pause = min(2 * pause, 0.1)

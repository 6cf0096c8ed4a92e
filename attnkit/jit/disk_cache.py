"""Store compiled kernels on disk, one file for each entry, and verify a file when it is read.

A file holds a magic number, the lengths of key and content, the sha256 of both, the full text of
the key, and the content. It is written under another name and renamed, so a reader sees all of it
or nothing. A file that fails the check counts as a miss and is overwritten. A process that compiles
an entry holds a lock on it, so that others wait instead of doing the same work. The operating
system releases the lock when the process ends, and nobody waits longer than `PATIENCE`.

The content is native code. So a folder, an entry or a lock that another user could have written is
ignored, with a warning. The one exception is the folder that ATTNKIT_SHARED_CACHE_DIR names: there
the owner of the folder is trusted. It is only read, except by an owner who names it as
ATTNKIT_CACHE_DIR too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from attnkit.errors import OptionError
from attnkit.jit import trusted_files

try:
    import fcntl
except ImportError:  # Windows: no locks; the last writer wins
    fcntl = None  # type: ignore[assignment]

FOLDER_VARIABLE = "ATTNKIT_CACHE_DIR"
SHARED_VARIABLE = "ATTNKIT_SHARED_CACHE_DIR"
PATIENCE = 300.0  # seconds to wait for another process's compilation
LIMIT = 2**30  # bytes of all entries; the least recently used are removed first
ENTRY_LIMIT = 2**28  # bytes of one entry
_MAGIC = b"attnkit kernel\x00\x01"
_HEADER = struct.Struct(f"<{len(_MAGIC)}sQQ32s")
_DAY = 86400.0
_TEMPORARY = "attnkit-new-"  # prefix of files that are being written
_ENTRY_NAME = re.compile(r"[0-9a-f]{40}\.kernel")
# Files that a process leaves behind if it is killed: half an entry, the file of a lock.
_LEFTOVER_NAME = re.compile(rf"{_TEMPORARY}[a-z0-9_]+|[0-9a-f]{{40}}\.lock")

_warned: set[Path] = set()


def default_folder() -> Path:
    """Return the cache's folder: ATTNKIT_CACHE_DIR, or `attnkit` in the platform's cache folder.

    Where no home directory can be written, it is a folder for this user under the folder for
    temporary files.

    Raises:
        OptionError: ATTNKIT_CACHE_DIR begins with the home directory of nobody.
    """
    return _named_folder(FOLDER_VARIABLE) or _home_folder() or _temporary_folder()


def shared_folder() -> Path | None:
    """Return the folder that ATTNKIT_SHARED_CACHE_DIR names; None if the variable is not set.

    Raises:
        OptionError: it begins with the home directory of nobody.
    """
    return _named_folder(SHARED_VARIABLE)


def _named_folder(variable: str) -> Path | None:
    """Return the folder that an environment variable names; None if it is not set."""
    named = os.environ.get(variable)
    if not named:
        return None
    try:
        return Path(named).expanduser()
    except RuntimeError:
        raise OptionError(
            f"{variable}={named!r}: there is no such home directory; give an absolute path"
        ) from None


def _home_folder() -> Path | None:
    """Return `attnkit` in the platform's cache folder; None if it cannot be created there."""
    if sys.platform == "darwin":
        base = Path("~/Library/Caches")
    else:
        named = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        # The XDG specification says that a relative path is invalid and to be ignored.
        base = named if named.is_absolute() else Path("~/.cache")
    try:
        folder = base.expanduser() / "attnkit"
    except RuntimeError:  # no home directory
        return None
    try:
        existing = next(p for p in (folder, *folder.parents) if p.exists())
    except (OSError, StopIteration):
        return None
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return folder if existing == folder or writable else None


def _temporary_folder() -> Path:
    """Return a folder for this user under the folder for temporary files."""
    try:
        base = tempfile.gettempdir()
    except FileNotFoundError:  # none can be written: a write to the result will say so
        base = "/tmp"
    # Windows has a folder for temporary files for each user.
    return Path(base, f"attnkit-{os.getuid()}" if hasattr(os, "getuid") else "attnkit")


class KernelCache:
    """Reads and writes entries of a folder, one for each key.

    Args:
        folder: the first write creates it; None for `default_folder()`, with `shared_folder()`
            for entries that are not there.

    Raises:
        OptionError: an environment variable names no folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder
        self.shared = shared_folder() if folder is None else None

    def path(self, key: str) -> Path:
        """Return the path of an entry's file."""
        return self.folder / _entry_name(key)

    def get(self, key: str) -> bytes | None:
        """Read an entry; None if there is none, it is damaged, or it is not trusted.

        Warns once for a folder that is not trusted.
        """
        content = self._get_own(key)
        if content is None and self.shared is not None and self.shared != self.folder:
            content = self._get_shared(key, self.shared)
        return content

    def _get_own(self, key: str) -> bytes | None:
        """Read an entry of this user's folder, and mark it as used."""
        if not self._usable():
            return None
        path = self.path(key)
        try:
            data, status = trusted_files.read(path, ENTRY_LIMIT)
        except OSError:
            return None
        if abs(time.time() - status.st_mtime) > _DAY:  # old, or from a clock that was wrong
            with contextlib.suppress(OSError):  # the folder may be read-only
                os.utime(path)  # mark as used: `_trim` removes the oldest first
        return _checked(data, key.encode())

    def _get_shared(self, key: str, folder: Path) -> bytes | None:
        """Read an entry of the shared folder, whose owner is trusted."""
        try:
            owners = (folder.stat().st_uid,)
            reason = trusted_files.reason_to_distrust_folder(folder, owners)
        except OSError as error:
            self._warn(folder, f"the shared cache of kernels, {folder}, is not used ({error})")
            return None
        if reason:
            self._warn(
                folder,
                f"the shared cache of kernels, {folder}, is not used: {reason}, and whoever may "
                "write there could run code as you. Its owner can restrict that: "
                f"chmod go-w {folder}",
            )
            return None
        try:
            data, _ = trusted_files.read(folder / _entry_name(key), ENTRY_LIMIT, owners)
        except OSError:
            return None
        return _checked(data, key.encode())

    def put(self, key: str, content: bytes) -> bool:
        """Write an entry; return whether that succeeded. Warns once for each folder if not."""
        text = key.encode()
        digest = hashlib.sha256(text + content).digest()
        header = _HEADER.pack(_MAGIC, len(text), len(content), digest)
        data = header + text + content
        try:
            if len(data) > ENTRY_LIMIT:
                raise OSError(errno.EFBIG, f"an entry of {len(data)} bytes is too large")
            self._create()
            if not self._usable():
                return False
            self._write(self.path(key), data)
        except OSError as error:
            self._warn(
                self.folder,
                f"compiled kernels cannot be kept in {self.folder} ({error}): every process "
                f"compiles its own. Set {FOLDER_VARIABLE} to a folder that can be written",
            )
            return False
        self._trim()
        return True

    def _create(self) -> None:
        """Create the folder if there is none; only the owner of a shared one lets others read it."""
        mode = 0o755 if self.folder == self.shared else 0o700
        self.folder.mkdir(mode=mode, parents=True, exist_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file under another name, and rename it."""
        file, name = tempfile.mkstemp(dir=self.folder, prefix=_TEMPORARY)
        try:
            with os.fdopen(file, "wb") as out:
                out.write(data)
            if self.folder == self.shared:  # whoever may read the folder may read its entries
                os.chmod(name, 0o600 | self.folder.stat().st_mode & 0o044)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _trim(self) -> None:
        """Remove the least recently used entries beyond the limit, and files of killed processes."""
        entries = []
        now = time.time()
        try:
            found = list(os.scandir(self.folder))
        except OSError:  # another process may have removed the folder
            return
        for file in found:
            with contextlib.suppress(OSError):  # another process may have removed it
                status = file.stat(follow_symlinks=False)
                if _ENTRY_NAME.fullmatch(file.name):
                    # A clock was wrong when this was used: it counts as the oldest.
                    used = status.st_mtime if status.st_mtime < now + _DAY else 0.0
                    entries.append((used, status.st_size, file.path))
                elif _LEFTOVER_NAME.fullmatch(file.name) and abs(now - status.st_mtime) > _DAY:
                    os.unlink(file.path)
        excess = sum(size for _, size, _ in entries) - LIMIT
        for _, size, path in sorted(entries):
            if excess <= 0:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
            excess -= size

    @contextlib.contextmanager
    def lock(self, key: str, patience: float | None = None) -> Iterator[None]:
        """Hold the lock of an entry, so that one process at a time compiles it.

        If the folder allows no locks, or the wait is too long, run the block without one.

        Args:
            key: of the entry.
            patience: seconds to wait; None for `PATIENCE`.
        """
        file = self._open_lock(key)
        if file is None:
            yield
            return
        path = self.path(key).with_suffix(".lock")
        try:
            held = _acquire(file, PATIENCE if patience is None else patience)
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
        """Open the lock file of an entry; None if that is not possible or it is not trusted."""
        if fcntl is None:
            return None
        try:
            self._create()
            if not self._usable():
                return None
            path = self.path(key).with_suffix(".lock")
            return trusted_files.open_file(path, os.O_RDWR | os.O_CREAT)
        except OSError:
            return None

    def _usable(self) -> bool:
        """Return whether the folder exists and is trusted; warn once if it is not trusted."""
        try:
            reason = trusted_files.reason_to_distrust_folder(self.folder)
        except OSError:
            return False
        if not reason:
            return True
        self._warn(
            self.folder,
            f"compiled kernels are neither read from {self.folder} nor kept there: {reason}, and "
            "whoever may write there could run code as you. Every process compiles its own. "
            f"Restrict the folder (chmod go-w {self.folder}), or set {FOLDER_VARIABLE} to a folder "
            f"of yours. To read the kernels of another user whom you trust, name the folder in "
            f"{SHARED_VARIABLE}",
        )
        return False

    def _warn(self, folder: Path, message: str) -> None:
        """Warn about a folder, once for each."""
        if folder in _warned:
            return
        _warned.add(folder)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _entry_name(key: str) -> str:
    """Return the name of an entry's file."""
    return f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.kernel"


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


def _acquire(file: int, patience: float) -> bool:
    """Wait for a lock; return False after `patience` seconds, or if the file system has no locks."""
    end = time.monotonic() + patience
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

"""Keep compiled kernels on disk: one file per entry, verified whenever it is read.

A file holds a magic number, the lengths of key and content, the sha256 of both, the full key and
the content. It is written under a temporary name and renamed, so a reader sees either the whole
file or no file. A file that fails verification counts as a miss and is overwritten. A process that
compiles an entry holds a lock on the entry, so that other processes wait instead of doing the same
work. The operating system releases the lock when the process ends, and a process waits for at most
`PATIENCE` seconds.

The content is native code. attnkit therefore ignores a folder, an entry or a lock that another user
could have written, and warns about the folder. The only exception is the folder that
ATTNKIT_SHARED_CACHE_DIR names, whose owner is trusted. attnkit only reads from this folder, unless
ATTNKIT_CACHE_DIR names it too.
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
from attnkit.util import environment

try:
    import fcntl
except ImportError:  # Windows: no locks; the last writer wins
    fcntl = None  # type: ignore[assignment]

FOLDER_VARIABLE = "ATTNKIT_CACHE_DIR"
SHARED_VARIABLE = "ATTNKIT_SHARED_CACHE_DIR"
PATIENCE = 300.0  # seconds to wait for a compilation in another process
LIMIT = 2**30  # bytes of all entries; the least recently used entries are removed first
ENTRY_LIMIT = 2**28  # bytes of one entry
_MAGIC = b"attnkit kernel\x00\x01"
_HEADER = struct.Struct(f"<{len(_MAGIC)}sQQ32s")
_DAY = 86400.0
_TEMPORARY = "attnkit-new-"  # prefix of files that are being written
_ENTRY_NAME = re.compile(r"[0-9a-f]{40}\.kernel")
# Files that remain after a process is killed: partly written entries and lock files.
_LEFTOVER_NAME = re.compile(rf"{_TEMPORARY}[a-z0-9_]+|[0-9a-f]{{40}}\.lock")

_warned: set[Path] = set()


def default_folder() -> Path:
    """Return the cache's folder: ATTNKIT_CACHE_DIR, or `attnkit` in the platform's cache folder.

    If the platform's cache folder is not writable, the result is a folder of this user in the
    folder for temporary files.

    Raises:
        OptionError: ATTNKIT_CACHE_DIR begins with a home directory ("~user") that does not exist.
    """
    return _named_folder(FOLDER_VARIABLE) or _home_folder() or _temporary_folder()


def shared_folder() -> Path | None:
    """Return the folder that ATTNKIT_SHARED_CACHE_DIR names; None if the variable is not set.

    Raises:
        OptionError: the variable begins with a home directory ("~user") that does not exist.
    """
    return _named_folder(SHARED_VARIABLE)


def _named_folder(variable: str) -> Path | None:
    """Return the folder that an environment variable names; None if it is not set."""
    named = environment.read(variable)
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
        named = Path(environment.read("XDG_CACHE_HOME") or "~/.cache")
        # The XDG specification requires that relative paths are ignored.
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
    """Return the path of this user's cache folder inside the folder for temporary files."""
    try:
        base = tempfile.gettempdir()
    except FileNotFoundError:  # no folder is writable: a later write will report that
        base = "/tmp"
    # On Windows each user has a separate folder for temporary files.
    return Path(base, f"attnkit-{os.getuid()}" if hasattr(os, "getuid") else "attnkit")


class KernelCache:
    """Cache that maps text keys to bytes, stored as one file per key in a folder.

    Args:
        folder: folder of the entries, created by the first write. None means `default_folder()`,
            with `shared_folder()` as a read-only fallback.

    Raises:
        OptionError: an environment variable names an invalid folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder
        self.shared = shared_folder() if folder is None else None

    def path(self, key: str) -> Path:
        """Return the path of the file for `key`, whether or not it exists."""
        return self.folder / _entry_name(key)

    def get(self, key: str) -> bytes | None:
        """Return the content of the entry `key`; None if it is missing, damaged or not trusted.

        Warns once for each folder that is not trusted.
        """
        content = self._get_own(key)
        if content is None and self.shared is not None and self.shared != self.folder:
            content = self._get_shared(key, self.shared)
        return content

    def _get_own(self, key: str) -> bytes | None:
        """Return an entry from `self.folder`, or None; update the time of its last use."""
        if not self._usable():
            return None
        path = self.path(key)
        try:
            data, status = trusted_files.read(path, ENTRY_LIMIT)
        except OSError:
            return None
        if abs(time.time() - status.st_mtime) > _DAY:  # old, or written with a wrong clock
            with contextlib.suppress(OSError):  # the folder may be read-only
                os.utime(path)  # mark as used: `_trim` removes the oldest entries first
        return _checked(data, key.encode())

    def _get_shared(self, key: str, folder: Path) -> bytes | None:
        """Return an entry from the shared `folder`, whose owner is trusted, or None."""
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
        """Write an entry and return whether that succeeded; warn once per folder if it failed."""
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
        """Create the folder if it does not exist; other users may read only a shared folder."""
        mode = 0o755 if self.folder == self.shared else 0o700
        self.folder.mkdir(mode=mode, parents=True, exist_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file atomically: write to a temporary name, then rename it to `path`."""
        file, name = tempfile.mkstemp(dir=self.folder, prefix=_TEMPORARY)
        try:
            with os.fdopen(file, "wb") as out:
                out.write(data)
            if self.folder == self.shared:  # users who may read the folder may read its entries
                os.chmod(name, 0o600 | self.folder.stat().st_mode & 0o044)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _trim(self) -> None:
        """Remove the least recently used entries above `LIMIT` and files of killed processes."""
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
                    # A time in the future comes from a wrong clock and counts as the oldest.
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
        """Hold the lock of an entry in the `with` block, so that only one process compiles it.

        If the folder does not support locks or the wait is too long, the block runs without a lock.

        Args:
            key: key of the entry.
            patience: seconds to wait; None means `PATIENCE`.
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
                    # Processes that wait on the removed file then find the entry. Later processes
                    # create a new lock file.
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                    fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)

    def _open_lock(self, key: str) -> int | None:
        """Return a descriptor of the lock file of an entry; None if not possible or not trusted."""
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
        """Emit a RuntimeWarning, at most one per folder."""
        if folder in _warned:
            return
        _warned.add(folder)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _entry_name(key: str) -> str:
    """Return the file name of the entry `key`: 40 hexadecimal digits of its sha256."""
    return f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.kernel"


def _checked(data: bytes, key: bytes) -> bytes | None:
    """Return the content from the bytes of a file; None if damaged or written for another key."""
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
    """Acquire the lock of `file`; return False on timeout (`patience` seconds) or without locks."""
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

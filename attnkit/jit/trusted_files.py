"""Decide whether another user could have written a file, and read files that nobody else could.

A compiled kernel is native code. So its file counts only if it belongs to this user or to root and
if nobody else may write to it; the same holds for the folder. Systems without such owners (Windows)
get no check.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

_CHECKED = hasattr(os, "geteuid")
# A link is refused, and opening a named pipe does not wait for its writer.
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def reason_to_distrust(status: os.stat_result, owners: Collection[int] = ()) -> str:
    """Return why a file or folder is not trusted; "" if it is.

    Args:
        status: its status.
        owners: uids of other users whose files are trusted too.
    """
    if not _CHECKED:
        return ""
    if status.st_uid not in {os.geteuid(), 0, *owners}:
        return f"it belongs to {user_name(status.st_uid)}"
    if status.st_mode & stat.S_IWOTH:
        return "everybody may write to it"
    if status.st_mode & stat.S_IWGRP:
        return f"the group {group_name(status.st_gid)} may write to it"
    return ""


def reason_to_distrust_folder(path: Path, owners: Collection[int] = ()) -> str:
    """Return why a folder is not trusted; "" if it is.

    Args:
        path: the folder, or a link to it, whose owner must be trusted as well.
        owners: as of `reason_to_distrust`.

    Raises:
        OSError: it does not exist, or cannot be looked at.
    """
    link, status = path.lstat(), path.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if _CHECKED and link.st_uid not in {os.geteuid(), 0, *owners}:
        what = "it is a link, which" if stat.S_ISLNK(link.st_mode) else "it"
        return f"{what} belongs to {user_name(link.st_uid)}"
    return reason_to_distrust(status, owners)


def reason_to_distrust_place(path: str) -> str:
    """Return why private files in a folder are not safe from other users; "" if they are.

    Others may write to the folder if its sticky bit keeps them from replacing files.

    Raises:
        OSError: it does not exist, or cannot be looked at.
    """
    status = os.stat(path)
    if status.st_mode & stat.S_ISVTX and status.st_uid in {0, getattr(os, "geteuid", int)()}:
        return ""
    return reason_to_distrust(status)


def open_file(path: Path, flags: int, mode: int = 0o600, owners: Collection[int] = ()) -> int:
    """Open a regular file that is trusted, and return its descriptor.

    Args:
        path: the file; a link is refused.
        flags: as of `os.open`.
        mode: permissions of a new file.
        owners: as of `reason_to_distrust`.

    Raises:
        OSError: it cannot be opened.
        PermissionError: it is not a regular file, or it is not trusted.
    """
    file = os.open(path, flags | _SAFE | getattr(os, "O_BINARY", 0), mode)
    try:
        status = os.fstat(file)
        regular = stat.S_ISREG(status.st_mode)
        if reason := reason_to_distrust(status, owners) if regular else "it is not a regular file":
            raise PermissionError(f"{path} is not trusted: {reason}")
    except BaseException:
        os.close(file)
        raise
    return file


def read(path: Path, limit: int, owners: Collection[int] = ()) -> tuple[bytes, os.stat_result]:
    """Read a file that is trusted, and its status.

    Args:
        path: the file.
        limit: largest size in bytes.
        owners: as of `reason_to_distrust`.

    Raises:
        OSError: it cannot be read, is not trusted, or is too large.
    """
    with open(open_file(path, os.O_RDONLY, owners=owners), "rb") as file:
        status = os.fstat(file.fileno())
        data = file.read(limit + 1) if status.st_size <= limit else b""
    if status.st_size > limit or len(data) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return data, status


def writers(status: os.stat_result) -> str:
    """List who may write to a file or folder, as text."""
    if not _CHECKED:
        return "whoever the system lets"
    names = [user_name(uid) for uid in sorted({0, status.st_uid})]
    if status.st_mode & stat.S_IWGRP:
        names.append(f"the group {group_name(status.st_gid)}")
    if status.st_mode & stat.S_IWOTH:
        names.append("everybody")
    return ", ".join(names)


def user_name(uid: int) -> str:
    """Return the name of a user, or the number of one that has no name."""
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return f"user {uid}"


def group_name(gid: int) -> str:
    """Return the name of a group, or the number of one that has no name."""
    try:
        import grp

        return grp.getgrgid(gid).gr_name
    except (ImportError, KeyError):
        return str(gid)

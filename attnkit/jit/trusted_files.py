"""Decide whether another user could have written a file, and read only files that are trusted.

A compiled kernel is native code. Its file is therefore trusted only if the file and its folder
belong to this user or to root and no other user may write to them. Systems without such owners
(Windows) are not checked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

_CHECKED = hasattr(os, "geteuid")
# Refuse symbolic links, and do not block when a named pipe is opened.
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def reason_to_distrust(status: os.stat_result, owners: Collection[int] = ()) -> str:
    """Return why a file or folder is not trusted, or "" if it is trusted.

    Args:
        status: result of `os.stat` for the file or folder.
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
    """Return why a folder is not trusted, or "" if it is trusted.

    Args:
        path: the folder or a link to it. The owner of the link must be trusted too.
        owners: see `reason_to_distrust`.

    Raises:
        OSError: `path` does not exist or its status cannot be read.
    """
    link, status = path.lstat(), path.stat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if _CHECKED and link.st_uid not in {os.geteuid(), 0, *owners}:
        what = "it is a link, which" if stat.S_ISLNK(link.st_mode) else "it"
        return f"{what} belongs to {user_name(link.st_uid)}"
    return reason_to_distrust(status, owners)


def reason_to_distrust_place(path: str) -> str:
    """Return why other users could replace private files in a folder, or "" if they cannot.

    Other users may write to the folder if its sticky bit prevents them from replacing files.

    Raises:
        OSError: `path` does not exist or its status cannot be read.
    """
    status = os.stat(path)
    if status.st_mode & stat.S_ISVTX and status.st_uid in {0, getattr(os, "geteuid", int)()}:
        return ""
    return reason_to_distrust(status)


def open_file(path: Path, flags: int, mode: int = 0o600, owners: Collection[int] = ()) -> int:
    """Open a regular file, check that it is trusted, and return its file descriptor.

    Args:
        path: the file; a symbolic link is refused.
        flags: flags of `os.open`.
        mode: permissions of a new file.
        owners: see `reason_to_distrust`.

    Raises:
        OSError: the file cannot be opened.
        PermissionError: the file is not a regular file or is not trusted.
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
    """Read a trusted file; return its content and its status.

    Args:
        path: the file.
        limit: largest allowed size in bytes.
        owners: see `reason_to_distrust`.

    Raises:
        OSError: the file cannot be read, is not trusted or is too large.
    """
    with open(open_file(path, os.O_RDONLY, owners=owners), "rb") as file:
        status = os.fstat(file.fileno())
        data = file.read(limit + 1) if status.st_size <= limit else b""
    if status.st_size > limit or len(data) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return data, status


def writers(status: os.stat_result) -> str:
    """Return a text that lists the users and groups that may write to a file or folder."""
    if not _CHECKED:
        return "whoever the system lets"
    names = [user_name(uid) for uid in sorted({0, status.st_uid})]
    if status.st_mode & stat.S_IWGRP:
        names.append(f"the group {group_name(status.st_gid)}")
    if status.st_mode & stat.S_IWOTH:
        names.append("everybody")
    return ", ".join(names)


def user_name(uid: int) -> str:
    """Return the name of a user, or "user <uid>" if the user has no name."""
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return f"user {uid}"


def group_name(gid: int) -> str:
    """Return the name of a group, or its gid as text if the group has no name."""
    try:
        import grp

        return grp.getgrgid(gid).gr_name
    except (ImportError, KeyError):
        return str(gid)

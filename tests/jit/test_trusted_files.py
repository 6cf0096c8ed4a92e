"""Check which files are trusted, for each combination of owner and mode."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnkit.jit import trusted_files

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no owners")
UIDS = st.one_of(
    st.sampled_from([0, os.geteuid() if hasattr(os, "geteuid") else 0]), st.integers(0, 9)
)


def status(mode: int, uid: int = 0) -> os.stat_result:
    return os.stat_result([stat.S_IFREG | mode, 0, 0, 1, uid, 0, 0, 0, 0, 0])


@given(mode=st.integers(0, 0o7777), uid=UIDS, owners=st.lists(UIDS, max_size=2))
def test_a_file_is_trusted_if_only_trusted_users_write_it(
    mode: int, uid: int, owners: list[int]
) -> None:
    trusted = uid in {0, os.geteuid(), *owners} and not mode & (stat.S_IWGRP | stat.S_IWOTH)
    assert (trusted_files.reason_to_distrust(status(mode, uid), owners) == "") == trusted


@given(mode=st.integers(0, 0o7777), uid=UIDS)
def test_whoever_may_write_is_listed(mode: int, uid: int) -> None:
    who = trusted_files.writers(status(mode, uid)).split(", ")
    names = {trusted_files.user_name(0), trusted_files.user_name(uid)}
    assert names <= set(who)
    assert ("everybody" in who) == bool(mode & stat.S_IWOTH)
    assert any(name.startswith("the group ") for name in who) == bool(mode & stat.S_IWGRP)


def test_numbers_stand_for_users_without_names() -> None:
    assert trusted_files.user_name(987654321) == "user 987654321"
    assert trusted_files.group_name(987654321) == "987654321"
    assert trusted_files.user_name(0) == "root"


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path.with_name("target")),
        lambda path: os.mkfifo(path),
    ],
    ids=["folder", "link", "pipe"],
)
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "target").write_bytes(b"content")
    assert trusted_files.read(tmp_path / "target", 7)[0] == b"content"
    make(tmp_path / "x")
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match=r"not a regular file|Too many levels|Is a directory"):
        trusted_files.read(tmp_path / "x", 7)
    assert len(os.listdir("/dev/fd")) == before


def test_a_larger_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    with pytest.raises(OSError, match="has more than 6 bytes"):
        trusted_files.read(tmp_path / "x", 6)

"""Check the disk cache: damaged, foreign and outdated entries, many processes, bad folders."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnkit.errors import DeviceError, OptionError
from attnkit.jit import disk_cache, dsl_runtime, kernel
from attnkit.jit.disk_cache import KernelCache, default_folder
from attnkit.jit.kernel import Build, Source
from attnkit.util import caches
from attnkit.util.package import FOLDER

FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).parents[2]
IN_ORDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(disk_cache, "_warned", set())


def _python(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# -- entries -------------------------------------------------------------------------------------


def test_entries_are_found_by_their_keys(cache: KernelCache) -> None:
    assert cache.get("a") is None
    assert cache.put("a", b"first")
    assert cache.put("b", b"")
    assert cache.get("a") == b"first"
    assert cache.get("b") == b""
    assert cache.put("a", b"second")
    assert cache.get("a") == b"second"
    assert sorted(p.suffix for p in cache.folder.iterdir()) == [".kernel", ".kernel"]


@IN_ORDER
@given(
    content=st.binary(max_size=200),
    place=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
    key=st.text(max_size=20),
)
def test_no_flipped_byte_is_believed(
    cache: KernelCache, content: bytes, place: float, flip: int, key: str
) -> None:
    cache.put(key, content)
    path = cache.path(key)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= flip
    path.write_bytes(data)
    assert cache.get(key) is None
    cache.put(key, content)
    assert cache.get(key) == content


@IN_ORDER
@given(content=st.binary(max_size=200), place=st.floats(0, 1, exclude_max=True), more=st.binary())
def test_no_other_length_is_believed(
    cache: KernelCache, content: bytes, place: float, more: bytes
) -> None:
    cache.put("key", content)
    path = cache.path("key")
    data = path.read_bytes()
    path.write_bytes(data[: int(place * len(data))])
    assert cache.get("key") is None
    path.write_bytes(data + more)
    assert cache.get("key") == (None if more else content)


def test_another_entry_under_this_name_is_not_believed(cache: KernelCache) -> None:
    cache.put("theirs", b"content")
    cache.path("theirs").rename(cache.path("mine"))
    assert cache.get("mine") is None
    cache.path("mine").write_bytes(b"\x7fELF of another program")
    assert cache.get("mine") is None
    cache.path("mine").unlink()
    cache.path("mine").mkdir()
    assert cache.get("mine") is None


def test_what_was_not_used_for_longest_goes_first(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "LIMIT", 3500)
    old = time.time() - 10 * 86400
    for age, key in enumerate("abc"):
        cache.put(key, bytes(900))
        os.utime(cache.path(key), (old + age, old + age))
    assert cache.get("a") == bytes(900)  # used again
    other = cache.folder / "notes.txt"
    other.write_text("not ours")
    for name in ("attnkit-new-1", "attnkit-new-2"):
        (cache.folder / name).write_text("half")
    os.utime(cache.folder / "attnkit-new-1", (old, old))
    os.utime(other, (old, old))
    cache.put("d", bytes(900))
    assert [key for key in "abcd" if cache.get(key)] == ["a", "c", "d"]
    left = {p.name for p in cache.folder.iterdir() if p.suffix != ".kernel"}
    assert left == {"notes.txt", "attnkit-new-2"}


def test_files_of_killed_processes_are_removed(cache: KernelCache) -> None:
    cache.put("key", b"content")
    hour, days = time.time() - 3600, time.time() - 2 * 86400
    names = ["attnkit-new-abc_1", cache.path("dead").with_suffix(".lock").name, "poetry.lock"]
    for moment in (hour, days, time.time() + 2 * 86400):  # a clock may have been wrong
        for name in names:
            (cache.folder / name).write_text("")
            os.utime(cache.folder / name, (moment, moment))
        cache.put("key", b"content")
        left = {p.name for p in cache.folder.iterdir() if p.suffix != ".kernel"}
        assert left == (set(names) if moment == hour else {"poetry.lock"})


def test_an_entry_dated_in_the_future_is_the_first_to_go(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "LIMIT", 2500)
    for key in ("future", "past"):
        cache.put(key, bytes(900))
    later = time.time() + 1000 * 86400
    os.utime(cache.path("future"), (later, later))
    cache.put("new", bytes(900))
    assert [key for key in ("future", "past", "new") if cache.get(key)] == ["past", "new"]


def test_a_use_corrects_a_date_in_the_future(cache: KernelCache) -> None:
    cache.put("key", b"content")
    later = time.time() + 1000 * 86400
    os.utime(cache.path("key"), (later, later))
    assert cache.get("key") == b"content"
    assert cache.path("key").stat().st_mtime < later - 86400


@pytest.mark.parametrize("step", ["replace", "scandir"])
def test_the_folder_is_removed_during_a_write(
    cache: KernelCache, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write survives another process that removes the folder, and the next write succeeds."""
    real = getattr(os, step)

    def removed(*arguments: Any) -> Any:
        monkeypatch.setattr(os, step, real)
        shutil.rmtree(cache.folder)
        return real(*arguments)

    monkeypatch.setattr(os, step, removed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cache.put("key", b"content") == (step == "scandir")
    assert cache.put("key", b"content")
    assert cache.get("key") == b"content"


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the environment to a user without HOME and without an entry in the user database."""
    import pwd

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    for name in ("ATTNKIT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.mark.usefixtures("no_home")
def test_without_a_home_the_folder_is_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = tmp_path / f"attnkit-{os.getuid()}"
    assert default_folder() == mine
    for home in (tmp_path / "missing", tmp_path / "file" / "home"):  # as of a system's users
        monkeypatch.setenv("HOME", str(home))
        (tmp_path / "file").touch()
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
            assert default_folder() == mine

    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.delattr(os, "getuid")  # Windows
    assert default_folder() == tmp_path / "attnkit"


@pytest.mark.usefixtures("no_home")
def test_a_home_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache folder is in a read-only home directory if kernels are there, as in containers."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "attnkit"
    folder.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert default_folder() == folder


@pytest.mark.usefixtures("no_home")
def test_no_folder_for_temporary_files_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert default_folder() == Path(f"/tmp/attnkit-{os.getuid()}")


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("variable", ["ATTNKIT_CACHE_DIR", "ATTNKIT_SHARED_CACHE_DIR"])
def test_the_home_of_nobody_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "~/kernels")
    with pytest.raises(OptionError, match=f"{variable}='~/kernels': .* give an absolute path"):
        KernelCache()


def test_a_relative_path_of_xdg_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ATTNKIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_folder() == tmp_path / ".cache" / "attnkit"


def test_the_folder_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", "/some/where")
    assert default_folder() == Path("/some/where")
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_folder() == Path("/caches/attnkit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_folder() == Path("/home/me/.cache/attnkit")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_folder() == Path("/home/me/Library/Caches/attnkit")


def _write(folder: Path, letter: bytes) -> None:
    cache = KernelCache(folder)
    for i in range(300):
        cache.put("key", letter * (1000 + i))


def test_readers_never_see_half_an_entry(cache: KernelCache) -> None:
    writers = [FORK.Process(target=_write, args=(cache.folder, x)) for x in (b"a", b"b")]
    for w in writers:
        w.start()
    seen: set[bytes] = set()
    while any(w.is_alive() for w in writers):
        content = cache.get("key")
        assert content is not None or not seen  # once there, it is always there, and whole
        if content is not None:
            assert content == content[:1] * len(content)
            seen.add(content)
    assert [w.exitcode for w in writers] == [0, 0]
    assert len(seen) > 1
    assert [p.suffix for p in cache.folder.iterdir()] == [".kernel"]


# -- folders that fail ---------------------------------------------------------------------------


def _impossible(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("not a folder")
    return tmp_path / "file" / "cache"


def test_a_folder_that_cannot_be_made_warns_once(tmp_path: Path) -> None:
    cache = KernelCache(_impossible(tmp_path))
    with pytest.warns(RuntimeWarning, match="cannot be kept in .*ATTNKIT_CACHE_DIR"):
        assert not cache.put("a", b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache.put("b", b"x")
        assert cache.get("a") is None
        with cache.lock("a"):
            pass


def test_a_full_disk_leaves_nothing_behind(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put("a", b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert not cache.put("a", b"after")
    assert cache.get("a") == b"before"
    assert [p.suffix for p in cache.folder.iterdir()] == [".kernel"]


# -- files that another user could have written ---------------------------------------------------


STRANGER = 54321  # the uid of another user


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Return a table {file: uid} of owners that `os.stat` reports to this process."""
    table: dict[Path, int] = {}
    real = {name: getattr(os, name) for name in ("stat", "lstat", "fstat")}

    def with_owner(name: str) -> Any:
        def status(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            found: os.stat_result = real[name](path, *args, **kwargs)
            for file, uid in table.items():
                other = real["lstat"](file)
                if (other.st_dev, other.st_ino) == (found.st_dev, found.st_ino):
                    return os.stat_result([*found[:4], uid, *found[5:]])
            return found

        return status

    for name in real:
        monkeypatch.setattr(os, name, with_owner(name))
    return table


@pytest.mark.parametrize("mode", [0o777, 0o722, 0o1777, 0o770, 0o730])
def test_a_folder_that_others_can_write_is_neither_read_nor_written(
    cache: KernelCache, mode: int
) -> None:
    cache.put("key", b"content")
    cache.folder.chmod(mode)
    with pytest.warns(
        RuntimeWarning, match=r"may write to it.*chmod go-w .*ATTNKIT_SHARED_CACHE_DIR"
    ):
        assert cache.get("key") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        assert not cache.put("other", b"content")
        with cache.lock("key"):
            assert not list(cache.folder.glob("*.lock"))
    assert len(list(cache.folder.iterdir())) == 1
    cache.folder.chmod(0o755)
    assert cache.get("key") == b"content"


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_an_entry_that_others_can_write_is_compiled_again(cache: KernelCache, mode: int) -> None:
    cache.put("key", b"planted")
    cache.path("key").chmod(mode)
    assert cache.get("key") is None
    cache.put("key", b"content")
    assert cache.get("key") == b"content"


def test_a_folder_of_another_user_is_not_read(cache: KernelCache, owners: dict[Path, int]) -> None:
    cache.put("key", b"planted")
    owners[cache.folder] = STRANGER
    with pytest.warns(RuntimeWarning, match=f"it belongs to user {STRANGER}"):
        assert cache.get("key") is None
    assert not cache.put("key", b"content")


@pytest.mark.parametrize("named", [True, False])
def test_an_entry_of_another_user_is_not_read(
    owners: dict[Path, int], named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry of another user is not read, unless that user is root.

    This holds also for a folder that the user named.
    """
    if not named:
        monkeypatch.delenv("ATTNKIT_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = KernelCache()
    cache.put("key", b"planted")
    owners[cache.path("key")] = STRANGER
    assert cache.get("key") is None
    owners[cache.path("key")] = 0
    assert cache.get("key") == b"planted"  # root may do everything anyway


def test_a_folder_behind_a_link_of_another_user_is_not_read(
    tmp_path: Path, owners: dict[Path, int]
) -> None:
    real, link = KernelCache(tmp_path / "real"), KernelCache(tmp_path / "link")
    real.put("key", b"content")
    link.folder.symlink_to(real.folder)
    assert link.get("key") == b"content"
    owners[link.folder] = STRANGER
    with pytest.warns(RuntimeWarning, match="it is a link, which belongs to"):
        assert link.get("key") is None


def test_an_entry_that_is_no_regular_file_is_not_read(cache: KernelCache, tmp_path: Path) -> None:
    cache.put("key", b"content")
    aside = tmp_path / "aside"
    path = cache.path("key").rename(aside)
    cache.path("key").symlink_to(path)
    assert cache.get("key") is None
    cache.path("key").unlink()
    os.mkfifo(cache.path("key"))
    assert cache.get("key") is None  # and nobody waits for a writer
    with cache.lock("key"):
        pass


def test_a_lock_that_is_no_regular_file_is_not_used(cache: KernelCache, tmp_path: Path) -> None:
    cache.put("key", b"content")
    lock, victim = cache.path("key").with_suffix(".lock"), tmp_path / "victim"
    lock.symlink_to(victim)
    with cache.lock("key"):
        assert not victim.exists()
    lock.unlink()
    os.mkfifo(lock)
    with cache.lock("key"):
        pass
    lock.unlink()
    lock.touch()
    lock.chmod(0o666)
    with cache.lock("key"):
        assert cache._open_lock("key") is None


def test_no_entry_is_larger_than_the_limit(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put("key", bytes(1000))
    monkeypatch.setattr(disk_cache, "ENTRY_LIMIT", 1000)
    assert cache.get("key") is None
    with pytest.warns(RuntimeWarning, match="an entry of .* bytes is too large"):
        assert not cache.put("key", bytes(1000))
    assert cache.put("key", bytes(900))
    assert cache.get("key") == bytes(900)


# -- a cache that another user shares -------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with one entry, set as the shared cache by its environment variable."""
    folder = tmp_path / "shared"
    monkeypatch.setenv("ATTNKIT_SHARED_CACHE_DIR", str(folder))
    with monkeypatch.context() as patch:
        patch.setenv("ATTNKIT_CACHE_DIR", str(folder))
        KernelCache().put("key", b"content")
    return folder


def test_the_owner_lets_others_read(shared: Path) -> None:
    (entry,) = shared.iterdir()
    assert (shared.stat().st_mode & 0o777, entry.stat().st_mode & 0o777) == (0o755, 0o644)


def test_nobody_else_reads_a_folder_that_is_not_shared() -> None:
    cache = KernelCache()
    cache.put("key", b"content")
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    cache.folder.chmod(0o755)
    cache.put("key", b"content")
    assert cache.path("key").stat().st_mode & 0o777 == 0o600


def test_a_second_user_reads_a_shared_cache(shared: Path, owners: dict[Path, int]) -> None:
    (entry,) = shared.iterdir()
    owners |= {shared: STRANGER, entry: STRANGER}
    cache = KernelCache()
    assert cache.get("key") == b"content"
    assert cache.get("missing") is None
    assert cache.put("missing", b"compiled")  # in this user's own folder
    assert cache.get("missing") == b"compiled"
    assert list(shared.iterdir()) == [entry]


@pytest.mark.parametrize("who", ["third", "group", "everybody", "folder"])
def test_of_a_shared_cache_only_the_owner_is_trusted(
    shared: Path, owners: dict[Path, int], who: str
) -> None:
    (entry,) = shared.iterdir()
    owners |= {shared: STRANGER, entry: STRANGER}
    cache = KernelCache()
    if who == "third":
        owners[entry] = STRANGER + 1
    elif who == "folder":
        shared.chmod(0o775)
    else:
        entry.chmod(0o664 if who == "group" else 0o646)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.get("key") is None
        assert cache.get("key") is None
    assert len(caught) == (who == "folder")  # the others are compiled again, as damaged ones are


def test_a_shared_cache_that_does_not_exist_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNKIT_SHARED_CACHE_DIR", str(tmp_path / "nowhere"))
    with pytest.warns(RuntimeWarning, match="the shared cache of kernels, .*nowhere, is not used"):
        assert KernelCache().get("key") is None


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become two users"
)
def test_two_users_compile_once() -> None:
    """A second user reads kernels from the shared folder that the first one filled."""
    with tempfile.TemporaryDirectory() as name:  # pytest's folders are for root alone
        folder = Path(name)
        folder.chmod(0o755)
        _two_users(folder)


def _two_users(folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir()
    homes = {uid: folder / str(uid) for uid in (4001, 4002)}
    for uid, home in homes.items():
        home.mkdir()
        os.chown(home, uid, uid)
    os.chown(shared, 4001, 4001)

    def as_user(uid: int, folder: Path, work: Callable[[KernelCache], bool]) -> int | None:
        def run() -> None:
            os.setgid(uid)
            os.setuid(uid)
            os.environ["ATTNKIT_CACHE_DIR"] = str(folder)
            os.environ["ATTNKIT_SHARED_CACHE_DIR"] = str(shared)
            os._exit(0 if work(KernelCache()) else 1)

        process = FORK.Process(target=run)
        process.start()
        process.join(60)
        return process.exitcode

    assert as_user(4001, shared, lambda cache: cache.put("key", b"content")) == 0
    assert as_user(4002, homes[4002], lambda cache: cache.get("key") == b"content") == 0
    assert as_user(4002, homes[4002], lambda cache: cache.put("own", b"x")) == 0
    assert [p.stat().st_uid for p in shared.iterdir()] == [4001]


# -- locks ---------------------------------------------------------------------------------------


def _hold(folder: Path, held: Any) -> None:
    with KernelCache(folder).lock("key"):
        held.set()
        time.sleep(60)


def test_a_lock_ends_with_its_process(cache: KernelCache) -> None:
    held = FORK.Event()
    other = FORK.Process(target=_hold, args=(cache.folder, held))
    other.start()
    assert held.wait(60)
    file = cache._open_lock("key")
    assert file is not None
    with pytest.raises(BlockingIOError):
        disk_cache.fcntl.flock(file, disk_cache.fcntl.LOCK_EX | disk_cache.fcntl.LOCK_NB)
    os.close(file)
    other.kill()
    other.join()
    with cache.lock("key"):
        cache.put("key", b"x")
    assert [p.suffix for p in cache.folder.iterdir()] == [".kernel"]


def test_a_wait_for_a_process_that_hangs_ends(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "PATIENCE", 0.05)
    with cache.lock("key"):
        entered = False
        with cache.lock("key"):  # as another process would
            entered = True
    assert entered


# -- kernels -------------------------------------------------------------------------------------

# Requests one kernel; each compilation appends a line to a log.
MAKE = """
import sys
import attnkit.jit.kernel as c
c._sources = lambda: "unchanged"

def build():
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    from tests.jit import compiled_kernels
    return compiled_kernels.affine(5.0)

k = c.kernel(c.Source("shared", "sm_90a", build))
print(k.stats[0].registers, len(k.artifact.code))
"""


def test_processes_at_once_compile_once(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    log = tmp_path / "log"
    running = [_python(MAKE, str(log)) for _ in range(3)]
    said = set()
    for process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        said.add(out)
    assert len(said) == 1
    assert log.read_text() == "built\n"
    assert [p.suffix for p in default_folder().iterdir()] == [".kernel"]


def test_a_process_that_dies_while_compiling_holds_nobody_up(tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    log = tmp_path / "log"
    stuck = MAKE.replace("    from tests", "    import time; time.sleep(600)\n    from tests")
    dying = _python(stuck, str(log))
    while not log.exists():
        assert dying.poll() is None
        time.sleep(0.05)
    waiting = _python(MAKE, str(log))
    time.sleep(1.0)
    dying.send_signal(signal.SIGKILL)
    out, err = waiting.communicate(timeout=300)
    dying.communicate()
    assert waiting.returncode == 0, err
    assert out
    assert log.read_text() == "built\nbuilt\n"


class Counted:
    """Kernel source that counts its builds."""

    def __init__(self) -> None:
        pytest.importorskip("cutlass")
        self.builds = 0

    def __call__(self, key: str = "k", arch: str = "sm_90a") -> kernel.CompiledKernel:
        kernel._kernels.clear()
        return kernel.kernel(Source(key, arch, self.build))

    def build(self) -> Build:
        from tests.jit import compiled_kernels

        self.builds += 1
        return compiled_kernels.affine()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.setattr(kernel, "_sources", lambda: "unchanged")
    return Counted()


def test_cleared_caches_drop_kernels_that_stay_callable(counted: Counted) -> None:
    source = Source("cleared", "sm_90a", counted.build)
    before = kernel.kernel(source)
    assert kernel.kernel(source) is before
    caches.clear_all()
    after = kernel.kernel(source)  # from disk
    assert after is not before
    assert counted.builds == 1
    x, c = torch.zeros(4, 8), torch.zeros(4)
    for each in (before, after):  # both check their arguments up to the device
        with pytest.raises(DeviceError, match="takes CUDA tensors"):
            each(x, x, c, c, 1.0, 4)


def test_whatever_changes_the_code_makes_another_kernel(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted()
    counted()
    assert counted.builds == 1
    counted(key="other")
    assert counted.builds == 2
    assert counted(arch="sm_100a").artifact.ptx != counted().artifact.ptx
    assert counted.builds == 3
    for name in ("_sources", "identity"):
        with monkeypatch.context() as patch:
            patch.setattr(kernel, name, lambda: "edited")
            counted()
    assert counted.builds == 5
    counted()
    assert counted.builds == 5
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    counted()
    assert counted.builds == 6
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", "/nowhere")  # has no influence on the code
    counted()
    assert counted.builds == 6


def test_a_damaged_kernel_is_compiled_again(counted: Counted) -> None:
    first = counted()
    (path,) = default_folder().iterdir()
    good = path.read_bytes()
    for bad in (good[:-1], good[:100], b"", good[:-9] + b"\0" + good[-8:], b"x" * len(good)):
        path.write_bytes(bad)
        builds = counted.builds
        assert counted().stats == first.stats
        assert counted.builds == builds + 1
        assert path.read_bytes() != bad
    counted()
    assert counted.builds == 6


def test_an_entry_for_another_key_is_not_taken(counted: Counted) -> None:
    counted("theirs")
    (theirs,) = default_folder().iterdir()
    mine = KernelCache().path(kernel.full_key(Source("mine", "sm_90a", counted.build)))
    mine.write_bytes(theirs.read_bytes())
    counted("mine")
    assert counted.builds == 2


def test_without_a_folder_kernels_live_in_memory(
    counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(_impossible(tmp_path)))
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        first = counted("one")
    source = Source("one", "sm_90a", counted.build)
    assert kernel.kernel(source) is first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counted("two") is not first
    assert counted.builds == 2


def test_a_failed_build_leaves_nothing(counted: Counted) -> None:
    def broken() -> Build:
        raise RuntimeError("broken template")

    source = Source("broken", "sm_90a", broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken template"):
            kernel.kernel(source)
    assert list(default_folder().iterdir()) == []


def _package(root: Path) -> Path:
    """Copy the package's files to `root`, with links resolved; return the copy's folder."""
    return Path(shutil.copytree(FOLDER, root / "attnkit", ignore=shutil.ignore_patterns("*.pyc")))


def test_every_file_that_shapes_a_kernel_enters_the_digest(tmp_path: Path) -> None:
    """An edited, renamed or new file changes the digest in every room that shapes kernels.

    Rooms that do not exist yet count too.
    """
    root = _package(tmp_path)
    seen = {kernel.sources_digest(str(root))}

    def changes(what: str) -> None:
        digest = kernel.sources_digest(str(root))
        assert digest not in seen, what
        seen.add(digest)

    for room in (
        *("graph", "codegen", "jit", "splice", "templates", "templates/sm90", "templates/sm100"),
        *("", "a_new_room", "splice/a_new_room", "graph/cli", "jit/schedule", "codegen/runtime"),
    ):
        new = root / room / "a_new_file.py"
        new.parent.mkdir(exist_ok=True)
        for text in ("", "a = 1\n"):
            new.write_text(text)
            changes(f"{room}: {text!r}")
        new.rename(new.with_name("renamed.py"))
        changes(f"{room}: renamed")


def test_files_that_shape_no_kernel_recompile_none(tmp_path: Path) -> None:
    root = _package(tmp_path)
    before = kernel.sources_digest(str(root))
    for room in ("cli", "runtime", "schedule", "templates/cpu", "masks", "emulator"):
        (root / room / "a_new_file.py").write_text("a = 1\n")
    assert kernel.sources_digest(str(root)) == before


def test_the_dsl_is_identified_without_importing_it() -> None:
    pytest.importorskip("cutlass")
    import cutlass

    version, *libraries = dsl_runtime.identity().split()
    assert version == cutlass.__version__
    assert any(name.startswith("libcute_dsl_runtime.so:") for name in libraries)


def test_the_header_is_as_documented(cache: KernelCache) -> None:
    cache.put("kéy", b"content")
    data = cache.path("kéy").read_bytes()
    assert data[:16] == b"attnkit kernel\x00\x01"
    assert struct.unpack_from("<QQ", data, 16) == (4, 7)
    assert data[64:] == "kéy".encode() + b"content"

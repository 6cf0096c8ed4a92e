"""Check that cached values derived from tensors live until the tensors die or change."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch

from attnkit.util import tensor_cache
from attnkit.util.data_state import DataState, state_of
from attnkit.util.tensor_cache import VersionedCache


def test_hit_edit_and_other_tensor() -> None:
    cache: VersionedCache[int] = VersionedCache(4)
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    a, b = torch.zeros(3), torch.zeros(3)
    assert [cache.get("k", [a], make) for _ in range(3)] == [0, 0, 0]
    assert cache.get("k", [b], make) == 1
    assert cache.get("other", [a], make) == 2
    a.add_(1)
    assert cache.get("k", [a], make) == 3
    assert cache.get("k", [a], make) == 3
    assert cache.get("k", [b], make) == 1
    assert cache.get("k", [a, b], make) == 4


def test_views_share_the_version() -> None:
    cache: VersionedCache[int] = VersionedCache(4)
    base = torch.zeros(4)
    view = base[1:]
    assert cache.get(0, [view], lambda: 1) == 1
    base[2] = 5
    assert cache.get(0, [view], lambda: 2) == 2


def test_a_new_tensor_at_an_old_address_is_a_miss() -> None:
    cache: VersionedCache[int] = VersionedCache(64)
    for i in range(50):
        t = torch.full((2,), i)
        assert cache.get(0, [t], lambda i=i: i) == i  # type: ignore[misc]
        del t  # frees it at once: the next one often gets its address


def test_bounded() -> None:
    cache: VersionedCache[int] = VersionedCache(2)
    t = torch.zeros(1)
    for key in (1, 2, 1, 3):
        cache.get(key, [t], lambda key=key: key)  # type: ignore[misc]
    assert cache.get(1, [t], lambda: -1) == 1  # recently used
    assert cache.get(2, [t], lambda: -2) == -2  # dropped


def in_another_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("size", [1, 4])
def test_another_thread_drops_an_entry_that_is_looked_up(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache: VersionedCache[int] = VersionedCache(size)
    tensor = torch.zeros(1)
    assert cache.get("k", [tensor], lambda: 1) == 1

    def interrupted(tensor: torch.Tensor) -> DataState:
        in_another_thread(lambda: cache.get("other", [], lambda: 2))  # drops "k" if size is 1
        in_another_thread(cache.clear)
        return state_of(tensor)

    monkeypatch.setattr(tensor_cache, "state_of", interrupted)
    assert cache.get("k", [tensor], lambda: 3) == 3
    monkeypatch.undo()
    assert cache.get("k", [tensor], lambda: 4) == 3


def test_values_are_computed_without_the_lock() -> None:
    """The cache does not hold its lock while it computes a value.

    Otherwise a computation that waits for another thread's computation would wait forever.
    """
    cache: VersionedCache[int] = VersionedCache(2)
    tensor = torch.zeros(1)

    def make() -> int:
        other = threading.Thread(target=lambda: cache.get("inner", [tensor], lambda: 1))
        other.start()
        other.join(60)
        return -1 if other.is_alive() else cache.get("inner", [tensor], lambda: 2)

    assert cache.get("outer", [tensor], make) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    cache: VersionedCache[int] = VersionedCache(2)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with tensor_cache._lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(30)  # ends the child if it waits
        os._exit(0 if cache.get("k", [], lambda: 7) == 7 else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("copies", [True, False])
def test_values_of_inference_tensors_are_kept_with_a_copy_of_their_data(copies: bool) -> None:
    cache: VersionedCache[int] = VersionedCache(4) if copies else VersionedCache(4, copies=False)
    with torch.inference_mode():
        table = torch.zeros(3)
        assert cache.get("k", [table], lambda: 1) == 1
        assert cache.get("k", [table], lambda: 2) == (1 if copies else 2)
        table[1] = 5
        assert cache.get("k", [table], lambda: 3) == 3

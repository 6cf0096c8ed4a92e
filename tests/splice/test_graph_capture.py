"""Check that objects read by a captured CUDA graph live as long as the graph (fake driver)."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch

import attnkit
from attnkit.splice import graph_capture
from attnkit.splice.graph_capture import keep_while_replayable, release_unreplayable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="semaphores of the C library")

CPU = torch.device("cpu")


class Table:
    """Stub of a tensor that a graph reads."""


class Driver:
    """Stub of the CUDA driver that captures one graph at a time."""

    def __init__(self) -> None:
        self.knows_user_objects = True
        self.captured = self.begin()

    def begin(self) -> list[tuple[int, int]]:
        """Begin a graph; return the list that will hold its (destructor, argument) pairs."""
        self.captured = []
        return self.captured

    def call_with_graph(self, stream: int, destructor: int, argument: int) -> bool:
        if self.knows_user_objects:
            self.captured.append((destructor, argument))
        return self.knows_user_objects


def destroy(graph: list[tuple[int, int]]) -> None:
    """Destroy a graph as CUDA does, calling each destructor once."""
    while graph:
        destructor, argument = graph.pop()
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(destructor)(argument)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    monkeypatch.setattr(graph_capture, "driver", lambda: driver)
    yield driver
    destroy(driver.captured)
    release_unreplayable()


def kept() -> weakref.ref[Table]:
    """Attach a new table to the graph that is being captured; return a weak reference to it."""
    table = Table()
    keep_while_replayable(CPU, table)
    return weakref.ref(table)


def test_kept_until_the_graph_is_destroyed(driver: Driver) -> None:
    tables = [kept() for _ in range(3)]
    release_unreplayable()
    gc.collect()
    assert all(table() is not None for table in tables)
    destroy(driver.captured)
    release_unreplayable()
    assert all(table() is None for table in tables)


def test_graphs_are_told_apart(driver: Driver) -> None:
    first, early = driver.captured, kept()
    second, late = driver.begin(), kept()
    destroy(first)
    release_unreplayable()
    assert early() is None
    assert late() is not None
    destroy(second)
    release_unreplayable()
    assert late() is None


def test_the_next_capture_releases(driver: Driver) -> None:
    first, table = driver.captured, kept()
    destroy(first)
    assert table() is not None
    driver.begin()
    kept()
    assert table() is None


def test_clear_caches_leaves_what_can_be_replayed(driver: Driver) -> None:
    first, early = driver.captured, kept()
    driver.begin()
    late = kept()
    destroy(first)
    attnkit.clear_caches()
    assert early() is None
    assert late() is not None


@pytest.mark.parametrize("driver_is_there", [False, True])
def test_kept_for_ever_where_the_driver_cannot_say(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, driver_is_there: bool
) -> None:
    monkeypatch.setattr(graph_capture, "_held_for_ever", [])
    driver.knows_user_objects = False
    if not driver_is_there:
        monkeypatch.setattr(graph_capture, "driver", lambda: None)
    table = kept()
    attnkit.clear_caches()
    assert table() is not None


class Library:
    """Stub of libcuda with a given capture status and an optional function that fails."""

    def __init__(self, status: int = 1, failing: str = "") -> None:
        self.status, self.failing = status, failing
        self.retained: list[int] = []

    def cuStreamGetCaptureInfo_v2(
        self, stream: object, status: object, id_out: None, graph: object, *rest: None
    ) -> int:
        status._obj.value, graph._obj.value = self.status, 77  # type: ignore[attr-defined]
        return self.failing == "info"

    def cuUserObjectCreate(self, out: object, *rest: object) -> int:
        out._obj.value = 5  # type: ignore[attr-defined]
        return self.failing == "create"

    def cuGraphRetainUserObject(self, graph: object, *rest: object) -> int:
        self.retained.append(graph.value)  # type: ignore[attr-defined]
        return self.failing == "retain"


@pytest.mark.parametrize(
    ("library", "done"),
    [
        (Library(), True),
        (Library(status=0), False),
        (Library(status=2), False),
        (Library(failing="info"), False),
        (Library(failing="create"), False),
        (Library(failing="retain"), False),
    ],
    ids=lambda x: x if isinstance(x, bool) else f"{x.status}{x.failing}",
)
def test_calls_of_the_driver(library: Library, done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert graph_capture.CudaDriver().call_with_graph(3, 4, 5) is done
    assert library.retained == ([77] if done or library.failing == "retain" else [])

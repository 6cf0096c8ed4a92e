"""Keep what a captured CUDA graph reads for as long as the graph can be replayed, and no longer.

A captured launch holds addresses only: of tables and copied tensors that belong to attnkit, and whose
memory torch would hand out again. torch does not say which graph is captured, nor when it is gone.
CUDA does: a user object that a graph retains is destroyed with the last of the graph, its clones
and its executable graphs (CUDA C++ Programming Guide, "CUDA User Objects").

The destructor of a user object runs on a thread of CUDA's, where neither CUDA nor Python may be
called. It is `sem_post` of the C library on a semaphore that is polled at the next capture, and by
`attnkit.clear_caches()`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Protocol

from attnkit.util import caches

_SEMAPHORE_BYTES = 64  # sizeof(sem_t) is 32 at most
_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_NO_DESTRUCTOR_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
_MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE: the graph takes over the only reference

# What is kept, by the address of the semaphore that says that its graph is gone.
_kept: dict[int, object] = {}
# What graphs read where the driver cannot say when they are gone: kept until the process ends.
_kept_for_ever: list[object] = []


class Driver(Protocol):
    """What is needed of CUDA's driver."""

    def call_with_graph(self, stream: int, destructor: int, argument: int) -> bool:
        """Have `destructor(argument)` called once the graph that a stream captures is gone.

        Returns:
            False, and nothing is done, if that is not possible.
        """


class _Cuda:
    """The driver of this machine."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._capture_info = library.cuStreamGetCaptureInfo_v2
        self._create = library.cuUserObjectCreate
        self._retain = library.cuGraphRetainUserObject

    def call_with_graph(self, stream: int, destructor: int, argument: int) -> bool:
        status, graph, user_object = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        pointer = ctypes.c_void_p
        failed = self._capture_info(
            pointer(stream), ctypes.byref(status), None, ctypes.byref(graph), None, None
        )
        if failed or status.value != _ACTIVE:
            return False
        failed = self._create(
            *(ctypes.byref(user_object), pointer(argument), pointer(destructor)),
            *(ctypes.c_uint(1), ctypes.c_uint(_NO_DESTRUCTOR_SYNC)),
        )
        if failed:
            return False
        # it fails only for a graph or an object that does not exist; then the object is leaked
        return not self._retain(graph, user_object, ctypes.c_uint(1), ctypes.c_uint(_MOVE))


@functools.cache
def _driver() -> Driver | None:
    try:
        return _Cuda()
    except (OSError, AttributeError):  # no driver, or one before CUDA 11.3
        return None


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    return library


def keep_while_replayable(stream: int, kept: object) -> None:
    """Keep an object alive until the graph that a stream captures can no longer be replayed.

    Args:
        stream: handle of a stream on which a CUDA graph is captured.
        kept: what holds the tensors that the graph reads.
    """
    release_unreplayable()
    driver, libc = _driver(), _libc()
    # of malloc, not of ctypes: a graph may outlive the interpreter
    semaphore = libc.malloc(ctypes.c_size_t(_SEMAPHORE_BYTES))
    libc.sem_init(ctypes.c_void_p(semaphore), 0, ctypes.c_uint(0))
    post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
    if driver is not None and post and driver.call_with_graph(stream, post, semaphore):
        _kept[semaphore] = kept
        return
    libc.free(ctypes.c_void_p(semaphore))
    _kept_for_ever.append(kept)


def release_unreplayable() -> None:
    """Drop what was kept for graphs that are gone."""
    libc = _libc()
    gone = [s for s in _kept if libc.sem_trywait(ctypes.c_void_p(s)) == 0]
    for semaphore in gone:
        del _kept[semaphore]
        libc.free(ctypes.c_void_p(semaphore))


caches.register(release_unreplayable)

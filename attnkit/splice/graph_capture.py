"""Keep what a captured CUDA graph reads for as long as the graph can be replayed, and no longer.

A captured launch holds addresses only: of tables and copied tensors that belong to attnkit, and
whose memory torch would hand out again. torch does not say which graph is captured, nor when it is
gone. CUDA does: a user object that a graph retains is destroyed with the last of the graph, its
clones and its executable graphs (CUDA C++ Programming Guide, "CUDA User Objects").

The destructor of a user object runs on a thread of CUDA's, where neither CUDA nor Python may be
called. It is `sem_post` of the C library on a semaphore that is polled at the next capture, and by
`attnkit.clear_caches()`.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Protocol

import torch

from attnkit.util import caches
from attnkit.util.torch_private import is_stream_capturing, stream_of

_SEMAPHORE_BYTES = 64  # sizeof(sem_t) is 32 at most
_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_NO_DESTRUCTOR_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
_MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE: the graph takes over the only reference

# Objects that captured graphs read, by the address of the semaphore that signals the graph's end.
_held_by_semaphore: dict[int, object] = {}
# The same where the driver cannot signal the end of a graph: held until the process ends.
_held_for_ever: list[object] = []
_lock = threading.Lock()


class Driver(Protocol):
    """The functions of CUDA's driver that this module needs."""

    def call_with_graph(self, stream: int, destructor: int, argument: int) -> bool:
        """Have `destructor(argument)` called once the graph that a stream captures is gone.

        Returns:
            False, and nothing is done, if that is not possible.
        """


class CudaDriver:
    """The driver of this machine."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._capture_info = library.cuStreamGetCaptureInfo_v2
        self._create = library.cuUserObjectCreate
        self._retain = library.cuGraphRetainUserObject

    def call_with_graph(self, stream: int, destructor: int, argument: int) -> bool:
        """See `Driver`."""
        status, graph, user_object = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        pointer = ctypes.c_void_p
        failed = self._capture_info(
            pointer(stream), ctypes.byref(status), None, ctypes.byref(graph), None, None
        )
        if failed or status.value != _ACTIVE:
            return False
        failed = self._create(
            ctypes.byref(user_object),
            pointer(argument),
            pointer(destructor),
            ctypes.c_uint(1),  # initial references
            ctypes.c_uint(_NO_DESTRUCTOR_SYNC),
        )
        if failed:
            return False
        # fails only for a graph or an object that does not exist: its destructor never runs then
        return not self._retain(graph, user_object, ctypes.c_uint(1), ctypes.c_uint(_MOVE))


@functools.cache
def driver() -> Driver | None:
    """The driver of this machine; None if there is none that knows user objects."""
    try:
        return CudaDriver()
    except (OSError, AttributeError):  # no driver, or one before CUDA 11.3
        return None


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    return library


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the current stream of a device."""
    return device.type == "cuda" and is_stream_capturing()


def keep_while_replayable(device: torch.device, owner: object) -> None:
    """Keep an object alive until the graph that is being captured can no longer be replayed.

    Args:
        device: on whose current stream a CUDA graph is captured.
        owner: holds the tensors that the graph reads.
    """
    release_unreplayable()
    cuda, libc = driver(), _libc()
    stream = 0 if device.index is None else stream_of(device.index)
    # of malloc, not of ctypes: a graph may outlive the interpreter
    semaphore = libc.malloc(ctypes.c_size_t(_SEMAPHORE_BYTES))
    libc.sem_init(ctypes.c_void_p(semaphore), 0, ctypes.c_uint(0))
    post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
    if cuda is not None and post and cuda.call_with_graph(stream, post, semaphore):
        with _lock:
            _held_by_semaphore[semaphore] = owner
        return
    libc.free(ctypes.c_void_p(semaphore))
    _held_for_ever.append(owner)


def release_unreplayable() -> None:
    """Drop what was kept for graphs that are gone."""
    libc = _libc()
    with _lock:
        gone = [s for s in _held_by_semaphore if libc.sem_trywait(ctypes.c_void_p(s)) == 0]
        released = [_held_by_semaphore.pop(s) for s in gone]
        for semaphore in gone:
            libc.free(ctypes.c_void_p(semaphore))
    del released  # outside of the lock: it may run anything


caches.register(release_unreplayable)

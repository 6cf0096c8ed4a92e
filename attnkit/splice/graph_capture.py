"""Keep the tensors that a captured CUDA graph reads alive until the graph is destroyed.

A captured launch holds only addresses. Some of them belong to tables and copies that attnkit owns.
If attnkit dropped these tensors, torch's allocator would reuse their memory. torch does not expose
which graph is being captured, nor when it is destroyed. CUDA does: a user object that a graph
retains is destroyed after the graph, its clones and its executable graphs (CUDA C++ Programming
Guide, "CUDA User Objects").

The destructor of a user object runs on a thread of CUDA, where neither CUDA nor Python may be
called. The destructor used here is `sem_post` of the C library on a semaphore. The next capture and
`attnkit.clear_caches()` poll that semaphore.
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

# Address of the semaphore that signals a graph's end -> objects that the graph reads.
_held_by_semaphore: dict[int, object] = {}
# Objects that graphs read whose end the driver cannot signal. They are kept until the process ends.
_held_for_ever: list[object] = []
_lock = threading.Lock()


class Driver(Protocol):
    """Interface to the functions of the CUDA driver that this module needs."""

    def call_with_graph(self, stream: int, destructor: int, argument: int) -> bool:
        """Register `destructor(argument)` to run when the graph captured on `stream` is destroyed.

        Returns:
            Whether the registration succeeded. If not, it has no effect.
        """


class CudaDriver:
    """Implements `Driver` with libcuda through ctypes."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._capture_info = library.cuStreamGetCaptureInfo_v2
        self._create = library.cuUserObjectCreate
        self._retain = library.cuGraphRetainUserObject

    def call_with_graph(self, stream: int, destructor: int, argument: int) -> bool:
        """Register a destructor with the captured graph, see `Driver.call_with_graph`."""
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
        # fails only if the graph or the object does not exist; then the destructor never runs
        return not self._retain(graph, user_object, ctypes.c_uint(1), ctypes.c_uint(_MOVE))


@functools.cache
def driver() -> Driver | None:
    """Load the CUDA driver; return None if it is missing or does not support user objects."""
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
    """Return whether a CUDA graph is being captured on the current stream of a device."""
    return device.type == "cuda" and is_stream_capturing()


def keep_while_replayable(device: torch.device, owner: object) -> None:
    """Keep `owner` alive until the CUDA graph that is being captured is destroyed.

    Args:
        device: device on whose current stream a CUDA graph is being captured.
        owner: object that holds the tensors that the graph reads.
    """
    release_unreplayable()
    cuda, libc = driver(), _libc()
    stream = 0 if device.index is None else stream_of(device.index)
    # memory of malloc, not of ctypes, because a graph may outlive the interpreter
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
    """Drop the objects that `keep_while_replayable` kept for graphs that no longer exist."""
    libc = _libc()
    with _lock:
        gone = [s for s in _held_by_semaphore if libc.sem_trywait(ctypes.c_void_p(s)) == 0]
        released = [_held_by_semaphore.pop(s) for s in gone]
        for semaphore in gone:
            libc.free(ctypes.c_void_p(semaphore))
    del released  # outside of the lock, as finalizers may run any code


caches.register(release_unreplayable)

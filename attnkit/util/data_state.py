"""Detect whether the data of a tensor changed after a cached value was computed from it.

torch's version counter does not count every write. It misses writes through a NumPy or DLPack view,
`tensor.data[...]`, a copy into the storage, a fused optimizer, a torch.distributed collective and a
custom kernel. A `DataState` therefore also records the content of the tensor. On the CPU it keeps a
copy and compares it before a cached value is used. On a GPU it keeps a fingerprint (`fingerprint`).
The host cannot compare a fingerprint without a synchronization, so `attnkit.runtime.data_guard`
compares it on the GPU.

All caches share one state per tensor. The state is created before any value is computed from the
data, so every cached value is checked against the same content.

A state with recorded content holds no weak reference to its tensor, because
`torch.utils.swap_tensors` refuses tensors that have one. It compares the id, the layout and the
content. Another tensor that gets the id of a deleted one and agrees in all of them may use the same
values. Where the content is not compared, a weak reference tells both tensors apart.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnkit.errors import ArgumentError, UnsupportedError
from attnkit.util import caches
from attnkit.util.arguments import check_flag
from attnkit.util.fingerprint import fingerprint
from attnkit.util.torch_private import PLAIN, is_stream_capturing, version


def address(tensor: Tensor) -> int:
    """Return the data pointer of `tensor`, or 0 if it has none (for example a functorch wrapper).

    A `DataState` compares it because `t.data = other` does not increment the version counter.
    """
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor of torch.func, or without data
        return 0


class DataState:
    """Snapshot of a tensor's data that detects whether the data has changed since.

    Attributes:
        valid: False after `invalidate`, or after a comparison that found other data.
        expected: recorded fingerprint if the data is compared on the tensor's device; else None.
        shape, dtype: those of the tensor.
        address: address of the first element, 0 if there is none.
    """

    __slots__ = (
        "__weakref__",
        "_copy",
        "_digest",
        "_fingerprint",
        "_id",
        "_inference",
        "_object",
        "_offset",
        "_ready",
        "_storage",
        "_stride",
        "_trusted",
        "_version",
        "address",
        "dtype",
        "expected",
        "shape",
        "valid",
    )

    # an attribute, as module globals may be cleared when the last states are released at exit
    _hash = staticmethod(functools.partial(hashlib.blake2b, digest_size=8))

    def __init__(
        self,
        tensor: Tensor,
        forget: Callable[[Any], None] | None = None,
        *,
        compare: bool = True,
    ) -> None:
        """Record the version, address, layout and content of `tensor`.

        Args:
            tensor: the tensor.
            forget: called with a weak reference when the tensor or its memory is deleted.
            compare: whether to record the content. False is for tensors that only attnkit writes.
        """
        self.valid = True
        self._id = id(tensor)
        self._inference = tensor.is_inference()
        self._trusted = setting.trusts and not self._inference
        self._version = -1 if self._inference else version(tensor)
        self.address = address(tensor)
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._copy: Any = None
        self._digest = b""
        self._fingerprint: Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        self._storage: weakref.ref[Any] | None = None
        self._object: weakref.ref[Tensor] | None = None
        self.expected: Tensor | None = None
        if not compare or self._trusted or not self.address or tensor.__class__ not in PLAIN:
            self._stride, self._offset = (), 0
            self._object = weakref.ref(tensor, forget)
            return
        self._stride, self._offset = tensor.stride(), int(tensor.storage_offset())
        self._storage = weakref.ref(tensor.untyped_storage(), forget)
        on_device = not self._inference and setting.compares_on(tensor.device)
        if tensor.device.type == "cpu" and not on_device:
            self._copy = _memory(tensor).copy()
            return
        _refuse_capture(tensor)
        self._fingerprint = _fingerprint(tensor)
        if on_device:
            self.expected = self._fingerprint
            if tensor.is_cuda:
                self._ready = torch.cuda.Event()
                self._ready.record(torch.cuda.current_stream(tensor.device))

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is the recorded object and its data has not changed.

        The content is not compared here if a GPU compares it (`expected` is not None) or if
        version counters are trusted. A tensor that got the id of a deleted one counts as the
        recorded object if its layout and content are those recorded.

        Raises:
            UnsupportedError: the comparison must wait for a GPU while a CUDA graph is captured.
        """
        if self._storage is not None and (
            tensor.stride() != self._stride
            or tensor.shape != self.shape
            or tensor.dtype is not self.dtype
        ):
            return False
        return self.holds_in_same_layout(tensor)

    def holds_in_same_layout(self, tensor: Tensor) -> bool:
        """Return what `holds` returns, for a tensor with the recorded shape, strides and dtype.

        Other guards have often compared these already, which takes a quarter of a microsecond.

        Raises:
            UnsupportedError: see `holds`.
        """
        if id(tensor) != self._id or not self.valid:
            return False
        if not self._inference:
            if version(tensor) != self._version:
                return False
            if self._trusted and not setting.trusts:  # no content was recorded
                return False
        if address(tensor) != self.address:
            return False
        if self._storage is None:
            assert self._object is not None
            return self._object() is tensor
        if setting.trusts and not self._inference:
            return self._is_object(tensor)
        return self.expected is not None or self.has_content_of(tensor)

    def _is_object(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is the object whose versions were counted since the record.

        The first time this compares the content. From then on a weak reference tells the object
        from another one with the same id, which may count its versions anew.

        Raises:
            UnsupportedError: see `holds`.
        """
        if self._object is None:
            if not self._has_recorded_content(tensor):
                return False
            self._object = weakref.ref(tensor)
        return self._object() is tensor

    def has_content_of(self, tensor: Tensor) -> bool:
        """Return whether the content of `tensor` equals the recorded content.

        If the data is compared on the tensor's device (`expected` is not None), this compares only
        the address. If no content was recorded, this returns True.

        Raises:
            UnsupportedError: see `holds`.
        """
        if self.expected is not None:
            return address(tensor) == self.address
        return self._has_recorded_content(tensor)

    def _has_recorded_content(self, tensor: Tensor) -> bool:
        """Compare the content of `tensor` on the host; wait for a GPU if it is there."""
        if self._copy is not None:
            now = _memory(tensor)
            return now.shape == self._copy.shape and np.array_equal(now, self._copy)
        if self._digest:  # the copy was released
            same = tensor.shape == self.shape and tensor.dtype is self.dtype
            return same and self._hash(_memory(tensor).tobytes()).digest() == self._digest
        if self._fingerprint is None:
            return True
        _refuse_capture(tensor)
        return torch.equal(_fingerprint(tensor), self._fingerprint)

    def storage(self) -> Any:
        """Return the storage that was recorded; None if it was freed or not recorded."""
        return None if self._storage is None else self._storage()

    def recorded(self) -> Tensor | None:
        """Return the recorded memory as a new tensor; None if it was freed or not recorded."""
        storage = self.storage()
        if storage is None:
            return None
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self._offset, self.shape, self._stride)

    def storage_pointer(self) -> int:
        """Return the address of the first byte of the storage; 0 if it was freed."""
        if self._storage is None:
            t = None if self._object is None else self._object()
            return 0 if t is None else _storage(t)
        storage = self._storage()
        return 0 if storage is None else int(storage.data_ptr())

    def is_reference(self, reference: Any) -> bool:
        """Return whether this state created the weak reference that `forget` received."""
        return reference is self._storage or reference is self._object

    def wait_until_recorded(self) -> None:
        """Wait until the GPU has computed `expected`, so that kernels on any stream may read it."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = None

    def digest(self) -> bytes:
        """Return an 8-byte hash of the recorded data, or b"" if there is no copy in host memory."""
        if not self._digest and self._copy is not None:
            self._digest = self._hash(self._copy.tobytes()).digest()
        return self._digest

    def release(self) -> None:
        """Invalidate the state, and free the copy, after the memory was freed.

        Caches may still reference this state, and another tensor may get the id and the address. A
        hash or a fingerprint stays: activation checkpointing frees a tensor that a function makes,
        and makes it again for the backward, where it is compared with that of the forward.
        """
        self.valid = False
        self.digest()
        self._copy = self.expected = None


def data_digest(states: Sequence[DataState]) -> int:
    """Return a positive hash of the data of all `states`; 0 if no state has a copy on the host."""
    parts = [s.digest() for s in states]
    if not any(parts):
        return 0
    return 1 + int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=7).digest(), "little")


def _memory(tensor: Tensor) -> Any:
    """Return a NumPy integer view of a CPU tensor's memory, without calling a torch operator.

    So no torch mode intercepts the access, and NaNs compare by their bits.
    """
    item = tensor.element_size()
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), np.uint8)
    strides = tuple(s * item for s in tensor.stride())
    size = sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + item
    raw: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    return np.ndarray(tuple(tensor.shape), f"i{item}", raw, 0, strides)


def _fingerprint(tensor: Tensor) -> Tensor:
    """Compute the fingerprint of `tensor`, with the registered kernel if its device has one."""
    own = setting.compares_on(tensor.device)
    return setting.record(tensor) if own else fingerprint(tensor)


def _refuse_capture(tensor: Tensor) -> None:
    """Raise if a comparison would have to wait for the GPU while a CUDA graph is captured.

    Raises:
        UnsupportedError: `tensor` is on a GPU whose current stream is capturing a CUDA graph.
    """
    if tensor.is_cuda and is_stream_capturing():
        raise UnsupportedError(
            "a captured tensor cannot be compared with its earlier data while a CUDA graph is "
            "captured, because that waits for the GPU. Call the function once before the capture; "
            "for a tensor that was made in inference mode, make it outside of "
            "torch.inference_mode(); where attnkit has no kernels for this GPU, use "
            "attnkit.trust_version_counters()"
        )


class Setting:
    """Process-wide settings; they are not per thread because autograd uses its own threads.

    Attributes:
        trusts: whether version counters are trusted, see `trust_version_counters`.
        compares_on: function from a device to whether data is compared on that device.
        record: function that computes the fingerprint of a tensor on such a device.
    """

    trusts = False
    compares_on: Callable[[torch.device], bool] = staticmethod(lambda device: False)
    record: Callable[[Tensor], Tensor] = staticmethod(fingerprint)


setting = Setting()
# By the id of the tensor. A state leaves when its memory is freed; a view may be deleted earlier.
_states: dict[int, DataState] = {}
_SIZE = 4096
caches.register(_states.clear)


def state_of(tensor: Tensor) -> DataState:
    """Return the `DataState` of `tensor`: the same object until a change of its data is found."""
    state = _states.get(id(tensor))
    if state is not None and state.holds(tensor):
        return state
    return _new_state(tensor)


def settled_state_of(tensor: Tensor) -> DataState:
    """Return the `DataState` of `tensor` after comparing its content, on a GPU too.

    For data that is compared on a GPU this waits for the GPU, unless a CUDA graph is captured. Slow
    paths call it before they use values that were cached for the data.
    """
    state = _states.get(id(tensor))
    if state is not None and state.expected is not None and not setting.trusts:
        if not (tensor.is_cuda and is_stream_capturing()) and state.holds(tensor):
            state.valid = torch.equal(_fingerprint(tensor), state.expected)
    return state_of(tensor)


def set_own(tensor: Tensor) -> None:
    """Mark a new tensor as written only by attnkit, so its content is never compared."""
    _new_state(tensor, compare=False)


def _new_state(tensor: Tensor, *, compare: bool = True) -> DataState:
    key, states = id(tensor), _states  # a local: module globals may be cleared at exit

    def forget(reference: Any) -> None:
        known = states.get(key)
        if known is not None and known.is_reference(reference):
            states.pop(key, None)
            known.release()

    state = DataState(tensor, forget, compare=compare)
    _drop(key)
    while len(states) >= _SIZE:
        for oldest in list(states)[:1]:  # a copy, as another thread may edit the table
            _drop(oldest)
    states[key] = state
    return state


def _drop(key: int) -> None:
    """Remove the state of an id, and invalidate it, because `invalidate` no longer finds it."""
    state = _states.pop(key, None)
    if state is not None:
        state.valid = False


def invalidate(tensor: Tensor) -> None:
    """Drop everything cached for the data of `tensor`: tiles, index bounds and fingerprints.

    Call this function after a write that torch's version counter does not count, such as a write by
    a custom kernel, a DLPack view, a fused optimizer or a torch.distributed collective. On the CPU
    attnkit detects such writes itself. On a GPU the next attnkit call rebuilds what it needs.
    Without `invalidate` the first call after the write computes with old tiles, and a later call
    raises `StaleDataError`.

    Args:
        tensor: a tensor captured by a score_mod or mask_mod, a block list, or any tensor that
            shares the storage of one of these.

    Raises:
        ArgumentError: `tensor` is not a tensor.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    _drop(id(tensor))
    invalidate_storage(_storage(tensor))


def invalidate_storage(pointer: int) -> None:
    """Invalidate the states of all tensors whose storage begins at the address `pointer`."""
    if not pointer:
        return
    for key, state in list(_states.items()):
        if state.storage_pointer() == pointer:
            _drop(key)


def _storage(tensor: Tensor) -> int:
    """Return the data pointer of the storage of `tensor`, or 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def trust_version_counters(trust: bool = True) -> AbstractContextManager[None]:
    """Choose whether attnkit detects changes of captured data by torch's version counters alone.

    If `trust` is True, attnkit neither compares captured data on the CPU nor checks fingerprints on
    the GPU. On the CPU that saves the time to read the data. On a GPU it saves a launch for the
    calls whose kernels cannot compare data: calls on Blackwell, calls in torch operators, and
    tensors with gaps between their elements. The caller must then make sure that every write to a
    captured tensor goes through an in-place torch operator or is followed by `attnkit.invalidate`.
    Otherwise results can be silently wrong.

    attnkit then holds a weak reference to a captured tensor. So `torch.utils.swap_tensors` refuses
    that tensor, and with it `module.double()` under
    `torch.__future__.set_swap_module_params_on_conversion(True)`.

    The setting applies to all threads of the process, because autograd runs backward passes in its
    own threads. In a `with` statement, the previous setting is restored after the block.

    Args:
        trust: whether to trust version counters. attnkit starts with False.

    Raises:
        OptionError: `trust` is not a bool.
    """
    check_flag("trust", trust)
    before, setting.trusts = setting.trusts, trust
    return _restored(before)


@contextmanager
def _restored(before: bool) -> Iterator[None]:
    try:
        yield
    finally:
        setting.trusts = before


def compare_on_devices(
    compares_on: Callable[[torch.device], bool], record: Callable[[Tensor], Tensor] = fingerprint
) -> tuple[Callable[[torch.device], bool], Callable[[Tensor], Tensor]]:
    """Register the devices that compare captured data by a kernel instead of on the host.

    For a tensor on such a device `DataState.holds` does not compare the content. The user of the
    state must launch a kernel that compares `DataState.expected`.

    Args:
        compares_on: function from a device to whether data is compared on that device.
        record: function that computes the fingerprint of a tensor on such a device.

    Returns:
        The previous `compares_on` and `record`.
    """
    before = setting.compares_on, setting.record
    setting.compares_on, setting.record = compares_on, record
    return before

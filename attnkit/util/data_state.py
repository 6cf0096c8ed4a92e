"""Detect whether the data of a tensor changed after a cached value was computed from it.

torch's version counter does not count every write. It misses writes through a NumPy or DLPack view,
`tensor.data[...]`, a copy into the storage, a fused optimizer, a torch.distributed collective and a
custom kernel. A `DataState` therefore also records the content of the tensor. On the CPU it keeps a
copy and compares it before a cached value is used. On a GPU it keeps a fingerprint (`fingerprint`).
The host cannot compare a fingerprint without a synchronization, so `attnkit.runtime.data_guard`
compares it on the GPU.

All caches share one state per tensor. The state is created before any value is computed from the
data, so every cached value is checked against the same content.
"""

from __future__ import annotations

import ctypes
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
        reference: weak reference to the tensor.
        valid: False after `invalidate`, or after a comparison that found other data.
        expected: recorded fingerprint if the data is compared on the tensor's device; else None.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_copy",
        "_digest",
        "_fingerprint",
        "_inference",
        "_ready",
        "_trusted",
        "_version",
        "expected",
        "reference",
        "valid",
    )

    def __init__(
        self,
        tensor: Tensor,
        forget: Callable[[Any], None] | None = None,
        *,
        compare: bool = True,
    ) -> None:
        """Record the version, address and content of `tensor`.

        Args:
            tensor: the tensor.
            forget: called with the weak reference when the tensor is deleted.
            compare: whether to record the content. False is for tensors that only attnkit writes.
        """
        self.reference = weakref.ref(tensor, forget)
        self.valid = True
        self._inference = tensor.is_inference()
        self._trusted = setting.trusts and not self._inference
        self._version = -1 if self._inference else version(tensor)
        self._address = address(tensor)
        self._copy: Any = None
        self._digest = b""
        self._fingerprint: Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        self.expected: Tensor | None = None
        if not compare or self._trusted or not self._address or tensor.__class__ not in PLAIN:
            return
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
        version counters are trusted.

        Raises:
            UnsupportedError: the comparison must wait for a GPU while a CUDA graph is captured.
        """
        if self.reference() is not tensor or not self.valid:
            return False
        if not self._inference:
            if version(tensor) != self._version:
                return False
            if self._trusted and not setting.trusts:  # no content was recorded
                return False
        if address(tensor) != self._address:
            return False
        if self.expected is not None or (setting.trusts and not self._inference):
            return True
        return self.has_content_of(tensor)

    def has_content_of(self, tensor: Tensor) -> bool:
        """Return whether the content of `tensor` equals the recorded content.

        If the data is compared on the tensor's device (`expected` is not None), this compares only
        the address. If no content was recorded, this returns True.

        Raises:
            UnsupportedError: see `holds`.
        """
        if self._copy is not None:
            now = _memory(tensor)
            return now.shape == self._copy.shape and np.array_equal(now, self._copy)
        if self.expected is not None:
            return address(tensor) == self._address
        if self._fingerprint is None:
            return True
        _refuse_capture(tensor)
        return torch.equal(_fingerprint(tensor), self._fingerprint)

    def wait_until_recorded(self) -> None:
        """Wait until the GPU has computed `expected`, so that kernels on any stream may read it."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = None

    def digest(self) -> bytes:
        """Return an 8-byte hash of the recorded data, or b"" if there is no copy in host memory."""
        if not self._digest and self._copy is not None:
            self._digest = hashlib.blake2b(self._copy.tobytes(), digest_size=8).digest()
        return self._digest

    def release(self) -> None:
        """Free the copy and the fingerprint after the tensor was deleted.

        Caches may still reference this state.
        """
        self._copy = self._fingerprint = self.expected = None


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
_states: dict[int, DataState] = {}  # by the id of the tensor
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
        if known is not None and known.reference is reference:
            states.pop(key, None)
            known.release()

    state = states[key] = DataState(tensor, forget, compare=compare)
    return state


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
    storage = _storage(tensor)
    for key, state in list(_states.items()):
        other = state.reference()
        if other is None:
            continue
        if other is tensor or (storage and _storage(other) == storage):
            state.valid = False
            _states.pop(key, None)


def _storage(tensor: Tensor) -> int:
    """Return the data pointer of the storage of `tensor`, or 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def trust_version_counters(trust: bool = True) -> AbstractContextManager[None]:
    """Choose whether attnkit detects changes of captured data by torch's version counters alone.

    If `trust` is True, attnkit neither compares captured data on the CPU nor checks fingerprints on
    the GPU. That saves about 2 us per call. The caller must then make sure that every write to a
    captured tensor goes through an in-place torch operator or is followed by `attnkit.invalidate`.
    Otherwise results can be silently wrong.

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

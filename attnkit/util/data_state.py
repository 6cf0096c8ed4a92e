"""Tell whether the data of a tensor is still that from which something was derived, whoever wrote it.

Torch's version counter does not see every write: a NumPy or DLPack view, `tensor.data[...]`, a copy
into the storage, a fused optimizer, a collective of torch.distributed and a kernel of one's own
raise none. So a `DataState` also holds the content of the tensor. On the CPU that is a copy, which
is compared before the derived value is used. On a GPU it is a fingerprint (`fingerprint`), which
cannot be compared without waiting; `attnkit.runtime.data_guard` compares it on the GPU.

All caches share one state per tensor. A state is created before anything is derived from the data,
so that what a cache derives later is checked against the same content.
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
    """Return the address of a tensor's data, 0 if it has none.

    States compare it because `t.data = other` does not raise the version counter.
    """
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor of torch.func, or without data
        return 0


class DataState:
    """Records the data of a tensor, to tell later whether the tensor still holds the same data.

    Attributes:
        reference: weak reference to the tensor.
        valid: False after `invalidate`.
        expected: fingerprint of a tensor whose data is compared on its device; else None.
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
        """Record the data of a tensor.

        Args:
            tensor: the tensor.
            forget: called when the tensor is deleted.
            compare: whether its content is compared. No need for tensors that only attnkit writes.
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
        self._fingerprint = setting.record(tensor) if on_device else fingerprint(tensor)
        if on_device:
            self.expected = self._fingerprint
            if tensor.is_cuda:
                self._ready = torch.cuda.Event()
                self._ready.record(torch.cuda.current_stream(tensor.device))

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is the same object with the same data, as far as the host sees.

        Raises:
            UnsupportedError: the host must wait for a GPU to compare, and a CUDA graph is captured.
        """
        if self.reference() is not tensor or not self.valid:
            return False
        if not self._inference:
            if version(tensor) != self._version:
                return False
            if self._trusted and not setting.trusts:  # there is nothing to compare with
                return False
        if address(tensor) != self._address:
            return False
        if self.expected is not None or (setting.trusts and not self._inference):
            return True
        return self.has_content_of(tensor)

    def has_content_of(self, tensor: Tensor) -> bool:
        """Compare the data itself.

        Of a tensor whose data is compared on its device only the address is compared: a kernel may
        read the data there.

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
        return torch.equal(fingerprint(tensor), self._fingerprint)

    def wait_until_recorded(self) -> None:
        """Wait until `expected` is computed, so that any stream may read it."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = None

    def digest(self) -> bytes:
        """Return a digest of the data, kept in host memory; empty if there is no copy there."""
        if not self._digest and self._copy is not None:
            self._digest = hashlib.blake2b(self._copy.tobytes(), digest_size=8).digest()
        return self._digest

    def release(self) -> None:
        """Free the copy and the fingerprint; the tensor was deleted, but caches hold its state."""
        self._copy = self._fingerprint = self.expected = None


def data_digest(states: Sequence[DataState]) -> int:
    """Return a positive number for the data of tensors; 0 if the host has a copy of none."""
    parts = [s.digest() for s in states]
    if not any(parts):
        return 0
    return 1 + int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=7).digest(), "little")


def _memory(tensor: Tensor) -> Any:
    """View the memory of a CPU tensor as an array of integers, without an operator of torch.

    No mode intercepts it, and NaNs compare by their bits.
    """
    item = tensor.element_size()
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), np.uint8)
    strides = tuple(s * item for s in tensor.stride())
    size = sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True)) + item
    raw: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    return np.ndarray(tuple(tensor.shape), f"i{item}", raw, 0, strides)


def _refuse_capture(tensor: Tensor) -> None:
    """Refuse to wait for the GPU while a CUDA graph is captured.

    Raises:
        UnsupportedError: a CUDA graph is captured on the current stream.
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
    """Holds settings of all threads, because autograd runs backwards in threads of its own.

    Attributes:
        trusts: see `trust_version_counters`.
        compares_on: whether data on a device is compared there, so that the host need not wait.
        record: computes a fingerprint on such a device.
    """

    trusts = False
    compares_on: Callable[[torch.device], bool] = staticmethod(lambda device: False)
    record: Callable[[Tensor], Tensor] = staticmethod(fingerprint)


setting = Setting()
_states: dict[int, DataState] = {}  # by the id of the tensor
caches.register(_states.clear)


def state_of(tensor: Tensor) -> DataState:
    """Return the state of a tensor: the same object for as long as its data is unchanged."""
    state = _states.get(id(tensor))
    if state is not None and state.holds(tensor):
        return state
    return _new_state(tensor)


def settled_state_of(tensor: Tensor) -> DataState:
    """Return the state of a tensor, and make sure that its data is the tensor's now.

    For data that is compared on a GPU this waits for it, unless a CUDA graph is captured. Slow paths
    call it before they use what caches have derived from the data.
    """
    state = _states.get(id(tensor))
    if state is not None and state.expected is not None and not setting.trusts:
        if not (tensor.is_cuda and is_stream_capturing()) and state.holds(tensor):
            state.valid = torch.equal(setting.record(tensor), state.expected)
    return state_of(tensor)


def set_own(tensor: Tensor) -> None:
    """Say that only attnkit writes to a new tensor, so that its content need not be compared."""
    _new_state(tensor, compare=False)


def _new_state(tensor: Tensor, *, compare: bool = True) -> DataState:
    key, states = id(tensor), _states  # a local name, because modules lose theirs at exit

    def forget(reference: Any) -> None:
        known = states.get(key)
        if known is not None and known.reference is reference:
            states.pop(key, None)
            known.release()

    state = states[key] = DataState(tensor, forget, compare=compare)
    return state


def invalidate(tensor: Tensor) -> None:
    """Forget what was derived from a tensor: tiles, proofs of indices and fingerprints.

    Call it after a write that torch's version counter does not see: by a kernel of your own, a
    DLPack view, a fused optimizer or a collective of torch.distributed. On the CPU such writes are
    found without it. On a GPU the next call of attnkit rebuilds what it needs; without
    `invalidate` the call after a write computes with old tiles, and a later call raises
    `StaleDataError`.

    Args:
        tensor: a tensor that a score_mod or mask_mod captures, a block list, or any tensor that
            shares its storage.

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
    """Return the address of a tensor's storage, 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def trust_version_counters(trust: bool = True) -> AbstractContextManager[None]:
    """Choose whether a version counter of torch alone may tell that data is unchanged.

    If so, attnkit neither compares captured data on the CPU nor checks fingerprints on the GPU. That
    saves about 2 us of each call, and it is your promise that every write to captured tensors goes
    through an in-place operator of torch or is followed by `attnkit.invalidate`. If the promise is
    broken, results are wrong without a word.

    The setting is for all threads of the process, because autograd runs backwards in threads of its
    own. Used in a `with` statement it ends with the block.

    Args:
        trust: whether to trust version counters; not at start.

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
    """Set which devices compare data themselves; who uses a state then has to ask them to.

    Args:
        compares_on: device -> whether it compares data.
        record: computes the fingerprint of a tensor on such a device.

    Returns:
        The functions that were set before.
    """
    before = setting.compares_on, setting.record
    setting.compares_on, setting.record = compares_on, record
    return before

"""Detect edits of captured data after tiles and bounds proofs were derived from it.

On the CPU, `DataState` compares the data before every use. On a GPU, such a comparison would have
to synchronize. Instead the kernels of the call compare fingerprints beside their own work, and
report a difference through host memory. The next call reads the report and raises `StaleDataError`.
Where the kernels cannot compare the data, a small kernel does, before them, on the same stream and
in the same CUDA graph.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from attnkit.errors import StaleDataError
from attnkit.splice import fingerprint_check
from attnkit.splice.data_check import DataCheck, check_table, is_dense
from attnkit.splice.fingerprint_check import FingerprintCheck, stale_report
from attnkit.splice.graph_capture import is_capturing, keep_while_replayable
from attnkit.util.data_state import (
    DataState,
    compare_on_devices,
    data_digest,
    invalidate_storage,
    setting,
)
from attnkit.util.torch_private import is_stream_capturing

compare_on_devices(fingerprint_check.compares_on, fingerprint_check.fingerprint_on_device)

_guards: weakref.WeakValueDictionary[int, DataGuard] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)

_ADVICE = (
    "Write through torch's in-place operators, or call attnkit.invalidate(tensor) after such a "
    "write and before the next call"
)


class DataGuard:
    """Checks the tensors on whose data the tiles and bounds proofs of a prepared call depend.

    Attributes:
        states: the state of each tensor's data when the call was prepared.
        names: names of the tensors, for messages.
        on_gpu: whether the device compares data. False if version counters are trusted.
        device: the GPU on which data was last compared; None if none was.
    """

    def __init__(
        self,
        states: Sequence[DataState],
        names: Sequence[str],
        score_slots: Sequence[int] = (),
        lists: int = 0,
    ) -> None:
        """Create a guard from states that were recorded before the data was used.

        Args:
            states: states of tensors of the score, of block lists, then of all tensors of the mask.
            names: names of the tensors.
            score_slots: position of each tensor of the score among those that the score captures.
            lists: number of the block lists, which a backward does not read.
        """
        self.states = tuple(states)
        self.names = tuple(names)
        self.on_gpu = not setting.trusts and any(s.expected is not None for s in self.states)
        self._score_slots = tuple(score_slots)
        self._lists = range(len(score_slots), len(score_slots) + lists)
        self.device: torch.device | None = None
        self._check: FingerprintCheck | None = None
        self._backward_check: FingerprintCheck | None = None
        self._number = next(_numbers)
        if self.on_gpu:
            _guards[self._number] = self

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether `tensors` are the recorded ones, with no edit that the host can detect."""
        for state, t in zip(self.states, tensors, strict=True):
            if not state.holds(t):
                return False
        return True

    def check(self) -> None:
        """Launch the comparison of GPU data with its fingerprints on the current stream.

        Call this before the kernels of a call for which `holds` is true, unless they compare the
        data themselves (`kernel_check`). A later `raise_if_stale` reports a difference.
        """
        if self.on_gpu and not setting.trusts:
            check = self._check
            if check is None:
                check = self._check = self._new_check(range(0))
            self._launch(check)

    def kernel_check(self, device: torch.device, *, masked: bool) -> DataCheck | None:
        """Return the comparisons that the kernels of a call do; None if only `check` can compare.

        Args:
            device: device of the kernels.
            masked: whether a backward reads the mask's tensors, so that their memory exists.
        """
        watched = {i: s for i, s in enumerate(self.states) if s.expected is not None}
        if not self.on_gpu or not all(is_dense(s, device) for s in watched.values()):
            return None
        if is_capturing(device):  # a table cannot be copied to the device now
            return None
        self.device = device
        saved = (*range(self._lists.start), *range(self._lists.stop, len(self.states) * masked))
        forward = check_table(watched, self._number, self)
        assert forward is not None
        read = {i: s for i, s in watched.items() if i in saved}
        backward = check_table(read, self._number, self)
        return DataCheck(forward, backward, self.launch_backward)

    def check_saved(self, scores: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
        """Check that the data is the same in a backward as in its forward, as far as the host can.

        Args:
            scores: tensors that the score captures, as the forward saved them.
            masks: those of the mask; () if the mask needs no tensor.

        Raises:
            StaleDataError: the data has changed. Autograd itself rejects edits that raise torch's
                version counter.
        """
        if setting.trusts:
            return
        for i, slot in enumerate(self._score_slots):
            self._check_saved(i, scores[slot])
        for i, t in enumerate(masks, self._lists.stop):
            self._check_saved(i, t)

    def launch_backward(self) -> None:
        """Launch the comparison of the data that a backward reads, as `check` does."""
        if self.on_gpu and not setting.trusts:
            if self._backward_check is None:
                self._backward_check = self._new_check(self._lists)
            self._launch(self._backward_check)

    def _check_saved(self, position: int, tensor: Tensor) -> None:
        if not self.states[position].has_content_of(tensor):
            raise StaleDataError(_between(self.description(position)))

    def _new_check(self, without: range) -> FingerprintCheck | None:
        """Build the GPU check of all states except positions `without`; None if none is needed."""
        watched = {
            i: (t, s.expected)
            for i, s in enumerate(self.states)
            if i not in without and s.expected is not None and (t := s.recorded()) is not None
        }
        for i in watched:
            self.states[i].wait_until_recorded()
        return FingerprintCheck(watched, self._number) if watched else None

    def _launch(self, check: FingerprintCheck | None) -> None:
        if check is None:
            return
        self.device = check.device
        if check.device.type == "cuda" and is_stream_capturing():
            # the graph reads the memory at each replay, even if the caller frees the tensors
            memory = [m for s in self.states if (m := s.storage()) is not None]
            keep_while_replayable(check.device, (self, memory))
        check()

    def digest(self) -> int:
        """Return a hash of the data that a backward reads; 0 if the host cannot compute it."""
        states = [s for i, s in enumerate(self.states) if i not in self._lists]
        return data_digest(states)

    def check_digest(self, forward: int) -> None:
        """Raise a StaleDataError if the data differs from that of the forward, by its digest.

        This serves operators whose forward and backward share no guard.

        Args:
            forward: `digest` of the forward's guard.

        Raises:
            StaleDataError: both digests are known and differ.
        """
        own = self.digest()
        if forward and own and forward != own and not setting.trusts:
            raise StaleDataError(_between(f"captured data ({', '.join(self.names)})"))

    def description(self, position: int) -> str:
        """Return name, dtype and shape of the tensor at `position` as text for a message."""
        state = self.states[position]
        kind = f"{state.dtype}, shape {tuple(state.shape)}"
        return f"captured tensor {self.names[position]!r} ({kind})"

    def forget(self) -> None:
        """Invalidate everything that was derived from the tensors."""
        for state in self.states:
            state.valid = False
            invalidate_storage(state.storage_pointer())


def _between(what: str) -> str:
    """Return the error message for data that changed between a forward and its backward."""
    return (
        f"{what} was changed between a forward and its backward, by a write that torch's version "
        "counter does not see; the gradients would be those of neither. Do not write to it before "
        "the backward has run"
    )


def raise_if_stale() -> None:
    """Raise a StaleDataError if a kernel has reported data that differs from its fingerprint.

    Raises:
        StaleDataError: a difference was reported. Everything derived from the data is invalidated,
            so that the next call uses the current data.
    """
    code = stale_report.code[0]
    if code:
        _report(code)


def _report(code: int) -> None:
    number, position = fingerprint_check.decode(code)
    guard = _guards.get(number)
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        # kernels that are still running would report it again
        torch.cuda.synchronize(None if guard is None else guard.device)
    stale_report.code[0] = 0
    what = "a captured tensor"
    if guard is not None:
        what = guard.description(position)
        guard.forget()
    raise StaleDataError(
        f"{what} did not hold the data of which its tiles were computed when a kernel ran, so that "
        "results since that write are wrong. It was changed by a write that torch's version counter "
        "does not see (a kernel, a DLPack view, a fused optimizer, a collective), or a CUDA graph "
        f"was replayed after an edit. {_ADVICE}; capture CUDA graphs again after an edit"
    )

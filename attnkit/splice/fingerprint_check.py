"""Detect edits of captured tensors on a GPU by comparing their data with stored fingerprints.

The kernel writes its report to pinned host memory, so that the host never waits for the kernel.
Under unified virtual addressing such memory has the same address on the host and on every GPU (CUDA
C++ Programming Guide, "Unified Virtual Address Space").
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from attnkit.schedule.plan import has_dsl
from attnkit.schedule.targets import Target, of_capability
from attnkit.util import caches
from attnkit.util.fingerprint import CHUNK, words_of
from attnkit.util.torch_private import device_index, stream_of

if TYPE_CHECKING:
    from attnkit.jit.kernel import Source
    from attnkit.jit.relaunch import Relaunch

# (dtype, rank, whether the first axis has stride 1): the compile-time properties of a tensor.
WordsKind: TypeAlias = tuple[str, int, bool]

LARGEST = 1 << 30  # most words of one tensor, so that 32-bit indices suffice
_WARPS = 4  # warps of a CTA; each compares one chunk at a time
_GROUP = 16  # most tensors of one launch, because the arguments of a kernel are limited
_CODES = 1 << 16  # report codes of one check, one for each tensor


class StaleReport:
    """Holds the report of all checks: 0, or the code of a tensor whose data differs.

    Attributes:
        code: memoryview [1] of the report. Reading it takes a fraction of the time of reading a
            tensor.
        memory: pinned tensor that holds the report; None until `pinned` is called.
    """

    def __init__(self) -> None:
        self.code = memoryview(bytearray(8)).cast("q")
        self.memory: Tensor | None = None

    def pinned(self) -> Tensor:
        """Return the report as an int64 tensor [1], pinned for GPUs; allocate it at first."""
        if self.memory is None:
            pin = torch.cuda.is_available()  # without a GPU, emulated kernels write the report
            self.memory = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=pin)
            view: Any = self.memory.numpy()
            self.code = memoryview(view)
        return self.memory


stale_report = StaleReport()


class _OnDevice:
    """Wraps a pinned host tensor so that a kernel launch accepts it as a tensor of a GPU."""

    def __init__(self, memory: Tensor, device: int) -> None:
        self.dtype, self.shape = memory.dtype, memory.shape
        self.stride, self.data_ptr = memory.stride, memory.data_ptr
        self._index = device

    def get_device(self) -> int:
        return self._index


@functools.cache
def compares_on(device: torch.device) -> bool:
    """Return whether the fingerprint kernel can run on `device`."""
    return _target(device) is not None


caches.register(compares_on.cache_clear)


def _target(device: torch.device) -> Target | None:
    if device.type != "cuda" or torch.version.hip is not None or not has_dsl():
        return None
    return of_capability(torch.cuda.get_device_capability(device))


def kernel_words(tensor: Tensor) -> list[Tensor]:
    """Return integer views of a tensor for the kernel: axes reversed, split at 2**30 words."""
    words = words_of(tensor)
    words = words.permute(*reversed(range(words.ndim)))
    return list(words.split(LARGEST)) if words.ndim == 1 else [words]


def fingerprint_source(kinds: tuple[WordsKind, ...], arch: str) -> Source:
    """Return the source of the fingerprint kernel for tensors of the given kinds.

    Args:
        kinds: kind of each tensor.
        arch: target architecture.
    """
    from attnkit.jit.kernel import Build, Source

    def build() -> Build:
        from attnkit.splice.fake_arguments import fingerprint_arguments
        from attnkit.templates.common.fingerprint import Fingerprint

        return Build(Fingerprint(), fingerprint_arguments(kinds))

    return Source(f"fingerprint\n{kinds}", arch, build, "fingerprint")


def words_kind(words: Tensor) -> WordsKind:
    """Return the compile-time kind of a view from `kernel_words`."""
    return str(words.dtype).removeprefix("torch."), words.ndim, words.stride(0) == 1


def fingerprint_on_device(tensor: Tensor) -> Tensor:
    """Compute the fingerprint of a GPU tensor with a kernel: int32 [chunks, 2].

    The result equals that of `attnkit.util.fingerprint`.

    Args:
        tensor: tensor on a device for which `compares_on` is true.
    """
    from attnkit.jit.kernel import kernel

    pieces = kernel_words(tensor)
    counts = [-(-words.numel() // CHUNK) for words in pieces]
    whole = torch.empty((sum(counts), 2), dtype=torch.int32, device=tensor.device)
    for words, sums in zip(pieces, whole.split(counts), strict=True):
        source, arguments = _launch([words], [sums], [0], 1)
        kernel(source)(*arguments)
    return whole


def _launch(
    words: Sequence[Tensor], sums: Sequence[Tensor], codes: Sequence[int], records: int
) -> tuple[Source, tuple[Any, ...]]:
    """Return the source and the arguments of the kernel launch for these tensors.

    Args:
        words: views from `kernel_words`.
        sums: fingerprint of each view.
        codes: report code of each view.
        records: 1 to write the fingerprints to `sums`, 0 to compare the data with them.
    """
    device = words[0].device
    target, index = _target(device), device.index
    assert target is not None  # see `compares_on`
    source = fingerprint_source(tuple(map(words_kind, words)), target.arch)
    most = 2 * torch.cuda.get_device_properties(index).multi_processor_count
    report = _OnDevice(stale_report.pinned(), index)
    return source, (*words, *sums, report, *codes, records, grid(sums, most))


class FingerprintCheck:
    """Callable that compares tensors of one GPU with their fingerprints.

    It does not keep the tensors alive. They must keep the addresses that they had when the check
    was built.

    Args:
        tensors: position -> (tensor, its fingerprint).
        number: number of this check, 1 or more, which `decode` returns.

    Attributes:
        device: the GPU.
    """

    def __init__(self, tensors: Mapping[int, tuple[Tensor, Tensor]], number: int) -> None:
        self.device = next(iter(tensors.values()))[0].device
        self._index = self.device.index
        self._expected = [e for _, e in tensors.values()]
        pieces = [
            (words, sums, encode(number, position))
            for position, (t, e) in tensors.items()
            for words, sums in zip(kernel_words(t), e.split(LARGEST // CHUNK), strict=True)
        ]
        self._launches = [
            self._relauncher(pieces[i : i + _GROUP]) for i in range(0, len(pieces), _GROUP)
        ]

    def _relauncher(self, pieces: Sequence[tuple[Tensor, Tensor, int]]) -> Relaunch:
        """Compile the kernel for (words, fingerprint, code) triples; return its launch function."""
        from attnkit.jit.kernel import kernel

        words, sums, codes = zip(*pieces, strict=True)
        source, arguments = _launch(words, sums, codes, 0)
        return kernel(source).relauncher(arguments, ())

    def __call__(self) -> None:
        """Launch the comparison on the current stream of the device; do not wait for it."""
        index = self._index
        if device_index() == index:
            stream = stream_of(index)
            for relaunch in self._launches:
                relaunch(stream, ())
        else:
            with torch.cuda.device(index):
                self()


def grid(sums: Sequence[Tensor], most: int) -> int:
    """Return the number of CTAs that compare tensors with fingerprints `sums`, at most `most`."""
    chunks = max(s.shape[0] for s in sums)
    return max(1, min(-(-chunks // _WARPS), most))


def encode(number: int, position: int) -> int:
    """Return the code by which check `number` reports a difference in the tensor at `position`."""
    return number * _CODES + position


def decode(code: int) -> tuple[int, int]:
    """Return the number of the check that reported `code`, and the position of the tensor."""
    return divmod(code, _CODES)

"""Compare captured data with its fingerprints on a GPU, and report a difference to the host.

The kernel writes its report to host memory that the GPU can write, so that nobody waits for it. Under
unified virtual addressing such memory has the same address on the host and on every GPU (CUDA C++
Programming Guide, "Unified Virtual Address Space").
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

# dtype, rank, and whether the first axis is without gaps: what a kernel is compiled for.
WordsKind: TypeAlias = tuple[str, int, bool]

_LARGEST = 1 << 30  # words that a kernel counts in 32 bits
_WARPS = 4  # of a CTA; a warp compares a chunk at a time
_GROUP = 16  # tensors of a launch, whose arguments are limited
_CODES = 1 << 16  # codes of a check, one for each tensor


class StaleReport:
    """Holds the report of all checks: 0, or the code of a tensor whose data differs.

    Attributes:
        code: view of length 1 on the report. A view is read in a fraction of the time of a tensor.
    """

    def __init__(self) -> None:
        self.code = memoryview(bytearray(8)).cast("q")
        self.memory: Tensor | None = None

    def pinned(self) -> Tensor:
        """Return the report as memory that a GPU can write; allocate it at the first call."""
        if self.memory is None:
            self.memory = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
            view: Any = self.memory.numpy()
            self.code = memoryview(view)
        return self.memory


stale_report = StaleReport()


class _OnDevice:
    """Passes memory of the host to a kernel as a tensor of its GPU."""

    def __init__(self, memory: Tensor, device: int) -> None:
        self.dtype, self.shape = memory.dtype, memory.shape
        self.stride, self.data_ptr = memory.stride, memory.data_ptr
        self._index = device

    def get_device(self) -> int:
        return self._index


@functools.cache
def compares_on(device: torch.device) -> bool:
    """Return whether a kernel can compare data on a device."""
    return _target(device) is not None


caches.register(compares_on.cache_clear)


def _target(device: torch.device) -> Target | None:
    if device.type != "cuda" or torch.version.hip is not None or not has_dsl():
        return None
    return of_capability(torch.cuda.get_device_capability(device))


def kernel_words(tensor: Tensor) -> list[Tensor]:
    """View a tensor as the kernel reads it: integers, first axis fastest, at most 2**30 a piece."""
    words = words_of(tensor)
    words = words.permute(*reversed(range(words.ndim)))
    return list(words.split(_LARGEST)) if words.ndim == 1 else [words]


def fingerprint_source(kinds: tuple[WordsKind, ...], arch: str) -> Source:
    """Return the source of the kernel that compares tensors of some kinds.

    Args:
        kinds: of each tensor.
        arch: target architecture.
    """
    from attnkit.jit.kernel import Build, Source

    def build() -> Build:
        from attnkit.splice.fake_arguments import fingerprint_arguments
        from attnkit.templates.common.fingerprint import Fingerprint

        return Build(Fingerprint(), fingerprint_arguments(kinds))

    return Source(f"fingerprint\n{kinds}", arch, build, "fingerprint")


def words_kind(words: Tensor) -> WordsKind:
    """Describe words as a kernel is compiled for them."""
    return str(words.dtype).removeprefix("torch."), words.ndim, words.stride(0) == 1


def fingerprint_on_device(tensor: Tensor) -> Tensor:
    """Compute the fingerprint of a tensor by a kernel; equals `attnkit.util.fingerprint`.

    Args:
        tensor: on a device for which `compares_on` is true.
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
    """Return the kernel for some pieces, and its arguments."""
    device = words[0].device
    target, index = _target(device), device.index
    assert target is not None  # see `compares_on`
    source = fingerprint_source(tuple(map(words_kind, words)), target.arch)
    most = 2 * torch.cuda.get_device_properties(index).multi_processor_count
    report = _OnDevice(stale_report.pinned(), index)
    return source, (*words, *sums, report, *codes, records, grid(sums, most))


class FingerprintCheck:
    """Compares tensors of one GPU with their fingerprints, each time it is called.

    It does not keep the tensors alive; they must have the addresses that they had when it was built.

    Args:
        tensors: position -> tensor and its fingerprint.
        number: number of this check, from 1, for `decode`.

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
            for words, sums in zip(kernel_words(t), e.split(_LARGEST // CHUNK), strict=True)
        ]
        self._launches = [
            self._relauncher(pieces[i : i + _GROUP]) for i in range(0, len(pieces), _GROUP)
        ]

    def _relauncher(self, pieces: Sequence[tuple[Tensor, Tensor, int]]) -> Relaunch:
        """Compile the kernel that compares some pieces, and prepare its launch."""
        from attnkit.jit.kernel import kernel

        words, sums, codes = zip(*pieces, strict=True)
        source, arguments = _launch(words, sums, codes, 0)
        return kernel(source).relauncher(arguments, ())

    def __call__(self) -> None:
        """Launch the kernel on the current stream of its device, without waiting for it."""
        index = self._index
        if device_index() == index:
            stream = stream_of(index)
            for relaunch in self._launches:
                relaunch(stream, ())
        else:
            with torch.cuda.device(index):
                self()


def grid(sums: Sequence[Tensor], most: int) -> int:
    """Return how many CTAs compare tensors with these fingerprints; at most `most`."""
    chunks = max(s.shape[0] for s in sums)
    return max(1, min(-(-chunks // _WARPS), most))


def encode(number: int, position: int) -> int:
    """Return the code with which a check reports a tensor."""
    return number * _CODES + position


def decode(code: int) -> tuple[int, int]:
    """Return the number of the check that reported a code, and the position of the tensor."""
    return divmod(code, _CODES)

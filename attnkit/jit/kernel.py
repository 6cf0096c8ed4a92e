"""Compiled kernels: made once for a key, kept in memory and on disk, called without ceremony.

    source = Source(key, "sm_90a", lambda: Build(forward, (query, key, value, ..., CUstream(0))))
    kernel(source)(query, key, value, ...)      # on torch's current stream, no synchronisation

The key says all on which the generated code depends; `build` is called only if no kernel with that
key exists. `kernel(source)` compiles if it must and touches no GPU; the first call of the kernel on
a device loads it there. Call a kernel once before capturing it in a CUDA graph, or `prepare` it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from attnkit.errors import DeviceError
from attnkit.jit.abi import Signature
from attnkit.jit.build import Artifact, Build, Source, compile_source
from attnkit.jit.cubin import KernelStats
from attnkit.jit.disk_cache import KernelCache
from attnkit.jit.dsl_runtime import identity, settings
from attnkit.jit.loader import PREFIX, Entry
from attnkit.jit.relaunch import Again, repeated
from attnkit.util.package import FOLDER
from attnkit.util.torch_fast import device_index, stream_of

if TYPE_CHECKING:
    from attnkit.emulator import Executable

__all__ = [
    "Artifact",
    "Build",
    "Kernel",
    "KernelStats",
    "Source",
    "asked",
    "full_key",
    "kernel",
    "runs_on",
]

# Rooms with no part in what a kernel is compiled to: what they decide stands in the key, or is
# passed at run time. Every other file of the package counts, a new file or a new room too.
_APART = frozenset(
    "cli emulator inspection masks mods runtime schedule sparsity testing tracing util".split()
) | {"templates/cpu"}


class Kernel:
    """A compiled kernel, callable with tensors and numbers.

    Attributes:
        artifact: what was compiled.
        name: for people.
    """

    def __init__(self, artifact: Artifact, name: str = "kernel") -> None:
        self.artifact = artifact
        self.name = name
        self._gather = artifact.signature.gather
        self._entry: Entry | None = None
        self._devices: set[int] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<kernel {self.name} for {self.artifact.arch}>"

    @property
    def signature(self) -> Signature:
        """The arguments, flattened."""
        return self.artifact.signature

    @property
    def stats(self) -> tuple[KernelStats, ...]:
        """Registers, stack, shared memory and code size of each device function."""
        return self.artifact.stats

    @property
    def ptx(self) -> str:
        """The device code as PTX text."""
        return self.artifact.ptx

    def prepare(self, device: int) -> None:
        """Load the kernel on a CUDA device, as the first call does.

        Raises:
            DeviceError: it was compiled for another architecture.
            LaunchError: CUDA refuses.
        """
        with self._lock:
            if device in self._devices:
                return
            if not runs_on(self.artifact.arch, torch.cuda.get_device_capability(device)):
                raise DeviceError(
                    f"{self!r} cannot run on cuda:{device}, {torch.cuda.get_device_name(device)}"
                )
            if self._entry is None:
                a = self.artifact
                self._entry = Entry(a.image, a.code, a.function, a.signature)
            with torch.cuda.device(device):
                self._entry.prepare(device)
            self._devices.add(device)

    def __call__(self, *arguments: Any) -> None:
        """Launch on the current stream of the tensors' device; does not wait for the kernel.

        Args:
            arguments: CUDA tensors of one device and Python numbers, in the order of the build's
                arguments; lists of tensors one by one, None and the stream left out.

        Raises:
            ArgumentError, DTypeError, ShapeError, DeviceError: an argument does not fit what the
                kernel was compiled for.
            LaunchError: CUDA refuses.
        """
        self._start(arguments, *self._gather(arguments, self._stream))

    def repeated(self, arguments: Sequence[Any], changing: Sequence[int]) -> Again:
        """Quicker launches of the kernel, for arguments like these, of which some change.

        Args:
            arguments: of a call that was made.
            changing: their indices, in increasing order.

        Raises:
            As a call.
        """
        _, device = self._gather(arguments, self._stream)
        self.prepare(device)
        assert self._entry is not None
        return repeated(self._entry, self.signature, arguments, changing)

    def _start(self, arguments: Sequence[Any], values: Sequence[Any], device: int) -> None:
        if device == device_index():
            self._launch(arguments, values)
        else:
            with torch.cuda.device(device):
                self._launch(arguments, values)

    def _stream(self, device: int) -> int:
        if device not in self._devices:
            if device < 0:
                raise DeviceError(
                    f"{self!r} takes CUDA tensors, got none; `executable()` runs it on the CPU"
                )
            self.prepare(device)
        return stream_of(device)

    def _launch(self, arguments: Sequence[Any], values: Sequence[Any]) -> None:
        assert self._entry is not None
        try:
            self._entry(values)
        except (struct.error, OverflowError):  # a number that is out of range: say which
            self.signature.checked(arguments, self._stream)
            raise

    def executable(self) -> Executable:
        """The same kernel for the emulator, which runs it on CPU tensors.

        The arguments of a run are those of a call; `emulator.Undefined` marks outputs.

        Raises:
            UnsupportedError: there is no C compiler.
        """
        from attnkit.emulator import Executable

        a = self.artifact
        return Executable.of(a.ptx, a.code, a.function, a.signature.specs, PREFIX)


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for an architecture runs on devices of a compute capability.

    >>> runs_on("sm_90a", (9, 0)), runs_on("sm_100a", (10, 3)), runs_on("sm_100f", (10, 3))
    (True, False, True)
    """
    number = int(arch.removeprefix("sm_").rstrip("af"))
    major, minor = divmod(number, 10)
    if arch.endswith("a"):
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


_kernels: dict[Source, Kernel] = {}
_asked: ContextVar[list[Source] | None] = ContextVar("kernels asked for", default=None)
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # another thread of the parent may have held it
    os.register_at_fork(after_in_child=lambda: _lock._at_fork_reinit())  # type: ignore[attr-defined]


@contextmanager
def asked() -> Iterator[list[Source]]:
    """The sources of the kernels that the block asks for, each once, in order."""
    sources: list[Source] = []
    token = _asked.set(sources)
    try:
        yield sources
    finally:
        _asked.reset(token)


def kernel(source: Source, *, lines: bool = False) -> Kernel:
    """The kernel of a source: from memory, from disk, or compiled and kept.

    Needs no GPU. Processes that want the same kernel at once compile it once, where the cache's
    folder has locks. `lines`: it is for the emulator, whose reports name lines of the program.

    Raises:
        UnsupportedError: the CuTe DSL is not installed, and the kernel was never compiled.
        Others: as `compile_source`.
    """
    if lines and _asked.get() is None:
        source = replace(source, lines=True)
    found = _kernels.get(source)
    if found is None:
        with _lock:
            found = _kernels.get(source)
            if found is None:
                found = _kernels[source] = Kernel(_artifact(source), source.name)
    sources = _asked.get()
    if sources is not None and source not in sources:
        sources.append(source)
    return found


def _artifact(source: Source) -> Artifact:
    cache, key = KernelCache(), full_key(source)
    if data := cache.get(key):
        return Artifact.load(data)
    with cache.lock(key):
        if data := cache.get(key):  # another process was first
            return Artifact.load(data)
        artifact = compile_source(source)
        cache.put(key, artifact.dump())
    return artifact


def full_key(source: Source) -> str:
    """A source's key with all else on which the generated code depends."""
    lines = [
        f"attnkit {_sources()}",
        f"dsl {identity()}",
        f"settings {settings()}",
        f"host {platform.system()} {platform.machine()}",
        f"arch {source.arch}{' with lines' if source.lines else ''}",
        "",
        source.key,
    ]
    return "\n".join(lines)


@cache
def _sources() -> str:
    """Digest of the package's own text: an edited template is another kernel."""
    return sources_digest(FOLDER)


def sources_digest(root: str) -> str:
    """Digest of the files of the rooms that decide what a kernel is compiled to.

    Args:
        root: the package's folder.
    """
    digest = hashlib.sha256()
    for folder, inner, files in os.walk(root, followlinks=True):
        here = os.path.relpath(folder, root).replace(os.sep, "/")
        above = "" if here == "." else f"{here}/"
        inner[:] = sorted(f for f in inner if f != "__pycache__" and above + f not in _APART)
        for name in sorted(f for f in files if f.endswith(".py")):
            with open(os.path.join(folder, name), "rb") as file:
                digest.update(f"{above}{name}\0".encode() + file.read() + b"\0")
    return digest.hexdigest()[:32]

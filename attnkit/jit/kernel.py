"""Get the compiled kernel of a `Source` from memory, disk or the compiler, and launch it.

    source = Source(key, "sm_90a", lambda: Build(forward, (query, key, value, ..., CUstream(0))))
    kernel(source)(query, key, value, ...)      # on torch's current stream, no synchronisation

The key contains everything on which the generated code depends. `build` is called only if no kernel
with that key is cached. `kernel(source)` does not use a GPU. The first call of the kernel on a
device loads it there. Before a kernel is captured in a CUDA graph, call it once or `prepare` it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from attnkit.errors import ArgumentError, DeviceError
from attnkit.jit.abi import Signature
from attnkit.jit.artifact import Artifact, Build, KernelStats, Source
from attnkit.jit.disk_cache import KernelCache
from attnkit.jit.dsl_runtime import identity, settings
from attnkit.jit.loader import PREFIX, Entry, link, loaded_entry
from attnkit.jit.relaunch import Relaunch, relauncher
from attnkit.util import caches
from attnkit.util.package import FOLDER
from attnkit.util.torch_private import device_index, stream_of

if TYPE_CHECKING:
    from attnkit.emulator import Executable

__all__ = [
    "Artifact",
    "Build",
    "CompiledKernel",
    "KernelStats",
    "Source",
    "full_key",
    "is_compiled",
    "kernel",
    "request",
    "requested_sources",
    "runs_on",
]

_log = logging.getLogger("attnkit.jit")

# Folders whose files are not part of a kernel's key, because their decisions are already part of
# `Source.key` or are passed at run time. Every other file of the package is part of the key,
# including new files and folders.
_NOT_IN_KEY = frozenset(
    "cli emulator inspection masks mods runtime schedule sparsity testing tracing util".split()
) | {"templates/cpu"}


class CompiledKernel:
    """Compiled kernel that is launched by a call with CUDA tensors and numbers.

    Attributes:
        artifact: the result of the compilation.
        name: name of the kernel in reports and error messages.
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
        """Return the specs of the flattened arguments."""
        return self.artifact.signature

    @property
    def stats(self) -> tuple[KernelStats, ...]:
        """Return registers, stack, shared memory and code size of each device function."""
        return self.artifact.stats

    @property
    def ptx(self) -> str:
        """Return the device code as PTX text."""
        return self.artifact.ptx

    def prepare(self, device: int) -> None:
        """Load the kernel on a CUDA device; otherwise the first call on the device loads it.

        Raises:
            DeviceError: the kernel was compiled for another architecture.
            LaunchError: CUDA reports an error.
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
                self._entry = loaded_entry(a.image, a.code, a.function, a.signature)
            with torch.cuda.device(device):
                self._entry.prepare(device)
            self._devices.add(device)

    def __call__(self, *arguments: Any) -> None:
        """Launch the kernel asynchronously on the current stream of the tensors' device.

        Args:
            arguments: CUDA tensors of one device and Python numbers, in the order of
                `Build.arguments`. Lists of tensors are flattened; None and the stream are left out.

        Raises:
            ArgumentError, DTypeError, ShapeError, DeviceError: an argument does not match the
                signature that the kernel was compiled for.
            LaunchError: CUDA reports an error.
        """
        self._start(arguments, *self._gather(arguments, self._stream))

    def relauncher(self, arguments: Sequence[Any], changing: Sequence[int]) -> Relaunch:
        """Return a faster launch function for calls that change some arguments of an earlier call.

        Args:
            arguments: all arguments of the earlier call.
            changing: indices of the arguments that change, in increasing order.

        Raises:
            The errors of a call.
        """
        _, device = self._gather(arguments, self._stream)
        self.prepare(device)
        assert self._entry is not None
        return relauncher(self._entry, self.signature, arguments, changing)

    def _start(self, arguments: Sequence[Any], values: Sequence[Any], device: int) -> None:
        """Launch on `device` with the `values` that `Signature.gather` returned."""
        if device == device_index():
            self._launch(arguments, values)
        else:
            with torch.cuda.device(device):
                self._launch(arguments, values)

    def _stream(self, device: int) -> int:
        """Return torch's current stream of `device`; first load the kernel there if necessary."""
        if device not in self._devices:
            if device < 0:
                raise DeviceError(
                    f"{self!r} takes CUDA tensors, got none; `executable()` runs it on the CPU"
                )
            self.prepare(device)
        return stream_of(device)

    def _launch(self, arguments: Sequence[Any], values: Sequence[Any]) -> None:
        """Launch on the current device; `arguments` are used only for error messages."""
        assert self._entry is not None
        try:
            self._entry(values)
        except (struct.error, OverflowError):  # out of range: `checked` names the argument
            self.signature.checked(arguments, self._stream)
            raise

    def executable(self) -> Executable:
        """Return the `Executable` that runs this kernel in the emulator, on CPU tensors.

        A run takes the same arguments as a call of the kernel. `emulator.Undefined` marks outputs.

        Raises:
            UnsupportedError: there is no C compiler.
        """
        from attnkit.emulator import Executable

        a = self.artifact
        return Executable.of(a.ptx, a.code, a.function, a.signature.specs, PREFIX)


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Return whether code for `arch` runs on devices of compute capability (major, minor).

    >>> runs_on("sm_90a", (9, 0)), runs_on("sm_100a", (10, 3)), runs_on("sm_100f", (10, 3))
    (True, False, True)
    """
    number = int(arch.removeprefix("sm_").rstrip("af"))
    major, minor = divmod(number, 10)
    if arch.endswith("a"):
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


# Largest number of kernels in memory. If there are more, the least recently used kernel is dropped;
# it is read from disk if it is needed again. A kernel has 0.05 to 1 MB.
TABLE_SIZE = 512
_kernels: dict[Source, CompiledKernel] = {}
_requested: ContextVar[list[Source] | None] = ContextVar("requested kernel sources", default=None)
_lock = caches.fork_safe_lock()  # held while a kernel is compiled
_table_lock = caches.fork_safe_lock()
_numbers = count(1)  # of the kernels that this process compiles


def _forget_kernels() -> None:
    """Clear the in-memory cache of kernels; kernels that a caller still references keep working.

    Code that was loaded on a device stays there until the process ends (see `loader.Entry`),
    because a captured CUDA graph may launch it.
    """
    with _table_lock:
        _kernels.clear()


def _known_kernel(source: Source) -> CompiledKernel | None:
    """Return the kernel of `source` from the in-memory cache, or None; mark it as recently used."""
    with _table_lock:
        compiled = _kernels.pop(source, None)
        if compiled is not None:
            _kernels[source] = compiled
        return compiled


def _store_kernel(source: Source, compiled: CompiledKernel) -> None:
    """Add a kernel to the in-memory cache and drop the least recently used ones if it is full."""
    with _table_lock:
        _kernels[source] = compiled
        while len(_kernels) > TABLE_SIZE:
            caches.drop_oldest(_kernels)


caches.register(_forget_kernels)


@contextmanager
def requested_sources() -> Iterator[list[Source]]:
    """Yield a list that collects the distinct sources that the `with` block requests, in order."""
    sources: list[Source] = []
    token = _requested.set(sources)
    try:
        yield sources
    finally:
        _requested.reset(token)


def kernel(source: Source, *, lines: bool = False) -> CompiledKernel:
    """Return the kernel of `source` from memory or disk; compile and store it on a cache miss.

    This needs no GPU. If several processes need the same kernel at the same time, one of them
    compiles it and the others wait, provided the file system of the cache supports locks.

    Args:
        source: the kernel to compile.
        lines: whether to store line numbers of the Python source, for the emulator's reports.

    Raises:
        UnsupportedError: the CuTe DSL is not installed, and the kernel is not on disk.
        OptionError, ArgumentError, LaunchError: see `compile_source`.
    """
    if lines and _requested.get() is None:
        source = replace(source, lines=True)
    compiled = _known_kernel(source)
    if compiled is None:
        with _lock:
            compiled = _known_kernel(source)
            if compiled is None:
                compiled = CompiledKernel(_artifact(source), source.name)
                _store_kernel(source, compiled)
    elif _log.isEnabledFor(logging.DEBUG):
        _log.debug("kernel %s for %s is in memory", source.name, source.arch)
    request(source)
    return compiled


def request(source: Source) -> None:
    """Add `source` to the list of `requested_sources`, if one collects, without compiling it."""
    requested = _requested.get()
    if requested is not None and source not in requested:
        requested.append(source)


def is_compiled(source: Source) -> bool:
    """Return whether the kernel of `source` is in memory or on disk."""
    with _table_lock:
        if source in _kernels:
            return True
    return KernelCache().get(full_key(source)) is not None


def _artifact(source: Source) -> Artifact:
    """Return the artifact of `source` from disk; compile it and write it to disk on a miss."""
    start = time.perf_counter()
    disk, key = KernelCache(), full_key(source)
    if artifact := _stored_artifact(disk, key):
        _log_load(source, disk, start)
        return artifact
    # A kernel from the disk does not need these modules.
    from attnkit.jit.build import compile_source
    from attnkit.jit.held_signals import held_signals
    from attnkit.util.status_line import elapsed

    with disk.lock(key):
        # Another process may have compiled the kernel in the meantime.
        if artifact := _stored_artifact(disk, key):
            _log_load(source, disk, start)
            return artifact
        what = f"compiling kernel {next(_numbers)}: {source.name} for {source.arch}"
        with elapsed(what), held_signals():
            start = time.perf_counter()
            artifact = compile_source(source)
            kept = disk.put(key, artifact.dump())
    _log.info(
        "compiled kernel %s for %s in %.1f s, %s",
        source.name,
        source.arch,
        time.perf_counter() - start,
        f"kept in {disk.folder}" if kept else "kept in this process only",
    )
    return artifact


def _log_load(source: Source, disk: KernelCache, start: float) -> None:
    """Log that a kernel came from the disk cache, and how long that took since `start`."""
    _log.debug(
        "loaded kernel %s for %s from %s in %.1f ms",
        source.name,
        source.arch,
        disk.folder,
        1e3 * (time.perf_counter() - start),
    )


def _stored_artifact(disk: KernelCache, key: str) -> Artifact | None:
    """Return the artifact with `key` from disk; None if it is missing or invalid.

    An artifact that was stored without a linked image is linked now, if there is a C compiler.
    """
    data = disk.get(key)
    if data is None:
        return None
    try:
        artifact = Artifact.load(data)
    except ArgumentError:
        return None
    if not artifact.image and (image := link(artifact.code)):
        artifact = replace(artifact, image=image)
        disk.put(key, artifact.dump())
    return artifact


def full_key(source: Source) -> str:
    """Return the disk cache key: `source.key` plus versions, settings, host and source digest."""
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
    """Return a digest of attnkit's own source, so that an edited template gives a new key."""
    return sources_digest(FOLDER)


def sources_digest(root: str) -> str:
    """Return a digest of the package's source files on which compiled kernels depend.

    The digest is of the bytes, so an edit of a comment compiles all kernels again. Every process
    that uses a kernel computes it: the bytes take 2 ms, parsing them to leave out comments and
    docstrings would take 400 ms.

    Args:
        root: the package's folder.

    Returns:
        32 hexadecimal digits of the sha256.
    """
    digest = hashlib.sha256()
    for name, path in _source_files(root):
        with open(path, "rb", buffering=0) as file:
            digest.update(f"{name}\0".encode() + file.read() + b"\0")
    return digest.hexdigest()[:32]


def _source_files(folder: str, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name relative to the package, path) of each source file in the key, sorted by name."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            name = above + entry.name
            if name.endswith(".py"):
                yield name, entry.path
            elif entry.name != "__pycache__" and name not in _NOT_IN_KEY and entry.is_dir():
                yield from _source_files(entry.path, f"{name}/")

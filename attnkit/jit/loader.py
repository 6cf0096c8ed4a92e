"""Link the object that the DSL exports, load it, and call its host function with packed values.

If there is a C compiler, the object is linked to a shared library right after compilation. Loading
that takes well under a millisecond and needs the DSL's runtime library only. Without a C compiler
the DSL's own linker loads the object, which needs the whole DSL imported.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from attnkit.errors import LaunchError
from attnkit.jit.abi import Signature
from attnkit.jit.dsl_runtime import error_name, library, runtime
from attnkit.jit.scratch import places, scratch_folder, warn_once, write_file
from attnkit.util import caches

PREFIX = "attnkit"  # of the exported symbols
_LINKER_ROOM = 2**20  # bytes of temporary files of the linker itself


def link(code: bytes) -> bytes:
    """Link an exported object to a shared library; return b"" if that is not possible.

    Without a C compiler nothing is linked. If linking fails, a warning says so once. In both cases
    the DSL's linker loads the object.

    Raises:
        UnsupportedError: there is no room for temporary files.
    """
    compiler = _c_compiler()
    if compiler is None:
        return b""
    with scratch_folder(2 * len(code) + _LINKER_ROOM) as folder:
        obj, lib = folder / "kernel.o", folder / "kernel.so"
        # Linking against the runtime records its name as a dependency; `runtime()` has loaded a
        # library of that name by the time this one is loaded.
        options = ["-shared", "-nostdlib", "-Wl,-Bsymbolic", "-Wl,-z,noexecstack"]
        try:
            obj.write_bytes(code)
            done = subprocess.run(
                [compiler, *options, "-o", str(lib), str(obj), str(library())],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": str(folder)},
                # The terminal sends Ctrl-C to a group of processes, and would end the linker.
                process_group=0,
            )
            if not done.returncode:
                return lib.read_bytes()
            problem = done.stderr.strip()[-1000:] or f"exit status {done.returncode}"
        except OSError as error:
            problem = str(error)
    warn_once(
        f"the C compiler {compiler} cannot link a compiled kernel ({problem})",
        "the linker of the CuTe DSL is used instead, which takes seconds in each process",
    )
    return b""


def _c_compiler() -> str | None:
    """Find the C compiler: $CC, or cc, gcc or clang on the path.

    This is the emulator's search order, repeated here so that the emulator need not be imported.
    """
    named = os.environ.get("CC", "").split()
    return next(filter(None, map(shutil.which, (*named[:1], "cc", "gcc", "clang"))), None)


def _load_library(image: bytes) -> ctypes.CDLL:
    """Load a shared library from its bytes.

    Raises:
        LaunchError: it cannot be written or loaded anywhere.
    """
    failures = []
    for place in places():
        try:
            # Each library needs its own file name: dlopen takes equal names for the same library.
            path = write_file(image, ".so", place)
        except OSError as error:
            failures.append(f"{place}: {error.strerror}")
            continue
        try:
            loaded = ctypes.CDLL(path)
        except OSError as error:
            failures.append(str(error))
        else:
            if failures:
                warn_once(
                    f"a compiled kernel cannot be loaded as a temporary file ({failures[0]})",
                    f"{place} is used instead. Set TMPDIR to a folder with room, from which "
                    "programs may be run",
                )
            return loaded
        finally:
            os.unlink(path)
    raise LaunchError(
        f"a compiled kernel cannot be loaded ({'; '.join(failures)}). Set TMPDIR to a folder with "
        "room, from which programs may be run"
    )


class _Engine:
    """Loads an object with the DSL's linker, and gives its functions as attributes."""

    def __init__(self, code: bytes) -> None:
        from cutlass.cute.runtime import load_module

        with scratch_folder(len(code)) as folder:
            path = folder / "kernel.o"
            path.write_bytes(code)
            self._engine = load_module(str(path)).engine

    def __getattr__(self, name: str) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(self._engine.lookup(name))


class Frame:
    """Holds the memory of one call: the values, the array of pointers to them, the status."""

    def __init__(self, signature: Signature) -> None:
        packing, offsets = signature.layout
        self.pack = packing.pack_into
        self.values = ctypes.create_string_buffer(offsets[-1] + 8)
        base = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * len(offsets))(*[base + n for n in offsets])
        self.count = len(offsets)
        # a view of length 1, which is read in a fraction of the time of a ctypes attribute
        self.status = memoryview(self.values).cast("B").cast("i")[offsets[-1] // 4 :][:1]


class Entry:
    """Loads a compiled kernel into the process, and launches it on any device it is prepared for.

    Nothing unloads it. The shared library and the device code stay until the process ends, because
    a captured CUDA graph may launch the code after the last `Entry` is gone.

    Args:
        image: the kernel as a shared library; may be empty.
        code: the kernel as an object file, which is loaded if `image` is empty.
        function: name of the compiled function.
        signature: its arguments.
    """

    def __init__(self, image: bytes, code: bytes, function: str, signature: Signature) -> None:
        runtime()
        self._library: Any = _load_library(image) if image else _Engine(code)
        self._function = getattr(self._library, f"_mlir_{PREFIX}__mlir_ciface_{function}")
        self._signature = signature
        self._frames: list[Frame] = []  # the free ones; each call in progress takes one out
        self._module = ctypes.c_void_p()  # cudaLibrary_t
        self._devices: set[int] = set()
        self._lock = threading.Lock()

    def prepare(self, device: int) -> None:
        """Load the device code on a device and set its attributes there, unless that was done.

        Raises:
            LaunchError: CUDA reports an error.
        """
        with self._lock:
            if device in self._devices:
                return
            if not self._module:
                self._initialise("init")
            self._initialise("load_to_device", ctypes.c_int32(device))
            self._devices.add(device)

    def _initialise(self, step: str, *numbers: ctypes.c_int32) -> None:
        """Call one of the functions that the DSL exports to load device code."""
        status, module = ctypes.c_int32(0), ctypes.pointer(self._module)
        slots = [ctypes.addressof(x) for x in (module, *numbers, status)]
        array = (ctypes.c_void_p * len(slots))(*slots)
        getattr(self._library, f"_mlir_{PREFIX}_cuda_{step}")(array, len(slots))
        if status.value:
            raise LaunchError(
                f"the device code of a kernel cannot be loaded: {error_name(status.value)}"
            )

    def __call__(self, values: Sequence[Any]) -> None:
        """Launch the kernel with the values of `Signature.gather`.

        Raises:
            LaunchError: the launch failed.
            struct.error, OverflowError: a number does not fit its type.
        """
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = Frame(self._signature)
        try:
            frame.pack(frame.values, 0, *values)
            self.launch(frame)
        finally:
            self._frames.append(frame)

    def launch(self, frame: Frame) -> None:
        """Launch the kernel with the values in a frame.

        Raises:
            LaunchError: the launch failed.
        """
        self._function(frame.pointers, frame.count)
        status = frame.status[0]
        if status:
            frame.status[0] = 0
            raise LaunchError(f"the launch of a kernel failed: {error_name(status)}")


# By the digest of its code. Nothing unloads code, so each is loaded once: a kernel that was dropped
# from memory and read again must not take more of it.
_entries: dict[bytes, Entry] = {}
_lock = caches.fork_safe_lock()


def loaded_entry(image: bytes, code: bytes, function: str, signature: Signature) -> Entry:
    """Load a compiled kernel into the process, or return the `Entry` of an earlier load.

    Args:
        image, code, function, signature: as of `Entry`.

    Raises:
        LaunchError: it cannot be loaded.
    """
    key = hashlib.sha256(image or code)
    key.update(function.encode())
    digest = key.digest()
    with _lock:
        if digest not in _entries:
            _entries[digest] = Entry(image, code, function, signature)
        return _entries[digest]

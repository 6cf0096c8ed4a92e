"""Link the object file that the DSL exports, load it, and call its host function.

If there is a C compiler, the object is linked to a shared library right after compilation. Loading
the library takes well under a millisecond and needs only the DSL's runtime library. Without a C
compiler the DSL's own linker loads the object, which imports the whole DSL.
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
from attnkit.util import caches, environment

PREFIX = "attnkit"  # prefix of the exported symbols
_LINKER_ROOM = 2**20  # bytes for temporary files of the linker itself


def link(code: bytes) -> bytes:
    """Link an exported object file to a shared library and return its bytes; b"" on failure.

    If linking fails, this function warns once. If linking fails or there is no C compiler, the
    DSL's linker loads the object file later.

    Raises:
        UnsupportedError: there is no room for temporary files.
    """
    compiler = _c_compiler()
    if compiler is None:
        return b""
    with scratch_folder(2 * len(code) + _LINKER_ROOM) as folder:
        obj, lib = folder / "kernel.o", folder / "kernel.so"
        # Linking against the runtime library records its name as a dependency. `runtime()` loads a
        # library of that name before the linked library is loaded.
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
                # The terminal sends Ctrl-C to the whole process group and would end the linker.
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
    """Return the path of the C compiler ($CC, cc, gcc or clang), or None.

    The emulator searches in the same order. The code is repeated here so that the emulator need not
    be imported.
    """
    named = environment.read("CC").split()
    return next(filter(None, map(shutil.which, (*named[:1], "cc", "gcc", "clang"))), None)


def _load_library(image: bytes) -> ctypes.CDLL:
    """Write the bytes of a shared library to a temporary file, load it and return it.

    Raises:
        LaunchError: no folder allows the library to be written and loaded.
    """
    failures = []
    for place in places():
        try:
            # Each library needs a unique file name, because dlopen identifies libraries by name.
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
    """Object file loaded by the DSL's linker; its functions are attributes of the instance."""

    def __init__(self, code: bytes) -> None:
        from cutlass.cute.runtime import load_module

        with scratch_folder(len(code)) as folder:
            path = folder / "kernel.o"
            path.write_bytes(code)
            self._engine = load_module(str(path)).engine

    def __getattr__(self, name: str) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(self._engine.lookup(name))


class Frame:
    """Holds the argument buffer of one call: values, array of pointers to the values, status."""

    def __init__(self, signature: Signature) -> None:
        packing, offsets = signature.layout
        self.pack = packing.pack_into
        self.values = ctypes.create_string_buffer(offsets[-1] + 8)
        base = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * len(offsets))(*[base + n for n in offsets])
        self.count = len(offsets)
        # a view of length 1, because reading a ctypes attribute is several times slower
        self.status = memoryview(self.values).cast("B").cast("i")[offsets[-1] // 4 :][:1]


class Entry:
    """Compiled kernel loaded into the process, which can be launched on every prepared device.

    The shared library and the device code are never unloaded, because a captured CUDA graph may
    launch the code after the last `Entry` is deleted.

    Args:
        image: the kernel as a shared library; may be empty.
        code: the kernel as an object file, which is loaded if `image` is empty.
        function: name of the compiled host function.
        signature: the arguments of the host function.
    """

    def __init__(self, image: bytes, code: bytes, function: str, signature: Signature) -> None:
        runtime()
        self._library: Any = _load_library(image) if image else _Engine(code)
        self._function = getattr(self._library, f"_mlir_{PREFIX}__mlir_ciface_{function}")
        self._signature = signature
        self._frames: list[Frame] = []  # free frames; each call in progress takes one out
        self._module = ctypes.c_void_p()  # cudaLibrary_t
        self._devices: set[int] = set()
        self._lock = threading.Lock()

    def prepare(self, device: int) -> None:
        """Load the device code on `device` and set its function attributes, at the first call.

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
        """Call the exported initialization function `step` ("init" or "load_to_device").

        Raises:
            LaunchError: CUDA reports an error.
        """
        status, module = ctypes.c_int32(0), ctypes.pointer(self._module)
        slots = [ctypes.addressof(x) for x in (module, *numbers, status)]
        array = (ctypes.c_void_p * len(slots))(*slots)
        getattr(self._library, f"_mlir_{PREFIX}_cuda_{step}")(array, len(slots))
        if status.value:
            raise LaunchError(
                f"the device code of a kernel cannot be loaded: {error_name(status.value)}"
            )

    def __call__(self, values: Sequence[Any]) -> None:
        """Launch the kernel with the values that `Signature.gather` returned.

        Raises:
            LaunchError: the launch failed.
            struct.error, OverflowError: a number is out of the range of its type.
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
        """Launch the kernel with the values packed in `frame`.

        Raises:
            LaunchError: the launch failed.
        """
        self._function(frame.pointers, frame.count)
        status = frame.status[0]
        if status:
            frame.status[0] = 0
            raise LaunchError(f"the launch of a kernel failed: {error_name(status)}")


# Entries by the digest of their code. Code is never unloaded, so each kernel is loaded only once: a
# kernel that was dropped from the in-memory cache and read again must not use more memory.
_entries: dict[bytes, Entry] = {}
_lock = caches.fork_safe_lock()


def loaded_entry(image: bytes, code: bytes, function: str, signature: Signature) -> Entry:
    """Return the `Entry` of a compiled kernel; load the kernel into the process at the first call.

    Args:
        image, code, function, signature: see `Entry`.

    Raises:
        LaunchError: the kernel cannot be loaded.
    """
    key = hashlib.sha256(image or code)
    key.update(function.encode())
    digest = key.digest()
    with _lock:
        if digest not in _entries:
            _entries[digest] = Entry(image, code, function, signature)
        return _entries[digest]

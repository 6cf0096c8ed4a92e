"""Link the object that the DSL exports, load it, and call its host function with packed values.

If there is a C compiler, an object is linked to a shared library when it is compiled; loading that
takes well under a millisecond and needs the DSL's runtime library only. Without a C compiler the
DSL's own linker loads the object, which imports the DSL.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnkit.errors import LaunchError
from attnkit.jit.abi import Signature
from attnkit.jit.dsl_runtime import error_name, library, runtime

PREFIX = "attnkit"  # of the exported symbols


def link(code: bytes) -> bytes:
    """Link an exported object to a shared library; returns nothing (b"") without a C compiler.

    Raises:
        LaunchError: the compiler refused the object.
    """
    compiler = _c_compiler()
    if compiler is None:
        return b""
    with tempfile.TemporaryDirectory(prefix="attnkit-") as folder:
        obj, lib = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        obj.write_bytes(code)
        # Naming the runtime makes it a dependency by name, which resolves once it is loaded.
        options = ["-shared", "-nostdlib", "-Wl,-Bsymbolic", "-Wl,-z,noexecstack"]
        done = subprocess.run(
            [compiler, *options, "-o", str(lib), str(obj), str(library())],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise LaunchError(f"linking a compiled kernel failed:\n{done.stderr[-2000:]}")
        return lib.read_bytes()


def _c_compiler() -> str | None:
    """$CC, or cc, gcc or clang on the path: where the emulator looks, which is not loaded here."""
    named = os.environ.get("CC", "").split()
    return next(filter(None, map(shutil.which, (*named[:1], "cc", "gcc", "clang"))), None)


def _load_library(image: bytes) -> ctypes.CDLL:
    # Each library needs its own file name: the loader takes equal names for the same library.
    file, path = tempfile.mkstemp(prefix="attnkit-", suffix=".so")
    try:
        with os.fdopen(file, "wb") as out:
            out.write(image)
        return ctypes.CDLL(path)
    except OSError as error:
        raise LaunchError(
            f"a compiled kernel cannot be loaded: {error}. If programs may not be run from "
            f"{tempfile.gettempdir()}, set TMPDIR to a folder from which they may"
        ) from error
    finally:
        os.unlink(path)


class _Engine:
    """Loads an object with the DSL's linker; its functions are attributes."""

    def __init__(self, code: bytes) -> None:
        from cutlass.cute.runtime import load_module

        with tempfile.NamedTemporaryFile(prefix="attnkit-", suffix=".o") as file:
            file.write(code)
            file.flush()
            self._engine = load_module(file.name).engine

    def __getattr__(self, name: str) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(self._engine.lookup(name))


class Frame:
    """Memory for one call: the values, the array of pointers to them, the status."""

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
    """A loaded kernel, for all devices of the process.

    Nothing unloads it: the shared library and the device code stay until the process ends, because
    a captured CUDA graph may launch the code when no `Entry` is left.

    Args:
        image: its shared library; may be empty.
        code: its object, which is loaded if there is no library.
        function: name of the compiled function.
        signature: its arguments.
    """

    def __init__(self, image: bytes, code: bytes, function: str, signature: Signature) -> None:
        runtime()
        self._library: Any = _load_library(image) if image else _Engine(code)
        self._function = getattr(self._library, f"_mlir_{PREFIX}__mlir_ciface_{function}")
        self._signature = signature
        self._frames: list[Frame] = []  # not in use; calls of other threads take theirs out
        self._module = ctypes.c_void_p()  # cudaLibrary_t

    def prepare(self, device: int) -> None:
        """Load the device code on a device and set its attributes there; call it once per device.

        Raises:
            LaunchError: CUDA refuses.
        """
        if not self._module:
            self._initialise("init")
        self._initialise("load_to_device", ctypes.c_int32(device))

    def _initialise(self, step: str, *numbers: ctypes.c_int32) -> None:
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

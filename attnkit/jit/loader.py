"""The direct entry of an exported object: linked, loaded, and called with packed values.

An object is linked into a shared library when it is compiled, if there is a C compiler; loading one
takes well under a millisecond and needs of the DSL its runtime library only. Without a C compiler
the DSL's own linker loads the object, which imports the DSL.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnkit.errors import LaunchError, UnsupportedError
from attnkit.jit.abi import Signature
from attnkit.jit.dsl_runtime import error_name, library, runtime

PREFIX = "attnkit"  # of the exported symbols


def link(code: bytes) -> bytes:
    """A shared library of an exported object; empty without a C compiler.

    Raises:
        LaunchError: the compiler refused the object.
    """
    from attnkit.emulator.host.host_function import compiler

    try:
        command = compiler()
    except UnsupportedError:
        return b""
    with tempfile.TemporaryDirectory(prefix="attnkit-") as folder:
        obj, lib = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        obj.write_bytes(code)
        # Naming the runtime makes it a dependency by name: it is found once it is loaded.
        options = ["-shared", "-nostdlib", "-Wl,-Bsymbolic", "-Wl,-z,noexecstack"]
        done = subprocess.run(
            [command, *options, "-o", str(lib), str(obj), str(library())],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise LaunchError(f"linking a compiled kernel failed:\n{done.stderr[-2000:]}")
        return lib.read_bytes()


def _load_library(image: bytes) -> ctypes.CDLL:
    # Each library needs a file name of its own: the loader takes equal names for the same library.
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
    """The functions of an object that the DSL's linker loaded, by name."""

    def __init__(self, code: bytes) -> None:
        from cutlass.cute.runtime import load_module

        with tempfile.NamedTemporaryFile(prefix="attnkit-", suffix=".o") as file:
            file.write(code)
            file.flush()
            self._engine = load_module(file.name).engine

    def __getattr__(self, name: str) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(self._engine.lookup(name))


class Frame:
    """Memory of one call: the values, the array of pointers to them, the status."""

    def __init__(self, signature: Signature) -> None:
        packing, offsets = signature.layout
        self.pack = packing.pack_into
        self.values = ctypes.create_string_buffer(offsets[-1] + 8)
        base = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * len(offsets))(*[base + n for n in offsets])
        self.count = len(offsets)
        # of length 1: an element of it is read in a fraction of the time of a ctypes attribute
        self.status = memoryview(self.values).cast("B").cast("i")[offsets[-1] // 4 :][:1]


class Entry:
    """A loaded kernel, for all devices of the process.

    Args:
        image: its shared library; may be empty.
        code: its object, used without a library.
        function: name of the compiled function.
    """

    def __init__(self, image: bytes, code: bytes, function: str, signature: Signature) -> None:
        runtime()
        self._library: Any = _load_library(image) if image else _Engine(code)
        self._function = getattr(self._library, f"_mlir_{PREFIX}__mlir_ciface_{function}")
        self._signature = signature
        self._frames: list[Frame] = []  # not in use now; calls of other threads may be under way
        self._module = ctypes.c_void_p()  # cudaLibrary_t

    def prepare(self, device: int) -> None:
        """Load the device code and set its attributes for a device. Once for each.

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
        """Run the host function with the values of `Signature.gather`.

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
        """Run the host function with the values of a frame.

        Raises:
            LaunchError: the launch failed.
        """
        self._function(frame.pointers, frame.count)
        status = frame.status[0]
        if status:
            frame.status[0] = 0
            raise LaunchError(f"the launch of a kernel failed: {error_name(status)}")

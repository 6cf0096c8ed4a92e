"""Run the generated host function of a compiled kernel without a GPU, and capture its launches.

The system's C compiler links the host object with `shim.c`, which replaces the CUDA runtime. So the
grid, cluster, shared memory size, tensor maps and kernel parameters are those of a real call.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnkit.emulator.faults import EmulatorError
from attnkit.emulator.ptx.kernel import PtxKernel
from attnkit.errors import UnsupportedError

_ATTRIBUTE_BYTES = 72
_CLUSTER_DIMENSION = 4  # cudaLaunchAttributeClusterDimension
_STREAM_SERIALIZATION = 6  # cudaLaunchAttributeProgrammaticStreamSerialization
_PREFIX = "attnkit_emulated"


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Config), ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)
)


@dataclass(frozen=True)
class Captured:
    """Describes one kernel launch that the host function requested.

    Attributes:
        shared: size of the dynamic shared memory in bytes.
        params: kernel parameters, laid out as in the parameter space of PTX.
        dependent: whether the kernel may start before the previous kernel of the stream is complete
            (programmatic dependent launch).
    """

    kernel: PtxKernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    params: bytes
    dependent: bool = False


def compiler() -> str:
    """Return the path of the C compiler: $CC, or cc, gcc or clang on the path.

    Raises:
        UnsupportedError: there is none.
    """
    named = os.environ.get("CC", "").split()
    for name in (*named[:1], "cc", "gcc", "clang"):
        if path := shutil.which(name):
            return path
    raise UnsupportedError(
        "the emulator links the kernel's host code with a C compiler, and found none: "
        "install gcc or clang, or name one in CC"
    )


def _link(code: bytes, folder: str) -> ctypes.CDLL:
    """Link a host object with `shim.c` into a shared library, and load it."""
    obj, lib = Path(folder, "kernel.o"), Path(folder, "kernel.so")
    obj.write_bytes(code)
    shim = Path(__file__).with_name("shim.c")
    command = [
        compiler(),
        "-shared",
        "-fPIC",
        "-Wl,-Bsymbolic",  # the DSL's runtime, loaded in this process, exports the same names
        "-o",
        str(lib),
        str(obj),
        str(shim),
        "-lm",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorError(f"linking the kernel's host code failed:\n{done.stderr[-2000:]}")
    return ctypes.CDLL(str(lib))


class HostFunction:
    """Calls the host function of a compiled object with packed C arguments."""

    def __init__(
        self, code: bytes, name: str, kernels: dict[str, PtxKernel], prefix: str = _PREFIX
    ) -> None:
        self.kernels = kernels
        self.prefix = prefix
        try:
            self.folder = tempfile.mkdtemp(prefix="attnkit-emulator-")
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
            self.library = _link(code, self.folder)
        except OSError as error:
            raise EmulatorError(
                f"the kernel's host code cannot be linked and loaded: {error}. Set TMPDIR to a "
                "folder with room, from which programs may be run, and CC to a C compiler"
            ) from error
        self.name = name
        self._load()

    def _load(self) -> None:
        """Load the module as the CuTe DSL's loader would; `shim.c` stands in for the GPU."""
        pointer = ctypes.c_void_p(0)
        self._handle = ctypes.pointer(pointer)
        status, device = ctypes.c_int32(0), ctypes.c_int32(0)
        slots = [ctypes.pointer(x) for x in (self._handle, ctypes.pointer(status))]
        self._call(f"_mlir_{self.prefix}_cuda_init", slots)
        slots.insert(1, ctypes.pointer(ctypes.pointer(device)))
        self._call(f"_mlir_{self.prefix}_cuda_load_to_device", slots)
        if status.value:
            raise EmulatorError(f"the kernel's module failed to load: status {status.value}")

    def _call(self, name: str, slots: Sequence[Any]) -> None:
        """Call a function of the library with pointers to its arguments."""
        array = (ctypes.c_void_p * len(slots))(*[ctypes.cast(s, ctypes.c_void_p) for s in slots])
        getattr(self.library, name)(array)

    def capture(self, arguments: Sequence[bytes]) -> list[Captured]:
        """Return the launches that a call with these packed arguments makes, in order."""
        launches: list[Captured] = []
        errors: list[BaseException] = []

        def on_launch(config: Any, name: bytes, params: Any) -> int:
            try:
                launches.append(self._captured(config.contents, name.decode(), params))
            except BaseException as error:  # raised below; not even Ctrl-C may cross C frames
                errors.append(error)
                return 1
            return 0

        keep = _Callback(on_launch)
        self.library.emulator_set_callback(keep)
        buffers = [ctypes.create_string_buffer(a, max(len(a), 8)) for a in arguments]
        status = ctypes.c_int32(0)
        slots = [ctypes.addressof(x) for x in (*buffers, status)]
        array = (ctypes.c_void_p * len(slots))(*slots)
        getattr(self.library, f"_mlir_{self.prefix}__mlir_ciface_{self.name}")(array, len(slots))
        if errors:
            raise errors[0]
        if status.value:
            raise EmulatorError(f"the kernel's host function returned {status.value}")
        return launches

    def _captured(self, config: _Config, name: str, params: Any) -> Captured:
        """Decode the C structures that describe a launch."""
        kernel = self.kernels[name]
        blob = bytearray(kernel.param_bytes)
        for i, p in enumerate(kernel.params):
            blob[p.offset : p.offset + p.size] = ctypes.string_at(params[i], p.size)
        cluster, dependent = (1, 1, 1), False
        for i in range(config.attribute_count):
            raw = ctypes.string_at(config.attributes + _ATTRIBUTE_BYTES * i, _ATTRIBUTE_BYTES)
            kind = struct.unpack_from("<i", raw)[0]
            if kind == _CLUSTER_DIMENSION:
                cluster = struct.unpack_from("<3I", raw, 8)
            elif kind == _STREAM_SERIALIZATION:
                dependent = struct.unpack_from("<i", raw, 8)[0] != 0
        gx, gy, gz = config.grid
        bx, by, bz = config.block
        shared = int(config.shared)
        grid, block = (gx, gy, gz), (bx, by, bz)
        return Captured(kernel, grid, block, cluster, shared, bytes(blob), dependent)


def _load_runtime() -> None:
    """Load the CuTe DSL's runtime library into the process.

    Without its symbols, an object that was compiled for an architecture other than that of the
    environment variable CUTE_DSL_ARCH cannot be exported.
    """
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs

    for path in (get_prefix_dsl_libs("CUTE_DSL") or "").split(":"):
        if path:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def host_function(compiled: Any, kernels: dict[str, PtxKernel]) -> HostFunction:
    """Return the host function of an object that `cute.compile` returned."""
    _load_runtime()
    return HostFunction(compiled.dump_to_object(_PREFIX), compiled.function_name, kernels)

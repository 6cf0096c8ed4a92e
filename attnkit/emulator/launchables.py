"""Define what the emulator can run: PTX text, and compiled functions with their host code."""

from __future__ import annotations

import struct
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnkit.emulator.execution.generated_kernel import GeneratedKernel
from attnkit.emulator.host.arguments import pack_all
from attnkit.emulator.host.host_function import Captured, HostFunction, host_function
from attnkit.emulator.machine.global_memory import GlobalMemory, Pointers, Undefined
from attnkit.emulator.ptx.kernel import PtxKernel
from attnkit.emulator.ptx.parser import parse
from attnkit.errors import ArgumentError, OptionError

Dim = tuple[int, int, int]


class Launchable(ABC):
    """Base class of what `run` accepts; converts the arguments of a call to kernel launches.

    Attributes:
        ptx: the text of the device code.
        kernels: the kernels in it, by name.
        names, roles: see `describe`.
        sms: number of SMs of the emulated GPU (%nsmid).
    """

    ptx: str

    def __init__(self, kernels: dict[str, PtxKernel]) -> None:
        self.kernels = kernels
        self._generated: dict[str, GeneratedKernel] = {}
        self.names: Mapping[int, str] = {}
        self.roles: Mapping[str, Iterable[int]] = {}
        self.sms = 132

    @abstractmethod
    def captured(self, args: Sequence[Any], memory: GlobalMemory) -> list[Captured]:
        """Return the launches that a call with `args` makes; register its arrays in `memory`."""

    def generated(self, kernel: PtxKernel) -> GeneratedKernel:
        """Return the Python code generated for a kernel; generate and check it on first use."""
        if kernel.name not in self._generated:
            self._generated[kernel.name] = GeneratedKernel(kernel)
            self._generated[kernel.name].check()
        return self._generated[kernel.name]

    def describe(
        self,
        *,
        names: Mapping[int, str] | None = None,
        roles: Mapping[str, Iterable[int]] | None = None,
    ) -> Launchable:
        """Set names of mbarriers and warps that reports use; return this object.

        Args:
            names: name of each mbarrier, by its byte offset in shared memory.
            roles: numbers of the warps in each role, by name of the role.
        """
        self.names, self.roles = names or self.names, roles or self.roles
        return self


class Ptx(Launchable):
    """Runs a kernel from PTX text, with a launch configuration from the caller.

    Arguments are arrays (passed as pointers), Python ints and floats (passed in the size of the
    parameter) and bytes (a structure or tensor map). With `dependent` the kernel is launched as a
    programmatic dependent: the preceding kernel of the stream may still run until the kernel
    executes griddepcontrol.wait.
    """

    def __init__(
        self,
        text: str,
        *,
        grid: Dim = (1, 1, 1),
        block: Dim = (32, 1, 1),
        cluster: Dim = (1, 1, 1),
        shared: int = 0,
        kernel: str | None = None,
        dependent: bool = False,
    ) -> None:
        super().__init__(parse(text))
        self.ptx = text
        if kernel is None and len(self.kernels) > 1:
            raise OptionError(f"kernel=None: the text has several, {sorted(self.kernels)}")
        self.kernel = self.kernels[kernel] if kernel else next(iter(self.kernels.values()))
        self.shape = (grid, block, cluster)
        self.dependent = dependent
        self.shared = shared

    def captured(self, args: Sequence[Any], memory: GlobalMemory) -> list[Captured]:
        """Return the single launch, with the arguments packed into kernel parameters."""
        params = self.kernel.params
        if len(args) != len(params):
            raise ArgumentError(f"{len(args)} arguments: the kernel has {len(params)} parameters")
        blob = bytearray(self.kernel.param_bytes)
        for i, (p, a) in enumerate(zip(params, args, strict=True)):
            blob[p.offset : p.offset + p.size] = _parameter(a, p.size, memory, f"argument {i}")
        grid, block, cluster = self.shape
        shared, dependent = self.shared, self.dependent
        return [Captured(self.kernel, grid, block, cluster, shared, bytes(blob), dependent)]


def _parameter(a: Any, size: int, memory: GlobalMemory, name: str) -> bytes:
    """Return the bytes of a kernel parameter."""
    if isinstance(a, bytes):
        out = a
    elif isinstance(a, float):
        out = struct.pack("<f" if size == 4 else "<d", a)
    elif isinstance(a, int | np.integer):
        out = (int(a) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    elif isinstance(a, Pointers):
        a.add_targets(name, memory)
        out = struct.pack("<Q", memory.add(name, a.array))
    elif isinstance(a, Undefined):
        out = struct.pack("<Q", memory.add(name, a.array, undefined=True))
    else:
        out = struct.pack("<Q", memory.add(name, a))
    if len(out) != size:
        raise ArgumentError(f"{name}: {len(out)} bytes, the parameter has {size}")
    return out


class Executable(Launchable):
    """Runs a function compiled by the CuTe DSL (with --keep-ptx) with its own host code.

    `specs` are the arguments of `cute.compile`: fake tensors, numbers, sequences, streams.
    """

    def __init__(self, compiled: Any, specs: Sequence[Any]) -> None:
        text = getattr(compiled.artifacts, "PTX", None)
        if not text:
            raise OptionError("compiled without PTX: add --keep-ptx to the options of cute.compile")
        super().__init__(parse(text))
        self.ptx = text
        self.cubin: bytes | None = getattr(compiled.artifacts, "CUBIN", None)
        self.specs = tuple(specs)
        self.host: HostFunction = host_function(compiled, self.kernels)

    def captured(self, args: Sequence[Any], memory: GlobalMemory) -> list[Captured]:
        """Run the host code with these arguments, and return the launches that it makes."""
        launches = self.host.capture(pack_all(self.specs, args, memory))
        return [replace(c, kernel=self.kernels[c.kernel.name]) for c in launches]

    @classmethod
    def of(
        cls, text: str, code: bytes, function: str, specs: Sequence[Any], prefix: str
    ) -> Executable:
        """Build an executable from the stored parts of a compiled function.

        Args:
            text: PTX of the function.
            code: object file of the host code, exported with symbols that begin with `prefix`.
            function: name of the function.
            specs: descriptions of its arguments, flattened. A tensor is an object with the
                attributes of a fake tensor that `host.arguments` reads, a number an object with its
                type in `kind`, a stream an object whose type name contains "stream".
        """
        self = object.__new__(cls)
        Launchable.__init__(self, parse(text))
        self.ptx, self.cubin, self.specs = text, None, tuple(specs)
        self.host = HostFunction(code, function, self.kernels, prefix)
        return self

    def with_ptx(self, text: str) -> Executable:
        """Return a copy of this executable with other PTX, to test kernels with seeded faults."""
        other = object.__new__(Executable)
        Launchable.__init__(other, parse(text))
        other.ptx, other.cubin, other.specs, other.host = text, None, self.specs, self.host
        other.names, other.roles, other.sms = self.names, self.roles, self.sms
        return other


def compile(fn: Any, *specs: Any, options: str = "", **kwargs: Any) -> Executable:
    """Compile `fn` with `cute.compile(fn, *specs)`, and keep the PTX and its source lines.

    The target architecture is that of the DSL (CUTE_DSL_ARCH, or --gpu-arch in `options`).
    """
    import cutlass.cute as cute

    # To keep PTX, the DSL also writes a file, by default in the working directory.
    with tempfile.TemporaryDirectory(prefix="attnkit-emulator-") as folder:
        keep = "--keep-ptx --keep-cubin --generate-line-info"
        flags = f"{keep} --dump-dir={folder} {options}".strip()
        compiled = cute.compile(fn, *specs, options=flags, **kwargs)
    return Executable(compiled, (*specs, *kwargs.values()))

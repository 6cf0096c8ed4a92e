"""Compile a kernel with the CuTe DSL: from a `Source` to the `Artifact` that is stored on disk."""

from __future__ import annotations

import gc
import json
import math
import operator
import platform
import re
import struct
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from attnkit.errors import ArgumentError, OptionError
from attnkit.jit.abi import Signature
from attnkit.jit.arg_specs import dump_spec, load_spec, read_specs
from attnkit.jit.cubin import KernelStats, kernel_stats
from attnkit.jit.dsl_runtime import runtime
from attnkit.jit.loader import PREFIX, link
from attnkit.jit.sass_checks import problems
from attnkit.jit.scratch import scratch_folder
from attnkit.util.package import FOLDER

# Python allocates the frames of calls in chunks of 16 KiB, and frees a chunk when the last frame in
# it returns. If a chunk ends just where a long loop makes its calls, each call maps and unmaps
# memory, which took a third of the time of a trace. A function that declares a stack of this many
# values gets a chunk of 2 MiB instead, and half of it remains for the calls that it makes.
_STACK = 1 << 17

# Options that switch off passes of the DSL, by its version and the architecture. These passes
# change no kernel, and take a twelfth of the time to compile one (for Blackwell a twentieth).
_SKIPPED_PASSES = {
    ("4.8.1", "sm_90a"): "use-strength-reduction-pass=false use-nvgpu-optimization-pass=false",
    ("4.8.1", "sm_100a"): "use-strength-reduction-pass=false",
}

# Bytes of temporary files that a compilation may write: PTX, CUBIN and an object. The largest of
# attnkit's kernels takes a tenth.
_ROOM = 2**25

# Copies of attnkit in other folders may share a cache. So PTX text on disk names the files of the
# package by this prefix, and each copy replaces it by its own path.
_PACKAGE_PREFIX = "<attnkit>/"

_PTX_LIMIT = 2**28  # bytes; a few compressed ones could become more than the memory

# Machines may share a cache, so the host code must run on any processor of the family.
_HOSTS = {
    "x86_64": "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64",
    "aarch64": "llvm -mtriple=aarch64-unknown-linux-gnu -mcpu=generic",
}


@dataclass(frozen=True)
class Build:
    """Bundles the arguments of `cute.compile`.

    Attributes:
        function: a `@cute.jit` callable. It stores its constants itself.
        arguments: fake tensors, numbers of the DSL, lists of fake tensors, None; the last one is
            the stream, `CUstream(0)`.
        options: "--opt-level=N", or nothing for level 3.
    """

    function: Any
    arguments: tuple[Any, ...]
    options: str = ""


@dataclass(frozen=True)
class Source:
    """Describes a kernel by its key, and says how to build it if it is not in a cache.

    Attributes:
        key: text that names everything on which the generated code depends, and nothing else: the
            graph, the plan, dtypes, alignments. `kernel.full_key` adds versions, the architecture
            and a digest of attnkit's own source.
        arch: target architecture, such as "sm_90a".
        build: called only if the kernel is neither in memory nor on disk.
        name: for reports and messages.
        lines: whether to store line numbers of the Python program. The machine code is the same,
            the object larger.
    """

    key: str
    arch: str
    build: Callable[[], Build] = field(compare=False, repr=False)
    name: str = field(default="kernel", compare=False)
    lines: bool = False


@dataclass(frozen=True)
class Artifact:
    """Holds a compiled kernel as it is stored on disk.

    Attributes:
        function: name of the host function in the object.
        arch: target architecture.
        signature: the arguments.
        stats: registers, stack, shared memory and code size of each device function.
        problems: what is wrong with the device code, see `sass_checks.problems`.
        seconds: time that the compilation took.
        code: host object file, which contains the device code.
        image: the object linked to a shared library; empty if there was no C compiler.
        packed_ptx: the device code as PTX text, compressed; a prefix stands for the package's
            folder in its paths.
    """

    function: str
    arch: str
    signature: Signature
    stats: tuple[KernelStats, ...]
    problems: tuple[str, ...]
    seconds: float
    code: bytes = field(repr=False)
    image: bytes = field(repr=False)
    packed_ptx: bytes = field(repr=False)

    @cached_property
    def ptx(self) -> str:
        """Return the device code as PTX text, with paths of this copy of attnkit."""
        unpacked = zlib.decompressobj().decompress(self.packed_ptx, _PTX_LIMIT)
        return _with_folder(unpacked.decode(), _PACKAGE_PREFIX, FOLDER)

    def dump(self) -> bytes:
        """Serialize the artifact to bytes for the disk."""
        parts = (self.code, self.image, self.packed_ptx)
        head = {
            "function": self.function,
            "arch": self.arch,
            "signature": [dump_spec(s) for s in self.signature.specs],
            "stats": [asdict(s) for s in self.stats],
            "problems": self.problems,
            "seconds": self.seconds,
            "parts": [len(p) for p in parts],
        }
        text = json.dumps(head).encode()
        return struct.pack("<Q", len(text)) + text + b"".join(parts)

    @staticmethod
    def load(data: bytes) -> Artifact:
        """Deserialize the bytes that `dump` returned.

        Raises:
            ArgumentError: they are not those of an artifact.
        """
        try:
            start = 8 + struct.unpack_from("<Q", data)[0]
            head = json.loads(data[8:start])
            parts = []
            for length in map(operator.index, head["parts"]):
                if length < 0:
                    raise ValueError(f"a part of {length} bytes")
                parts.append(data[start : start + length])
                start += length
            artifact = Artifact(
                head["function"],
                head["arch"],
                Signature([load_spec(s) for s in head["signature"]]),
                tuple(KernelStats(**s) for s in head["stats"]),
                tuple(head["problems"]),
                head["seconds"],
                *parts,
            )
        except (struct.error, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"not a compiled kernel: {error}") from error
        if start != len(data) or not artifact._is_plain:
            raise ArgumentError("not a compiled kernel: a part has a value that none can have")
        return artifact

    @property
    def _is_plain(self) -> bool:
        """Return whether texts are what is printed and looked up, and numbers are numbers."""
        texts = (*self.problems, *(s.name for s in self.stats))
        counts = [
            n for s in self.stats for n in (s.registers, s.stack, s.shared, s.code, s.threads)
        ]
        return (
            all(isinstance(t, str) and t.isprintable() for t in (*texts, self.function, self.arch))
            and re.fullmatch(r"\w+", self.function, re.ASCII) is not None
            and re.fullmatch(r"sm_\d+[af]?", self.arch, re.ASCII) is not None
            and all(type(n) is int and n >= 0 for n in counts)
            and type(self.seconds) is float
            and math.isfinite(self.seconds)
        )


def _with_folder(ptx: str, source: str, target: str) -> str:
    """Replace a folder in the paths of a PTX text."""
    return re.sub(
        rf'^(\s*\.file\s+\d+\s+"){re.escape(source)}', lambda m: m[1] + target, ptx, flags=re.M
    )


def host_target() -> str:
    """Return the DSL's options for host code of this machine's processor family.

    Raises:
        OptionError: the DSL generates no code for this processor.
    """
    machine = platform.machine()
    if machine not in _HOSTS:
        raise OptionError(
            f"kernels cannot be compiled on a processor of type {machine!r}; expected one of "
            f"{', '.join(_HOSTS)}"
        )
    return _HOSTS[machine]


def compile_source(source: Source) -> Artifact:
    """Compile a source; needs no GPU.

    Raises:
        OptionError: the build's options are not an optimisation level.
        ArgumentError: the build's arguments cannot be passed at run time.
        UnsupportedError: there is no room for temporary files.
    """
    with _without_garbage_collection():
        return _compiled(source)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector: it would scan all objects of torch and the DSL many times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _compiled(source: Source) -> Artifact:
    """Compile, link and check a source; `compile_source` pauses the garbage collector around it."""
    from cutlass import cute

    runtime()  # the DSL needs its symbols to write out an object
    start = time.perf_counter()
    build = source.build()
    signature = Signature(list(read_specs(build.arguments)))
    with scratch_folder(_ROOM) as folder:
        compiler = cute.compile[_options(build, source, str(folder))]
        with warnings.catch_warnings():
            # An empty list of tensors is intended, and so is the unrolling of static loops.
            warnings.filterwarnings("ignore", "Argument .* cannot be converted to a JitArgument")
            warnings.filterwarnings("ignore", "This static loop has")
            # `loader.Entry` loads and calls the object, so the DSL needs no engine of its own.
            compiled = compiler(build.function, *build.arguments, no_jit_engine=True)
        code = compiled.dump_to_object(PREFIX)
    image = link(code)
    cubin, kernels = compiled.artifacts.CUBIN, compiled.kernel_info
    return Artifact(
        compiled.function_name,
        source.arch,
        signature,
        kernel_stats(cubin) if kernels else (),
        problems(cubin, source.arch) if kernels else (),
        time.perf_counter() - start,
        code,
        image,
        zlib.compress(_with_folder(compiled.artifacts.PTX or "", FOLDER, _PACKAGE_PREFIX).encode()),
    )


def _options(build: Build, source: Source, folder: str) -> tuple[Any, ...]:
    """Build the options of `cute.compile`, which writes PTX and CUBIN files to the folder."""
    import cutlass
    from cutlass import cute
    from cutlass.base_dsl.compiler import DumpDir, ExtraCompilerOpts, HostTarget

    level = re.fullmatch("(?:--opt-level=([0-3]))?", build.options)
    if level is None:
        raise OptionError(
            f"options={build.options!r}: expected '--opt-level=N', N from 0 to 3, or nothing; the "
            "architecture is the source's"
        )
    return (
        cute.OptLevel(int(level[1] or 3)),
        cute.GPUArch(source.arch),
        # The DSL keeps PTX and CUBIN in memory only if it writes them to files too.
        cute.KeepPTX(True),
        cute.KeepCUBIN(True),
        DumpDir(folder),
        HostTarget(host_target()),
        cute.GenerateLineInfo(source.lines),
        ExtraCompilerOpts(_SKIPPED_PASSES.get((cutlass.__version__, source.arch), "")),
    )


# See _STACK.
_compiled.__code__ = _compiled.__code__.replace(co_stacksize=_STACK)

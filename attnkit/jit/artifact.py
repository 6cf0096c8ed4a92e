"""Describe a kernel before compilation (`Source`) and as stored on disk (`Artifact`)."""

from __future__ import annotations

import json
import math
import operator
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from attnkit.errors import ArgumentError
from attnkit.jit.abi import Signature
from attnkit.jit.arg_specs import dump_spec, load_spec
from attnkit.util.package import FOLDER

# Copies of attnkit in different folders may share a cache. PTX text on disk therefore names the
# files of the package with this prefix, and each copy replaces the prefix by its own path.
_PACKAGE_PREFIX = "<attnkit>/"
_PTX_LIMIT = 2**28  # bytes; a small compressed text could otherwise expand beyond the memory


class Build(NamedTuple):
    """Holds the arguments of `cute.compile`.

    Attributes:
        function: a `@cute.jit` callable, which stores compile-time constants as its own state.
        arguments: fake tensors, numbers of the DSL, lists of fake tensors or None. The last one is
            the stream, `CUstream(0)`.
        options: "--opt-level=N"; an empty string means level 3.
    """

    function: Any
    arguments: tuple[Any, ...]
    options: str = ""


@dataclass(frozen=True)
class Source:
    """Describes a kernel by a cache key and a function that builds the kernel on a cache miss.

    Attributes:
        key: text that contains exactly the data on which the generated code depends: the graph, the
            plan, dtypes and alignments. `kernel.full_key` adds versions, the architecture and a
            digest of attnkit's own source.
        arch: target architecture, such as "sm_90a".
        build: returns the arguments of `cute.compile`; called only if the kernel is neither in
            memory nor on disk.
        name: name of the kernel in reports and error messages.
        lines: whether to store line numbers of the Python source. They make the object larger but
            do not change the machine code.
    """

    key: str
    arch: str
    build: Callable[[], Build] = field(compare=False, repr=False)
    name: str = field(default="kernel", compare=False)
    lines: bool = False


class KernelStats(NamedTuple):
    """Holds the resource usage of one device function of a CUBIN.

    Attributes:
        name: symbol of the function.
        registers: registers per thread at launch; `setmaxnreg` may change them later.
        stack: bytes of a thread's stack frame; above 0 if registers were spilled.
        shared: bytes of static shared memory; dynamic shared memory is not counted.
        code: bytes of instructions.
        threads: threads per CTA; 0 if the kernel does not fix the number.
    """

    name: str
    registers: int
    stack: int
    shared: int
    code: int
    threads: int = 0


@dataclass(frozen=True, eq=False)
class Artifact:
    """Holds a compiled kernel as it is stored on disk.

    Attributes:
        function: name of the host function in the object.
        arch: target architecture.
        signature: the arguments of the host function.
        stats: registers, stack, shared memory and code size of each device function.
        problems: problems of the device code, see `sass_checks.problems`.
        seconds: duration of the compilation.
        code: host object file, which contains the device code.
        image: shared library linked from `code`; empty if there was no C compiler.
        packed_ptx: compressed PTX text. In its paths a prefix replaces the package's folder.
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
        """Return the device code as PTX text, with source paths of this copy of attnkit."""
        unpacked = zlib.decompressobj().decompress(self.packed_ptx, _PTX_LIMIT)
        return _with_folder(unpacked.decode(), _PACKAGE_PREFIX, FOLDER)

    def dump(self) -> bytes:
        """Serialize the artifact to bytes for the disk cache."""
        parts = (self.code, self.image, self.packed_ptx)
        head = {
            "function": self.function,
            "arch": self.arch,
            "signature": [dump_spec(s) for s in self.signature.specs],
            "stats": [s._asdict() for s in self.stats],
            "problems": self.problems,
            "seconds": self.seconds,
            "parts": [len(p) for p in parts],
        }
        text = json.dumps(head).encode()
        return struct.pack("<Q", len(text)) + text + b"".join(parts)

    @staticmethod
    def load(data: bytes) -> Artifact:
        """Create an artifact from the bytes that `dump` returned.

        Raises:
            ArgumentError: `data` is not a serialized artifact.
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
        """Return whether all texts are printable, all names valid and all numbers in range."""
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


def pack_ptx(ptx: str) -> bytes:
    """Compress PTX text for the disk cache; `Artifact.ptx` decompresses it."""
    return zlib.compress(_with_folder(ptx, FOLDER, _PACKAGE_PREFIX).encode())


def _with_folder(ptx: str, source: str, target: str) -> str:
    """Replace the path prefix `source` by `target` in the `.file` lines of PTX text."""
    return re.sub(
        rf'^(\s*\.file\s+\d+\s+"){re.escape(source)}', lambda m: m[1] + target, ptx, flags=re.M
    )

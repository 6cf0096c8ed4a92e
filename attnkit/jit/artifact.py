"""Describe a kernel before it is compiled, a `Source`, and as it is stored on disk, an `Artifact`."""

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

# Copies of attnkit in other folders may share a cache. So PTX text on disk names the files of the
# package by this prefix, and each copy replaces it by its own path.
_PACKAGE_PREFIX = "<attnkit>/"
_PTX_LIMIT = 2**28  # bytes; a few compressed ones could become more than the memory


class Build(NamedTuple):
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


class KernelStats(NamedTuple):
    """Lists the resources of one device function of a CUBIN.

    Attributes:
        name: symbol of the function.
        registers: per thread at launch; `setmaxnreg` moves them between warpgroups afterwards.
        stack: bytes of a thread's stack frame; above 0 if registers were spilled.
        shared: bytes of static shared memory; dynamic shared memory is not counted.
        code: bytes of instructions.
        threads: threads of a CTA; 0 if the kernel does not fix them.
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
            "stats": [s._asdict() for s in self.stats],
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


def pack_ptx(ptx: str) -> bytes:
    """Compress PTX text for the disk; `Artifact.ptx` unpacks it."""
    return zlib.compress(_with_folder(ptx, FOLDER, _PACKAGE_PREFIX).encode())


def _with_folder(ptx: str, source: str, target: str) -> str:
    """Replace a folder in the paths of a PTX text."""
    return re.sub(
        rf'^(\s*\.file\s+\d+\s+"){re.escape(source)}', lambda m: m[1] + target, ptx, flags=re.M
    )

"""Compile a `Source` with the CuTe DSL to the `Artifact` that is stored on disk.

This module is imported only to compile a kernel. A kernel from the disk cache does not need it.
"""

from __future__ import annotations

import gc
import platform
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnkit.errors import OptionError
from attnkit.jit.abi import Signature
from attnkit.jit.arg_specs import read_specs
from attnkit.jit.artifact import Artifact, Build, Source, pack_ptx
from attnkit.jit.cubin import kernel_stats
from attnkit.jit.dsl_runtime import runtime
from attnkit.jit.loader import PREFIX, link
from attnkit.jit.sass_checks import problems
from attnkit.jit.scratch import scratch_folder

# CPython allocates call frames in chunks of 16 KiB and frees a chunk when the last frame in it
# returns. If a chunk ends exactly where a long loop makes its calls, each call maps and unmaps
# memory, which took a third of the time of a trace. A function that declares a stack of this many
# values gets a chunk of 2 MiB instead, and half of the chunk remains for the calls that it makes.
_STACK = 1 << 17

# Options that disable passes of the DSL, by DSL version and architecture. These passes change no
# kernel and take a twelfth of the compilation time (a twentieth for Blackwell).
_SKIPPED_PASSES = {
    ("4.8.1", "sm_90a"): "use-strength-reduction-pass=false use-nvgpu-optimization-pass=false",
    ("4.8.1", "sm_100a"): "use-strength-reduction-pass=false",
}

# Bytes of temporary files (PTX, CUBIN and an object) that a compilation may write. The largest of
# 4000 kernels needed 2 MiB.
_ROOM = 2**25

# Several machines may share a cache, so the host code must run on any processor of the family.
_HOSTS = {
    "x86_64": "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64",
    "aarch64": "llvm -mtriple=aarch64-unknown-linux-gnu -mcpu=generic",
}


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
    """Compile a `Source` to an `Artifact`; this needs no GPU.

    Raises:
        OptionError: the build's options are not an optimisation level.
        ArgumentError: the build's arguments cannot be passed at run time.
        UnsupportedError: there is no room for temporary files.
    """
    with _without_garbage_collection():
        return _compiled(source)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector in the `with` block, to save its scans of torch and the DSL."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _compiled(source: Source) -> Artifact:
    """Implement `compile_source`, which disables the garbage collector during this call."""
    from cutlass import cute

    runtime()  # the DSL needs its symbols to write out an object
    start = time.perf_counter()
    build = source.build()
    signature = Signature(list(read_specs(build.arguments)))
    with scratch_folder(_ROOM) as folder:
        compiler = cute.compile[_options(build, source, str(folder))]
        with warnings.catch_warnings():
            # Empty lists of tensors and unrolled static loops are intended.
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
        pack_ptx(compiled.artifacts.PTX or ""),
    )


def _options(build: Build, source: Source, folder: str) -> tuple[Any, ...]:
    """Return the options of `cute.compile`, which writes PTX and CUBIN files to `folder`."""
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

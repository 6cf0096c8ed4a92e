"""Locate the CuTe DSL, identify its build, and load its runtime library.

This module does not import the DSL: a kernel from the disk cache needs only the runtime library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from functools import cache
from pathlib import Path

from attnkit.errors import UnsupportedError
from attnkit.util import environment

_PACKAGE = "nvidia_cutlass_dsl"
_LIBRARY = "libcute_dsl_runtime.so"
# Settings of the DSL that do not change the generated code; attnkit overrides ARCH.
_NEUTRAL = tuple(
    f"CUTE_DSL_{name}"
    for name in "ARCH LIBS CACHE DISABLE_FILE NO_CACHE JIT_ DUMP KEEP LOG PRINT SHOW FILTER".split()
)


@cache
def folder() -> Path:
    """Return the installation folder of the package nvidia_cutlass_dsl.

    Raises:
        UnsupportedError: the DSL is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if Path(place, "dsl_packages", "cutlass", "__init__.py").is_file():
            return Path(place)
    raise UnsupportedError(
        "GPU kernels are compiled with the CuTe DSL, which is not installed: "
        "pip install nvidia-cutlass-dsl (Linux only)"
    )


def library() -> Path:
    """Return the path of the DSL's runtime library, from CUTE_DSL_LIBS or from the package.

    If there are builds for CUDA 12 and 13, the result is the build for CUDA 12, which also runs
    with older drivers.

    Raises:
        UnsupportedError: the library is missing.
    """
    named = [Path(p) for p in environment.read("CUTE_DSL_LIBS").split(os.pathsep) if p]
    inside = [folder() / part / _LIBRARY for part in ("lib", "cu12/lib", "cu13/lib")]
    for path in (*(p for p in named if p.name == _LIBRARY), *inside):
        if path.is_file():
            return path
    raise UnsupportedError(
        f"the CuTe DSL in {folder()} has no {_LIBRARY}: its installation is not complete, "
        "install nvidia-cutlass-dsl again"
    )


@cache
def runtime() -> ctypes.CDLL:
    """Load the DSL's runtime library once, with global symbols, and return it.

    The DSL needs these symbols to export objects for an architecture other than that of this
    machine.
    """
    loaded = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
    loaded.cuda_dialect_get_error_name.restype = ctypes.c_char_p
    return loaded


def error_name(status: int) -> str:
    """Return the name of the CUDA error with status code `status`."""
    name = runtime().cuda_dialect_get_error_name(ctypes.c_int(status))
    return name.decode() if name else f"CUDA error {status}"


@cache
def identity() -> str:
    """Return a text that identifies the DSL build: version, library names and library sizes."""
    package = folder() / "dsl_packages" / "cutlass"
    text = Path(package, "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    native = sorted(package.glob("_mlir/_mlir_libs/_cutlass_ir*.so"))
    parts = [f"{path.name}:{path.stat().st_size}" for path in (*native, library())]
    return " ".join([version[1] if version else "unknown", *parts])


def settings() -> str:
    """Return the DSL's environment variables that may change code, as "NAME=value ..."."""
    found = environment.read_prefixed("CUTE_DSL_")
    return " ".join(f"{k}={value}" for k, value in found.items() if not k.startswith(_NEUTRAL))

"""Say what this machine can run, and why it cannot run the rest: `attnkit doctor`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

import attnkit
from attnkit.cli.arguments import OK
from attnkit.errors import AttnkitError
from attnkit.schedule.plan import BACKENDS, Call, choose
from attnkit.schedule.targets import TARGETS

if TYPE_CHECKING:
    from attnkit.cli.arguments import Subparsers


class Finding(NamedTuple):
    """Reports in one line whether something is present, its state, and what to do if it is not."""

    present: bool
    name: str
    state: str
    todo: str = ""

    def __str__(self) -> str:
        mark = "ok" if self.present else "--"
        return f"{mark}  {self.name:24}{self.state}" + (f": {self.todo}" if self.todo else "")


def register(subparsers: Subparsers) -> None:
    """Add the parser of `attnkit doctor`."""
    parser = subparsers.add_parser("doctor", help="what this machine can run and why not the rest")
    parser.description = (
        "Look at the packages, the device, the compiler and the cache folder, and say for each "
        "backend whether it can run here. Computes nothing; the exit status is 0."
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line for each finding."""
    for finding in findings():
        print(finding)
    return OK


def findings() -> Iterator[Finding]:
    """Check packages, devices, the compiler, the cache folder and the backends; yield findings."""
    yield Finding(True, "attnkit", f"{attnkit.__version__}, Python {platform.python_version()}")
    yield Finding(True, "torch", torch.__version__)
    for look in (_cuda, _dsl, _compiler, _cache):
        yield look()
    yield _package("matplotlib", "plot", "pictures in files")
    yield _package("hypothesis", "test", "`attnkit check`")
    for target in TARGETS:
        yield Finding(True, f"kernels {target.arch}", f"{target.card}, {target.standing}")
    yield from _backends()


def _cuda() -> Finding:
    name = "CUDA device"
    if torch.version.cuda is None:
        return Finding(
            False,
            name,
            "none, this torch is built without CUDA",
            "for GPU kernels install a CUDA build of torch (pytorch.org/get-started)",
        )
    if not torch.cuda.is_available():
        return Finding(
            False,
            name,
            f"none is seen by torch, which is built for CUDA {torch.version.cuda}",
            "see whether `nvidia-smi` lists one and CUDA_VISIBLE_DEVICES allows it",
        )
    properties = torch.cuda.get_device_properties(0)
    state = (
        f"{properties.name}, sm_{properties.major}{properties.minor}, "
        f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
    )
    more = torch.cuda.device_count() - 1
    return Finding(True, name, state + (f", and {more} more" if more else ""))


def _dsl() -> Finding:
    name = "CuTe DSL"
    try:
        version = metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        where = "" if platform.system() == "Linux" else " (it exists for Linux alone)"
        return Finding(
            False,
            name,
            f"not installed{where}",
            "for GPU kernels and the emulator `pip install nvidia-cutlass-dsl`",
        )
    if importlib.util.find_spec("cutlass") is None:
        return Finding(
            False,
            name,
            f"{version} is installed but has no module `cutlass`",
            "`pip install --force-reinstall nvidia-cutlass-dsl`",
        )
    return Finding(True, name, version)


def _compiler() -> Finding:
    from attnkit.jit.emulator_runs import compiler

    try:
        return Finding(True, "C compiler", f"{compiler()}, for the emulator")
    except AttnkitError:
        todo = "for the emulator install gcc or clang, or name one in CC"
        return Finding(False, "C compiler", "none found", todo)


def _cache() -> Finding:
    from attnkit.jit.disk_cache import default_folder

    folder = default_folder()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            False,
            "cache folder",
            f"{folder} cannot be written",
            "set ATTNKIT_CACHE_DIR to a folder that can, or each process compiles its own kernels",
        )
    return Finding(True, "cache folder", f"{folder}, {_describe_entries(folder)}")


def _describe_entries(folder: Path) -> str:
    """Say how many kernels the cache folder has, and their size."""
    entries = [path.stat().st_size for path in folder.glob("*.kernel")] if folder.exists() else []
    return f"{len(entries)} kernels, {sum(entries) / 2**20:.1f} MiB" if entries else "empty"


def _package(name: str, extra: str, purpose: str) -> Finding:
    try:
        return Finding(True, name, f"{metadata.version(name)}, for {purpose}")
    except metadata.PackageNotFoundError:
        return Finding(
            False, name, "not installed", f"for {purpose} `pip install 'attnkit[{extra}]'`"
        )


def _backends() -> Iterator[Finding]:
    """Yield for each backend the plan of a call with bfloat16 and head dim 128, or its error.

    The call is on a CUDA device if there is one, except for the emulator.
    """
    cuda = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if cuda else None
    call = Call("bfloat16", 128, 128, capability)
    others = (f"emulate:{target.arch}" for target in TARGETS[1:])
    for backend in (*BACKENDS, *others):
        name = f"backend {backend}"
        device = "cuda" if cuda and not backend.startswith("emulate") else "cpu"
        try:
            plan = choose(backend, device=device, call=call)
            finding = Finding(True, name, "; ".join((plan.reason, *plan.notes)))
        except AttnkitError as error:
            finding = Finding(False, name, str(error))
        yield finding

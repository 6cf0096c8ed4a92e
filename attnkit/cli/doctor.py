"""Report what this machine can run, and why it cannot run the rest: `attnkit doctor`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import stat
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

import attnkit
from attnkit.cli.arguments import FAILED, OK
from attnkit.errors import AttnkitError
from attnkit.schedule.plan import BACKENDS, Call, choose
from attnkit.schedule.targets import TARGETS
from attnkit.util import environment

if TYPE_CHECKING:
    from attnkit.cli.arguments import Subparsers


class Finding(NamedTuple):
    """Holds the result of one check: whether it passed, what was found, and what to do if not."""

    present: bool
    name: str
    state: str
    todo: str = ""

    def __str__(self) -> str:
        mark = "ok" if self.present else "--"
        return f"{mark}  {self.name:26}{self.state}" + (f": {self.todo}" if self.todo else "")


def register(subparsers: Subparsers) -> None:
    """Add the parser of `attnkit doctor`."""
    parser = subparsers.add_parser("doctor", help="what this machine can run and why not the rest")
    parser.description = (
        "Look at the packages, the device, the compiler, the cache folder and the environment "
        "variables, and say for each backend whether it can run here. Computes nothing; the exit "
        "status is 0. With --security, say who may write the code that attnkit loads; the exit "
        "status is 1 if that is anybody but you, root and the owner of a shared cache."
    )
    parser.add_argument(
        "--security",
        action="store_true",
        help="say who may write the cache of compiled kernels, and nothing else",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line for each finding, and return the exit status."""
    found = list(security_findings() if options.security else findings())
    for finding in found:
        print(finding)
    return FAILED if options.security and not all(f.present for f in found) else OK


def findings() -> Iterator[Finding]:
    """Yield findings on packages, devices, the compiler, the cache folder and the backends."""
    yield Finding(True, "attnkit", f"{attnkit.__version__}, Python {platform.python_version()}")
    yield Finding(True, "torch", torch.__version__)
    for look in (_cuda, _dsl, _compiler, _cache):
        yield look()
    yield _package("matplotlib", "plot", "pictures in files")
    yield _package("hypothesis", "check", "`attnkit check`")
    yield from _variables()
    for target in TARGETS:
        yield Finding(True, f"kernels {target.arch}", f"{target.card}, {target.standing}")
    yield from _backends()


def security_findings() -> Iterator[Finding]:
    """Yield findings on who may write to the folders from which code is loaded."""
    from attnkit.jit.disk_cache import default_folder, shared_folder

    yield from _writers("cache folder", default_folder(), shared=False)
    shared = shared_folder()
    if shared is None:
        yield Finding(True, "shared cache", "none, ATTNKIT_SHARED_CACHE_DIR is not set")
    else:
        yield from _writers("shared cache", shared, shared=True)
    yield _temporary_files()


def _writers(name: str, folder: Path, *, shared: bool) -> Iterator[Finding]:
    """Yield findings on who may write to a cache folder, its entries, and the folders above it."""
    from attnkit.jit import trusted_files

    try:
        owners = (folder.stat().st_uid,) if shared else ()
        reason = trusted_files.reason_to_distrust_folder(folder, owners)
    except FileNotFoundError:
        state = "does not exist" if shared else "does not exist yet; it will be yours alone"
        yield Finding(not shared, name, f"{folder} {state}")
    except OSError as error:
        yield Finding(False, name, f"{folder} cannot be looked at: {error}")
    else:
        who = trusted_files.writers(folder.stat())
        todo = f"{reason}, so it is ignored; `chown` and `chmod go-w` make it its owner's alone"
        yield Finding(not reason, name, f"{folder}: {who} may write", todo if reason else "")
        yield _entries(folder, owners)
    # a link on the way has folders above it, and so has its target
    above = [*folder.absolute().parents, *Path(os.path.realpath(folder)).parents]
    for place in dict.fromkeys(map(str, above)):
        if problem := _problem_above(place, folder):
            yield Finding(False, f"above the {name}", f"{place}{problem}", "move the cache")


def _problem_above(place: str, folder: Path) -> str:
    """Return why the folder `place` above a cache is not trusted, or "" if it is."""
    from attnkit.jit.trusted_files import reason_to_distrust_place

    try:
        reason = reason_to_distrust_place(place)
    except FileNotFoundError:
        # whoever may create it can write to a folder above it, which gets a finding of its own
        return " is a link to nothing" if os.path.islink(place) else ""
    except OSError as error:
        return f" cannot be looked at: {error.strerror}"
    return f": {reason}, and could replace {folder}" if reason else ""


def _entries(folder: Path, owners: tuple[int, ...]) -> Finding:
    """Return a finding with the number of kernels in a cache folder and of those not trusted."""
    from attnkit.jit import trusted_files

    bad = []
    paths = sorted(folder.glob("*.kernel"))
    for path in paths:
        status = path.lstat()
        reason = trusted_files.reason_to_distrust(status, owners)
        if not stat.S_ISREG(status.st_mode):
            reason = "it is not a regular file"
        if reason:
            bad.append(f"{path.name}: {reason}")
    state = f"{len(paths)} kernels, of which {len(bad)} are ignored"
    return Finding(not bad, "  its kernels", state, f"remove {bad[0]}" if bad else "")


def _temporary_files() -> Finding:
    """Return a finding on whether others could replace a file in the folder for temporary files."""
    from attnkit.jit.trusted_files import reason_to_distrust_place

    name = "temporary files"
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        return Finding(False, name, str(error), "set TMPDIR")
    if reason := reason_to_distrust_place(folder):
        state = f"{folder}: {reason}, and could replace a kernel that is being loaded"
        return Finding(False, name, state, "another folder is used; set TMPDIR to one of yours")
    return Finding(True, name, f"{folder}: nobody else can replace a file of yours")


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
    from attnkit.jit.trusted_files import reason_to_distrust_folder

    folder = default_folder()
    if folder.exists() and (reason := reason_to_distrust_folder(folder)):
        return Finding(
            False,
            "cache folder",
            f"{folder} is not used, {reason}",
            "see `attnkit doctor --security`",
        )
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
    """Format the number of kernels in the cache folder and their total size."""
    entries = [path.stat().st_size for path in folder.glob("*.kernel")] if folder.exists() else []
    return f"{len(entries)} kernels, {sum(entries) / 2**20:.1f} MiB" if entries else "empty"


def _package(name: str, extra: str, purpose: str) -> Finding:
    try:
        return Finding(True, name, f"{metadata.version(name)}, for {purpose}")
    except metadata.PackageNotFoundError:
        return Finding(
            False, name, "not installed", f"for {purpose} `pip install 'attnkit[{extra}]'`"
        )


def _variables() -> Iterator[Finding]:
    """Yield a finding for each environment variable that attnkit reads: its value and meaning."""
    for variable in environment.VARIABLES:
        value = environment.current_value(variable)
        state = repr(value) if value else f"not set (default: {variable.default})"
        yield Finding(True, variable.name, f"{state}; {variable.meaning}".replace("`", ""))


def _backends() -> Iterator[Finding]:
    """Yield a finding for each backend: the plan of a bfloat16 call, head dim 128, or its error.

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

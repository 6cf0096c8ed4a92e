"""Decide whether kernels may run on a GPU on which they have not been verified.

A self-check tests the kernels once on each machine. It runs in a subprocess, so that a kernel that
crashes or hangs does not affect the caller. If it compared results, the verdict (correct or wrong)
is cached on disk with the compiled kernels. The key contains the version of the package, the name
of the GPU and the version of its driver. A self-check that times out or fails otherwise may be due
to a busy GPU, so its verdict applies to this process only.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from attnkit.jit.disk_cache import KernelCache, default_folder
from attnkit.jit.kernel import Source, full_key
from attnkit.schedule.targets import Target
from attnkit.util.package import FOLDER
from attnkit.util.status_line import elapsed

_log = logging.getLogger("attnkit.runtime")

# Time limit of the whole self-check in seconds, compilation included. The time that a process waits
# for the self-check of another process counts too.
TIMEOUT = 600.0
_RIGHT, _WRONG = 0, 10  # exit status of `attnkit.testing.selfcheck`, which cannot be imported here
_DRIVER = Path("/proc/driver/nvidia/version")

_verdicts: dict[tuple[Target, torch.device], str] = {}


class Verdict(NamedTuple):
    """Holds the result of a self-check.

    Attributes:
        reason: why the kernels must not run; "" if they are correct.
        in_numbers: whether results were compared, so that a repeated check would give the same
            verdict.
    """

    reason: str
    in_numbers: bool


def reason_against(target: Target, device: torch.device) -> str:
    """Return why the kernels of a target must not run on a CUDA device; "" if they may.

    The first call on a machine runs the self-check, which takes a minute or two. A failed
    self-check also emits a RuntimeWarning.
    """
    if target.proven:
        return ""
    reason = _verdicts.get((target, device))
    if reason is None:
        verdict = _cached_verdict(target, device)
        reason = _verdicts[target, device] = verdict.reason
        if reason:
            again = f"delete {default_folder()}" if verdict.in_numbers else "start a new process"
            warnings.warn(
                f"attnkit does not use its {target.card} kernels here: {reason}. Torch operators "
                f"take their place; {again} to have them tested again",
                RuntimeWarning,
                stacklevel=2,
            )
    return reason


def _cached_verdict(target: Target, device: torch.device) -> Verdict:
    """Return the verdict stored on disk, or run the self-check and store its verdict if final."""
    end = time.monotonic() + TIMEOUT
    cache, key = KernelCache(), full_key(_cache_source(target, device))
    with cache.lock(key, patience=TIMEOUT):  # another process may be testing
        stored = cache.get(key)
        if stored is not None:
            return Verdict(stored.decode(errors="replace"), in_numbers=True)
        start = time.monotonic()
        with elapsed(f"testing the {target.card} kernels on {device}, once for this machine"):
            verdict = run_selfcheck(target, device, end - start)
        _log.info(
            "tested the kernels for %s on %s in %.0f s: %s",
            target.card,
            device,
            time.monotonic() - start,
            verdict.reason or "they are right",
        )
        if verdict.in_numbers:
            cache.put(key, verdict.reason.encode())
    return verdict


def _cache_source(target: Target, device: torch.device) -> Source:
    """Return a pseudo kernel source whose key identifies the verdict in the kernel cache."""

    def build() -> None:
        raise AssertionError("a verdict is not compiled")

    parts = (
        f"verdict on {target.name}",
        torch.cuda.get_device_name(device),
        str(torch.version.cuda),
        _driver_version(),
    )
    return Source("\n".join(parts), target.arch, build)  # type: ignore[arg-type]


def _driver_version() -> str:
    """Return the version line of the NVIDIA driver; "" if the system does not provide it."""
    try:
        return _DRIVER.read_text(errors="replace").partition("\n")[0]
    except OSError:  # WSL has no such file
        return ""


def run_selfcheck(target: Target, device: torch.device, seconds: float = TIMEOUT) -> Verdict:
    """Run `attnkit.testing.selfcheck` in a subprocess.

    Args:
        target: the target whose kernels to test.
        device: the device to test on.
        seconds: time limit.
    """
    late = Verdict(f"their test did not end within {TIMEOUT:.0f} seconds", in_numbers=False)
    if seconds <= 0:
        return late
    command = [sys.executable, "-m", "attnkit.testing.selfcheck", "cute", str(device)]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command,
            stdout=pipe,
            stderr=pipe,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            # `python -m` looks there first: this copy of attnkit need not be on the path
            cwd=Path(FOLDER).parent,
        )
    except (OSError, ValueError, TypeError) as error:  # an embedded Python has no program
        return Verdict(f"their test could not be started: {error}", in_numbers=False)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _stop(process)
        return late
    except BaseException:  # Ctrl-C
        _stop(process)
        raise
    if process.returncode == _RIGHT:
        return Verdict("", in_numbers=True)
    lines = (out.strip() or err.strip() or "nothing was said").splitlines()
    reason = f"their test failed with status {process.returncode}: {lines[-1]}"
    return Verdict(reason, in_numbers=process.returncode == _WRONG)


def _stop(process: subprocess.Popen[str]) -> None:
    """Kill a process; wait at most five seconds for its end, as it may hang in the driver."""
    process.kill()
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

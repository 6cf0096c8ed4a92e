"""Decide whether to use kernels on a GPU on which they have not been verified.

A self-check tests them once on each machine, in a subprocess, so that a kernel that crashes or
hangs does not take the caller down. The verdict is cached on disk with the compiled kernels; its
key contains the version of the package and the name of the GPU.
"""

from __future__ import annotations

import subprocess
import sys
import warnings

import torch

from attnkit.jit.disk_cache import KernelCache, default_folder
from attnkit.jit.kernel import Source, full_key
from attnkit.schedule.targets import Target

TIMEOUT = 600.0  # seconds for the whole self-check, compilation included

_verdicts: dict[tuple[Target, torch.device], str] = {}


def reason_against(target: Target, device: torch.device) -> str:
    """Return why the kernels of a target must not run on a CUDA device; "" if they may.

    The first call on a machine runs the self-check, which takes a minute or two. If it fails, this
    also warns.
    """
    if target.proven:
        return ""
    verdict = _verdicts.get((target, device))
    if verdict is None:
        verdict = _verdicts[target, device] = _cached_verdict(target, device)
        if verdict:
            warnings.warn(
                f"attnkit does not use its {target.card} kernels here: {verdict}. Torch operators "
                f"take their place; delete {default_folder()} to have them tested again",
                RuntimeWarning,
                stacklevel=2,
            )
    return verdict


def _cached_verdict(target: Target, device: torch.device) -> str:
    """Read the verdict of this machine from disk, or run the self-check and store its verdict."""
    cache, key = KernelCache(), full_key(_cache_source(target, device))
    with cache.lock(key):  # another process may be testing
        verdict = cache.get(key)
        if verdict is None:
            verdict = run_selfcheck(target, device).encode()
            cache.put(key, verdict)
    return verdict.decode()


def _cache_source(target: Target, device: torch.device) -> Source:
    """Describe what a verdict depends on, in the form of a source for the kernel cache."""

    def build() -> None:
        raise AssertionError("a verdict is not compiled")

    gpu = torch.cuda.get_device_name(device)
    return Source(f"verdict on {target.name}\n{gpu}\n{torch.version.cuda}", target.arch, build)  # type: ignore[arg-type]


def run_selfcheck(target: Target, device: torch.device) -> str:
    """Run `attnkit.testing.selfcheck` in a subprocess; return what is wrong, "" if nothing is."""
    command = [sys.executable, "-m", "attnkit.testing.selfcheck", "cute", str(device)]
    try:
        check = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"their test did not end within {TIMEOUT:.0f} seconds"
    except OSError as error:
        return f"their test could not be started: {error}"
    if check.returncode == 0:
        return ""
    output = (check.stdout.strip() or check.stderr.strip() or "nothing was said").splitlines()
    return f"their test failed with status {check.returncode}: {output[-1]}"

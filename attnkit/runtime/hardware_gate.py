"""Whether kernels that never ran on a GPU of some kind may be used on this one.

They are tested once on a machine, in a process of their own, so that a kernel that crashes or never
ends harms nobody. The verdict is kept among the compiled kernels, for the package and the GPU.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable

import torch

from attnkit.jit.disk_cache import KernelCache, default_folder
from attnkit.jit.kernel import Source, full_key
from attnkit.schedule.targets import Target

TIMEOUT = 600.0  # seconds for the whole test, compilation included
Test = Callable[[Target, torch.device], str]

_verdicts: dict[tuple[Target, torch.device], str] = {}


def doubt(target: Target, device: torch.device) -> str:
    """Why the kernels of a target are not to be used on a CUDA device; empty if they may be.

    The first call on a machine tests them, which takes a minute or two; a bad verdict is a warning
    too.
    """
    if target.proven:
        return ""
    found = _verdicts.get((target, device))
    if found is None:
        found = _verdicts[target, device] = _kept(target, device)
        if found:
            warnings.warn(
                f"attnkit does not use its {target.card} kernels here: {found}. Torch operators "
                f"take their place; delete {default_folder()} to have them tested again",
                RuntimeWarning,
                stacklevel=2,
            )
    return found


def _kept(target: Target, device: torch.device) -> str:
    """The verdict of this machine, made if there is none."""
    cache, key = KernelCache(), full_key(_source(target, device))
    with cache.lock(key):  # another process may be testing
        known = cache.get(key)
        if known is None:
            known = apart(target, device).encode()
            cache.put(key, known)
    return known.decode()


def _source(target: Target, device: torch.device) -> Source:
    """What a verdict depends on."""

    def build() -> None:
        raise AssertionError("a verdict is not compiled")

    card = torch.cuda.get_device_name(device)
    return Source(f"verdict on {target.name}\n{card}\n{torch.version.cuda}", target.arch, build)  # type: ignore[arg-type]


def apart(target: Target, device: torch.device) -> str:
    """Test in a process of its own; what is wrong, empty if nothing is."""
    command = [sys.executable, "-m", "attnkit.testing.selfcheck", "cute", str(device)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return f"their test did not end within {TIMEOUT:.0f} seconds"
    except OSError as error:
        return f"their test could not be started: {error}"
    if done.returncode == 0:
        return ""
    said = (done.stdout.strip() or done.stderr.strip() or "nothing was said").splitlines()
    return f"their test failed with status {done.returncode}: {said[-1]}"

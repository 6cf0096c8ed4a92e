"""Count the workers of a schedule, which are the CTAs that run at once."""

from __future__ import annotations

import functools

import torch

from attnkit.util import caches

EMULATED_SMS = 2  # few, so that each CTA computes several work tiles
# A deterministic backward is scheduled for a device with this many SMs, and chooses its kernel for
# it, so that the bits of its gradients are the same on all devices.
REFERENCE_SMS = 132


def worker_count(device: torch.device, emulated: bool) -> int:
    """Return the number of CTAs that run at once: one per SM of the device or of the emulator."""
    if not emulated:
        return sm_count(device)
    from attnkit.jit import emulation

    return emulation.ctas(EMULATED_SMS)


@functools.lru_cache(maxsize=16)
def sm_count(device: torch.device) -> int:
    """Return the number of SMs of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


caches.register(sm_count.cache_clear)

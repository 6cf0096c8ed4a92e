"""How many CTAs run at once: the workers that a schedule shares the work among."""

from __future__ import annotations

import functools

import torch

from attnkit.jit import emulation
from attnkit.util import caches

EMULATED_SMS = 2  # few, so that each CTA computes several work tiles


def worker_count(device: torch.device, emulated: bool) -> int:
    """SMs of a device, or of the emulator: as many CTAs run at once, one on each."""
    return emulation.ctas(EMULATED_SMS) if emulated else sm_count(device)


@functools.lru_cache(maxsize=16)
def sm_count(device: torch.device) -> int:
    """SMs of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


caches.register(sm_count.cache_clear)

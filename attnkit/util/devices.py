"""Resolve devices to the form in which tensors report them."""

from __future__ import annotations

import torch


def resolve_device(device: torch.device | str) -> torch.device:
    """Return the device with its index: "cuda" gives the current CUDA device, such as cuda:0.

    Raises:
        RuntimeError, AssertionError: torch has no such device.
    """
    return torch.empty(0, device=device).device


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, None for any other."""
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device)
    return None

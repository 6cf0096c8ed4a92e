"""Parse devices, and resolve them to the form in which tensors report them."""

from __future__ import annotations

from typing import Any

import torch

from attnkit.errors import DeviceError
from attnkit.util.arguments import shown


def parse_device(device: Any) -> torch.device:
    """Convert a device, its name or its CUDA index to a `torch.device`.

    Raises:
        DeviceError: it is none of these.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _error(device, error) from None


def resolve_device(device: Any) -> torch.device:
    """Return the device with its index: "cuda" gives the current CUDA device, such as cuda:0.

    Raises:
        DeviceError: torch has no such device here.
    """
    parsed = parse_device(device)
    try:
        return torch.empty(0, device=parsed).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise _error(device, error) from None


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, None for any other."""
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device)
    return None


def _error(device: Any, error: Exception) -> DeviceError:
    reason = (str(error).splitlines() or [""])[0]
    return DeviceError(
        f"device must be a torch.device or a name such as 'cpu' or 'cuda:0', and this machine must "
        f"have it; got {shown(device)}: {reason}"
    )

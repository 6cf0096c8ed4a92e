"""Parse device arguments and resolve them to a `torch.device` with an index."""

from __future__ import annotations

from typing import Any

import torch

from attnkit.errors import DeviceError
from attnkit.util.arguments import shown


def parse_device(device: Any) -> torch.device:
    """Convert a device, a device name or a CUDA index to a `torch.device`.

    Raises:
        DeviceError: `device` is none of these.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise _error(device, error) from None


def resolve_device(device: Any) -> torch.device:
    """Return the `torch.device` that a tensor on `device` reports: "cuda" gives cuda:0, say.

    Raises:
        DeviceError: torch has no such device on this machine.
    """
    parsed = parse_device(device)
    try:
        return torch.empty(0, device=parsed).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise _error(device, error) from None


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return (major, minor) compute capability of a CUDA device; None for any other device."""
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device)
    return None


def _error(device: Any, error: Exception) -> DeviceError:
    reason = (str(error).splitlines() or [""])[0]
    return DeviceError(
        f"device must be a torch.device or a name such as 'cpu' or 'cuda:0', and this machine must "
        f"have it; got {shown(device)}: {reason}"
    )

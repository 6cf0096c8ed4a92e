"""Devices as tensors name them."""

from __future__ import annotations

import torch


def resolved(device: torch.device | str) -> torch.device:
    """The device that a tensor made there says it is on: "cuda" is the current one, say cuda:0.

    Raises:
        RuntimeError, AssertionError: torch has no such device.
    """
    return torch.empty(0, device=device).device

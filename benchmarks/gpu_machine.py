"""Describe the GPU, driver and packages that a row was measured with."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from importlib import metadata

import torch
from machine import describe

PACKAGES = ("triton", "nvidia-cutlass-dsl", "flash-attn-4", "nvidia-cudnn-frontend")


def describe_gpu(device: torch.device) -> dict[str, object]:
    """Return the fields that all rows of a run share: versions, GPU, driver and power limit.

    Args:
        device: a CUDA device.
    """
    known = describe()
    properties = torch.cuda.get_device_properties(device)
    found = {name: known[name] for name in ("date", "commit", "python", "torch", "attnkit")}
    found["run"] = datetime.now(UTC).isoformat(timespec="seconds")
    found |= {"gpu": properties.name, "sms": properties.multi_processor_count}
    found |= {"driver": _smi("driver_version"), "power_limit_w": _smi("power.limit")}
    found |= {"max_sm_mhz": _smi("clocks.max.sm"), "cudnn": torch.backends.cudnn.version()}
    return found | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _smi(field: str) -> str:
    """Return one value that nvidia-smi reports for GPU 0, or "" if it gives no answer."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""Describe the machine and packages that a row was measured with."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from pathlib import Path

import torch

import attnkit


def _git(*words: str) -> str:
    """Run a git command in this checkout; return its output, empty if there is no checkout."""
    done = subprocess.run(
        ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def cpu_model() -> str:
    """Return the processor's name, or its type if the system does not know the name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe() -> dict[str, object]:
    """Return the fields of a row that do not depend on the case."""
    changed = _git("status", "--porcelain", "--", "../attnkit", "../templates")
    return {
        "date": date.today().isoformat(),
        "commit": _git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else ""),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attnkit": attnkit.__version__,
        "load": round(os.getloadavg()[0], 2),
    }

"""Describe the machine and packages that a row was measured with."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from datetime import date
from pathlib import Path

import committed
import torch

import attnkit


def cpu_model() -> str:
    """Return the processor's model name, or its architecture if the name is unknown."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe() -> dict[str, object]:
    """Return the fields that all rows of a run share: date, commit, CPU and versions."""
    return {
        "date": date.today().isoformat(),
        "commit": committed.described(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "attnkit": attnkit.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    """Print the machine, or with `--stamp` the stamp of a clean checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--stamp", action="store_true", help="print COMMIT:DIGEST for --commit of the benchmarks"
    )
    if not parser.parse_args().stamp:
        print(*(f"{k}: {v}" for k, v in describe().items()), sep="\n")
        return 0
    try:
        print(committed.stamp())
    except committed.NotCommitted as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

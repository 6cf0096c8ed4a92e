"""Time and memory of tile classification: `python benchmarks/classify.py [--json FILE]`.

Masks are classified flat, into 128 x 128 tiles, one batch and head. Each case runs in a fresh
process, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnkit.tiles import Statistics, classify
from attnkit.trace import trace

LENGTHS = (8192, 32768, 131072)
BLOCK = (128, 128)
LIMIT_MS, LIMIT_MB, LIMIT_LENGTH = 100, 150, 131072

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(length: int) -> MaskMod:
    return lambda b, h, q, kv: q >= kv


def window(length: int) -> MaskMod:
    return lambda b, h, q, kv: (q >= kv) & (q - kv < 512)


def documents(length: int) -> MaskMod:
    """Causal within documents of random lengths, 1500 positions on average."""
    sizes = torch.randint(1, 3000, (length,), generator=torch.Generator().manual_seed(0))
    document = torch.searchsorted(sizes.cumsum(0), torch.arange(length), right=True)
    return lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv])


CASES: dict[str, Callable[[int], MaskMod]] = {
    "causal": causal,
    "window 512": window,
    "causal documents": documents,
}


def memory(field: str) -> float:
    """A field of this process's memory account, in MB (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}: memory can be measured on Linux only")


def measure(case: str, length: int, repeats: int) -> dict[str, Any]:
    """Classify one mask again and again in this process."""
    traced = trace(CASES[case](length), "mask")
    sizes = {"q_len": length, "kv_len": length, "batch": 1, "heads": 1}
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = memory("VmRSS")
    times, record = [], Statistics()
    for _ in range(repeats + 1):
        record = Statistics()
        start = time.perf_counter()
        runs = classify(traced.root, traced.tensors, block=BLOCK, device=torch.device("cpu"),
                        statistics=record, **sizes)  # fmt: skip
        times.append(1000 * (time.perf_counter() - start))
    empty, partial, full = runs.counts()
    return {
        "benchmark": "classify",
        "case": case,
        "length": length,
        "block": BLOCK,
        "first_ms": times[0],
        "median_ms": statistics.median(times[1:]),
        "least_ms": min(times[1:]),
        "peak_mb": memory("VmHWM") - before,
        "empty": empty,
        "partial": partial,
        "full": full,
        "searched": record.open,
        "evaluated_whole": record.dense,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }


def child(case: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one case in a fresh process."""
    command = [sys.executable, __file__, "--one", case, str(length)]
    command += ["--repeats", str(options.repeats), "--threads", str(options.threads)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also append the rows to FILE")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs after the first")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--one", nargs=2, metavar=("CASE", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]), options.repeats)))
        return 0
    print(
        f"{'mask':18} {'length':>7} {'first':>9} {'median':>9} {'least':>9} {'peak':>8}   tiles kept"
    )
    slow = 0
    for case in CASES:
        for length in LENGTHS:
            row = child(case, length, options)
            kept = row["partial"] + row["full"]
            share = kept / (kept + row["empty"])
            print(
                f"{case:18} {length:7} {row['first_ms']:6.1f} ms {row['median_ms']:6.1f} ms "
                f"{row['least_ms']:6.1f} ms {row['peak_mb']:5.0f} MB   {kept} ({share:.1%}), "
                f"{row['evaluated_whole']} evaluated whole",
                flush=True,
            )
            over = row["median_ms"] >= LIMIT_MS or row["peak_mb"] >= LIMIT_MB
            slow += length == LIMIT_LENGTH and over
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    verdict = "missed" if slow else "met"
    print(f"target at {LIMIT_LENGTH}: under {LIMIT_MS} ms and {LIMIT_MB} MB: {verdict}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure time and memory of tile classification: `python benchmarks/classify.py [--json FILE]`.

The script classifies the 128 x 128 tiles of each mask, for one batch element and one head. With
`--library` it classifies every mask of the library at 131072 positions instead, with the batch and
heads of the mask's example. On the CPU each case runs in a fresh process, so that the peak memory
is that of the case alone.
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
from typing import Any, NamedTuple

import torch
from committed import add_commit, row_file

from attnkit import Mask, masks
from attnkit.masks import Example
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.sparsity.classify import Statistics, classify
from attnkit.tracing.tracer import trace

LENGTHS = (8192, 32768, 131072)
MILLION = 1 << 20
LIBRARY_LENGTH = 131072
LIBRARY_MEDIAN_MS = 30
BLOCK = (128, 128)


class Limit(NamedTuple):
    """Hold the limits of a case.

    Attributes:
        ms: time in milliseconds.
        mb: peak memory during classification, in MB.
        stored_mb: memory of the resulting block lists, in MB.
    """

    ms: float
    mb: float
    stored_mb: float = float("inf")


LIMITS = {131072: Limit(100, 150), MILLION: Limit(1000, 250, 1)}
LIMITS_BY_NAME = {
    ("causal", MILLION): Limit(200, 250, 1),
    ("global tokens, window 4096", MILLION): Limit(1500, 250, 1),
}


def causal_documents(length: int) -> Mask:
    """Return a causal mask within documents of random lengths, 1500 positions on average."""
    sizes = torch.randint(1, 3000, (length,), generator=torch.Generator().manual_seed(0))
    ids = torch.searchsorted(sizes.cumsum(0), torch.arange(length), right=True)
    return masks.causal() & masks.document(ids)


def documents_1500(length: int) -> Mask:
    """Return a mask within 1500 documents that end at random positions."""
    drawn = torch.randint(0, length, (1499,), generator=torch.Generator().manual_seed(0))
    return masks.document(torch.searchsorted(drawn.sort().values, torch.arange(length), right=True))


# name: (lengths at which to measure, function that builds the mask for a length)
CASES: dict[str, tuple[tuple[int, ...], Callable[[int], Mask]]] = {
    "causal": ((*LENGTHS, MILLION), lambda length: masks.causal()),
    "window 512": (LENGTHS, lambda length: masks.sliding_window(512)),
    "causal documents": (LENGTHS, causal_documents),
    "window 4096": ((MILLION,), lambda length: masks.sliding_window(4096)),
    "1500 documents": ((MILLION,), documents_1500),
    "1500 documents, causal": ((MILLION,), lambda n: masks.causal() & documents_1500(n)),
    "global tokens, window 4096": ((MILLION,), lambda length: masks.longformer(2048, 64)),
}


def example(case: str, length: int, device: torch.device) -> Example:
    """Build the mask of `case` with its sizes; `case` is a name in `CASES` or `library/NAME`."""
    if case.startswith("library/"):
        return masks.examples(length, device=device)[case.removeprefix("library/")]
    with torch.device(device):
        return Example(CASES[case][1](length), length, length)


def memory(field: str) -> float:
    """Return a field of /proc/self/status, in MB (Linux only)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}: memory can be measured on Linux only")


class Peak:
    """Measure peak memory of the process or GPU, in MB above the memory in use at construction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device) / 2**20
        else:
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            self.before = memory("VmRSS")

    def read(self) -> float:
        """Return the peak memory since construction, minus the memory in use then, in MB."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20 - self.before
        return memory("VmHWM") - self.before


def stored_mb(runs: BlockRuns) -> float:
    """Return the memory of the block lists of `runs`, by row and by column, in MB."""
    kinds = (runs.full, runs.partial, runs.full_t, runs.partial_t)
    return sum(t.nbytes for kind in kinds for t in (kind.row_ptr, kind.start, kind.length)) / 1e6


def measure(case: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Classify one mask `options.repeats` + 1 times in this process and return its row."""
    device = torch.device(options.device)
    entry = example(case, length, device)
    traced = trace(entry.mask, "mask")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    peak = Peak(device)
    times, cpu, record = [], [], Statistics()
    for _ in range(options.repeats + 1):
        record = Statistics()
        wait()
        start, start_cpu = time.perf_counter(), time.process_time()
        runs = classify(traced.root, traced.tensors, q_len=entry.q_len, kv_len=entry.kv_len,
                        block=BLOCK, batch=entry.batch, heads=entry.heads, device=device,
                        statistics=record)  # fmt: skip
        wait()
        times.append(1000 * (time.perf_counter() - start))
        cpu.append(1000 * (time.process_time() - start_cpu))
    peak_mb = peak.read()
    empty, partial, full = runs.counts()
    return {
        "benchmark": "classify",
        "case": case,
        "length": length,
        "block": BLOCK,
        "first_ms": times[0],
        "median_ms": statistics.median(times[1:]),
        "least_ms": min(times[1:]),
        "least_cpu_ms": min(cpu[1:]),  # sum over all threads, may exceed `least_ms`
        "peak_mb": peak_mb,
        "stored_mb": stored_mb(runs),
        "empty": empty,
        "partial": partial,
        "full": full,
        "nodes": record.nodes,
        "searched": record.open,
        "evaluated_whole": record.dense,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
    }


def child(case: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one case in a fresh process and return its row."""
    command = [sys.executable, __file__, "--one", case, str(length), "--device", options.device]
    command += ["--repeats", str(options.repeats), "--threads", str(options.threads)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def is_over(row: dict[str, Any]) -> bool:
    """Return whether a row exceeds its limits.

    The time compared is the least of all runs, because other processes may be running.
    """
    key = row["case"], row["length"]
    limit = LIMITS_BY_NAME.get(key) or LIMITS.get(row["length"])
    if limit is None or row["case"].startswith("library/"):
        return False
    return bool(
        row["least_ms"] >= limit.ms
        or row["peak_mb"] >= limit.mb
        or row["stored_mb"] >= limit.stored_mb
    )


def show(row: dict[str, Any]) -> None:
    """Print a row as one line of the table."""
    kept = row["partial"] + row["full"]
    print(
        f"{row['case']:28} {row['length']:7} {row['first_ms']:8.1f} {row['median_ms']:8.1f} "
        f"{row['least_ms']:8.1f} {row['least_cpu_ms']:8.1f} ms {row['peak_mb']:4.0f} MB "
        f"{row['stored_mb']:7.3f} MB   {kept} ({kept / (kept + row['empty']):.1%}), "
        f"{row['evaluated_whole']} evaluated fully{'  OVER ITS LIMIT' if is_over(row) else ''}",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also append the rows to FILE")
    add_commit(parser)
    parser.add_argument(
        "--repeats", type=int, default=9, help="number of timed runs after the first"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", help="device, cpu (default) or cuda")
    parser.add_argument("--library", action="store_true", help="time every mask of the library")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "LENGTH"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(measure(options.one[0], int(options.one[1]), options)))
        return 0
    file = row_file(options.json, options.commit)
    if options.library:
        todo = [(f"library/{name}", LIBRARY_LENGTH) for name in masks.examples()]
    else:
        todo = [(case, length) for case, (lengths, _) in CASES.items() for length in lengths]
    print(f"{'mask':28} {'length':>7} {'first':>8} {'median':>8} {'least':>8} {'its CPU':>8}"
          f"    {'peak':>7} {'stored':>10}   tiles kept")  # fmt: skip
    rows = []
    for case, length in todo:
        if options.only not in case:
            continue
        # torch counts a GPU's memory itself, and a fresh process would have to initialize CUDA
        in_turn = options.device != "cpu"
        rows.append((measure if in_turn else child)(case, length, options))
        show(rows[-1])
        file.append(rows[-1])
    return verdict(rows, library=options.library)


def verdict(rows: list[dict[str, Any]], *, library: bool) -> int:
    """Print whether the rows are within their limits; return the exit status (1 if one is not)."""
    if library and rows:
        median = statistics.median(row["least_ms"] for row in rows)
        print(f"median of the least times: {median:.1f} ms, limit {LIBRARY_MEDIAN_MS} ms")
        return int(median > LIBRARY_MEDIAN_MS)
    over = [f"{row['case']} at {row['length']}" for row in rows if is_over(row)]
    print(f"over their limits: {', '.join(over) if over else 'none'}")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())

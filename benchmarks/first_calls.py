"""Measure how long the first calls of each mask and mod of the library take to get their kernels.

`python benchmarks/first_calls.py` traces, classifies, plans and compiles each variant as a forward
and a backward with new functions and an empty kernel cache do, and prints the slowest. Nothing is
executed, and no GPU is needed. Seconds are those of the CPU: a compile uses one thread, and other work
on the machine changes them less than it changes the time on the wall.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from committed import add_commit, row_file
from emulate import library
from frames import head_dims
from machine import describe
from machine_code import ARCHS, Job, sources

import attnkit
from attnkit.errors import AttnkitError
from attnkit.jit import kernel as compiled

LENGTH = 600
WARM = "mods:alibi"
CACHE = "ATTNKIT_CACHE_DIR"
Row = dict[str, Any]


def start(arch: str) -> None:
    """Measure one variant, so that no other pays for imports."""
    torch.set_num_threads(1)
    measure(Job(WARM, arch, (64, 64), "backward"))


def measure(job: Job) -> Row:
    """Return a row with the CPU seconds of a job; a backward job contains the forward."""
    attnkit.clear_caches()
    os.environ[CACHE] = tempfile.mkdtemp(dir=os.environ[CACHE])
    began = time.process_time()
    try:
        kernels = [compiled.kernel(source).name for source in sources(job)]
    except AttnkitError as error:
        return asdict(job) | {"skipped": type(error).__name__}
    return asdict(job) | {"kernels": kernels, "cpu_s": round(time.process_time() - began, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", nargs="*", default=[""], help="only variants whose name starts with one of these"
    )
    parser.add_argument("--arch", choices=ARCHS, default=ARCHS[0])
    parser.add_argument("--head-dim", type=head_dims, default=(128, 128))
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--save", type=Path, help="append the rows to this file")
    add_commit(parser)
    options = parser.parse_args()
    file = row_file(options.save, options.commit)
    where = {"benchmark": "first calls"} | describe()
    names = (n for n in library(LENGTH) if n.startswith(tuple(options.only)))
    jobs = [Job(name, options.arch, options.head_dim, "backward") for name in names]
    rows = []
    with tempfile.TemporaryDirectory(prefix="attnkit-first-calls-") as folder:
        os.environ[CACHE] = folder
        context = get_context("spawn")
        with ProcessPoolExecutor(options.workers, context, start, (options.arch,)) as pool:
            for row in pool.map(measure, jobs):
                rows.append(row)
                file.append(where | row)
    timed = sorted((r for r in rows if "cpu_s" in r), key=lambda r: -r["cpu_s"])
    for row in timed[:20]:
        print(f"{row['cpu_s']:7.2f} s  {row['variant']}: {len(row['kernels'])} kernels")
    print(f"{len(timed)} first calls, {len(rows) - len(timed)} have no kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())

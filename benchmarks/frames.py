"""Compile the Blackwell kernels of every mask and mod; record stack frames and compile times.

`python benchmarks/frames.py --ctas one` compiles the one-CTA kernels of each variant of the
library, forward and backward. It prints each kernel that has a stack frame (spilled registers) or
took more than five seconds to compile. The forward of a mod is compiled with a causal mask; with
`--ctas pair` also without a mask. `--save` appends one row for each group of kernels that differ
only in their variant. Nothing is executed, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from committed import add_commit, row_file
from emulate import DIRECTIONS, library, variant_and_zeros

from attnkit.jit import emulation, kernel
from attnkit.schedule.kernel_table import Kernel, kernels
from attnkit.splice import sm100, sm100_backward, sm100_pairs

LENGTH = 600
SECONDS = 5.0
CTAS = {"one": 1, "pair": 2}  # number of CTAs that execute one MMA together
GROUP = ("arch", "ctas", "direction", "dtype", "head_dims", "block", "deterministic")
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Describe the main kernels of one library variant in one direction.

    Attributes:
        variant: name in `emulate.library`, followed by " + causal" for a mod with a causal mask.
        head_dims: head dims of query and value.
        ctas: "one" or "pair", where both kernels exist.
        block: tile sizes of a forward; None for a backward.
    """

    variant: str
    head_dims: tuple[int, int]
    dtype: str
    arch: str
    ctas: str
    direction: str
    deterministic: bool
    block: tuple[int, int] | None


def sources(job: Job) -> list[kernel.Source]:
    """Request the kernels of a job without running them; return the sources of its main kernels."""
    backward = job.direction == "backward"
    variant, qkv = variant_and_zeros(
        job.variant, LENGTH, job.head_dims, getattr(torch, job.dtype), backward
    )

    def asked(candidates: Sequence[Kernel], *_: Any) -> tuple[Kernel, str]:
        return next(k for k in candidates if k.block == job.block), "its tiles are asked for"

    # attnkit would choose between one CTA and a pair by predicted clocks: force the job's choice
    fewer = mock.patch.object(sm100_pairs, "fewer_clocks", return_value=job.ctas == "pair")
    choose = asked if job.block else sm100.choose_kernel
    chosen = mock.patch.object(sm100, "FORWARD", sm100.FORWARD._replace(choose=choose))
    with fewer, chosen, emulation.session(execute=False), kernel.requested_sources() as requested:
        out = variant(
            *qkv,
            backend=f"emulate:{job.arch}",
            kernel_options=job.block and dict(zip(("BLOCK_M", "BLOCK_N"), job.block, strict=True)),
            deterministic=job.deterministic,
        )
        if backward:
            out.sum().backward()
    return [s for s in requested if s.name.startswith(job.direction)]


def run(job: Job) -> list[Row]:
    """Compile a job's main kernels; return a row with stack frame and seconds for each."""
    rows = []
    for source in sources(job):
        artifact = kernel.kernel(source).artifact
        rows.append(
            asdict(job)
            | {
                "kernel": source.name,
                "stack": max(s.stack for s in artifact.stats),
                "code": sum(s.code for s in artifact.stats),
                "pair": "cta_group::2" in artifact.ptx,
                "seconds": round(artifact.seconds, 2),
            }
        )
    return rows


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yield the jobs that the command-line options select."""
    for dims in options.head_dim:
        rest = dims, options.dtype, options.arch, options.ctas
        candidates = [k for k in kernels(*dims, template="sm100") if k.ctas == CTAS[options.ctas]]
        tiles = [k.block for k in candidates if k.block in options.block or not options.block]
        tiles = tiles if options.block else tiles[:1]
        for name, member in library(LENGTH).items():
            if not name.startswith(tuple(options.only)):
                continue
            if "forward" in options.direction:
                modded = member.variant.score_mod is not None
                variants = [name, f"{name} + causal"][options.ctas == "one" :] if modded else [name]
                for variant, block in product(variants, tiles):
                    yield Job(variant, *rest, "forward", options.deterministic, block)
            if "backward" in options.direction and sm100_backward.widths(dims):
                yield Job(name, *rest, "backward", options.deterministic, None)


def results(wanted: list[Job], workers: int) -> Iterator[Row]:
    """Yield the rows of all jobs, in the order of `wanted`, computed by `workers` processes."""
    if workers == 1:
        torch.set_num_threads(1)
        for job in wanted:
            yield from run(job)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        for rows in pool.map(run, wanted):
            yield from rows


def grouped(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each group of kernels that differ only in their variant."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    return [
        dict(zip(GROUP, key, strict=True))
        | {
            "kernels": len(group),
            "with_frame": {row["variant"]: row["stack"] for row in group if row["stack"]},
            "code_most": max(row["code"] for row in group),
            "seconds_median": round(statistics.median(row["seconds"] for row in group), 2),
            "seconds_most": max(row["seconds"] for row in group),
            "slow": {row["variant"]: row["seconds"] for row in group if row["seconds"] > SECONDS},
        }
        for key, group in groups.items()
    ]


def tile(text: str) -> tuple[int, int]:
    """Parse tile sizes such as "128x64" into (rows, columns)."""
    rows, _, columns = text.partition("x")
    return int(rows), int(columns)


def head_dims(text: str) -> tuple[int, int]:
    """Parse the head dims of query and value from "128" (both) or "192,128"."""
    wide, _, deep = text.partition(",")
    return int(wide), int(deep or wide)


def line(row: Row) -> str:
    """Format a row as one line of text."""
    block = "{}x{}".format(*row["block"]) if row["block"] else ""
    ctas = "pair" if row["pair"] else "one"
    name = f"{row['variant']:36} {row['kernel']:34} {ctas:5} {block:8}"
    return f"{name} {row['stack']:4} B {row['code'] / 1024:6.1f} KiB {row['seconds']:6.2f} s"


def main() -> int:
    """Compile the kernels and print the problems; return 1 if a kernel has a stack frame."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", nargs="*", default=[""], help="run only variants whose name starts with this"
    )
    parser.add_argument(
        "--head-dim",
        type=head_dims,
        action="append",
        help="one or two head dims, such as 128 or 192,128",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--arch", default="sm_100a")
    parser.add_argument("--ctas", choices=CTAS, default="one")
    parser.add_argument(
        "--block",
        type=tile,
        action="append",
        help="tile size, such as 128x64 (default: the forward's best tiles)",
    )
    parser.add_argument("--direction", choices=DIRECTIONS, action="append", help="default: both")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--save", type=Path, help="append one row per group to this file")
    add_commit(parser)
    options = parser.parse_args()
    file = row_file(options.save, options.commit)
    options.head_dim = options.head_dim or [(128, 128)]
    options.direction = options.direction or DIRECTIONS
    options.block = options.block or []
    rows = []
    for row in results(list(jobs(options)), options.workers):
        rows.append(row)
        if row["stack"] or row["seconds"] > SECONDS:
            print(line(row), flush=True)
    for row in grouped(rows):
        file.append(row)
    spilled = sum(row["stack"] > 0 for row in rows)
    slow = sum(row["seconds"] > SECONDS for row in rows)
    print(f"{len(rows)} kernels: {spilled} with a frame, {slow} over {SECONDS:g} s")
    return bool(spilled)


if __name__ == "__main__":
    sys.exit(main())

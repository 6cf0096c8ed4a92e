"""Compare the machine code of the kernels of every mask and mod before and after a change.

`python benchmarks/machine_code.py --save before.jsonl` compiles the kernels of each variant of the
library, forward and backward, and writes one row for each kernel. After the change, `--against
before.jsonl` compiles them again and prints each kernel whose instructions differ. Nothing is
executed, and no GPU is needed. `--sample N` takes every N-th job, which takes minutes instead of an
hour.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import committed
import torch
from committed import add_commit, row_file
from emulate import DIRECTIONS, library, variant_and_zeros
from frames import head_dims

from attnkit import clear_caches
from attnkit.errors import AttnkitError
from attnkit.jit import dsl_runtime, emulation
from attnkit.jit import kernel as compiled
from attnkit.jit.cubin import kernel_code

LENGTH = 600
OUTCOME = ("digest", "registers", "stack", "commit")  # the other fields name the kernel
CLEAN = re.compile(r"[0-9a-f]{7,40}")
ARCHS = ("sm_90a", "sm_100a")
HEAD_DIMS = ((64, 64), (128, 128), (192, 192), (256, 256))
_CUDA_ELF = b"\x7fELF\x02\x01\x01"
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Describe one variant of the library in one direction.

    Attributes:
        variant: name in `emulate.library`, followed by " + causal" for a mod with a causal mask.
        arch: architecture of the kernels.
        head_dims: head dims of query and value.
        direction: "forward" or "backward".
        deterministic: whether the backward accumulates its sums in a fixed order.
    """

    variant: str
    arch: str
    head_dims: tuple[int, int]
    direction: str
    deterministic: bool = False


def sources(job: Job) -> list[compiled.Source]:
    """Return the sources of a job's kernels; for a forward only those of the main kernel."""
    backward = job.direction == "backward"
    clear_caches()  # else a third job that differs in numbers alone reads them at run time
    variant, qkv = variant_and_zeros(job.variant, LENGTH, job.head_dims, torch.bfloat16, backward)
    with emulation.session(execute=False), compiled.requested_sources() as requested:
        out = variant(*qkv, backend=f"emulate:{job.arch}", deterministic=job.deterministic)
        if backward:
            out.sum().backward()
    return [s for s in requested if backward or s.name.startswith("forward")]


def digest(code: bytes) -> str:
    """Hash the GPU instructions in a host object file; return "" if it has no GPU code."""
    start = code.find(_CUDA_ELF, 1)
    while start >= 0 and code[start + 18 : start + 20] != b"\xbe\x00":  # EM_CUDA
        start = code.find(_CUDA_ELF, start + 1)
    if start < 0:
        return ""
    hasher = hashlib.sha256()
    for data in kernel_code(code[start:]).values():
        hasher.update(data)
    return hasher.hexdigest()[:16]


def run(job: Job) -> list[Row]:
    """Compile a job; return a row per kernel, or one row with the error if there is none."""
    try:
        wanted = sources(job)
    except AttnkitError as error:
        return [asdict(job) | {"kernel": "", "digest": type(error).__name__}]
    rows = []
    for source in wanted:
        artifact = compiled.kernel(source).artifact
        rows.append(
            asdict(job)
            | {
                "kernel": source.name,
                "digest": digest(artifact.code),
                "registers": max(s.registers for s in artifact.stats),
                "stack": max(s.stack for s in artifact.stats),
            }
        )
    return rows


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yield the jobs that the command-line options select."""
    for arch in options.arch:
        for dims in options.head_dim:
            for name, member in library(LENGTH).items():
                if not name.startswith(tuple(options.only)):
                    continue
                modded = member.variant.score_mod is not None
                if "forward" in options.direction:
                    for variant in (name, f"{name} + causal")[modded:]:
                        yield Job(variant, arch, dims, "forward")
                if "backward" in options.direction:
                    for fixed in (False, True)[: 1 + options.deterministic]:
                        yield Job(name, arch, dims, "backward", fixed)


def results(wanted: list[Job], workers: int) -> Iterator[Row]:
    """Yield the rows of all jobs, in the order of `wanted`, computed by `workers` processes."""
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        for rows in pool.map(run, wanted):
            yield from rows


def identity(row: Row) -> str:
    """Return the fields of a row that identify the kernel, as JSON."""
    return json.dumps({k: v for k, v in row.items() if k not in OUTCOME})


def main() -> int:
    """Compile the kernels, then save or compare them; return 1 if one differs or is new."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", nargs="*", default=[""], help="compile only variants whose name starts with this"
    )
    parser.add_argument("--arch", action="append", choices=ARCHS, help="default: both")
    parser.add_argument(
        "--head-dim",
        type=head_dims,
        action="append",
        help="one or two head dims, such as 128 or 192,128",
    )
    parser.add_argument("--direction", choices=DIRECTIONS, action="append", help="default: both")
    parser.add_argument(
        "--deterministic", action="store_true", help="also compile with a fixed order of sums"
    )
    parser.add_argument("--sample", type=int, default=1, help="compile only every N-th job")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--save", type=Path, help="write the rows to this file")
    parser.add_argument("--against", type=Path, help="compare with the rows of this file")
    parser.add_argument("--record", type=Path, help="append a row with the outcome to this file")
    add_commit(parser)
    options = parser.parse_args()
    file = row_file(options.record, options.commit)
    options.arch = options.arch or ARCHS
    options.head_dim = options.head_dim or HEAD_DIMS
    options.direction = options.direction or DIRECTIONS
    before: dict[str, Row] = {}
    if options.against:
        rows = (json.loads(line) for line in options.against.read_text().splitlines())
        before = {identity(row): row for row in rows}
    measured_before = sorted({row.get("commit", "") for row in before.values()})
    if options.record and not all(map(CLEAN.fullmatch, measured_before or [""])):
        parser.error(
            f"--record: the rows of --against are of {measured_before or 'no file'}, expected those "
            "of a committed tree: write them again from one with --save"
        )
    count = different = unknown = 0
    stream = options.save.open("w") if options.save else None
    commit = file.commit or committed.described()
    for row in results(list(jobs(options))[:: options.sample], options.workers):
        count += 1
        if stream:
            print(json.dumps(row | {"commit": commit}), file=stream, flush=True)
        old = before.get(identity(json.loads(json.dumps(row))))
        unknown += bool(options.against) and old is None
        if old and old["digest"] != row["digest"]:
            different += 1
            print(f"differs: {identity(row)}: {old['registers']} -> {row['registers']} registers")
    compared = f": {different} differ, {unknown} are not in the file" if options.against else ""
    print(f"{count} kernels{compared}")
    if options.record:
        outcome: Row = {"benchmark": "machine code", "before": ", ".join(measured_before)}
        outcome |= {"after": file.commit, "archs": options.arch}
        outcome |= {"head_dims": options.head_dim, "directions": options.direction}
        outcome |= {"deterministic": options.deterministic, "kernels": count}
        outcome |= {"differ": different, "unknown": unknown, "libraries": dsl_runtime.identity()}
        file.append(outcome)
    return bool(different or unknown)


if __name__ == "__main__":
    sys.exit(main())

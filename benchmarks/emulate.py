"""Run every mask and mod of the library through the GPU kernels, in the emulator.

`python benchmarks/emulate.py --arch sm_100a` compiles the kernels of each variant, executes them on
the CPU (eager, late and random completion of asynchronous operations, race detection), and compares
the results with dense attention in float64. It writes one row for each variant. Gradients are
compared for several draws of all inputs, because dense attention may be exact by chance if a
gradient has few entries; all draws except the first run in eager mode only. If a variant has no
kernel, its row gives the reason. `--resume` keeps the rows in the file that belong to the requested
jobs and does not run those jobs again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from committed import add_commit, row_file
from machine import describe
from torch import Tensor

from attnkit import masks, mods
from attnkit.errors import UnsupportedError
from attnkit.jit import emulation
from attnkit.runtime.variant import Variant
from attnkit.schedule.targets import TARGETS
from attnkit.testing.kernels import Error, compare

HEADS, BATCH = 2, 1
DIRECTIONS = ("forward", "backward")
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Describe one run: a variant of the library, its direction, and how the emulator runs it."""

    name: str
    arch: str
    length: int
    head_dim: int
    dtype: str
    mode: str
    seeds: int
    draws: int
    ctas: int | None
    backward: bool

    @property
    def row(self) -> Row:
        """Return the fields that describe the job in its row."""
        own = dataclasses.asdict(self)
        name, backward = own.pop("name"), own.pop("backward")
        return {"variant": name, "direction": DIRECTIONS[backward]} | own


@dataclass(frozen=True, eq=False)
class Member:
    """Hold a variant of the library with sizes that fit it and its learned tensors."""

    variant: Variant
    q_len: int
    kv_len: int
    batch: int
    heads: int
    learned: tuple[Tensor, ...] = ()


def library(length: int) -> dict[str, Member]:
    """Build every mask and mod of the library, keyed by "masks:NAME" or "mods:NAME"."""
    members = {
        f"masks:{name}": Member(Variant(None, e.mask), e.q_len, e.kv_len, e.batch, e.heads)
        for name, e in masks.examples(length).items()
    }
    for name, e in mods.examples(length, HEADS, BATCH, requires_grad=True).items():
        members[f"mods:{name}"] = Member(Variant(e.mod), e.q_len, e.kv_len, BATCH, HEADS, e.learned)
    return members


def variant_and_zeros(
    name: str, length: int, head_dims: tuple[int, int], dtype: torch.dtype, requires_grad: bool
) -> tuple[Variant, list[Tensor]]:
    """Return a variant of the library, and query, key and value filled with zeros.

    Args:
        name: key in `library(length)`, optionally followed by "+ causal" for a mod with a causal
            mask.
        length: sequence length for which the library is built.
        head_dims: head dims of query and value.
        dtype: dtype of query, key and value.
        requires_grad: whether query, key and value require grad.
    """
    name, _, mask = name.partition(" + ")
    member = library(length)[name]
    variant = Variant(member.variant.score_mod, masks.causal()) if mask else member.variant
    wide, deep = head_dims
    sizes = (member.q_len, wide), (member.kv_len, wide), (member.kv_len, deep)
    shapes = [(member.batch, member.heads, *size) for size in sizes]
    return variant, [torch.zeros(s, dtype=dtype, requires_grad=requires_grad) for s in shapes]


def run(job: Job) -> Row:
    """Run a variant's kernels in the emulator, compare with dense attention, and return the row."""
    torch.set_num_threads(1)
    member = library(job.length)[job.name]
    dtype = getattr(torch, job.dtype)
    began = time.perf_counter()
    shape = [member.batch, member.heads, member.q_len, member.kv_len, job.head_dim]
    row: Row = job.row | {"shape": shape}
    learned = member.learned if job.backward else ()

    def compared(mode: str, draw: int) -> tuple[list[Error], emulation.Session]:
        generator = torch.Generator().manual_seed(draw)
        sizes = [(member.batch, member.heads, n, job.head_dim) for n in shape[2:4]]
        qkv = [torch.randn(sizes[i], generator=generator).to(dtype) for i in (0, 1, 1)]
        how = {"mode": mode, "seeds": job.seeds, "deterministic": not job.backward}
        with emulation.session(**how, ctas=job.ctas) as session:
            errors = compare(
                member.variant,
                qkv,
                backend=f"emulate:{job.arch}",
                backward=job.backward,
                learned=learned,
                seed=draw + 1,
            )
        return errors, session

    try:
        errors, session = compared(job.mode, 0)
        for draw in range(1, job.draws if job.backward else 1):
            more, _ = compared("eager", draw)
            errors = [worse(*both) for both in zip(errors, more, strict=True)]
    except UnsupportedError as refusal:
        return row | {"refused": str(refusal)}
    row |= {
        "errors": {e.name: [float(f"{e.size:.3g}"), float(f"{e.limit:.3g}")] for e in errors},
        "kernels": len(session.reports),
        "findings": [str(f) for _, report in session.reports for f in report.findings],
        "ok": session.ok and all(e.ok for e in errors),
        "seconds": round(time.perf_counter() - began, 1),
    }
    return row


def worse(one: Error, other: Error) -> Error:
    """Merge the errors of one result from two draws: keep the larger error and the larger limit."""
    # comparisons with NaN are false, and a NaN must remain the larger error
    size = other.size if one.size <= other.size or math.isnan(other.size) else one.size
    return dataclasses.replace(one, size=size, limit=max(one.limit, other.limit))


def results(jobs: list[Job], workers: int) -> Iterator[Row]:
    """Yield the row of each job, in the order of `jobs`, computed by `workers` processes."""
    if workers == 1:
        yield from map(run, jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, jobs)


def line(row: Row) -> str:
    """Format a row as one line of text."""
    name = f"{row['variant']:32} {row['arch']:8} {row['direction']:8}"
    if "refused" in row:
        return f"{name} refused: {row['refused']}"
    worst = max((e / limit if limit else float(e > 0)) for e, limit in row["errors"].values())
    mark = "ok" if row["ok"] else "WRONG"
    return f"{name} {mark:5} error {worst:.2f} of the limit, {row['seconds']:6.1f} s"


def main() -> int:
    """Run the jobs and print their rows; return 1 if a result or a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--arch", action="append", help="sm_90a or sm_100a (default); may be repeated"
    )
    parser.add_argument("--length", type=int, default=600)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mode", choices=emulation.MODES, default="check")
    parser.add_argument("--seeds", type=int, default=3, help="number of random orders per check")
    parser.add_argument("--draws", type=int, default=8, help="number of random inputs per variant")
    parser.add_argument(
        "--ctas",
        type=int,
        help="number of persistent CTAs; with fewer, each CTA reuses its buffers more often",
    )
    parser.add_argument("--direction", choices=DIRECTIONS, action="append", help="default: both")
    parser.add_argument("--only", default="", help="run only variants whose name starts with this")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--save", type=Path, help="write the rows to this file, replacing it")
    parser.add_argument(
        "--resume", action="store_true", help="skip variants that the file of --save already has"
    )
    add_commit(parser)
    options = parser.parse_args()
    file = row_file(options.save, options.commit)
    known = {t.arch for t in TARGETS}
    archs = options.arch or ["sm_100a"]
    if unknown := set(archs) - known:
        parser.error(f"--arch {unknown.pop()}: expected one of {', '.join(sorted(known))}")
    shared = (options.length, options.head_dim, options.dtype, options.mode, options.seeds)
    rest = (options.draws, options.ctas)
    jobs = [
        Job(name, arch, *shared, *rest, direction == "backward")
        for arch in archs
        for direction in options.direction or DIRECTIONS
        for name in library(options.length)
        if name.startswith(options.only)
    ]
    rows = known_rows(options.save, jobs) if options.resume else []
    have = [{key: row.get(key) for key in jobs[0].row} for row in rows]
    jobs = [job for job in jobs if job.row not in have]
    if options.save and not options.resume:
        options.save.unlink(missing_ok=True)
    if options.save and not options.save.exists():
        file.append({"benchmark": "library in the emulator", **describe()})
    for row in results(jobs, options.workers):
        print(line(row), flush=True)
        for finding in row.get("findings", ()):
            print(f"    {finding}")
        rows.append(row)
        file.append(row)
    wrong = [r for r in rows if "refused" not in r and not r["ok"]]
    refused = [r for r in rows if "refused" in r]
    print(f"{len(rows)} variants: {len(wrong)} wrong, {len(refused)} refused")
    return bool(wrong)


def known_rows(file: Path | None, jobs: list[Job]) -> list[Row]:
    """Return the rows in `file` that belong to one of `jobs`."""
    if file is None or not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in rows if any(job.row.items() <= row.items() for job in jobs)]


if __name__ == "__main__":
    sys.exit(main())

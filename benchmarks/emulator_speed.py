"""Measure the emulator's speed, and count its false reports on correct kernels.

    python benchmarks/emulator_speed.py [--seeds N] [--save FILE]

The script runs attnkit's own Hopper kernels and compiles them before it times anything. Times are
CPU time of the process, not wall time, because other programs may run at the same time. Each kernel
also runs in N adversarial orders and in race mode. The kernels are correct, so every finding is a
false report.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from committed import add_commit, row_file
from machine import describe

import attnkit
from attnkit import emulator, masks, mods
from attnkit.jit import emulator_runs


@dataclass(frozen=True)
class Case:
    """Describe one attention problem with one head in bfloat16, and what to measure."""

    length: int
    head_dim: int = 128
    mask: Callable[[], Any] | None = None
    mod: Callable[[], Any] | None = None
    backward: bool = False
    speed: bool = True
    seeds: bool = True


CASES = {
    "forward full": Case(512, seeds=False),
    "forward full, 1024": Case(1024, seeds=False),
    "forward causal": Case(512, mask=masks.causal),
    "forward causal softcap D=64": Case(600, 64, masks.causal, lambda: mods.softcap(20.0)),
    "backward full": Case(512, backward=True, seeds=False),
    "backward causal": Case(330, mask=masks.causal, backward=True),
    "backward causal D=64": Case(330, 64, masks.causal, backward=True),
}


def kernels(case: Case) -> list[tuple[str, emulator.Executable, list[Any]]]:
    """Run a case in the emulator; return (name, executable, arguments) of each kernel call."""
    calls: list[tuple[str, emulator.Executable, list[Any]]] = []

    def keep(kernel: Any, arguments: Any, **_: Any) -> None:
        exe = kernel.executable()
        calls.append((kernel.name, exe, list(arguments)))
        emulator.run(exe, *arguments)

    shape = (1, 1, case.length, case.head_dim)
    q, k, v = (torch.randn(shape).bfloat16().requires_grad_(case.backward) for _ in range(3))
    mask = case.mask() if case.mask else None
    mod = case.mod() if case.mod else None
    with mock.patch.object(emulator_runs, "run_emulated", keep):
        out = attnkit.flex_attention(q, k, v, score_mod=mod, block_mask=mask, backend="emulate")
        if case.backward:
            calls.clear()
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    return calls


def rows(case: Case, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row with the speed of each kernel in each mode, and a row with its false reports."""
    for name, exe, args in kernels(case):
        start = emulator.snapshot(args)
        if case.speed:
            for mode in ("eager", "adversarial", "race"):
                yield {"kernel": name} | timed(exe, args, start, mode)
        if case.seeds:
            reports = []
            runs = [("race", 0), *(("adversarial", s) for s in range(seeds))]
            for mode, seed in runs:
                emulator.restore(args, start)
                report = emulator.run(exe, *args, mode=mode, seed=seed, raises=False)
                reports += [str(f) for f in report.findings]
            yield {
                "kernel": name,
                "runs": len(runs),
                "false_reports": len(reports),
                "reports": reports,
            }
        emulator.restore(args, start)
        emulator.run(exe, *args)  # the next kernel reads its outputs


def timed(exe: emulator.Executable, args: list[Any], start: Any, mode: str) -> dict[str, Any]:
    """Time two runs and return the fields of the faster; the first also generates code."""
    best, number = float("inf"), 0
    for _ in range(2):
        emulator.restore(args, start)
        begin = time.process_time()
        number = emulator.run(exe, *args, mode=mode, raises=False).warp_instructions
        best = min(best, time.process_time() - begin)
    rate = round(number / best / 1e6, 3)
    return {
        "mode": mode,
        "warp_instructions": number,
        "cpu_seconds": round(best, 4),
        "million_a_second": rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--save", type=Path, help="append the rows to this file")
    add_commit(parser)
    args = parser.parse_args()
    file = row_file(args.save, args.commit)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    about = describe() | {"benchmark": "emulator speed"}
    for name, case in CASES.items():
        for row in rows(case, args.seeds):
            print(name, row, flush=True)
            sizes = {"case": name, "length": case.length, "head_dim": case.head_dim}
            file.append(about | sizes | row)


if __name__ == "__main__":
    main()

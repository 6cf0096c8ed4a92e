"""Measure what each optimization of the Hopper forward saves: `python benchmarks/ablation.py`.

The script changes one thing in the forward kernel at a time and times all changes round-robin, at
B=2 H=16 S=8192 D=128 bfloat16. The masks are: none, causal, a causal window, and a causal mask
within 16 documents. Staging is measured with causal ALiBi and with a causal relative bias. Several
processes compile the kernels into the disk cache before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from committed import add_commit, row_file
from gpu_machine import describe_gpu
from gpu_timing import MODES, NOISY, ROUNDS, UNCERTAIN, CudaTimer, steady
from gpu_variants import MASKS, documents

from attnkit import clear_caches, masks, mods
from attnkit.codegen.score_form import LOG2E, ScoreForm, unscaled
from attnkit.graph import staging
from attnkit.graph.ir import arg, const
from attnkit.graph.simplify import build
from attnkit.graph.staging import Level
from attnkit.runtime.variant import Variant
from attnkit.schedule.scheduler import schedule_forward
from attnkit.schedule.targets import SM90
from attnkit.splice import (
    Captured,
    ForwardInputs,
    KernelCall,
    forward,
    forward_variant,
    forward_work,
    sm90,
    workers,
)

LENGTH = 8192


@dataclass(frozen=True)
class Change:
    """Describe one change to the forward kernel or its schedule.

    Attributes:
        settings: fields of `ForwardConfig` to replace.
        schedule: arguments of `schedule_forward` to replace.
        staged: False to evaluate the whole score_mod once per score.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    staged: bool = True


CHANGES = {
    "as it is": Change(),
    "maxima in the loop": Change({"softmax": "online"}),
    "maxima in the loop, P packed late": Change({"softmax": "online", "double_buffer_p": False}),
    "grid order": Change({}, {"order": "grid"}),
    "longest first, not split": Change({}, {"split": False}),
}
STAGING = {"as it is": Change(), "no staging": Change(staged=False)}


def _unstaged(root: Any) -> ScoreForm:
    """Return the score form that evaluates the whole score_mod `root` once per score."""
    x = build("mul", unscaled(arg("score") if root is None else root), const(LOG2E))
    return ScoreForm(None, x, None, None, None)


@contextlib.contextmanager
def _changed(change: Change) -> Iterator[None]:
    """Patch `change` into attnkit inside the `with` block, with empty caches before and after."""
    with contextlib.ExitStack() as stack:
        patch = lambda *a: stack.enter_context(mock.patch.object(*a))
        config = lambda *a: {**sm90.config_of(*a), **change.settings}
        patch(sm90, "FORWARD", sm90.FORWARD._replace(config=config))
        order = lambda *a, **k: schedule_forward(*a, **{**k, **change.schedule})
        patch(forward_work, "schedule_forward", order)
        if not change.staged:
            patch(forward_variant, "score_form", _unstaged)
            patch(staging, "level_of", lambda n: Level.ELEMENT)
        clear_caches()
        yield
    clear_caches()


def _call(change: Change, score_mod: Any, mask: Any, qkv: Any) -> Callable[[], Any]:
    """Build the forward kernel with `change` applied; return a function that launches it."""
    query, key, _ = qkv
    with _changed(change):
        bound = Variant(score_mod, mask).bind(query, key, (128, 128))
        captured = Captured(*(list(t.tensors) if t else [] for t in (bound.score, bound.mask)))
        scale = 1 / math.sqrt(query.shape[-1])
        kernel_call = KernelCall(SM90.name, bound.program, bound.runs)
        inputs = ForwardInputs(*qkv, captured, scale)
        call = forward.build_call(kernel_call, inputs, workers.sm_count(query.device))
        call(*qkv, captured, scale)
        torch.cuda.synchronize()
    return lambda: call(*qkv, captured, scale)


Case = tuple[Any, Any, dict[str, Change]]  # score_mod, mask, changes by name


@functools.cache
def _inputs() -> tuple[tuple[torch.Tensor, ...], dict[str, Case]]:
    """Return (query, key, value), each [2, 16, LENGTH, 128] bfloat16, and the cases by name."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    qkv = tuple(
        torch.randn(2, 16, LENGTH, 128, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    bias = torch.randn(16, 2 * LENGTH, device=device)
    causal = masks.causal()
    return qkv, {
        "full": (None, None, CHANGES),
        "causal": (None, causal, CHANGES),
        "window": (None, MASKS["window"](LENGTH, device), CHANGES),
        "causal, 16 documents": (None, documents(LENGTH, device), CHANGES),
        "causal + ALiBi": (mods.alibi(16), causal, STAGING),
        "causal + relative bias": (
            lambda score, b, h, q, kv: score + bias[h, q - kv + LENGTH],
            causal,
            STAGING,
        ),
    }


def _compile(job: tuple[str, str]) -> None:
    """Compile the kernel of one (case name, change name) pair into the disk cache."""
    case, change = job
    qkv, cases = _inputs()
    score_mod, mask, changes = cases[case]
    _call(changes[change], score_mod, mask, qkv)


def main() -> int:
    """Time all changes, print and save the rows, and return the exit status (`NOISY` or 0)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=ROUNDS, default=7)
    parser.add_argument("--mode", choices=MODES, default="sustained")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--save", type=Path, help="append the rows to this file")
    add_commit(parser)
    options = parser.parse_args()
    file = row_file(options.save, options.commit)
    qkv, cases = _inputs()
    jobs = [(name, what) for name, (_, _, changes) in cases.items() for what in changes]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pool.map(_compile, jobs, chunksize=1)
    device, noisy = qkv[0].device, []
    for name, (score_mod, mask, changes) in cases.items():
        calls = {what: _call(change, score_mod, mask, qkv) for what, change in changes.items()}
        timer = CudaTimer(MODES[options.mode], device)
        found = steady(calls, timer, base="as it is", rounds=options.rounds)
        base = found.series["as it is"]
        print(f"{name}, {options.mode}")
        for what, series in found.series.items():
            ratio = series.times.over(base.times)
            row = {
                **describe_gpu(device),
                "benchmark": "hopper forward ablation",
                "case": name,
                "change": what,
                "mode": options.mode,
                "ms": series.times.median,
                "ratio": ratio,
                "attempts": found.attempts,
                "noisy": found.noisy,
                **series.spreads(base),
                **series.uncertainties(base),
            }
            cycles = ""
            if series.cycles and base.cycles:
                row |= {"cycles": series.cycles, "cycle_ratio": series.cycles / base.cycles}
                cycles = f"  cycles x {row['cycle_ratio']:.3f}"
            print(f"  {what:34} {series.times.median:8.4f} ms  x {ratio:.3f}{cycles}")
            if not found.noisy:
                file.append(row)
        if found.noisy:
            noisy.append(name)
            print(f"  noisy: a median is uncertain by more than {UNCERTAIN:.0%}; not saved")
    return NOISY if noisy else 0


if __name__ == "__main__":
    sys.exit(main())

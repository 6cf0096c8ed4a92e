"""Measure the host time of a call and the time of first calls: `python benchmarks/gpu.py --host`.

Host time is the time to queue a small problem, whose device time is shorter. It is measured for a
forward, a forward recorded by autograd, and a backward. The baselines are SDPA, which a user would
call without a score_mod, and torch operators that do almost nothing. First calls run in fresh
processes: the very first call, including imports; the first call of another variant; and a first
backward. Before the backward, torch runs the backward of a product, because torch takes 0.3 s to
load its own code at the first backward. Each is measured with empty disk caches (cold) and again
with filled ones (warm).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from committed import row_file
from gpu_contenders import CONTENDERS, OURS, Builder, Run, Unsuitable, default, skipped
from gpu_machine import describe_gpu
from gpu_timing import NOISY
from gpu_variants import Problem, Shape, problem
from timing import SPREAD, Times

import attnkit

Row = dict[str, Any]

CASES = ("full", "causal", "causal, 16 documents", "causal + ALiBi")
SMALL = Shape(batch=1, heads=2, kv_heads=2, length=256, head_dim=64, value_dim=64)
FIRST = ("causal", "causal + softcap 20")  # the cases of the first call and of another variant
FIRST_SHAPE = Shape(batch=1, heads=8, kv_heads=8, length=4096, head_dim=128, value_dim=128)
DIRECTIONS = ("forward", "recorded forward", "backward")
CALLS, REPEATS, ATTEMPTS = 100, 15, 3
CACHES = (
    "ATTNKIT_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)


def main(options: argparse.Namespace) -> int:
    """Run both benchmarks with the options of gpu.py; return the exit status."""
    file = row_file(options.save, options.commit)
    device = torch.device("cuda", torch.cuda.current_device())
    where = describe_gpu(device)
    config = tomllib.loads(options.cases.read_text())
    names = [part.strip() for part in options.contenders.split(",") if part.strip()]
    failed = noisy = False
    for row in (*host_rows(config, options.only, names, device), *first_rows(options, names)):
        print(line(row), flush=True)
        failed |= row.get("failed", False)
        if row.get("noisy", False):
            noisy = True
            print(f"noisy: repeats spread over more than {SPREAD:.0%}; not saved")
        else:
            file.append(where | row)
    return 1 if failed else NOISY if noisy else 0


def line(row: Row) -> str:
    """Format a row as one line of text."""
    text = f"{row['benchmark']:16}{row['case']:24}{row['contender']:20}"
    if "direction" in row:
        text += f"{row['direction']:18}"
    if "skipped" in row:
        return f"{text}skipped: {row['skipped']}"
    if "host_us" in row:
        return f"{text}{row['host_us']:8.1f} us a call"
    text += f"{row['first_s']:8.3f} s"
    if row["other_s"] is not None:
        text += f", then {row['other_s']:.3f} s for another variant"
    return text + f", {row['backward_s']:.3f} s for a backward"


def wait(device: torch.device) -> None:
    """Synchronize with a CUDA device; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- host time of a call


def sdpa(p: Problem) -> Run:
    """Build a call of scaled_dot_product_attention with the backend that torch chooses."""
    if p.score or p.mask not in ("", "causal"):
        raise Unsuitable("has no such mask or score")
    causal = p.mask == "causal"
    return Run(
        lambda: F.scaled_dot_product_attention(p.query, p.key, p.value, is_causal=causal),
        (p.query, p.key, p.value),
    )


def add(p: Problem) -> Run:
    """Build the baseline `torch.add(x, x, out=out)` on two scalars."""
    if p.mask or p.score:
        raise Unsuitable("is measured once")
    x, out = torch.zeros(2, device=p.query.device)
    return Run(lambda: torch.add(x, x, out=out), ())


def empty(p: Problem) -> Run:
    """Build the baseline `torch.empty_like(query)`."""
    if p.mask or p.score:
        raise Unsuitable("is measured once")
    like = p.query.detach()
    return Run(lambda: torch.empty_like(like), ())


def host_rows(config: Row, only: str, names: list[str], device: torch.device) -> Iterator[Row]:
    """Yield rows with the host time to queue a call, in microseconds."""
    baselines: dict[str, Builder] = {"SDPA": sdpa, "torch.add": add, "torch.empty_like": empty}
    chosen = {name: default(name) for name in names or CONTENDERS} | baselines
    for case in config["case"]:
        if case["name"] not in CASES or not re.search(only, case["name"]):
            continue
        torch.compiler.reset()
        for direction in DIRECTIONS:
            p = problem(case, SMALL, device, backward=direction != "forward")
            row: Row = {"benchmark": "gpu host", "case": case["name"], "direction": direction}
            for name, builder in chosen.items():
                fields = host_time(name, builder, p, direction, device)
                if name not in baselines or "host_us" in fields:
                    yield row | {"contender": name} | fields


def host_time(name: str, builder: Builder, p: Problem, direction: str, device: torch.device) -> Row:
    """Measure the host time of one contender; return the fields of its row."""
    try:
        run = builder(p)
        if direction != "forward" and not run.leaves:
            raise Unsuitable("has no gradient")
        call = run.directed(p.grad) if direction == "backward" else run.call
        call()
    except Exception as error:
        return skipped(name, error)
    return {"shape": vars(SMALL)} | host_us(call, device)


def host_us(call: Any, device: torch.device) -> Row:
    """Time batches of `CALLS` calls without synchronization; return median, spread and attempts.

    The batches are measured again while they spread over more than `SPREAD`, up to `ATTEMPTS`
    times.
    """
    attempts, times = 0, Times((0.0, 1.0))  # a spread above the limit, so that the loop begins
    while attempts < ATTEMPTS and times.spread > SPREAD:
        attempts += 1
        measured = []
        for _ in range(1 + REPEATS):  # the first is a warm-up
            wait(device)
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            measured.append(1e6 * (time.perf_counter() - began) / CALLS)
        times = Times(tuple(measured[1:]))
    row: Row = {"host_us": times.median, "spread": times.spread, "attempts": attempts}
    return row | {"noisy": times.spread > SPREAD}


# --- first calls


def first_rows(options: argparse.Namespace, names: list[str]) -> Iterator[Row]:
    """Yield rows with the seconds of first calls, in a cold and a warm process per contender."""
    write_bytecode(names)
    for name in names or CONTENDERS:
        with tempfile.TemporaryDirectory() as folder:
            for state in ("cold", "warm"):
                row: Row = {"benchmark": "gpu first call", "case": f"{FIRST[0]}, {state}"}
                row |= {"contender": name, "cache": state, "shape": vars(FIRST_SHAPE)}
                fields = first(name, options.cases, Path(folder))
                yield row | fields
                if "skipped" in fields:
                    break


def write_bytecode(names: list[str]) -> None:
    """Compile the modules that first calls import to bytecode, as a package installer does."""
    own = Path(attnkit.__file__).parent
    folders = [own, *(own / link for link in ("masks", "mods", "templates"))]
    modules = ["cutlass.cute"]
    if names != [OURS]:
        modules += ["flash_attn.cute.interface", "torch._inductor.compile_fx"]
    commands = [[sys.executable, "-c", f"import {name}"] for name in modules]
    commands.append([sys.executable, "-m", "compileall", "-q", *map(str, folders)])
    writing = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    for running in [subprocess.Popen(c, stderr=subprocess.DEVNULL, env=writing) for c in commands]:
        running.wait()  # a package may be missing; its contender then reports that


def first(name: str, cases: Path, folder: Path) -> Row:
    """Measure first calls in a fresh process with its caches in `folder`; return the fields."""
    own = {variable: str(folder / variable.lower()) for variable in CACHES}
    own["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    command = [sys.executable, __file__, name, str(cases)]
    done = subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"skipped": f"its process ended with {done.returncode}: {last}"[:200]}
    fields: Row = json.loads(done.stdout.splitlines()[-1])
    return fields


def child(name: str, cases: Path, device: torch.device) -> Row:
    """Measure the first calls of this process; return the seconds of each as fields of a row."""
    known = {case["name"]: case for case in tomllib.loads(cases.read_text())["case"]}
    times: list[float | None] = []
    for case in FIRST:
        p = problem(known[case], FIRST_SHAPE, device, backward=False)
        wait(device)
        began = time.perf_counter()
        try:
            default(name)(p).call()
        except Exception as error:
            if not times:
                return skipped(name, error)
            times.append(None)  # it has no such variant
            continue
        wait(device)
        times.append(time.perf_counter() - began)
    p = problem(known[FIRST[0]], FIRST_SHAPE, device, backward=True)
    backward = default(name)(p).directed(p.grad)
    x = torch.ones(8, device=device, requires_grad=True)
    (x * x).backward(torch.ones_like(x))
    wait(device)
    began = time.perf_counter()
    backward()
    wait(device)
    times.append(time.perf_counter() - began)
    return {"first_s": times[0], "other_s": times[1], "backward_s": times[2]}


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], Path(sys.argv[2]), torch.device("cuda"))))

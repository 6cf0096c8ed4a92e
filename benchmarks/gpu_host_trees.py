"""Compare the host time of two checkouts of attnkit: `python benchmarks/gpu_host_trees.py --help`.

Each round runs one fresh process per checkout, in alternating order, so that a slow phase of the
machine affects both. A process measures the import, the first call with filled disk caches, and
the time to queue a repeated call of a small problem (forward, forward recorded by autograd,
backward). The rows hold medians over rounds. The mods and masks are written out here, so that both checkouts trace the same functions.
The first round fills the disk caches and is not used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Call = Callable[[], Any]

WORKER = "--worker"
ROUNDS, CALLS, REPEATS = 6, 100, 15
SHAPE = {"batch": 1, "heads": 2, "kv_heads": 2, "length": 256, "head_dim": 64, "value_dim": 64}


def main() -> int:
    """Measure both checkouts, print one line a quantity and save the rows."""
    from committed import add_commit, row_file

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument(
        "--before-commit",
        required=True,
        metavar="COMMIT:DIGEST",
        help="output of `machine.py --stamp` in the other checkout",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--save", type=Path, help="append the rows to this file")
    add_commit(parser)
    options = parser.parse_args()
    before = verified(options.before, options.before_commit)
    file = row_file(options.save, options.commit)
    trees = {"before": options.before.resolve(), "after": Path(__file__).resolve().parents[1]}
    common = {"benchmark": "gpu host, two checkouts", "contender": "attnkit", "before": before}
    described: Row = {}
    if options.save is not None:
        import torch
        from gpu_machine import describe_gpu

        described = describe_gpu(torch.device("cuda", 0))
    for row in compare(trees, options.rounds):
        print(line(row), flush=True)
        file.append(described | common | row)
    return 0


def verified(tree: Path, given: str) -> str:
    """Return the commit of `tree`; exit with status 2 if its files have another digest."""
    from committed import STAMP, digest

    parts = STAMP.fullmatch(given)
    if parts is None or digest(tree) != parts.group(2):
        found = f"{tree} has the digest {digest(tree)}"
        print(f"--before-commit is {given!r}, expected COMMIT:DIGEST; {found}", file=sys.stderr)
        raise SystemExit(2)
    return parts.group(1)


def compare(trees: dict[str, Path], rounds: int) -> list[Row]:
    """Run `rounds` rounds over both checkouts; return one row a quantity, medians and ratios."""
    found: dict[str, list[Row]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(1 + rounds):
            for name in sorted(trees, reverse=turn % 2 == 0):
                row = measured(trees[name], Path(folder) / name)
                if turn > 0:
                    found[name].append(row)
    return [
        summary(quantity, *([row[quantity] for row in found[name]] for name in ("before", "after")))
        for quantity in found["after"][0]
    ]


def summary(quantity: str, before: Sequence[float], after: Sequence[float]) -> Row:
    """Return the row of one quantity: median, least and spread per checkout, and the ratios."""
    from timing import spread

    row: Row = {"case": quantity, "rounds": len(after)}
    for name, values in (("before", before), ("after", after)):
        row |= {f"{name}_median": statistics.median(values), f"{name}_least": min(values)}
        row[f"{name}_spread"] = spread(values)
    row["ratio"] = row["after_median"] / row["before_median"]
    return row | {"ratio_least": row["after_least"] / row["before_least"]}


def line(row: Row) -> str:
    """Format a row as one line of text."""
    spread = max(row["before_spread"], row["after_spread"])
    return (
        f"{row['case']:36} before {row['before_median']:10.4g}  after {row['after_median']:10.4g}  "
        f"ratio {row['ratio']:.3f}  of least {row['ratio_least']:.3f}  spread {spread:.1%}"
    )


def measured(tree: Path, cache: Path) -> Row:
    """Measure one checkout in a fresh process; return a value a quantity."""
    variables = {"PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}", "PYTHONSAFEPATH": "1"}
    variables["ATTNKIT_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, __file__, WORKER],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode != 0:
        raise SystemExit(f"{tree}: its process ended with {done.returncode}\n{done.stderr[-2000:]}")
    fields: Row = json.loads(done.stdout.splitlines()[-1])
    if not Path(fields.pop("file")).is_relative_to(tree):
        raise SystemExit(f"attnkit was not imported from {tree}")
    return fields


# --- in the process that measures one checkout


def worker() -> Row:
    """Measure this process's attnkit; times of repeated calls in us, others in s."""
    import torch

    x = torch.ones(8, device="cuda", requires_grad=True)
    (x * x).sum().backward()  # torch loads its own code at the first backward
    torch.cuda.synchronize()
    began, loaded = time.perf_counter(), len(sys.modules)
    import attnkit

    found: Row = {"file": attnkit.__file__, "import, s": time.perf_counter() - began}
    found["modules of the import"] = len(sys.modules) - loaded
    began = time.perf_counter()
    call, _ = calls(attnkit.flex_attention, "causal", grad=False)
    call()
    torch.cuda.synchronize()
    found["first call, warm, s"] = time.perf_counter() - began
    for case in ("full", "causal", "ALiBi", "softcap", "documents"):
        call, _ = calls(attnkit.flex_attention, case, grad=False)
        found[f"{case}, forward, us"] = repeated(call)
        call, backward = calls(attnkit.flex_attention, case, grad=True)
        found[f"{case}, recorded forward, us"] = repeated(call)
        found[f"{case}, backward, us"] = repeated(backward)
    return found


def calls(attention: Any, case: str, *, grad: bool) -> tuple[Call, Call]:
    """Return a forward and a backward of `case` on random tensors of `SHAPE`."""
    import torch

    import attnkit

    batch, length = SHAPE["batch"], SHAPE["length"]
    size = (batch, SHAPE["heads"], length, SHAPE["head_dim"])
    q, k, v = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in "qkv"
    )
    slopes = torch.tensor([0.25, 0.125], device="cuda")
    ids = torch.arange(length, device="cuda", dtype=torch.int32) // 100

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (ids[i] == ids[j]) & (i >= j)

    def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score - slopes[h] * (i - j)

    def softcap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return 20 * torch.tanh(score / 20)

    score = {"ALiBi": alibi, "softcap": softcap}.get(case)
    mask = {"full": None, "documents": documents}.get(case, causal)
    block = None
    if mask is not None:
        block = attnkit.create_block_mask(mask, batch, None, length, length, device="cuda")

    def forward() -> Any:
        return attention(q, k, v, score_mod=score, block_mask=block)

    out = forward()
    gradient = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    return forward, backward


def repeated(call: Call) -> float:
    """Return the time to queue one call, in us: the least of `REPEATS` batches.

    The host is shared, and an interruption only ever adds time.
    """
    import torch

    times = []
    for _ in range(1 + REPEATS):  # the first is a warm-up
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append(1e6 * (time.perf_counter() - began) / CALLS)
    return min(times[1:])


if __name__ == "__main__":
    if WORKER in sys.argv:
        print(json.dumps(worker()))
    else:
        sys.exit(main())

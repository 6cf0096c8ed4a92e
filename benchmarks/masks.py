"""Time how long attnkit and FlexAttention take to build block masks: `python benchmarks/masks.py`.

The script builds each mask with attnkit, with torch's `create_block_mask`, and on CUDA also with
`_compile=True`. It compares the tiles, then times all builders round-robin with the host's clock;
the device is idle before and after each call. Before each call the captured tensors are edited in
place, which invalidates cached results that depend on them, and attnkit's cache of masks is
disabled. The column `again` times attnkit with that cache and without the edit: the cost of a
training step that uses the same mask as the step before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from committed import add_commit, row_file
from gpu_timing import NOISY
from machine import describe
from mask_cases import CASES, Case
from timing import SPREAD, Times, in_turn
from torch.nn.attention import flex_attention as flex

import attnkit
from attnkit.inspection.summary import stored_bytes
from attnkit.sparsity import mask_runs
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.util.tensor_cache import VersionedCache

LENGTHS = (8192, 32768, 131072)
BLOCK = 128
ROWS = Path(__file__).parent / "results" / "masks.jsonl"
# Peak bytes of the eager `create_block_mask` per element of the dense mask. Measured on an H200:
# 640 MiB at 8192 and 10.2 GiB at 32768. The compiled one needs memory for block lists only.
EAGER_BYTES = 10.25
FREE_SHARE = 0.7  # fraction of the free memory that may be used

Row = dict[str, Any]
Build = Callable[[], Any]


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device, in bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise SystemExit("/proc/meminfo has no MemAvailable: free memory is known on Linux only")


def builds(case: Case, length: int, device: torch.device) -> dict[str, Build]:
    """Return the functions that build the mask, keyed by library and mode."""
    sizes = (case.batch, case.heads, length, length)

    def ours() -> Any:
        return attnkit.create_block_mask(case.mask_mod, *sizes, device, BLOCK).runs

    def theirs(compiled: bool) -> Build:
        def build() -> Any:
            return flex.create_block_mask(
                case.mask_mod, *sizes, device=str(device), BLOCK_SIZE=BLOCK, _compile=compiled
            )

        return build

    functions = {"attnkit": ours, "torch eager": theirs(False)}
    return functions | ({"torch compiled": theirs(True)} if device.type == "cuda" else {})


def invalidate(case: Case) -> None:
    """Edit the captured tensors in place, so that cached results about them are invalid."""
    for t in case.tensors:
        t.copy_(t.clone())


def timed_build(build: Build, case: Case, device: torch.device) -> Callable[[], Any]:
    """Wrap `build` for timing: invalidate caches before it and synchronize the device after it."""

    def run() -> Any:
        invalidate(case)
        mask = build()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return mask

    return run


def refusal(name: str, case: Case, length: int, device: torch.device) -> str:
    """Return the reason why peer `name` cannot run for lack of memory, or ""."""
    need = EAGER_BYTES * case.batch * case.heads * length**2
    room = FREE_SHARE * free_bytes(device)
    if name != "torch eager" or need <= room:
        return ""
    return f"needs about {need / 2**30:.0f} GiB, {room / 2**30:.0f} GiB are free for it"


def first_calls(
    case: Case, length: int, device: torch.device
) -> tuple[dict[str, Callable[[], Any]], dict[str, Row], dict[str, str]]:
    """Call each builder once.

    Returns:
        By builder name: the functions to time, fields of the row, and the reasons to skip others.
    """
    runs, facts, skipped = {}, {}, {}
    cuda = device.type == "cuda"
    for name, build in builds(case, length, device).items():
        skipped[name] = refusal(name, case, length, device)
        if skipped[name]:
            continue
        run = timed_build(build, case, device)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if cuda else 0
        start = time.perf_counter()
        try:
            mask = run()
        except Exception as error:  # a peer's error is reported in its row
            if name == "attnkit":
                raise
            skipped[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            continue
        facts[name] = {"first_ms": 1000 * (time.perf_counter() - start)}
        if cuda:
            peak = torch.cuda.max_memory_allocated(device) - before
            facts[name]["peak_mb"] = round(peak / 2**20, 1)
        facts[name] |= contents(mask)
        runs[name] = run
    return runs, facts, skipped


def contents(mask: Any) -> Row:
    """Return tile counts and stored bytes of a mask of attnkit or torch, as fields of a row."""
    if isinstance(mask, BlockRuns):
        _, partial, full = mask.counts()
        return {"partial": partial, "full": full, "stored_bytes": stored_bytes(mask)}
    tensors = [t for t in mask.as_tuple(flatten=True) if isinstance(t, torch.Tensor)]
    return {
        "partial": int(mask.kv_num_blocks.sum()),
        "full": int(mask.full_kv_num_blocks.sum()),
        "stored_bytes": sum(t.numel() * t.element_size() for t in tensors),
    }


def remembered(case: Case, length: int, device: torch.device) -> Times:
    """Time attnkit when its cache holds the mask, without waiting for the device."""
    build = builds(case, length, device)["attnkit"]
    return in_turn({"again": build}, seconds=0, least_rounds=20)["again"]


def measure(
    name: str, length: int, device: torch.device, seconds: float, attempts: int
) -> list[Row]:
    """Measure one case; return one row for each peer."""
    limit = SPREAD if device.type == "cuda" else None  # the CPU is shared with others
    torch.compiler.reset()  # else the ninth mask exceeds dynamo's limit and is built eagerly
    case = CASES[name](length, device)
    memory = mask_runs._runs, mask_runs._proofs
    mask_runs._runs, mask_runs._proofs = VersionedCache(0), VersionedCache(0)
    try:
        runs, facts, skipped = first_calls(case, length, device)
        times = in_turn(runs, seconds=seconds, attempts=attempts, least_rounds=5, limit=limit)
    finally:
        mask_runs._runs, mask_runs._proofs = memory
    again = remembered(case, length, device)
    ours = times.pop("attnkit")
    row: Row = {"benchmark": "masks", "device": device.type, "case": name, "length": length}
    row |= {"block": BLOCK, "batch": case.batch, "heads": case.heads}
    row |= {"ours_ms": ours.median, "ours_min": ours.least, "again_ms": again.median}
    row |= {f"ours_{k}": v for k, v in facts["attnkit"].items()}
    row |= {"rounds": len(ours.rounds), "spread": ours.spread}
    noisy = any(t.is_noisy(limit) for t in (ours, *times.values()))
    return [
        row | compared(ours, times, facts, peer, skipped[peer]) | {"noisy": noisy}
        for peer in list(skipped)[1:]
    ]


def compared(
    ours: Times, times: dict[str, Times], facts: dict[str, Row], peer: str, skipped: str
) -> Row:
    """Return the fields of a row that compare `peer` with attnkit."""
    if skipped:
        return {"peer": peer, "skipped": skipped}
    theirs, mine = times[peer], facts["attnkit"]
    row = {"peer": peer, "peer_ms": theirs.median, "peer_min": theirs.least}
    row |= {f"peer_{k}": v for k, v in facts[peer].items()}
    same = all(mine[k] == facts[peer][k] for k in ("partial", "full"))
    row["peer_spread"] = theirs.spread
    return row | {"ratio": theirs.over(ours), "same_tiles": same}


def line(row: Row) -> str:
    """Format a row as one line of the printed table."""
    text = f"{row['case']:18}{row['length']:7}{row['ours_ms']:9.2f}{1000 * row['again_ms']:8.0f}"
    text += f"{row['ours_stored_bytes'] / 1024:9.0f}  {row['peer']:15}"
    if "skipped" in row:
        return text + f"skipped: {row['skipped']}"
    text += (
        f"{row['peer_ms']:9.2f}{row['peer_first_ms']:9.0f}{row['peer_stored_bytes'] / 1024:9.0f}"
    )
    text += f"{row.get('peer_peak_mb', float('nan')):8.0f}{row['ratio']:8.1f}x"
    return text + ("" if row["same_tiles"] else "  OTHER TILES") + "  noisy" * row["noisy"]


def cell(rows: list[Row]) -> str:
    """Format attnkit's time and each peer's multiple of it, for one case and length."""
    # all peers of one measurement share our time; ratios of an older one are to another time
    newest = {row["peer"]: row for row in rows if row["ours_ms"] == rows[-1]["ours_ms"]}
    parts = [f"{newest[peer]['ratio']:.0f}x" for peer in newest if "ratio" in newest[peer]]
    return f"{rows[-1]['ours_ms']:.1f} ms" + (f" ({', '.join(parts)})" if parts else "")


def markdown(rows: list[Row], device: str) -> str:
    """Format the newest saved rows of a device type as a Markdown table, one line for each mask."""
    own = [row for row in rows if row["device"] == device]
    lengths = sorted({row["length"] for row in own})
    peers = ", ".join(dict.fromkeys(row["peer"] for row in own))
    lines = [f"| attnkit ({peers}) | {' | '.join(str(n) for n in lengths)} |"]
    lines.append("| --- |" + " --- |" * len(lengths))
    for case in dict.fromkeys(row["case"] for row in own):
        of_case = [[r for r in own if (r["case"], r["length"]) == (case, n)] for n in lengths]
        lines.append(f"| {case} | {' | '.join(cell(r) if r else '' for r in of_case)} |")
    return "\n".join(lines)


def where(device: torch.device) -> Row:
    """Return the fields that all rows of a run share: machine and versions."""
    if device.type == "cuda":
        from gpu_machine import describe_gpu

        return describe() | describe_gpu(device)
    return describe()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument(
        "--length", type=int, action="append", help="sequence length; may be repeated"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="number of torch threads (default 2)"
    )
    parser.add_argument("--seconds", type=float, default=1, help="shortest measurement in seconds")
    parser.add_argument("--attempts", type=int, default=3, help="attempts at a noisy measurement")
    parser.add_argument("--save", action="store_true", help=f"append the rows to {ROWS.name}")
    parser.add_argument(
        "--table", action="store_true", help="only print the saved rows as Markdown"
    )
    add_commit(parser)
    args = parser.parse_args()
    if args.table:
        saved = [json.loads(text) for text in ROWS.read_text().splitlines()]
        print(markdown(saved, args.device.type))
        return 0
    file = row_file(ROWS if args.save else None, args.commit)
    torch.set_num_threads(args.threads)
    device = torch.empty(0, device=args.device).device  # with its index
    warnings.filterwarnings("ignore", message="_compile flag on create_block_mask")
    known = where(device)
    print(*(f"{k}: {v}" for k, v in known.items()), sep=", ")
    print(
        f"{'mask':18}{'length':>7}{'ours ms':>9}{'again us':>8}{'KiB':>9}  {'peer':15}{'ms':>9}"
        f"{'first ms':>9}{'KiB':>9}{'peak MB':>8}{'ratio':>9}"
    )
    ratios, wrong, noisy = [], False, False
    for name in CASES:
        if args.only not in name:
            continue
        for length in args.length or LENGTHS:
            for row in measure(name, length, device, args.seconds, args.attempts):
                print(line(row), flush=True)
                wrong |= not row.get("same_tiles", True)
                ratios += [row["ratio"]] if "ratio" in row else []
                noisy |= row["noisy"]
                if not row["noisy"]:
                    file.append(known | row)
    if ratios:
        print(f"median ratio {statistics.median(ratios):.1f}x, least {min(ratios):.1f}x")
    # noisy rows of a shared CPU may be left out; those of a GPU must be measured again
    return 1 if wrong else NOISY if noisy and device.type == "cuda" else 0


if __name__ == "__main__":
    sys.exit(main())

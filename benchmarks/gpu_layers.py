"""Measure the attention of layers of Llama 3 8B and Gemma 2 9B, as transformers calls it, on a GPU.

    python benchmarks/gpu_layers.py --save

Each layer's attention function gets query, key and value [B, H, S, D] and returns [B, S, H, D], as
in a model. attnkit stands beside the implementations "flex_attention", "sdpa" and
"flash_attention_2" of transformers; without transformers, the same calls are made from a plain
module, and the rows say so. Results are checked against float64, then all contenders are timed in
turns, forward and backward. Both models take about 100 seconds, most of which compiles kernels;
`--seconds` bounds it. The exit status is as that of gpu.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from committed import add_commit, row_file
from gpu import HEAD, Settings, fail, line, measure
from gpu_machine import describe_gpu
from gpu_timing import ATTEMPTS, MODES, NOISY, ROUNDS, CudaTimer, Timer
from gpu_variants import Shape
from layer_interfaces import contenders, described

ROWS = Path(__file__).parent / "results" / "gpu_layers.jsonl"
LENGTH = 8192
_LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128}
_GEMMA = {"heads": 16, "kv_heads": 8, "head_dim": 256}
Row = dict[str, Any]
CASES: tuple[Row, ...] = (
    {"name": "Llama 3 8B", "mask": "causal", "shape": _LLAMA},
    {"name": "Gemma 2 9B", "mask": "causal", "score": "softcap_50", "shape": _GEMMA},
    {
        "name": "Gemma 2 9B, window 4096", "mask": "window_4096", "score": "softcap_50",
        "shape": _GEMMA,
    },
)  # fmt: skip


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", default="", metavar="NAME", help="run only layers whose name contains NAME"
    )
    parser.add_argument("--mode", choices=MODES, default="burst", help="as in gpu.py")
    parser.add_argument("--rounds", type=ROUNDS, default=7, help="as in gpu.py (default 7)")
    parser.add_argument(
        "--attempts", type=ATTEMPTS, default=2, metavar="N", help="as in gpu.py (default 2)"
    )
    parser.add_argument(
        "--seconds", type=float, default=95, metavar="S",
        help="start no layer and direction after S seconds (default 95)",
    )  # fmt: skip
    parser.add_argument(
        "--save", type=Path, nargs="?", const=ROWS, metavar="FILE",
        help="append the rows to FILE (default results/gpu_layers.jsonl)",
    )  # fmt: skip
    add_commit(parser)
    return parser


def run(options: argparse.Namespace, timer: Timer, device: torch.device, length: int) -> int:
    """Measure and print all cases; return 1 if attnkit was wrong, `NOISY` if noisy, else 0.

    Args:
        options: the options of the command line.
        timer: takes the measurements.
        device: device of the tensors.
        length: number of queries and keys.
    """
    where = describe_gpu(device) if device.type == "cuda" else {}
    where |= {"benchmark": "transformers layer", "interface": described()}
    print(*(f"{k}: {v}" for k, v in where.items()), sep=", ")
    file = row_file(options.save, options.commit)
    began, wrong, noisy = time.perf_counter(), False, False
    for case in CASES:
        for backward in (False, True):
            if options.only not in case["name"]:
                continue
            name = f"{case['name']}, {'backward' if backward else 'forward'}"
            if time.perf_counter() - began > options.seconds:
                print(f"\n{name}: not started within {options.seconds:.0f} s")
                continue
            shape = Shape.of({"batch": 1, "length": length} | case["shape"])
            settings = Settings(backward, options.mode, options.rounds, 3, 60, options.attempts)
            print(f"\n{name}, {options.mode}: {shape}\n{HEAD}", flush=True)
            for row in measure(case, shape, contenders(), timer, settings, device):
                print(line(row), flush=True)
                wrong |= row.get("failed", False)
                noisy |= row["noisy"]
                if not row["noisy"]:
                    file.append(row | where)
            if row["noisy"]:
                print("noisy: not saved")
            print(f"({time.perf_counter() - began:.0f} s)", flush=True)
    return 1 if wrong else NOISY if noisy else 0


def main(argv: list[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    if not any(options.only in case["name"] for case in CASES):
        return fail(f"no layer with {options.only!r}; there are {[c['name'] for c in CASES]}")
    if not torch.cuda.is_available():
        return fail("this benchmark needs a CUDA device, and torch.cuda sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    # a timed backward runs many times on the tensors that one forward saved
    torch._functorch.config.donated_buffer = False
    return run(options, CudaTimer(MODES[options.mode], device), device, LENGTH)


if __name__ == "__main__":
    sys.exit(main())

"""Run FlashAttention-4's own kernels in the emulator, as an independent check of the emulator.

    python benchmarks/emulator_flash_attention.py [CASE ...] [--mode check] [--save FILE]

The script needs the package flash-attn-4 (`flash_attn.cute`) and its dependencies (quack-kernels,
triton), but no GPU. It compiles FlashAttention-4's kernels for the architecture of the case and
executes them on the CPU through FlashAttention-4's own interface, with torch CPU tensors. Each case
runs in a separate process, because the architecture is fixed when the package is imported. The
script prints a JSON row for each kernel and each result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from committed import add_commit, row_file

SMS = {"sm_90a": 132, "sm_100a": 148}


@dataclass(frozen=True)
class Case:
    """Describe one problem in bfloat16 with batch 1, and which passes to run."""

    arch: str
    length: int
    head_dim: int
    heads: int = 1
    kv_heads: int = 1
    causal: bool = False
    forward: bool = True
    backward: bool = True


CASES = {
    "sm90": Case("sm_90a", 256, 128, causal=True),
    "sm90 grouped": Case("sm_90a", 384, 128, 2, 1),
    "sm90 ragged": Case("sm_90a", 200, 64, 2, 1, causal=True),
    "sm100": Case("sm_100a", 256, 128, causal=True, backward=False),
    "sm100 pairs forward": Case("sm_100a", 1024, 128, backward=False),
    "sm100 64": Case("sm_100a", 256, 64, causal=True),
    "sm100 ragged": Case("sm_100a", 300, 64, 2, 1, forward=False),
    "sm100 pairs backward": Case("sm_100a", 384, 128, forward=False),
    "sm100 pairs backward causal": Case("sm_100a", 256, 128, causal=True, forward=False),
}


def prepare(arch: str) -> Any:
    """Import FlashAttention-4's interface, patched to compile for `arch` and accept CPU tensors."""
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["FLASH_ATTENTION_ARCH"] = arch.rstrip("a")
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(SMS[arch])
    import torch
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor
    from cutlass.utils import hardware_info
    from flash_attn.cute import cute_dsl_utils, interface

    def fake(
        t: Any,
        assumed_align: int = 16,
        leading_dim: int = -1,
        fully_dynamic: bool = False,
        **_: Any,
    ) -> Any:
        if t is None:
            return None
        inner = t.ndim - 1 if leading_dim == -1 else leading_dim
        strides = tuple(
            1 if i == inner and not fully_dynamic else cute.sym_int64() for i in range(t.ndim)
        )
        dtype = cute_dsl_utils.torch2cute_dtype_map[t.dtype]
        shape = tuple(cute.sym_int() for _ in t.shape)
        return make_fake_tensor(dtype, shape, strides, assumed_align=assumed_align)

    info = hardware_info.HardwareInfo
    info.__init__ = lambda self, device_id=0: None
    info.get_device_multiprocessor_count = lambda self: SMS[arch]
    info.get_max_active_clusters = lambda self, cluster_size=1, *a, **k: SMS[arch] // cluster_size
    torch.Tensor.is_cuda = property(lambda self: True)
    interface.to_cute_tensor = fake
    names = {name: getattr(cute, name) for name in dir(cute)}
    interface.cute = type("cute", (), names | {"compile": Emulated})
    return interface


class Emulated:
    """Stand-in for `cute.compile` and its compiled kernels that records a row for each run."""

    mode = "check"
    rows: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, fn: Any, *args: Any, options: Any = None, **named: Any) -> None:
        from cuda.bindings import driver

        from attnkit import emulator

        self.stream = [_is_stream(a) for a in (*args, *named.values())]
        args = tuple(driver.CUstream(0) if _is_stream(a) else a for a in args)
        named = {k: driver.CUstream(0) if _is_stream(v) else v for k, v in named.items()}
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.exe = emulator.compile(fn, *args, **named)

    def __call__(self, *values: Any) -> None:
        from attnkit import emulator

        wanted = self.stream.count(False)
        args = [*values[:wanted], *[None] * (wanted - len(values))]
        begin = time.process_time()
        if self.mode == "check":
            report: Any = emulator.check(self.exe, *args, deterministic=False)
            first = report.runs[0]
        else:
            report = first = emulator.run(self.exe, *args, mode=self.mode, raises=False)
        opcodes = {op for s in first.launches for op in s.opcodes}
        self.rows.append(
            {
                "kernel": self.name,
                "mode": self.mode,
                "warp_instructions": first.warp_instructions,
                "eager_seconds": round(first.seconds, 3),
                "cpu_seconds": round(time.process_time() - begin, 3),
                "opcodes": len(opcodes),
                "pairs": any("cta_group::2" in op for op in opcodes),
                "covered": round(min(s.covered for s in first.launches), 3),
                "errors": [str(f) for f in report.findings if f.severity == "error"],
                "warnings": sorted({f.kind for f in report.findings if f.severity == "warning"}),
            }
        )


def _is_stream(value: Any) -> bool:
    return "stream" in type(value).__name__.lower()


def results(case: Case, mode: str) -> Iterator[dict[str, Any]]:
    """Run a case; yield a row for each result (out, LSE, gradients), then a row for each kernel."""
    Emulated.mode = mode
    interface = prepare(case.arch)
    import torch

    torch.manual_seed(0)
    n, d = case.length, case.head_dim
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, grad = [torch.randn(1, n, h, d).bfloat16() for h in heads]
    options = {"softmax_scale": 1 / math.sqrt(d), "causal": case.causal}
    exact, rough = (
        [x.detach() for x in dense(q, k, v, grad, case, t)] for t in (torch.double, q.dtype)
    )
    got: list[tuple[str, Any, Any, Any]] = []
    if case.forward:
        out, lse = interface._flash_attn_fwd(q, k, v, return_lse=True, **options)[:2]
        got += [("out", out, exact[0], rough[0]), ("lse", lse, exact[1], rough[1])]
    if case.backward:
        lse = exact[1].float().contiguous()
        out = exact[0].bfloat16()
        grads = interface._flash_attn_bwd(q, k, v, out, grad, lse, **options)
        got += zip(("dq", "dk", "dv"), grads, exact[2:], rough[2:], strict=False)
    for name, ours, want, same in got:
        error = float((ours.double() - want).abs().max())
        allowed = 2 * float((same.double() - want).abs().max())
        yield {"result": name, "error": error, "error_allowed": allowed}
    yield from Emulated.rows


def dense(q: Any, k: Any, v: Any, grad: Any, case: Case, dtype: Any) -> list[Any]:
    """Compute dense attention in `dtype`; return output, LSE, dQ, dK and dV."""
    import torch

    a, b, c = (x.to(dtype).requires_grad_() for x in (q, k, v))
    share = case.heads // case.kv_heads
    scores = torch.einsum("bqhd,bkhd->bhqk", a, b.repeat_interleave(share, 2)) / math.sqrt(
        case.head_dim
    )
    if case.causal:
        above = torch.ones(case.length, case.length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), c.repeat_interleave(share, 2))
    grads = torch.autograd.grad(out, (a, b, c), grad.to(dtype))
    return [out, scores.logsumexp(-1), *grads]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "cases",
        nargs="*",
        default=list(CASES),
        metavar="CASE",
        help=f"cases to run, from: {', '.join(CASES)}",
    )
    parser.add_argument(
        "--mode", default="check", choices=("check", "eager", "adversarial", "race")
    )
    parser.add_argument("--save", type=Path, help="append the rows to this file")
    add_commit(parser)
    args = parser.parse_args()
    file = row_file(args.save, args.commit)
    if len(args.cases) > 1:
        for name in args.cases:
            command = [sys.executable, __file__, name, "--mode", args.mode]
            command += ["--save", str(args.save)] if args.save else []
            command += ["--commit", args.commit] if args.commit else []
            subprocess.run(command, check=True)
        return
    from importlib import metadata

    from machine import describe

    (name,) = args.cases
    with tempfile.TemporaryDirectory(prefix="emulator-flash-attention-") as folder:
        os.environ["CUTE_DSL_DUMP_DIR"] = folder
        rows = list(results(CASES[name], args.mode))
    known = describe() | {"flash-attn-4": metadata.version("flash-attn-4")}
    for row in rows:
        row = known | {"benchmark": "emulated FlashAttention-4", "case": name} | row
        print(json.dumps(row))
        file.append(row)


if __name__ == "__main__":
    main()

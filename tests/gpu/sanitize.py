"""Make small calls of every kind of kernel, for compute-sanitizer (see `--help`).

PYTHONPATH=. compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py
PYTHONPATH=. compute-sanitizer --tool racecheck python3 tests/gpu/sanitize.py --only D=64 --calls-only
PYTHONPATH=. compute-sanitizer --tool initcheck python3 tests/gpu/sanitize.py --backward

racecheck does not follow `bar.arrive` (see `racecheck_idioms.py`). With `bar.arrive`, the backward
for head dims to 128 passes chunks of dQ to the warps that add them. With `--sync` these kernels use
`bar.sync` there and are otherwise unchanged.

Nor does racecheck follow one lane that arrives for its warp after a warp barrier. With `--lanes` every
lane arrives. docs/notes/hopper.md says what is then left.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from cutlass import cute

from attnkit import UnsupportedError, masks, mods
from attnkit.runtime.variant import Variant
from attnkit.templates.common import device
from attnkit.testing import Case
from tests.gpu import backward_kit
from tests.gpu import cute_kit as kit

BF16 = torch.bfloat16
# Counts of the mbarriers at which one lane arrives for each warp, by `device.arrive`. A barrier with
# such a count and other arrivals would hang with `--lanes`.
WARP_COUNTS = (4, 8, 12)
HANDED_BY = 160  # threads of a barrier: a consumer, and the warp that adds its chunk of dQ
SIZES: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 64, "value_dim": 64, "dtype": BF16}


def documents(length: int) -> Any:
    ids = torch.arange(length, device=kit.DEVICE) // 70
    return masks.causal() & masks.document(ids, sorted_ids=True)


def learned_bias(length: int) -> Any:
    table = torch.randn(2, 2 * length, device=kit.DEVICE, requires_grad=True)
    return lambda score, b, h, q, kv: score + table[h, q - kv + length]


def scattered(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Mask without intervals; some of its rows and tiles are fully masked."""
    return ((q * 7 + kv * 3) % 5 > 1) & (q // 128 != 1) & (kv > 20)


def configurations() -> Iterator[tuple[str, Variant, Case]]:
    """Yield (name, variant, case) for each mask form, score form, head dim, dtype and layout."""
    length = 200
    slopes = torch.rand(2, device=kit.DEVICE, requires_grad=True)
    variants = {
        "full": Variant(),
        "causal": Variant(None, masks.causal()),
        "window": Variant(None, masks.causal() & masks.sliding_window(50)),
        "documents": Variant(None, documents(length)),
        "scattered": Variant(None, scattered),
        "alibi": Variant(mods.alibi(slopes), masks.causal()),
        "softcap": Variant(mods.softcap(5.0), masks.causal()),
        "learned bias": Variant(learned_bias(length), masks.causal()),
        "head scale": Variant(mods.head_scale(slopes), masks.causal()),
    }
    for name, variant in variants.items():
        yield f"{name} D=64", variant, Case(length, length, **SIZES)
    for dims in (40, 72, 96, 128, 192, 256, 512, (192, 128)):
        head_dim, value_dim = dims if isinstance(dims, tuple) else (dims, dims)
        sizes = SIZES | {"head_dim": head_dim, "value_dim": value_dim}
        for name in ("full", "causal", "alibi"):
            yield f"{name} D={dims}", variants[name], Case(length, length, **sizes)
    for q_len, kv_len in ((1, 1), (1, 200), (200, 1), (129, 127), (64, 300)):
        yield f"causal {q_len} x {kv_len} D=64", variants["causal"], Case(q_len, kv_len, **SIZES)
    for layout in ("transposed", "sliced", "expanded"):
        case = Case(length, length, batch=2, kv_batch=2, layouts=(layout,) * 3, **SIZES)
        yield f"causal {layout} D=64", variants["causal"], case
    half = SIZES | {"dtype": torch.float16}
    yield "alibi float16 D=64", variants["alibi"], Case(length, length, **half)
    for dims in (64, 128, 256):  # each place in shared memory is filled several times
        sizes = SIZES | {"head_dim": dims, "value_dim": dims}
        yield f"long causal D={dims}", variants["causal"], Case(600, 600, **sizes)
    # enough work tiles for packed heads in the backward
    many = SIZES | {"heads": 4, "kv_heads": 2, "batch": 4, "kv_batch": 4}
    yield "packed window D=64", variants["window"], Case(6500, 6500, **many)
    # each CTA computes several work tiles, so that records and notes are overwritten
    several = SIZES | {"heads": 150, "kv_heads": 150, "head_dim": 128, "value_dim": 128}
    yield "many heads causal D=128", variants["causal"], Case(300, 300, **several)
    yield "many heads scattered D=128", variants["scattered"], Case(300, 300, **several)
    own = SIZES | {"kv_heads": 2}
    for name in ("causal", "alibi", "learned bias", "scattered"):  # dK and dV are not shared
        yield f"{name} own heads D=64", variants[name], Case(length, length, **own)


def run(variant: Variant, case: Case, compare: bool) -> str:
    """Run the forward; return what is wrong with its results, or ""."""
    found = kit.forward(variant, case)
    return "; ".join(kit.wrong(found, kit.dense(variant, case), case)) if compare else ""


def run_backward(variant: Variant, case: Case, compare: bool, orders: tuple[bool, ...]) -> str:
    """Run forward and backward in each order of sums; return what is wrong, or ""."""
    said = []
    for ordered in orders:
        with backward_kit.counted() as seen:
            found = backward_kit.gradients(variant, case, deterministic=ordered)
        if not seen and not ordered:
            raise UnsupportedError("the backward runs in torch operators")
        if seen and compare:
            said += backward_kit.wrong(found, variant, case)
    return "; ".join(said)


@contextmanager
def made_visible(sync: bool, lanes: bool) -> Iterator[None]:
    """Compile kernels inside the `with` block so that racecheck follows more of what they do.

    The disk cache is an empty folder, so that no kernel of another process is loaded.

    Args:
        sync: use `bar.sync` where chunks of dQ are passed.
        lanes: let every lane arrive at mbarriers, not one for its warp.
    """
    arrive, init = cute.arch.barrier_arrive, cute.arch.mbarrier_init

    def both_wait(*, barrier_id: Any, number_of_threads: int, **options: Any) -> None:
        one = cute.arch.barrier if number_of_threads == HANDED_BY else arrive
        one(barrier_id=barrier_id, number_of_threads=number_of_threads, **options)

    def init_for_lanes(barrier: Any, count: Any, **options: Any) -> None:
        init(barrier, 32 * count if count in WARP_COUNTS else count, **options)

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNKIT_CACHE_DIR", folder)
        if sync:
            patch.setattr(cute.arch, "barrier_arrive", both_wait)
        if lanes:
            patch.setattr(cute.arch, "mbarrier_init", init_for_lanes)
            patch.setattr(device, "arrive", lambda barrier: cute.arch.mbarrier_arrive(barrier))
        yield


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="names that have it")
    parser.add_argument("--backward", action="store_true", help="also gradients")
    parser.add_argument("--order", choices=("any", "fixed", "both"), default="both", help="of sums")
    parser.add_argument("--calls-only", action="store_true", help="compare nothing: less to run")
    parser.add_argument("--sync", action="store_true", help="bar.sync for bar.arrive: see above")
    parser.add_argument("--lanes", action="store_true", help="every lane arrives: see above")
    options = parser.parse_args()
    # Each tensor in an allocation of its own, so that a write beyond its end is seen. Read when
    # torch first allocates on the device.
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    orders = {"any": (False,), "fixed": (True,), "both": (False, True)}[options.order]
    changed = options.sync or options.lanes
    with made_visible(options.sync, options.lanes) if changed else nullcontext():
        return run_all(options, orders)


def run_all(options: argparse.Namespace, orders: tuple[bool, ...]) -> int:
    """Run every selected configuration; return 1 if a result was wrong."""
    bad = 0
    for name, variant, case in configurations():
        if not re.search(options.only, name):
            continue
        asked = variant, case, not options.calls_only
        try:
            said = run_backward(*asked, orders) if options.backward else run(*asked)
        except UnsupportedError as refusal:
            sys.stdout.write(f"{name}: not supported: {refusal}\n")
            continue
        torch.cuda.synchronize()
        bad += bool(said)
        sys.stdout.write(f"{name}: {said or 'ok'}\n")
        sys.stdout.flush()
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())

"""`attnkit emulate`: a variant's kernels, executed on the CPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from attnkit.cli.arguments import DTYPE_NAMES, FAILED, OK, TARGET, dtypes, size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from attnkit.cli.arguments import Subparsers
    from attnkit.emulation import Session
    from attnkit.variant import Variant

MODES = ("check", "eager", "adversarial", "race")


def register(subparsers: Subparsers) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser("emulate", help="run a variant's GPU kernels on the CPU")
    parser.description = (
        "Compile the kernels of a variant for a GPU and execute them on the CPU: results against "
        "dense float64, faults, races, and predicted clocks. Needs a C compiler and no GPU. Exit "
        "status 0: nothing wrong, 1: wrong results or findings, 2: could not be run."
    )
    parser.set_defaults(run=run)
    parser.add_argument("target", help=TARGET)
    parser.add_argument("--q-len", type=size, default=256, metavar="N", help="default 256")
    parser.add_argument("--kv-len", type=size, metavar="N", help="default q-len")
    parser.add_argument("--heads", type=size, default=1, metavar="N", help="query heads; default 1")
    parser.add_argument("--kv-heads", type=size, metavar="N", help="default heads")
    parser.add_argument("--batch", type=size, default=1, metavar="N", help="default 1")
    parser.add_argument("--head-dim", type=size, default=64, metavar="N", help="default 64")
    parser.add_argument(
        "--dtype", type=dtypes, metavar="D", help=f"one of {DTYPE_NAMES}; default bfloat16"
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="check",
        help="eager: asynchronous work at once; adversarial: as late as barriers allow; race: "
        "unordered accesses; check (default): all of them, from the same inputs",
    )
    parser.add_argument(
        "--seeds", type=size, default=3, metavar="N", help="adversarial orders; default 3"
    )
    parser.add_argument("--backward", action="store_true", help="gradients too")
    parser.add_argument(
        "--timeline", metavar="FILE.svg", type=Path, help="predict clocks and draw them"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the inputs")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="refuse kernels that would take longer"
    )


def run(options: argparse.Namespace) -> int:
    """Emulate the target; print what came of it."""
    import torch

    from attnkit import emulation
    from attnkit.testing.load import load

    variant = load(options.target)
    dtype = options.dtype[0] if options.dtype else torch.bfloat16
    query, key, value = _inputs(options, dtype)
    with emulation.session(
        mode=options.mode,
        seeds=options.seeds,
        minutes=options.minutes,
        timeline=options.timeline is not None,
        deterministic=not options.backward,  # gradients may be summed by atomics, in any order
    ) as session:
        wrong = _compare(variant, query, key, value, options.backward)
    for name, report in session.reports:
        print(f"{name}\n{report}")
    if options.timeline is not None:
        _draw(session, options.timeline)
    return FAILED if wrong or not session.ok else OK


def _inputs(options: argparse.Namespace, dtype: torch.dtype) -> list[Tensor]:
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    heads = options.heads
    shapes = (
        (options.batch, heads, options.q_len, options.head_dim),
        *[
            (
                options.batch,
                options.kv_heads or heads,
                options.kv_len or options.q_len,
                options.head_dim,
            )
        ]
        * 2,
    )
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def _compare(variant: Variant, query: Tensor, key: Tensor, value: Tensor, backward: bool) -> bool:
    """Run the variant emulated and dense; print the errors; whether one is too large."""
    import torch

    shared = query.shape[1] != key.shape[1]
    inputs = [x.requires_grad_(backward) for x in (query, key, value)]
    wide = [x.detach().double().requires_grad_(backward) for x in inputs]
    out, lse = variant(*inputs, backend="emulate", return_lse=True, enable_gqa=shared)
    exact, exact_lse = variant(*wide, backend="eager", return_lse=True, enable_gqa=shared)
    rounded = _rounded(variant, *inputs)
    off, epsilon = _distance(lse, exact_lse), torch.finfo(query.dtype).eps
    print(f"LSE: error {off:.2e}, limit {epsilon:.2e} (a unit of the inputs' dtype at 1)")
    rows = [("output", out, exact, rounded)]
    if backward:
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(out.shape, generator=generator).to(out.dtype)
        grads = [
            torch.autograd.grad(y, xs, grad.to(y.dtype))
            for y, xs in ((out, inputs), (exact, wide), (rounded, inputs))
        ]
        rows += zip(("dquery", "dkey", "dvalue"), *grads, strict=True)
    return any([_row(*row) for row in rows]) or not off <= epsilon


def _row(name: str, got: Tensor, exact: Tensor, rounded: Tensor) -> bool:
    """Print an error; whether it is too large."""
    error, limit = _distance(got, exact), 2 * _distance(rounded, exact)
    print(f"{name}: error {error:.2e}, limit {limit:.2e} (twice that of dense in the same dtype)")
    return not error <= limit


def _distance(x: Tensor, exact: Tensor) -> float:
    """The largest difference; NaN where only one is finite."""
    difference = (x.detach().double() - exact.detach()).abs()
    return float(difference.masked_fill(x.detach() == exact.detach(), 0).max())


def _rounded(variant: Variant, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Dense attention with scores in float32 and, as every kernel for 16-bit products must, the
    probabilities and the gradients of both rounded to the inputs' dtype."""
    import torch

    dtype, kv_len, group = query.dtype, key.shape[2], query.shape[1] // key.shape[1]
    identity = torch.eye(kv_len).expand(*key.shape[:2], kv_len, kv_len)
    keys = key.float().repeat_interleave(group, 1)
    scores = (query.float() @ keys.mT) * query.shape[-1] ** -0.5
    if scores.requires_grad:
        scores.register_hook(lambda grad: grad.to(dtype).float())
    # With identities for key and value the variant gives the probabilities of these scores.
    weights = variant(scores, identity, identity, backend="eager", scale=1.0, enable_gqa=group > 1)
    out: Tensor = weights.to(dtype) @ value.repeat_interleave(group, 1)
    return out


def _draw(session: Session, file: Path) -> None:
    """Print the predictions; one file for each kernel, numbered from the second on."""
    from attnkit import emulator

    for number, (name, timeline) in enumerate(session.timelines, 1):
        path = file if number == 1 else file.with_stem(f"{file.stem}-{number}")
        path.write_text(emulator.picture(timeline))
        print(f"{name}, drawn in {path}\n{timeline}")

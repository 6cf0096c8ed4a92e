"""Compute in float64 how much each rounding of a kernel changes dQ if a score_mod is sharp.

A kernel rounds P and O in its forward, rounds dS and dQ in its backward, and computes delta =
rowsum(dO O) from the rounded O. If one weight of a row is nearly 1, a relative rounding error of
that weight in P changes O by the same fraction of that key's V. The weight is exact if exponents
are relative to the row's own maximum. It is not exact if they are relative to an earlier maximum,
as in a forward that rescales only when needed. The forward for sm_100a also divides O by a row sum
in which the largest weight of each block is rounded.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from pathlib import Path

import torch
from committed import add_commit, row_file
from machine import describe
from torch import Tensor

from attnkit import mods

LENGTH, HEADS, HEAD_DIM, BLOCK = 600, 2, 64, 128
GROWTH = 8 * math.log(2)  # the forward on sm_100a rescales if the maximum grows by more


def rounded(x: Tensor) -> Tensor:
    """Round `x` to bfloat16 and return the result in float64."""
    return x.bfloat16().double()


def references(scores: Tensor) -> Tensor:
    """Return the running maximum that the kernel subtracts from each score, shaped like `scores`.

    The kernel visits the blocks of a row from last to first. It updates the maximum only if the
    maximum grows by more than `GROWTH`.
    """
    maxima, at = torch.empty_like(scores), None
    for start in reversed(range(0, scores.shape[-1], BLOCK)):
        top = scores[..., start : start + BLOCK].amax(-1, keepdim=True)
        at = top if at is None else torch.where(top - at > GROWTH, top, at)
        maxima[..., start : start + BLOCK] = at
    return maxima


def outputs(scores: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Compute O with P or the row sum rounded in several ways; return O by rounding."""
    top = scores.amax(-1, keepdim=True)
    outs = {"nothing": scores.softmax(-1) @ value}
    total = (scores - top).exp().sum(-1, keepdim=True)
    for name, at in (("the maximum", top), ("a maximum before", references(scores))):
        weights = rounded((scores - at).exp()) * (at - top).exp()
        outs[name] = weights @ value / total
    # `weights` are now those relative to an earlier maximum
    outs["a maximum before, over its own sum"] = weights @ value / weights.sum(-1, keepdim=True)
    partly = total + largest(weights - (scores - top).exp(), scores)
    outs["a maximum before, over a sum with the largest rounded"] = weights @ value / partly
    outs["the sum"] = rounded(scores.softmax(-1)) @ value
    return outs


def largest(x: Tensor, scores: Tensor) -> Tensor:
    """Sum the entries of `x` at the position of the largest score in each block of a row."""
    both = zip(x.split(BLOCK, -1), scores.split(BLOCK, -1), strict=True)
    return sum(
        (part.gather(-1, block.argmax(-1, keepdim=True)) for part, block in both),
        start=torch.zeros_like(x[..., :1]),
    )


def errors(mod: mods.Example, draw: int, gradients: int) -> dict[str, float]:
    """Return the largest error of dQ over `gradients` output gradients, by rounding."""
    generator = torch.Generator().manual_seed(draw)
    shape = (1, HEADS, LENGTH, HEAD_DIM)
    query, key, value = (
        torch.randn(shape, generator=generator).bfloat16().double() for _ in range(3)
    )
    place = torch.meshgrid(*map(torch.arange, (1, HEADS, LENGTH, LENGTH)), indexing="ij")
    raw = (query @ key.mT * HEAD_DIM**-0.5).requires_grad_()
    scores = mod.mod(raw, *place).double()
    (slope,) = torch.autograd.grad(scores.sum(), raw)
    scores = scores.detach()
    weights, by = scores.softmax(-1), outputs(scores, value)
    largest_errors: defaultdict[str, float] = defaultdict(float)
    for seed in range(1, gradients + 1):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()

        def dquery(out: Tensor, grad: Tensor = grad) -> Tensor:
            delta = (grad * out).sum(-1, keepdim=True)
            return weights * slope * (grad @ value.mT - delta)

        exact = dquery(by["nothing"]) @ key * HEAD_DIM**-0.5
        cases = {f"P relative to {name}, and O": dquery(rounded(o)) for name, o in by.items()}
        cases["dS"] = rounded(dquery(by["nothing"]))
        for name, ds in cases.items():
            error = (ds @ key * HEAD_DIM**-0.5 - exact).abs().max()
            largest_errors[name] = max(largest_errors[name], float(error))
    return largest_errors


def main() -> None:
    """Print the table of errors, and write one row for each draw of query, key and value."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mod", default="scalable_softmax")
    parser.add_argument("--draws", type=int, default=6, help="draws of query, key and value")
    parser.add_argument("--gradients", type=int, default=8, help="output gradients per draw")
    parser.add_argument("--save", type=Path)
    add_commit(parser)
    options = parser.parse_args()
    file = row_file(options.save, options.commit)
    torch.set_num_threads(1)
    mod = mods.examples(LENGTH, HEADS, 1)[options.mod]
    rows = [{"benchmark": "rounding and dQ", **describe()}]
    for draw in range(options.draws):
        row_errors = errors(mod, draw, options.gradients)
        rows.append({"mod": options.mod, "draw": draw, "gradients": options.gradients} | row_errors)
    for name in row_errors:
        print(f"{name:76}", *(f"{row[name]:.4f}" for row in rows[1:]))
    if options.save:
        options.save.unlink(missing_ok=True)
    for row in rows:
        file.append(row)


if __name__ == "__main__":
    main()

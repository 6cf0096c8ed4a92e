"""Compute dense attention in the case's dtype, with its sums in another order.

The order of a sum changes its rounding and nothing else, so each order gives another sample of the
dense reference's error. All queries that share a key are stacked and shuffled: those of the heads
of a group, and of the whole batch if it shares key and value. The keys are shuffled too.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.runtime import reference
from attnkit.testing.case import Case
from attnkit.testing.quantities import DenseCall, Quantities, differentiate, in_dtype
from attnkit.tracing.tracer import Traced


def shuffled(call: DenseCall, sample: int) -> Quantities:
    """Run the dense reference on stacked and shuffled queries and keys.

    Args:
        call: what to compute.
        sample: number of the sample, which seeds the order.

    Returns:
        Results and gradients by name, with their axes in the usual order.
    """
    case, device, score, kept = call.case, call.device, call.score, call.kept
    generator = torch.Generator().manual_seed(1000 * sample + case.seed)
    stack = _Stack(case, generator, device)
    inputs = case.inputs(device)
    key, value = (t[:, :, stack.columns] for t in inputs[1:])
    if score is not None:
        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        score = stack.reindexed(in_dtype(score, wide))
    if kept is not None:
        kept = stack.stacked(kept.expand(case.dense_shape))[..., stack.columns]
    results = reference.attention(
        stack.stacked(inputs[0]),
        key,
        value,
        score,
        scale=case.scale,
        allowed=kept,
    )
    results = tuple(stack.unstacked(r) for r in results)  # type: ignore[assignment]
    return differentiate(case, results, inputs, call.captured)


class _Stack:
    """Stacks the rows (batch element, query head, query) that share a key, in a random order."""

    def __init__(self, case: Case, generator: torch.Generator, device: torch.device) -> None:
        self.case = case
        self.sizes = case.batch // case.kv_batch, case.heads // case.kv_heads, case.q_len
        count = self.sizes[0] * self.sizes[1] * self.sizes[2]
        self.rows = torch.randperm(count, generator=generator).to(device)
        self.columns = torch.randperm(case.kv_len, generator=generator).to(device)

    def stacked(self, t: Tensor) -> Tensor:
        """Reshape [B, Hq, Sq, n] to [kv batch, kv heads, rows, n], in the random order."""
        batch, group, _ = self.sizes
        t = t.unflatten(0, (-1, batch)).unflatten(2, (-1, group))
        return t.transpose(1, 2).flatten(2, 4)[:, :, self.rows]

    def unstacked(self, t: Tensor) -> Tensor:
        """Reshape [kv batch, kv heads, rows, ...] to [B, Hq, Sq, ...], in the usual order."""
        t = t[:, :, self.rows.argsort()].unflatten(2, self.sizes)
        return t.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def reindexed(self, score: Traced) -> Traced:
        """Rewrite a score_mod for stacked rows and columns: it reads b, h, q and kv from tables."""
        batch, group, q_len = self.sizes
        kv_batch, kv_heads = self.case.kv_batch, self.case.kv_heads
        b = torch.arange(kv_batch, device=self.rows.device)[:, None, None] * batch
        h = torch.arange(kv_heads, device=self.rows.device)[:, None] * group
        # Every table has the full size [kv batch, kv heads, rows], so that the gradient of a
        # captured tensor is summed score by score: the longest sum that any backend may choose.
        lead = [ir.arg("b"), ir.arg("h")]
        row, column = [*lead, ir.arg("q")], [*lead, ir.arg("kv")]
        tables = {
            "b": (b + self.rows // (group * q_len), row),
            "h": (h + self.rows // q_len % group, row),
            "q": (self.rows % q_len, row),
            "kv": (self.columns, column),
        }

        def full(t: Tensor) -> Tensor:
            return t.to(torch.int32).expand(kv_batch, kv_heads, -1)

        slot = len(score.tensors)
        places = {
            ir.arg(name): ir.load(slot + i, ir.I32, index)
            for i, (name, (_, index)) in enumerate(tables.items())
        }
        return dataclasses.replace(
            score,
            root=ir.substitute(score.root, places),
            tensors=(*score.tensors, *(full(t) for t, _ in tables.values())),
            names=(*score.names, *tables),
        )

"""Compute dense attention in the case's dtype, with all sums in a random order.

The order of a sum changes only its rounding, so each order gives another sample of the dense
reference's error. All queries that share a key are stacked and shuffled: the queries of all heads
of a group, and of the whole batch if it shares key and value. The keys are shuffled too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit.testing import plain
from attnkit.testing.case import Case
from attnkit.testing.quantities import DenseCall, Quantities, by_name, differentiate


def shuffled(call: DenseCall, sample: int) -> Quantities:
    """Run the dense reference on stacked and shuffled queries and shuffled keys.

    Args:
        call: the call to compute.
        sample: index of the sample, which seeds the order.

    Returns:
        Results and gradients by name, with axes and rows in the original order.
    """
    case, device = call.case, call.device
    generator = torch.Generator().manual_seed(1000 * sample + case.seed)
    stack = _Stack(case, generator, device)
    inputs = case.inputs(device)
    query = stack.stacked(inputs[0])
    key, value = (t[:, :, stack.columns] for t in inputs[1:])
    kept = call.kept
    if kept is not None:
        kept = stack.stacked(kept.expand(case.dense_shape))[..., stack.columns]
    scores = plain.raw_scores(query, key, case.scale)
    if call.score_mod is not None:
        # Every index tensor has the full size, so the gradient of a captured tensor is summed over
        # individual scores. This is the longest sum that any backend may choose.
        scores = plain.modified_at(call.score_mod, scores, stack.positions())
    sink = call.sink
    if sink is not None:
        sink = stack.stacked(sink[:, None, None].expand(*case.dense_shape[:3], 1))
    survivors = call.survivors
    if survivors is not None:
        survivors = stack.stacked(survivors)[..., stack.columns]
    if case.kind == "softmax":
        found = plain.softmax_times(scores, value, kept, case.dtype, sink, survivors)
    else:
        found = plain.weighted_sum(scores, value, kept, case.dtype, survivors, case.kind)
    own = {name: stack.unstacked(r) for name, r in found._asdict().items() if r is not None}
    own["weights"] = own["weights"][..., stack.columns.argsort()]
    found = plain.DenseResult(**own)
    return differentiate(case, by_name(case, found), inputs, call.captured)


class _Stack:
    """Random order of the rows (batch element, query head, query) that share a key, and of keys."""

    def __init__(self, case: Case, generator: torch.Generator, device: torch.device) -> None:
        self.case = case
        self.sizes = case.batch // case.kv_batch, case.heads // case.kv_heads, case.q_len
        count = self.sizes[0] * self.sizes[1] * self.sizes[2]
        self.rows = torch.randperm(count, generator=generator).to(device)
        self.columns = torch.randperm(case.kv_len, generator=generator).to(device)

    def stacked(self, t: Tensor) -> Tensor:
        """Return `t` [B, Hq, Sq, n] as [kv batch, kv heads, rows, n], with shuffled rows."""
        batch, group, _ = self.sizes
        t = t.unflatten(0, (-1, batch)).unflatten(2, (-1, group))
        return t.transpose(1, 2).flatten(2, 4)[:, :, self.rows]

    def unstacked(self, t: Tensor) -> Tensor:
        """Return `t` [kv batch, kv heads, rows, ...] as [B, Hq, Sq, ...]; inverts `stacked`."""
        t = t[:, :, self.rows.argsort()].unflatten(2, self.sizes)
        return t.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def positions(self) -> tuple[Tensor, ...]:
        """Return batch, head, query and kv index (int32) of each score of the stacked queries."""
        batch, group, q_len = self.sizes
        kv_batch, kv_heads = self.case.kv_batch, self.case.kv_heads
        b = torch.arange(kv_batch, device=self.rows.device)[:, None, None, None] * batch
        h = torch.arange(kv_heads, device=self.rows.device)[:, None, None] * group
        rows = self.rows[:, None]
        indices = (
            b + rows // (group * q_len),
            h + rows // q_len % group,
            rows % q_len,
            self.columns,
        )
        return tuple(t.to(torch.int32) for t in indices)

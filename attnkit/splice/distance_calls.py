"""Compute tables by distance before kernels, and gradients through the tables after them.

The rest of attnkit sees a call of the user's score_mod: `DistanceCall` adds the tables to the
captured tensors of a forward and of a backward, and turns their gradients into those of the
captured tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnkit.codegen.distance_tables import distance_tables
from attnkit.splice.captured_arguments import on_device
from attnkit.splice.distance_values import DistanceValues, Memo, watched_slots
from attnkit.splice.forward_call import ForwardCall
from attnkit.splice.graph_capture import is_capturing, keep_while_replayable
from attnkit.splice.kept_distances import CallSizes, kept_distances
from attnkit.splice.kernel_call import (
    BackwardInputs,
    Captured,
    ForwardInputs,
    ForwardOutputs,
    KernelCall,
    RepeatedForward,
)
from attnkit.splice.program import Program
from attnkit.splice.runs_cache import wait_for_tables
from attnkit.splice.sink_gradient import RepeatedBackward
from attnkit.util import caches
from attnkit.util.tensor_cache import VersionedCache

# A call with fewer scores saves less time in its kernel than the operators for the tables cost.
LEAST_SCORES = 1 << 24
LEAST_LENGTH = 64  # of either sequence: a distance of fewer scores is not worth a table

_calls: VersionedCache[DistanceCall] = VersionedCache(128)
caches.register(_calls.clear)
caches.register(distance_tables.cache_clear)


@dataclass(frozen=True, eq=False)
class DistanceCall:
    """Converts the tensors of a call to those of the kernels, and gradients back.

    Attributes:
        outer: the call with the user's score_mod.
        inner: the call with the score_mod that reads tables.
        values: computes the tables.
    """

    outer: KernelCall
    inner: KernelCall
    values: DistanceValues

    def tables(self, scores: Sequence[Tensor]) -> tuple[Captured, list[Tensor], Memo]:
        """Compute the tables of a call.

        Args:
            scores: tensors that the user's score_mod captures.

        Returns:
            Captured tensors of the kernel's score_mod, without those of the mask; `scores` on the
            device of the query; and what `DistanceValues.gradients` needs.
        """
        device = self.values.device
        near = [on_device(t, device) for t in scores]
        if is_capturing(device):
            keep_while_replayable(device, self)
        tables, memo = self.values.values(near)
        return Captured((*self._kept(scores), *tables), ()), near, memo

    def _kept(self, scores: Sequence[Tensor]) -> list[Tensor]:
        return [scores[slot] for slot in self.values.tables.kept]

    def example(self, captured: Captured) -> Captured:
        """Return captured tensors like those of a call, whose tables hold no values."""
        device = self.values.device
        tables = [
            torch.empty(self.values.shape(e), dtype=torch.float32, device=device)
            for e in self.values.tables.expressions
        ]
        return Captured((*self._kept(captured.scores), *tables), captured.masks)

    def needs_grad(self, needs: Sequence[bool]) -> list[bool]:
        """Return whether the gradient of each tensor of the kernel's score_mod is needed."""
        kept = [needs[slot] for slot in self.values.tables.kept]
        return kept + self.values.needs_grad(needs)

    def prepare_gradients(self, captured: Captured, needs: Sequence[bool]) -> None:
        """Find the distances that the mask keeps, if the gradients depend on them.

        This may synchronize with the GPU, once.
        """
        values = self.values
        if values.has_gradients(needs):
            return
        with torch.no_grad(), torch.inference_mode(False):
            kept, call = None, self.outer
            if values.is_fragile(needs):
                kept = kept_distances(call.program, captured.masks, call.runs, values.sizes)
            values.prepare_gradients(needs, kept)
        wait_for_tables(values.device)

    def gradients(
        self,
        near: Sequence[Tensor],
        memo: Memo,
        found: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """Convert gradients of the kernel's captured tensors to those of the user's.

        Args:
            near, memo: results of `tables`.
            found: gradients of the tensors of the kernel's score_mod, float32; None if not needed.
            needs: for each captured tensor of the user's score_mod, whether its gradient is needed.
        """
        kept = self.values.tables.kept
        ordered = self.outer.spec.deterministic
        totals = self.values.gradients(near, memo, found[len(kept) :], needs, ordered)
        for slot, grad in zip(kept, found, strict=False):
            if grad is not None:
                totals[slot] = totals[slot] + grad if slot in totals else grad
        for slot, t in enumerate(near):
            if needs[slot] and slot not in totals:  # read, but with a derivative of 0
                totals[slot] = torch.zeros(t.shape, dtype=torch.float32, device=t.device)
        return [totals[slot] if need else None for slot, need in enumerate(needs)]

    def forward(self, kernels: ForwardCall, extras: int) -> DistanceForward:
        """Return a function that computes the tables and then runs the kernels of a forward.

        `extras` is that of the program, see `Program.extras`.
        """
        return DistanceForward(self, kernels, extras)

    def replayed(self, replay: RepeatedBackward, needs_grad: Sequence[bool]) -> RepeatedBackward:
        """Return a function that relaunches a backward: tables, kernels, gradients.

        Args:
            replay: relaunches the kernels.
            needs_grad: for each captured tensor of the user's score_mod, whether its gradient is
                needed.
        """
        needs, inner, count = list(needs_grad), self.needs_grad(needs_grad), len(needs_grad)

        def run(tensors: Sequence[Tensor]) -> list[Tensor] | None:
            if is_capturing(tensors[0].device):  # then no kernel is relaunched
                return None
            scores, rest = tensors[6 : 6 + count], tensors[6 + count :]
            own, near, memo = self.tables(scores)
            results = replay([*tensors[:6], *own.scores, *rest])
            if results is None:
                return None
            found = iter(results[3:])
            grads = self.gradients(near, memo, [next(found) if n else None for n in inner], needs)
            sink = found  # the gradient of a sink is the last, if there is one
            return [*results[:3], *(g for g in grads if g is not None), *sink]

        return run


@dataclass(frozen=True, eq=False)
class DistanceForward:
    """Callable that runs a forward: computes the tables, then launches the kernels.

    Attributes:
        call: converts the tensors.
        forward: the prepared kernels.
        extras: how many of the score's tensors the graph does not read: the last ones.
    """

    call: DistanceCall
    forward: ForwardCall
    extras: int

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, captured: Captured, scale: float
    ) -> ForwardOutputs:
        """Run the call on the current stream; return out, LSE, and the row maxima or None."""
        return self.forward(query, key, value, self._own(captured), scale)

    def _own(self, captured: Captured) -> Captured:
        """Return the captured tensors of the kernels."""
        count = len(captured.scores) - self.extras
        own, _, _ = self.call.tables(captured.scores[:count])
        return Captured((*own.scores, *captured.scores[count:]), captured.masks)

    @property
    def relaunch(self) -> RepeatedForward | None:
        """Return a function that relaunches the call; None until its kernels have run."""
        again = self.forward.relaunch
        if again is None:
            return None

        def run(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            captured: Captured,
            scale: float,
            keeps_lse: bool = True,
        ) -> ForwardOutputs | None:
            if is_capturing(query.device):  # then no kernel is relaunched
                return None
            return again(query, key, value, self._own(captured), scale, keeps_lse)

        return run


def with_tables(program: Program) -> Program:
    """Return a program whose score_mod reads tables by distance, if it has expensive ones."""
    tables = None if program.score is None else distance_tables(program.score)
    return program if tables is None else replace(program, score=tables.score)


def has_tables(sizes: CallSizes) -> bool:
    """Return whether a call of these sizes is large enough for tables by distance."""
    enough = sizes.batch * sizes.heads * sizes.q_len * sizes.kv_len >= LEAST_SCORES
    return enough and min(sizes.q_len, sizes.kv_len) >= LEAST_LENGTH


def distance_call(call: KernelCall, inputs: ForwardInputs | BackwardInputs) -> DistanceCall | None:
    """Return the cached or new `DistanceCall` of a kernel call; None if it needs no tables.

    Args:
        call: a call of GPU kernels.
        inputs: example tensors.
    """
    score, captured = call.program.score, inputs.captured
    batch, heads, q_len = inputs.query.shape[:3]
    sizes = CallSizes(batch, heads, q_len, inputs.key.shape[2])
    if score is None or call.program.checked:
        return None
    wanted = has_tables(sizes) if call.tables is None else call.tables
    if not wanted or distance_tables(score) is None:
        return None
    device = inputs.query.device
    kinds = tuple([(t.dtype, t.device, t.shape, t.stride()) for t in captured.scores])
    watched = [captured.scores[slot] for slot in sorted(watched_slots([score]))]
    key = call, sizes, device, kinds
    return _calls.get(
        key, [*watched, *captured.masks], lambda: _build(call, captured, sizes, device)
    )


def _build(
    call: KernelCall, captured: Captured, sizes: CallSizes, device: torch.device
) -> DistanceCall:
    tables = None if call.program.score is None else distance_tables(call.program.score)
    assert tables is not None
    with torch.no_grad(), torch.inference_mode(False):
        scores = [on_device(t, device) for t in captured.scores]
        values = DistanceValues(tables, sizes, device, scores)
    wait_for_tables(device)  # the first call on another stream may be the next
    return DistanceCall(call, replace(call, program=with_tables(call.program)), values)

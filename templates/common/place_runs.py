"""Sum gradients of consecutive scores that belong to the same element of a captured tensor.

A learned table with few entries (T5's buckets, a bias per pair of documents) receives the gradients
of millions of scores. Additions to one address in global memory are executed one after the other,
so adding each score would take far longer than the rest of the backward. Neighbouring
scores mostly read the same element. Each thread therefore sums a run of equal places in a register,
and adds the sum in memory when the place changes and at the end of the work tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from attnkit.templates.common.exact_sums import ExactSums


@dataclass(frozen=True)
class Runs:
    """Holds the current run of each load whose index repeats.

    Attributes:
        places: i32 [loads] per thread, the offset of the run's place in the gradient, in numbers.
            Offsets have 32 bits to save registers; `gradient_repeats` is False for larger tensors.
        sums: f32 [loads] per thread; 0 before the first.
    """

    places: cute.Tensor
    sums: cute.Tensor


@dataclass(frozen=True)
class CapturedSums:
    """Holds the sums of gradients of captured tensors, in registers and in memory.

    Attributes:
        running: f32 [values of `RUNNING`] per thread, sums over a work tile.
        runs: sums of values at the same place.
        totals: the gradients in global memory, see `Backward.__call__`.
    """

    running: cute.Tensor
    runs: Runs
    totals: Any


class PlaceRuns(ExactSums):
    """Mixin that sums runs of values before it adds them in global memory."""

    def make_runs(self) -> Runs:
        """Allocate registers for the runs of all loads whose index repeats."""
        count = max(sum(self.hooks.gradient_repeats), 1)
        return Runs(cute.make_rmem_tensor(count, Int32), cute.make_rmem_tensor(count, Float32))

    def begin_runs(self, runs: Runs) -> None:
        """Empty all runs, at the begin of a work tile."""
        if any(self.hooks.gradient_repeats):
            runs.places.fill(0)
            runs.sums.fill(0.0)

    def run_of(self, i: int) -> int:
        """Return the index in `Runs` of load `i`."""
        return sum(self.hooks.gradient_repeats[:i])

    def add_each(
        self,
        i: int,
        total: cute.Tensor,
        runs: Runs,
        places: Sequence[cute.Pointer],
        values: Sequence[Any],
    ) -> None:
        """Add the gradients of load `i` at `places`, through its run if its index repeats."""
        if self.hooks.gradient_repeats[i]:
            self.add_to_run(i, total, runs, places, values)
        else:
            for place, value in zip(places, values, strict=True):
                self.add_where(value != Float32(0.0), place, value)

    def add_to_run(
        self,
        i: int,
        total: cute.Tensor,
        runs: Runs,
        places: Sequence[cute.Pointer],
        values: Sequence[Any],
    ) -> None:
        """Add `values` at `places`: to the run of load `i` if the places are equal, else in memory.

        Args:
            i: index of the load.
            total: the gradient in global memory.
            runs: the runs of all loads.
            places: pointers into `total`, see `place_of`.
            values: one value for each place.
        """
        base, size = total.iterator.toint(), total.element_type.width // 8
        offsets = [Int32((place.toint() - base) // size) for place in places]
        self._add_group(total, runs, self.run_of(i), offsets, list(values))

    def add_of_block(
        self,
        i: int,
        total: cute.Tensor,
        runs: Runs,
        places: Sequence[cute.Pointer],
        values: Sequence[Any],
    ) -> None:
        """Add the sums of a block, as `add_to_run` does; all lanes of a warp must call it.

        The next block often has another place. If all lanes have the same place, they end their
        runs together, with one addition in memory.
        """
        base, size = total.iterator.toint(), total.element_type.width // 8
        offsets = [Int32((place.toint() - base) // size) for place in places]
        self._add_warp(total, runs, self.run_of(i), offsets, list(values))

    @cute.jit
    def _add_warp(
        self,
        total: cute.Tensor,
        runs: Runs,
        at: cutlass.Constexpr,
        offsets: list,
        values: list,
    ):
        first, more = offsets[0], values[0]
        equal = first == cute.arch.shuffle_sync(first, 0)
        for offset, value in zip(offsets[1:], values[1:], strict=True):
            equal = equal & (offset == first)
            more = more + value
        if cute.arch.vote_all_sync(equal):
            if cute.arch.vote_any_sync(first != runs.places[at]):
                self._end_run(total, runs, at)
                runs.places[at] = first
                runs.sums[at] = Float32(0.0)
            runs.sums[at] = runs.sums[at] + more
        else:
            self._add_group(total, runs, at, offsets, values)

    @cute.jit
    def _add_group(
        self,
        total: cute.Tensor,
        runs: Runs,
        at: cutlass.Constexpr,
        offsets: list,
        values: list,
    ):
        first, more, uniform = offsets[0], values[0], Boolean(True)
        for offset, value in zip(offsets[1:], values[1:], strict=True):
            uniform = uniform & ((offset == first) | (value == Float32(0.0)))
            more = more + value
        if uniform:
            if (first != runs.places[at]) & (more != Float32(0.0)):
                self._add_sum(runs.sums[at] != Float32(0.0), total, runs.places[at], runs.sums[at])
                runs.places[at] = first
                runs.sums[at] = Float32(0.0)
            runs.sums[at] = runs.sums[at] + more
        else:
            # the run goes on after a group that crosses the border of two entries
            for offset, value in zip(offsets, values, strict=True):
                self._add_sum(value != Float32(0.0), total, offset, value)

    def _add_sum(self, condition: Any, total: cute.Tensor, offset: Any, value: Any) -> None:
        """Add a value in memory where `condition` holds."""
        self.add_where(condition, total.iterator + offset, value)

    def end_runs(self, runs: Runs, totals: Any) -> None:
        """Add all runs in memory, at the end of a work tile; all lanes of a warp must call it."""
        for i, repeats in enumerate(self.hooks.gradient_repeats):
            if repeats:
                self._end_run(totals[self.hooks.gradient_slots[i]], runs, self.run_of(i))

    @cute.jit
    def _end_run(self, total: cute.Tensor, runs: Runs, at: cutlass.Constexpr):
        offset, value = runs.places[at], runs.sums[at]
        first = cute.arch.shuffle_sync(offset, 0)
        # one addition for the warp, if its lanes have the same place
        if cute.arch.vote_all_sync((offset == first) | (value == Float32(0.0))):
            for step in (16, 8, 4, 2, 1):
                value = value + cute.arch.shuffle_sync_bfly(value, step)
            lead = (cute.arch.lane_idx() == 0) & (value != Float32(0.0))
            self._add_sum(lead, total, first, value)
        else:
            self._add_sum(value != Float32(0.0), total, offset, value)

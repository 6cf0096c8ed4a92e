"""Sum gradients of consecutive scores that belong to the same element of a captured tensor.

A learned table with few entries (T5's buckets, a bias per pair of documents) receives the gradients
of millions of scores. Additions to one address in global memory are executed one after the other,
so adding each score would take a hundred times as long as the rest of the backward. Neighbouring
scores mostly read the same element. Each thread therefore sums a run of equal places in a register,
and adds the sum in memory when the place changes and at the end of the work tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int64, cute

from attnkit.templates.common.exact_sums import ExactSums


@dataclass(frozen=True)
class Runs:
    """Holds the current run of each load whose index repeats.

    Attributes:
        places: i64 [loads] per thread, the address of the run's place; 0 before the first.
        sums: f32 [loads] per thread; 0 before the first.
    """

    places: cute.Tensor
    sums: cute.Tensor


class PlaceRuns(ExactSums):
    """Mixin that sums runs of values before it adds them in global memory."""

    def make_runs(self) -> Runs:
        """Allocate registers for the runs of all loads whose index repeats."""
        count = max(sum(self.hooks.gradient_repeats), 1)
        return Runs(cute.make_rmem_tensor(count, Int64), cute.make_rmem_tensor(count, Float32))

    def begin_runs(self, runs: Runs) -> None:
        """Empty all runs, at the begin of a work tile."""
        if any(self.hooks.gradient_repeats):
            runs.places.fill(0)
            runs.sums.fill(0.0)

    def run_of(self, i: int) -> int:
        """Return the index in `Runs` of load `i`."""
        return sum(self.hooks.gradient_repeats[:i])

    def add_to_run(
        self, i: int, runs: Runs, places: Sequence[cute.Pointer], values: Sequence[Any]
    ) -> None:
        """Add `values` at `places` to the run of load `i`; zeros do not end a run."""
        addresses = [Int64(place.toint()) for place in places]
        self._add_group(runs, self.run_of(i), addresses, list(values))

    @cute.jit
    def _add_group(
        self,
        runs: Runs,
        at: cutlass.Constexpr,
        addresses: list,
        values: list,
    ):
        known = runs.places[at]
        same = Boolean(True)
        for address, value in zip(addresses, values, strict=True):
            same = same & ((address == known) | (value == Float32(0.0)))
        # in most groups all values continue the run: one test instead of one per value
        if same:
            total = values[0]
            for value in values[1:]:
                total = total + value
            runs.sums[at] = runs.sums[at] + total
        else:
            for address, value in zip(addresses, values, strict=True):
                self._add_one(runs, at, address, value)

    @cute.jit
    def _add_one(self, runs: Runs, at: cutlass.Constexpr, address: Int64, value: Float32):
        if value != Float32(0.0):
            if address != runs.places[at]:
                self._add_sum(runs.sums[at] != Float32(0.0), runs.places[at], runs.sums[at])
                runs.places[at] = address
                runs.sums[at] = value
            else:
                runs.sums[at] = runs.sums[at] + value

    def _add_sum(self, condition: Any, address: Any, value: Any) -> None:
        """Add the sum of a run in memory. A sum of 0 has no place, so it must not be added."""
        dtype = Int64 if self.config.sum_order else Float32
        place = cute.make_ptr(
            dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8
        )
        self.add_where(condition, place, value)

    def end_runs(self, runs: Runs) -> None:
        """Add all runs in memory, at the end of a work tile; all lanes of a warp must call it."""
        for at in range(sum(self.hooks.gradient_repeats)):
            self._end_run(runs, at)

    @cute.jit
    def _end_run(self, runs: Runs, at: cutlass.Constexpr):
        address, value = runs.places[at], runs.sums[at]
        first = cute.arch.shuffle_sync(address, 0)
        # one addition for the warp, if its lanes have the same place
        if cute.arch.vote_all_sync((address == first) | (value == Float32(0.0))):
            for step in (16, 8, 4, 2, 1):
                value = value + cute.arch.shuffle_sync_bfly(value, step)
            lead = (cute.arch.lane_idx() == 0) & (value != Float32(0.0))
            self._add_sum(lead, first, value)
        else:
            self._add_sum(value != Float32(0.0), address, value)

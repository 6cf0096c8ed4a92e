"""Write the results of the Hopper forward for head dims above 256: a part of the value columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.sm90.config import WARPGROUP_ROWS
from attnkit.templates.sm90.forward_epilogue import Epilogue, Results, RowPlace
from attnkit.templates.sm90.forward_hd512_config import Hd512Config
from attnkit.templates.sm90.forward_mma import ForwardMma


@dataclass(frozen=True)
class PartPlace(RowPlace):
    """Describes the position of a thread's first row, and the part of its value columns.

    Attributes:
        part: the part of the value columns.
    """

    part: Int32


class Hd512Epilogue(Epilogue):
    """Normalises and stores the output of a part of a work tile.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
    """

    config: Hd512Config

    def __init__(self, config: Hd512Config, hooks: ForwardHooks) -> None:
        super().__init__(config, hooks)

    @cute.jit
    def _write_row(
        self,
        results: Results,
        value: Any,
        statistics: tuple,
        place: PartPlace,
        r: cutlass.Constexpr,
    ):
        """Write LSE and statistics of row `r`, if this CTA has the first part of the value columns."""
        if place.part == 0:
            Epilogue._write_row(self, results, value, statistics, place, r)

    @cute.jit
    def store_part(
        self,
        mma: ForwardMma,
        rounded: cute.Tensor,
        results: Results,
        place: PartPlace,
        warpgroup: Int32,
    ):
        """Store a warpgroup's output; parts of split rows in float32, for `Combine`.

        `rounded` are registers for the rounded output, in the layout of the accumulator.
        """
        if place.work.split_slot >= 0:
            self.store_split_part(mma, results, place, warpgroup)
        else:
            self.store_from_registers(mma.acc_o, rounded, results.out, place)

    def store_split_part(
        self, mma: ForwardMma, results: Results, place: PartPlace, warpgroup: Int32
    ) -> None:
        """Store the float32 output of a part of split rows to its slot."""
        tile = cute.local_tile(  # f32 [64, head_dim_v]
            results.split_out[place.work.split_slot, None, None],
            (WARPGROUP_ROWS, self.config.head_dim_v),
            (warpgroup, place.part),
        )
        target = mma.thr_pv.partition_C(tile)  # f32 [64, head_dim_v] / 128 threads
        for i in range(cute.size(mma.acc_o)):
            target[i] = mma.acc_o[i]

    @cute.jit
    def _store_row(
        self,
        values: Any,
        start: Any,
        first: Int32,
        place: PartPlace,
        groups: cutlass.Constexpr,
        depth: cutlass.Constexpr,
    ):
        """Store the thread's 8 bytes of each group of 16 columns that the output has."""
        columns = self.config.head_dim_v
        most = (self.config.value_parts - 1) * columns  # first column of the last part
        own = start + place.part * columns
        begin = first + place.part * columns
        for j in cutlass.range_constexpr(groups):
            if const_expr(most + 16 * j + 16 <= depth):
                self._store_group(values, own, j)
            elif begin + 16 * j < depth:
                self._store_group(values, own, j)

"""Model the tensor memory of a CTA and its allocation (PTX ISA, "Tensor Memory")."""

from __future__ import annotations

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.numerics.formats import Lanes, u4

TMEM_COLUMNS = 512


class TensorMemory:
    """Holds 512 columns of 128 lanes of 32 bits, and the allocations of columns.

    Attributes:
        live: number of columns of each allocation, by its first column.
        relinquished: whether tcgen05.relinquish_alloc_permit was executed.
    """

    def __init__(self) -> None:
        self._data: Lanes | None = None
        self.live: dict[int, int] = {}
        self.relinquished = False
        self.last = TMEM_COLUMNS  # columns of the last allocation; later ones must not be larger
        # (operation, column, columns) of each cta_group::2 alloc and dealloc; the peer CTA must
        # execute the same ones
        self.collective: list[tuple[str, int, int]] = []

    @property
    def data(self) -> Lanes:
        """Return the contents [column, lane] as 32-bit words; initially each is a float32 NaN."""
        if self._data is None:
            self._data = np.full((TMEM_COLUMNS, 128), 0x7FC0DEAD, u4)
        return self._data

    def allocate(self, columns: int, group: int = 1) -> int:
        """Allocate columns, and return the first; `group`: number of CTAs that allocate together.

        Fault if no columns are free, where hardware would block.
        """
        if columns < 32 or columns > TMEM_COLUMNS or columns & (columns - 1):
            raise Trap(
                "tensor-memory", f"tcgen05.alloc of {columns} columns: a power of 2, 32 to 512"
            )
        if self.relinquished:
            raise Trap("tensor-memory", "tcgen05.alloc after relinquish_alloc_permit")
        if columns > self.last:
            raise Trap(
                "tensor-memory",
                f"tcgen05.alloc of {columns} columns after one of {self.last}: must not increase",
            )
        self.last = columns
        at = 0
        for base in sorted(self.live):
            if base - at >= columns:
                break
            at = base + self.live[base]
        if at + columns > TMEM_COLUMNS:
            raise Trap("tensor-memory", f"no {columns} free columns, allocated: {self.live}")
        self.live[at] = columns
        if group == 2:
            self.collective.append(("alloc", at, columns))
        return at

    def free(self, base: int, columns: int, group: int = 1) -> None:
        """Free an allocation of `columns` columns that begins at column `base`."""
        if group == 2:
            self.collective.append(("dealloc", base, columns))
        if self.live.pop(base, None) != columns:
            raise Trap(
                "tensor-memory", f"tcgen05.dealloc of {columns} columns at {base}: not allocated"
            )

    def check(self, column: int, n: int) -> None:
        """Fault if not all of the `n` columns from `column` on are allocated."""
        for base, size in self.live.items():
            if base <= column and column + n <= base + size:
                return
        raise Trap("tensor-memory", f"columns {column} to {column + n - 1} are not allocated")

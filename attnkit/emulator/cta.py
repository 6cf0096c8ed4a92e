"""One CTA: its shared, local and tensor memory, its barriers and its gangs of warps."""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from attnkit.emulator.barriers import MBarrier, NamedBarrier
from attnkit.emulator.faults import Trap
from attnkit.emulator.formats import Lanes, u1, u4
from attnkit.emulator.ops_bulk import BulkState
from attnkit.emulator.program import Program
from attnkit.emulator.spaces import PARAM_BASE
from attnkit.emulator.tensormap import TensorMap, decode
from attnkit.emulator.wording import mbarrier_name

if TYPE_CHECKING:
    from attnkit.emulator.cluster import Cluster
    from attnkit.emulator.gang import Gang
    from attnkit.emulator.launch import Launch
    from attnkit.emulator.memory import GlobalMemory

TMEM_COLUMNS = 512
UNDEFINED = 0xFFFF0BAD


class TensorMemory:
    """512 columns of 128 lanes of 32 bits, and what of them is allocated (PTX ISA, "Tensor Memory")."""

    def __init__(self) -> None:
        self._data: Lanes | None = None
        self.live: dict[int, int] = {}
        self.relinquished = False
        self.last = TMEM_COLUMNS  # columns of the last allocation: they must not increase
        self.collective: list[tuple[str, int, int]] = []  # what the peer CTA has to do as well

    @property
    def data(self) -> Lanes:
        """[column, lane]; filled with a NaN at first."""
        if self._data is None:
            self._data = np.full((TMEM_COLUMNS, 128), 0x7FC0DEAD, u4)
        return self._data

    def allocate(self, columns: int, group: int = 1) -> int:
        """The first column of the allocation; `group`: CTAs that allocate together."""
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
        if group == 2:
            self.collective.append(("dealloc", base, columns))
        if self.live.pop(base, None) != columns:
            raise Trap(
                "tensor-memory", f"tcgen05.dealloc of {columns} columns at {base}: not allocated"
            )

    def check(self, column: int, n: int) -> None:
        for base, size in self.live.items():
            if base <= column and column + n <= base + size:
                return
        raise Trap("tensor-memory", f"columns {column} to {column + n - 1} are not allocated")


class Cta:
    """State of one CTA. `late`: asynchronous work is put off (the adversarial mode)."""

    def __init__(self, cluster: Cluster, launch: Launch, ctaid: tuple[int, int, int], rank: int):
        self.cluster = cluster
        self.launch = launch
        self.program: Program = launch.program
        self.memory: GlobalMemory = launch.memory
        self.ctaid = ctaid
        self.rank = rank
        self.late = launch.mode.late
        self.strict_loads = launch.mode.strict_loads
        self.threads = launch.threads
        self.threads_in_warps = -(-self.threads // 32) * 32
        size = -(-(launch.shared + self.program.static_shared) // 1024) * 1024
        self.smem = np.full(max(size, 1024), 0xFF, u1)
        self._views: dict[tuple[Any, int], Lanes] = {}
        self._params: dict[tuple[int, Any, int], Lanes] = {}
        self._maps: dict[int, TensorMap] = {}
        local = -(-self.program.local_bytes // 16) * 16
        self.local = np.full((self.threads_in_warps, local), 0xFF, u1)
        self.tmem = TensorMemory()
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.bulk: dict[int, BulkState] = {}
        self.refused = False  # it has seen that no cluster was left to take over
        self.products: Counter[int] = Counter()  # wgmma by warp
        self.gangs: list[Gang] = []
        self.finished: list[Gang] = []

    @property
    def alive(self) -> bool:
        """Whether any thread has not exited."""
        return any(g.groups for g in self.gangs)

    def view(self, dtype: Any, n: int) -> Lanes:
        """Shared memory as items of `dtype`, in rows of n if n > 1."""
        key = (dtype, n)
        if key not in self._views:
            v = self.smem.view(dtype)
            self._views[key] = v if n == 1 else v.reshape(-1, n)
        return self._views[key]

    def checked(self, offsets: Lanes) -> Lanes:
        """`offsets` into shared memory, if all are inside."""
        lo, hi = int(offsets.min()), int(offsets.max())
        if lo < 0 or hi >= self.smem.size:
            raise Trap(
                "bounds", f"matrix operand at shared {lo:+#x} to {hi:+#x}, size {self.smem.size:#x}"
            )
        return offsets

    def param(self, offset: int, dtype: Any, width: int) -> Lanes:
        key = (offset, dtype, width)
        if key not in self._params:
            size = np.dtype(dtype).itemsize
            value = np.frombuffer(self.launch.params[offset : offset + size], dtype)
            self._params[key] = np.full(width, value[0])
        return self._params[key]

    def tensor_map(self, address: int) -> TensorMap:
        if address not in self._maps:
            off = address - PARAM_BASE
            if 0 <= off <= len(self.launch.params) - 128:
                raw = self.launch.params[off : off + 128]
            else:
                b = self.memory.find(address, address + 128)
                raw = b.data[address - b.base : address - b.base + 128].tobytes()
            if address % 64:
                raise Trap("descriptor", f"tensor map at {address:#x} is not 64-byte aligned")
            self._maps[address] = decode(raw)
        return self._maps[address]

    def barrier_name(self, offset: int, line: int) -> str:
        """A word for the mbarrier at `offset`, initialised at a line of the PTX: as it was given, or
        as the program calls it."""
        given = self.launch.names.get(offset)
        if given is not None:
            return given
        source = self.launch.source_of(line)
        name = mbarrier_name(source)
        return f"mbarrier {name}{' at ' if name else ''}smem+{offset:#x} of rank {self.rank}" + (
            f" ({source})" if source else ""
        )

    def clc_words(self, ctaid: tuple[int, int, int] | None) -> bytes:
        """Our encoding of the opaque response of clusterlaunchcontrol.try_cancel; the numbers in a
        refusal are undefined, so they are none that a grid has."""
        x, y, z = ctaid or (UNDEFINED, UNDEFINED, UNDEFINED)
        return struct.pack("<4I", x, y, z, 1 if ctaid else 0)

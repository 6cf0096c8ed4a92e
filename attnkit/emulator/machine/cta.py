"""Model a CTA: its shared, local and tensor memory, its barriers and its parameters."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.address_spaces import PARAM_BASE
from attnkit.emulator.machine.async_groups import BulkGroups
from attnkit.emulator.machine.barriers import MBarrier, NamedBarrier
from attnkit.emulator.machine.launch import Launch
from attnkit.emulator.machine.tensor_maps import TensorMap, decode
from attnkit.emulator.machine.tensor_memory import TensorMemory
from attnkit.emulator.numerics.formats import Lanes, u1
from attnkit.emulator.ptx.barrier_names import mbarrier_name

UNDEFINED = 0xFFFF0BAD


class Cta:
    """Holds the memories and barriers of one CTA.

    Attributes:
        ctaid, rank: its position in the grid, and in its cluster.
        threads_in_warps: number of threads, rounded up to whole warps.
        smem: shared memory, one element for each byte.
        local: local memory [threads of whole warps, bytes].
        mbarriers, named: mbarriers by address, and named barriers by number.
        bulk: bulk async-groups by thread.
        refused: whether clusterlaunchcontrol.query_cancel has told a thread of the CTA that a
            request for another cluster failed.
        products: number of wgmma that each warp has executed.
        exited: number of threads that have exited.
    """

    def __init__(self, launch: Launch, ctaid: tuple[int, int, int], rank: int) -> None:
        self.launch = launch
        self.ctaid = ctaid
        self.rank = rank
        self.threads = launch.threads
        self.threads_in_warps = -(-self.threads // 32) * 32
        size = -(-(launch.shared + launch.static.shared_bytes) // 1024) * 1024
        self.smem = np.full(max(size, 1024), 0xFF, u1)
        self._views: dict[tuple[Any, int], Lanes] = {}
        self._params: dict[tuple[int, Any, int], Lanes] = {}
        self._maps: dict[int, TensorMap] = {}
        local = -(-launch.static.local_bytes // 16) * 16
        self.local = np.full((self.threads_in_warps, local), 0xFF, u1)
        self.tmem = TensorMemory()
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.bulk: dict[int, BulkGroups] = {}
        self.refused = False
        self.products: Counter[int] = Counter()
        self.exited = 0

    @property
    def alive(self) -> bool:
        """Return whether any thread has not exited."""
        return self.exited < self.threads

    def view(self, dtype: Any, n: int) -> Lanes:
        """Return a view of shared memory as items of `dtype`, in rows of n if n > 1."""
        key = (dtype, n)
        if key not in self._views:
            v = self.smem.view(dtype)
            self._views[key] = v if n == 1 else v.reshape(-1, n)
        return self._views[key]

    def checked(self, offsets: Lanes) -> Lanes:
        """Return `offsets` into shared memory; fault if one is outside."""
        lo, hi = int(offsets.min()), int(offsets.max())
        if lo < 0 or hi >= self.smem.size:
            raise Trap(
                "bounds", f"matrix operand at shared {lo:+#x} to {hi:+#x}, size {self.smem.size:#x}"
            )
        return offsets

    def param(self, offset: int, dtype: Any, width: int) -> Lanes:
        """Return a kernel parameter as a vector of `width` lanes."""
        key = (offset, dtype, width)
        if key not in self._params:
            size = np.dtype(dtype).itemsize
            value = np.frombuffer(self.launch.params[offset : offset + size], dtype)
            self._params[key] = np.full(width, value[0])
        return self._params[key]

    def tensor_map(self, address: int) -> TensorMap:
        """Decode the tensor map at an address of a parameter or of global memory."""
        if address not in self._maps:
            off = address - PARAM_BASE
            if 0 <= off <= len(self.launch.params) - 128:
                raw = self.launch.params[off : off + 128]
            else:
                b = self.launch.memory.find(address, address + 128)
                raw = b.data[address - b.base : address - b.base + 128].tobytes()
            if address % 64:
                raise Trap("descriptor", f"tensor map at {address:#x} is not 64-byte aligned")
            self._maps[address] = decode(raw)
        return self._maps[address]

    def barrier_name(self, offset: int, line: int) -> str:
        """Return a name for the mbarrier at `offset`, which PTX line `line` initialised.

        `Launchable.describe` may set the name; otherwise it comes from the kernel's source.
        """
        name = self.launch.names.get(offset)
        if name is not None:
            return name
        source = self.launch.source_of(line)
        name = mbarrier_name(source)
        return f"mbarrier {name}{' at ' if name else ''}smem+{offset:#x} of rank {self.rank}" + (
            f" ({source})" if source else ""
        )

    def clc_words(self, ctaid: tuple[int, int, int] | None) -> bytes:
        """Encode a response of clusterlaunchcontrol.try_cancel; `ctaid` is None if it failed.

        The encoding is opaque to PTX programs. The first CTA in a failed response is undefined, so
        the response has a CTA that is in no grid.
        """
        x, y, z = ctaid or (UNDEFINED, UNDEFINED, UNDEFINED)
        return struct.pack("<4I", x, y, z, 1 if ctaid else 0)

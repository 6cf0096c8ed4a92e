"""Loads and stores on shared, global, local and generic addresses (PTX ISA, ld and st)."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.formats import Lanes, u8
from attnkit.emulator.spaces import (
    LOCAL_BASE,
    OFFSET_MASK,
    PARAM_BASE,
    RANK_SHIFT,
    SHARED_BASE,
)
from attnkit.emulator.state import GangState, Mask


class MemoryOps(GangState):
    # ---- shared memory
    def _shared(self, a: Lanes, m: Mask, size: int) -> tuple[int, Lanes]:
        """(rank, byte offsets of the active lanes); all lanes of one CTA, aligned, in bounds."""
        x = a if m is self.full else a[m]
        bits = int(np.bitwise_or.reduce(x))
        rank = int(x[0]) >> RANK_SHIFT
        if rank >= len(self.cta.cluster.ctas):
            raise Trap(
                "bounds", f"shared address {int(x[0]):#x}: no CTA of rank {rank} in the cluster"
            )
        if rank != self.cta.rank:
            self.cta.cluster.reached(rank)
        if bits & (size - 1):
            bad = int(x[(x & x.dtype.type(size - 1)) != 0][0]) & OFFSET_MASK
            raise Trap("alignment", f"shared access of {size} bytes at +{bad - SHARED_BASE:#x}")
        off = (x & x.dtype.type(OFFSET_MASK)).astype(np.int64) - SHARED_BASE
        lo, hi = int(off.min()), int(off.max())
        if lo < 0 or hi + size > self.cta.cluster.ctas[rank].smem.size:
            bad = lo if lo < 0 else hi
            have = self.cta.cluster.ctas[rank].smem.size
            raise Trap("bounds", f"shared access of {size} bytes at {bad:+#x}, size {have:#x}")
        return rank, off

    def _by_rank(self, a: Lanes, m: Mask) -> list[Mask]:
        """Masks of lanes that address the same CTA's shared memory."""
        if len(self.cta.cluster.ctas) == 1:
            return [m]
        ranks = (a >> a.dtype.type(RANK_SHIFT)).astype(np.int64)
        every = np.unique(ranks[m])
        return [m] if every.size == 1 else [m & (ranks == r) for r in every]

    def ld_shared(self, a: Lanes, m: Mask, dt: Any, n: int) -> list[Lanes]:
        parts = self._by_rank(a, m)
        size = np.dtype(dt).itemsize * n
        out = np.zeros((n, self.width), dt)
        for part in parts:
            rank, off = self._shared(a, part, size)
            if self.race is not None and self.clock_ is not None:
                i = self.race.shared(rank, off, size)
                self.race.read(i, self.clock_, asynchronous=False, line=self.line)
            got = self.cta.cluster.ctas[rank].view(dt, n)[off // size]
            if part is self.full:
                return list(np.ascontiguousarray(got.T)) if n > 1 else [got]
            out[:, part] = got.T
        return list(out)

    def st_shared(self, a: Lanes, m: Mask, dt: Any, values: list[Lanes]) -> None:
        n = len(values)
        size = np.dtype(dt).itemsize * n
        for part in self._by_rank(a, m):
            rank, off = self._shared(a, part, size)
            if self.race is not None and self.clock_ is not None:
                i = self.race.shared(rank, off, size)
                self.race.write(i, self.clock_, generic=True, line=self.line)
            target = self.cta.cluster.ctas[rank].view(dt, n)
            i = off // size
            chosen = values if part is self.full else [v[part] for v in values]
            if n == 1:
                target[i] = chosen[0]
            else:
                for j, v in enumerate(chosen):
                    target[i, j] = v

    # ---- global memory
    def _global(self, a: Lanes, m: Mask, size: int) -> tuple[Any, Lanes, Mask]:
        """(buffer, byte offsets of the lanes of one buffer, the mask of those lanes)."""
        x = a if m is self.full else a[m]
        if int(np.bitwise_or.reduce(x)) & (size - 1):
            bad = int(x[(x & u8(size - 1)) != 0][0])
            raise Trap("alignment", f"global access of {size} bytes at {bad:#x}")
        lo, hi = int(x.min()), int(x.max())
        memory = self.cta.memory
        for b in memory.buffers:
            if b.base <= lo and hi + size <= b.end:
                return b, (x - u8(b.base)).astype(np.int64), m
        b = memory.find(lo, lo + size)
        part = m & (a >= u8(b.base)) & (a + u8(size) <= u8(b.end))
        return b, (a[part] - u8(b.base)).astype(np.int64), part

    def ld_global(self, a: Lanes, m: Mask, dt: Any, n: int) -> list[Lanes]:
        item = np.dtype(dt).itemsize
        out, rest = np.zeros((n, self.width), dt), m
        while True:
            b, off, part = self._global(a, rest, item * n)
            self.cta.memory.check_defined(b, off, item * n)
            view, i = self._items(b, off, dt)
            if part is self.full:
                return [view[i + j] for j in range(n)]
            for j in range(n):
                out[j, part] = view[i + j]
            rest = rest & ~part
            if not rest.any():
                return list(out)

    def st_global(self, a: Lanes, m: Mask, dt: Any, values: list[Lanes]) -> None:
        item, rest = np.dtype(dt).itemsize, m
        while True:
            b, off, part = self._global(a, rest, item * len(values))
            self.cta.memory.mark(b, off, item * len(values))
            view, i = self._items(b, off, dt)
            for j, v in enumerate(values):
                view[i + j] = v if part is self.full else v[part]
            self.cta.cluster.events += 1
            rest = rest & ~part
            if part is self.full or not rest.any():
                return

    @staticmethod
    def _items(b: Any, off: Any, dt: Any) -> tuple[Lanes, Lanes]:
        """A view of a buffer whose items are aligned as the addresses are, and the indices."""
        item = np.dtype(dt).itemsize
        skew = -b.base % item
        if skew == 0:
            return b.view(dt), off // item
        data = b.data[skew:]
        return data[: data.size // item * item].view(dt), (off - skew) // item

    # ---- local and generic addresses
    def ld_local(self, a: Lanes, m: Mask, dt: Any, n: int) -> list[Lanes]:
        rows, i, view = self._local(a, m, dt, n)
        out = np.zeros((n, self.width), dt)
        for j in range(n):
            out[j, m] = view[rows, i + j]
        return list(out)

    def st_local(self, a: Lanes, m: Mask, dt: Any, values: list[Lanes]) -> None:
        rows, i, view = self._local(a, m, dt, len(values))
        for j, v in enumerate(values):
            view[rows, i + j] = v[m]

    def _local(self, a: Lanes, m: Mask, dt: Any, n: int) -> tuple[Lanes, Lanes, Lanes]:
        item, memory = np.dtype(dt).itemsize, self.cta.local
        off = a[m].astype(np.int64) - LOCAL_BASE
        if (off < 0).any() or (off + item * n > memory.shape[1]).any():
            raise Trap("bounds", f"local access at {int(off.min()):+#x}, size {memory.shape[1]:#x}")
        if (off % (item * n)).any():
            raise Trap("alignment", f"local access of {item * n} bytes at {int(off.max()):+#x}")
        return self.thread[m], off // item, memory.view(dt)

    thread: Lanes

    def _kind(self, a: Lanes, m: Mask) -> str:
        x = self.uniform(a, m)
        if x < 1 << 32:  # where an interpreter may have its heap, too
            low = any(b.base <= x < b.end for b in self.cta.memory.buffers)
            return "global" if low else "shared"
        return "local" if LOCAL_BASE <= x < LOCAL_BASE + (1 << 32) else "global"

    def ld_generic(self, a: Lanes, m: Mask, dt: Any, n: int) -> list[Lanes]:
        x = self.uniform(a, m)
        if PARAM_BASE <= x < PARAM_BASE + (1 << 20):
            item = np.dtype(dt).itemsize
            return [self.param(x + j * item, dt) for j in range(n)]
        out: list[Lanes] = getattr(self, f"ld_{self._kind(a, m)}")(a, m, dt, n)
        return out

    def st_generic(self, a: Lanes, m: Mask, dt: Any, values: list[Lanes]) -> None:
        getattr(self, f"st_{self._kind(a, m)}")(a, m, dt, values)

    def in_space(self, a: Lanes, space: str) -> Lanes:
        small = a < u8(1 << 32)
        for b in self.cta.memory.buffers:
            if b.base < 1 << 32:
                small &= (a < u8(b.base)) | (a >= u8(b.end))
        local = (a >= u8(LOCAL_BASE)) & (a < u8(LOCAL_BASE + (1 << 32)))
        return {"shared": small, "local": local}.get(space, ~small & ~local)

    def param(self, address: int, dt: Any) -> Lanes:
        """A kernel parameter, the same in every lane."""
        return self.cta.param(address - PARAM_BASE, dt, self.width)

    @staticmethod
    def mulhi64(a: Lanes, b: Lanes) -> Lanes:
        prod = [(x * y) >> 64 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        return np.array(prod, u8)

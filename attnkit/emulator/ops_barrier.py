"""mbarriers, named barriers, the cluster barrier, proxy fences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnkit.emulator.barriers import MBarrier, NamedBarrier
from attnkit.emulator.faults import Finding, Place, Trap
from attnkit.emulator.formats import Lanes, u8
from attnkit.emulator.spaces import OFFSET_MASK, RANK_SHIFT, SHARED_BASE
from attnkit.emulator.state import GangState, Mask
from attnkit.emulator.wording import barrier_name


class BarrierOps(GangState):
    bar_waits: dict[int, tuple[int, int]]
    cluster_wait_for: int
    last_polls: dict[int, bytes]
    polling: bool
    leaving: Lanes | None  # lanes of warps that must leave the gang before this block can run

    if TYPE_CHECKING:  # Gang has it

        def place(self, line: int) -> Place: ...

    def _find(self, address: int) -> MBarrier:
        return self.cta.cluster.mbarrier(address)

    def _lanes(self, a: Lanes, m: Mask) -> list[tuple[int, int]]:
        """(address, number of lanes that name it), in order of the lanes."""
        x = a if m is self.full else a[m]
        first = int(x[0])
        if x.size == 1 or (x == x[0]).all():
            return [(first, x.size)]
        values, where, counts = np.unique(x, return_index=True, return_counts=True)
        order = np.argsort(where)
        return [(int(values[i]), int(counts[i])) for i in order]

    def _known(self, b: MBarrier) -> None:
        """With race detection: the initialisation must be visible to whoever uses the barrier."""
        if self.race is not None and self.clock_ is not None and b.made is not None:
            text = f"use of {b.name} not ordered after its mbarrier.init"
            self.race.ordered(*b.made, self.clock_, text, self.line, b.line)

    def mb_init(self, a: Lanes, count: Lanes, m: Mask) -> None:
        for address, n in self._lanes(a, m):
            who = m & (a == a.dtype.type(address))
            if n > 1:
                self._shared_init(address, count, who)
            off = address & OFFSET_MASK
            if off % 8 or address >> RANK_SHIFT != self.cta.rank:
                raise Trap("alignment", f"mbarrier.init at shared address {address:#x}")
            c = int(count[self.active(who)[0]])
            old = self.cta.mbarriers.get(off)
            if old is not None and (old.flips or old.pending != old.count or old.tx):
                raise Trap("barrier", f"mbarrier.init of an object in use: {old}")
            name = self.cta.barrier_name(off - SHARED_BASE, self.line)
            b = self.cta.mbarriers[off] = MBarrier(off, c, self.line, name)
            if self.clock_ is not None:
                b.made = (self.clock_.agent, self.clock_.now)

    def _shared_init(self, address: int, count: Lanes, who: Mask) -> None:
        """Several threads initialise one object: undefined by the PTX ISA (mbarrier.init of a valid
        object), yet published kernels let all lanes of one warp do it at once."""
        n, warps = np.count_nonzero(who), self.warps_of(who)
        if len(warps) > 1 or np.unique(count[who]).size > 1:
            raise Trap("barrier", f"mbarrier.init of one object by {n} threads of warps {warps}")
        text = f"mbarrier.init of the object at shared {address & OFFSET_MASK:#x} by {n} lanes"
        self.cta.launch.note(Finding("barrier", text, self.place(self.line), "warning"))

    def mb_inval(self, a: Lanes, m: Mask) -> None:
        for address, _ in self._lanes(a, m):
            self._find(address)
            del self.cta.mbarriers[address & OFFSET_MASK]

    def mb_expect(self, a: Lanes, tx: Lanes, m: Mask) -> None:
        for lane in self.active(m).tolist():
            b = self._find(int(a[lane]))
            self._known(b)
            b.expect(int(tx[lane]))
        self.cta.cluster.events += 1

    def mb_complete(self, a: Lanes, tx: Lanes, m: Mask) -> None:
        for lane in self.active(m).tolist():
            self._find(int(a[lane])).expect(-int(tx[lane]))
        self.cta.cluster.events += 1

    def mb_arrive(
        self, a: Lanes, n: Lanes, m: Mask, tx: Lanes | None, drop: bool, relaxed: bool
    ) -> Lanes:
        """mbarrier.arrive[.expect_tx]; returns the phase before, as the state token."""
        state = 0
        for address, lanes in self._lanes(a, m):
            b = self._find(address)
            self._known(b)
            state = b.phase
            who = m & (a == a.dtype.type(address))
            if self.events is not None:
                self.events.add("arrive", self.line, what=b, phase=b.flips)
            b.release(self.clock_, relaxed)
            if drop:
                b.count -= lanes
            if tx is not None:
                b.expect(int(tx[who].astype(np.int64).sum()))
            b.arrive(int(n[who].astype(np.int64).sum()))
        self.cta.cluster.events += 1
        if self.clock_ is not None:
            self.clock_.tick()
        return np.full(self.width, state, u8)

    def mb_wait(
        self, a: Lanes, phase: Lanes, m: Mask, spin: bool, parity: bool, relaxed: bool
    ) -> Lanes | None:
        """Lanes whose phase is complete; None when all must wait. A fresh barrier lets parity 1
        pass (PTX ISA, mbarrier.test_wait: the phase before the current one is complete)."""
        ok = np.zeros(self.width, bool)
        bits = phase & phase.dtype.type(1)
        waits = ""
        for address, _ in self._lanes(a, m):
            b = self._find(address)
            self._known(b)
            lanes = m & (a == a.dtype.type(address))
            passed = lanes & (bits != b.phase)
            if passed.any():
                ok |= passed
                if self.events is not None:
                    self.events.add("wait", self.line, what=b, phase=b.flips - 1)
                if self.clock_ is not None and b.done is not None:
                    self.clock_.learn(b.done, relaxed)
            else:
                waits = f"waits for parity {self.uniform(bits, lanes)} of {b}"
        if ok.any():
            self.why = ""
            return ok
        self.why = waits
        if spin:
            return None
        self.yielded = self.polling = True
        return ok

    # ---- named barriers
    def bar(self, block: int, number: Lanes, threads: Lanes | None, m: Mask, arrive: bool) -> bool:
        """bar.sync and bar.arrive, counted in whole warps; False while it must wait."""
        if block in self.bar_waits:
            return self._resume(block)
        if self._differ(number, m, "number") or (
            threads is not None and self._differ(threads, m, "thread count")
        ):
            return False
        i = self.uniform(number, m)
        if not 0 <= i < 16:
            raise Trap("barrier", f"barrier {i}: there are 16, numbered 0 to 15")
        if i not in self.cta.named:
            name = barrier_name(self.cta.launch.source_of(self.line))
            self.cta.named[i] = NamedBarrier(i, name=name)
        b = self.cta.named[i]
        n = self.uniform(threads, m) if threads is not None else self.cta.threads_in_warps
        warps = self.warps_of(m)
        generation = b.generation
        if self.events is not None:
            self.events.add("arrive", self.line, what=b, phase=generation)
        b.release(self.clock_)
        if self.clock_ is not None:
            self.clock_.tick()
        done = b.arrive(32 * len(warps), n, warps)
        self.cta.cluster.events += 1
        if arrive:
            return True
        if done:
            self._learn(b, generation)
            return True
        self.bar_waits[block] = (i, generation)
        self.why = f"waits at {b}"
        return False

    def _differ(self, x: Lanes, m: Mask, what: str) -> bool:
        """Whether the warps of the gang disagree on `x`; those that disagree with the first then
        leave the gang, before either part goes on."""
        first = self.uniform(x, m)
        same = m & (x == x.dtype.type(first))
        if np.count_nonzero(same) == np.count_nonzero(m):
            return False
        rest = (m & ~same).reshape(-1, 32).any(1)
        if (rest & same.reshape(-1, 32).any(1)).any():
            raise Trap("barrier", f"lanes of one warp give a barrier's {what} differently")
        self.leaving = np.repeat(rest, 32)
        return True

    def _resume(self, block: int) -> bool:
        i, generation = self.bar_waits[block]
        b = self.cta.named[i]
        if b.generation == generation:
            self.why = f"waits at {b}"
            return False
        del self.bar_waits[block]
        self.why = ""
        self._learn(b, generation)
        return True

    def _learn(self, b: NamedBarrier, generation: int) -> None:
        if self.events is not None:
            self.events.add("wait", self.line, what=b, phase=generation)
        if self.clock_ is not None:
            self.clock_.join(*b.clocks[generation])

    # ---- cluster barrier
    def cluster_arrive(self, m: Mask, relaxed: bool) -> bool:
        b = self.cta.cluster.barrier
        if self.cluster_wait_for >= 0:
            raise Trap("barrier", "barrier.cluster.arrive twice without a wait")
        self.cluster_wait_for = b.generation
        if self.events is not None:
            self.events.add("arrive", self.line, what=b, phase=b.generation)
        self.cta.cluster.release_cluster(self.clock_, relaxed)
        b.arrive(len(self.warps_of(m)))
        self.cta.cluster.events += 1
        return True

    def cluster_wait(self, m: Mask) -> bool:
        b = self.cta.cluster.barrier
        if self.cluster_wait_for < 0:
            raise Trap("barrier", "barrier.cluster.wait without an arrive")
        if b.generation == self.cluster_wait_for:
            self.why = f"waits at barrier.cluster ({b.arrived} of {b.warps} warps)"
            return False
        if self.clock_ is not None:
            told = b.clocks.get(self.cluster_wait_for)
            if told is not None:  # else all arrived relaxed, with nothing fenced
                self.clock_.join(*told)
        if self.events is not None:
            self.events.add("wait", self.line, what=b, phase=self.cluster_wait_for)
        self.cluster_wait_for, self.why = -1, ""
        return True

    # ---- others
    def fence_proxy(self, m: Mask) -> None:
        """fence.proxy.async: generic writes known here become visible to the async proxy."""
        if self.clock_ is not None:
            np.maximum(self.clock_.fenced, self.clock_.known, out=self.clock_.fenced)
            self.clock_.tick()

    def fence(self) -> None:
        """What is known here may be handed on by relaxed arrivals, what they brought is known."""
        if self.clock_ is not None:
            self.clock_.fence()

    def polled(self, block: int, registers: list[int], m: Mask) -> None:
        """A strong load of global memory: yields if it brought nothing new."""
        values: Any = b"".join(self.R[i][m].tobytes() for i in registers)
        if self.last_polls.get(block) == values:
            self.yielded = self.polling = True
            self.why = "polls global memory"
        self.last_polls[block] = values

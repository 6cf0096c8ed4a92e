"""Detect races on global memory, between the warps, CTAs and kernels of a call.

Memory is tracked in granules of 2 bytes (1 if the kernel has smaller stores). Two accesses of the
same granule, at least one of them a write, race if neither happens before the other:

- Within a cluster, the vector clocks of `knowledge` order accesses.
- Between clusters, a release by one and an acquire by the other at the same address order them, if
  the scope of both includes the other thread (PTX ISA, "Release and Acquire Patterns" and "Scope").
- Between kernels, the stream orders them, or griddepcontrol.wait if the later kernel was launched
  as a programmatic dependent.

Two accesses that are both strong (or atomic) do not race.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from attnkit.emulator.machine.global_memory import Buffer, GlobalMemory
from attnkit.emulator.machine.knowledge import (
    CLUSTER,
    CTA,
    GLOBAL,
    GPU,
    KNOWN,
    Clock,
    Knowledge,
    Order,
    joined,
)

# Columns of an access record. WHO_CLUSTER is the number of the cluster plus 1; 0 means no access.
WHO_CLUSTER, WHO_AGENT, TIME, KIND, LINE = range(5)
COLUMNS = 5
_JOINED = 4096  # most results of `GlobalRaces._with` that are cached
GENERIC, STRONG = 1, 2  # bits of KIND
Rows = NDArray[np.int32]


class Place(Protocol):
    """Names a CTA: its position in the grid, and its rank in the cluster."""

    ctaid: tuple[int, int, int]
    rank: int


class Accessor(Protocol):
    """Represents the warp that accesses memory or issued an asynchronous operation."""

    line: int
    clock: Clock | None

    @property
    def cta(self) -> Place:
        """Return the CTA of the warp."""
        ...

    def handed_on(self, m: Any, relaxed: bool = False, scope: int = CLUSTER) -> Knowledge | None:
        """Return the knowledge that a release by the lanes `m` passes on; see `Gang.handed_on`."""
        ...


class Access(NamedTuple):
    """Describes an access: the agent that makes it, and its kind.

    Attributes:
        gang: the warp that makes the access, or issued the asynchronous operation that does.
        who: clock of the warp or asynchronous operation.
        agent: number of the agent that makes the access.
        kind: bits GENERIC (generic proxy) and STRONG (a strong access or an atomic).
    """

    gang: Accessor
    who: Clock
    agent: int
    kind: int

    @property
    def row(self) -> tuple[int, ...]:
        """Return the access record, in the order of the columns."""
        return (self.who.knows.cluster + 1, self.agent, self.who.now, self.kind, self.gang.line)


@dataclass(eq=False)
class Shadow:
    """Holds the records of the last write and the last read of each granule of a buffer."""

    name: str
    first: int  # address of the first granule, in granules
    writes: Rows
    reads: Rows


@dataclass(frozen=True)
class Released:
    """Holds the knowledge that a strong store releases.

    Attributes:
        cluster, rank: cluster of the store, and rank of its CTA.
        by_scope: knowledge that an acquire gets, by the smallest scope that includes both threads;
            shorter if the scope of the store is smaller.
    """

    cluster: int
    rank: int
    by_scope: tuple[Knowledge | None, ...]


@dataclass(frozen=True)
class GlobalConflict:
    """Describes a finding about an access of global memory and an earlier one.

    Attributes:
        kind: kind of the finding, "race" or "fence".
        first, second: (name of the agent, PTX line) of the earlier and of the later access; the
            first line is 0 if an earlier kernel made the access.
        cta: position of the CTA of the later access.
        where: name of the buffer, and byte offset in it.
    """

    kind: str
    text: str
    first: tuple[str, int]
    second: tuple[str, int]
    cta: tuple[int, int, int]
    where: str


@dataclass(eq=False)
class Kernel:
    """Describes a kernel of the stream.

    Attributes:
        concurrent: numbers of earlier kernels that may still run when this one starts.
        waited: whether any thread of it has executed griddepcontrol.wait.
    """

    concurrent: frozenset[int] = frozenset()
    waited: bool = False


@dataclass(eq=False)
class GlobalRaces:
    """Detects races on global memory in the kernels of a stream; holds their access records.

    Clusters and kernels are numbered in the order in which they start in the stream.

    Attributes:
        grain: bytes of a granule.
        kernels: the kernels so far; the last one is running.
        names: (names of agents, positions of CTAs) of each cluster of this call, by its number.
        kernel_of: number of the kernel of each cluster.
        released: knowledge that strong stores release, by address.
        conflicts: findings, by text and the PTX lines of the two accesses.
        counts: how often each conflict was found.
    """

    grain: int = 2
    kernels: list[Kernel] = field(default_factory=list)
    names: dict[int, tuple[list[str], list[tuple[int, int, int]]]] = field(default_factory=dict)
    kernel_of: list[int] = field(default_factory=list)
    released: dict[int, tuple[Released, ...]] = field(default_factory=dict)
    conflicts: dict[tuple[str, int, int], GlobalConflict] = field(default_factory=dict)
    counts: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _shadows: dict[int, Shadow] = field(default_factory=dict)
    _past: list[Shadow] = field(default_factory=list)
    _joined: dict[tuple[int, ...], tuple[tuple[Released, ...], Released, tuple[Released, ...]]] = (
        field(default_factory=dict)
    )
    _keep: list[GlobalMemory] = field(default_factory=list)

    # ---- kernels and clusters
    def begin_call(self, memory: GlobalMemory, grain: int) -> None:
        """Begin a call on the arrays of `memory`; keep the access records of earlier calls.

        Args:
            memory: the arrays.
            grain: bytes of a granule. If it differs from that of the last call, the records of
                earlier calls are dropped.
        """
        self._past = list(self._shadows.values()) if grain == self.grain else []
        self.grain = grain
        self._shadows, self.released = {}, {}
        self._joined.clear()
        # Arrays of the last call stay alive, so that no other array takes their addresses.
        self._keep = [*self._keep[-1:], memory]
        self.names = {}

    def begin_kernel(self, dependent: bool) -> None:
        """Begin a kernel; a dependent one may start before the preceding kernel is complete."""
        n = len(self.kernels)
        concurrent: frozenset[int] = frozenset()
        if dependent and n:
            last = self.kernels[-1]
            concurrent = frozenset({n - 1}) | last.concurrent
        self.kernels.append(Kernel(concurrent))

    def waited(self) -> None:
        """Record that a thread of the running kernel has executed griddepcontrol.wait."""
        self.kernels[-1].waited = True

    @property
    def next_cluster(self) -> int:
        """Return the number of the cluster that begins next."""
        return len(self.kernel_of)

    def begin_cluster(self, names: list[str], ctas: list[tuple[int, int, int]]) -> None:
        """Begin a cluster, with the names of its agents and its CTAs."""
        self.names[self.next_cluster] = (names, ctas)
        self.kernel_of.append(len(self.kernels) - 1)

    def _unfinished(self, who: Clock) -> frozenset[int]:
        """Return the earlier kernels that are not complete, as far as `who` knows."""
        kernel = self.kernels[-1]
        if not who.knows.grids:
            return kernel.concurrent
        # The preceding kernel is complete. So are its predecessors if it waited for them.
        last = self.kernels[-2] if len(self.kernels) > 1 else None
        return frozenset() if last is None or last.waited else last.concurrent

    # ---- accesses
    def _shadow(self, b: Buffer) -> Shadow:
        """Return the shadow of a buffer; a new shadow starts with the records of earlier calls."""
        if b.base not in self._shadows:
            first, last = b.base // self.grain, -(-b.end // self.grain)
            # np.zeros, so that pages which no kernel accesses take no memory
            writes, reads = (np.zeros((last - first, COLUMNS), np.int32) for _ in range(2))
            shadow = Shadow(b.name, first, writes, reads)
            for old in self._past:
                lo = max(first, old.first)
                hi = min(last, old.first + len(old.writes))
                if lo < hi:
                    to, source = (
                        slice(lo - first, hi - first),
                        slice(lo - old.first, hi - old.first),
                    )
                    shadow.writes[to], shadow.reads[to] = old.writes[source], old.reads[source]
            self._shadows[b.base] = shadow
        return self._shadows[b.base]

    def index(self, b: Buffer, offsets: Any, size: int) -> tuple[Shadow, NDArray[np.int64]]:
        """Return the shadow of `b`, and the granules of `size` bytes at each byte offset."""
        shadow = self._shadow(b)
        first = (b.base + np.asarray(offsets, np.int64)) // self.grain - shadow.first
        n = -(-size // self.grain)
        return shadow, (first[..., None] + np.arange(n)).ravel()

    def read(self, at: tuple[Shadow, Any], access: Access) -> None:
        """Record a read; report it if it is not ordered after the last write.

        Args:
            at: shadow and granules, from `index`.
            access: the agent that reads, and the kind of the access.
        """
        shadow, i = at
        self._check(at, shadow.writes[i], access, "read not ordered after write")
        shadow.reads[i] = access.row

    def write(self, at: tuple[Shadow, Any], access: Access) -> None:
        """Record a write; report it if it is not ordered after the last write and the last read.

        Arguments are those of `read`.
        """
        shadow, i = at
        text = "write not ordered after {}"
        self._check(at, shadow.writes[i], access, text.format("write"))
        self._check(at, shadow.reads[i], access, text.format("read"))
        shadow.writes[i] = access.row

    def check_constant(self, at: tuple[Shadow, Any], access: Access) -> None:
        """Report an ld.global.nc of memory that a thread of the same kernel has written."""
        shadow, i = at
        rows = shadow.writes[i]
        here = [c + 1 for c, k in enumerate(self.kernel_of) if k == len(self.kernels) - 1]
        bad = np.isin(rows[:, WHO_CLUSTER], here)
        if bad.any():
            text = "ld.global.nc of memory that the same kernel writes"
            self._note("race", text, at, rows, bad, access)

    def _check(self, at: tuple[Shadow, Any], rows: Rows, access: Access, text: str) -> None:
        """Report `access` if an earlier access is not ordered before it, or lacks a proxy fence.

        Args:
            at: shadow and granules of the access.
            rows: records of the earlier accesses to these granules, all reads or all writes.
            access: the later access.
            text: text of the finding.
        """
        bad, unseen = self._unordered(rows, access.who)
        if access.kind & STRONG:
            weak = rows[:, KIND] & STRONG == 0
            bad, unseen = bad & weak, unseen & weak
        if bad.any():
            self._note("race", text, at, rows, bad, access)
            return
        if access.kind & GENERIC or text.endswith("read"):
            return
        unseen &= rows[:, KIND] & GENERIC != 0
        if unseen.any():
            how = text.split(" ", 1)[0]
            why = f"asynchronous {how} after a generic write without fence.proxy.async"
            self._note("fence", why, at, rows, unseen, access)

    def _unordered(self, rows: Rows, who: Clock) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return two masks of `rows`: not ordered before `who`, not covered by a proxy fence."""
        unfinished: frozenset[int] | None = None
        bad = np.zeros(len(rows), bool)
        unseen = np.zeros(len(rows), bool)
        for number in np.unique(rows[:, WHO_CLUSTER]).tolist():
            if number == 0:
                continue
            mine, cluster = rows[:, WHO_CLUSTER] == number, number - 1
            if self.kernel_of[cluster] != len(self.kernels) - 1:
                if unfinished is None:
                    unfinished = self._unfinished(who)
                if self.kernel_of[cluster] in unfinished:
                    bad |= mine
                continue
            table = who.knows.of(cluster)
            agents, times = rows[:, WHO_AGENT], rows[:, TIME]
            if table is None:
                bad |= mine
                continue
            bad |= mine & (times > table[KNOWN][agents])
            unseen |= mine & (times > table[GLOBAL][agents])
        return bad, unseen

    def _note(
        self,
        kind: str,
        text: str,
        at: tuple[Shadow, Any],
        rows: Rows,
        bad: NDArray[Any],
        access: Access,
    ) -> None:
        """Add a conflict at the first granule in `bad`; count it if an equal one is known."""
        (shadow, i), gang = at, access.gang
        j = int(np.flatnonzero(bad)[0])
        row = rows[j]
        key = (text, int(row[LINE]), gang.line)
        self.counts[key] = self.counts.get(key, 0) + 1
        if key in self.conflicts:
            return
        cluster = int(row[WHO_CLUSTER]) - 1
        past = self.kernel_of[cluster] != len(self.kernels) - 1
        first = self._named(cluster, int(row[WHO_AGENT]))
        if past:
            text = f"{text} of an earlier kernel (griddepcontrol.wait)"
        where = f"{shadow.name} +{self.grain * int(i[j]):#x}"
        end = (self._named(access.who.knows.cluster, access.agent), gang.line)
        line = 0 if past else int(row[LINE])
        self.conflicts[key] = GlobalConflict(kind, text, (first, line), end, gang.cta.ctaid, where)

    def _named(self, cluster: int, agent: int) -> str:
        """Return the name of an agent, including its CTA."""
        if cluster not in self.names:
            return "an earlier call"
        agents, ctas = self.names[cluster]
        name = agents[agent]
        for rank, ctaid in enumerate(ctas):
            name = name.replace(f"warp {rank}.", f"CTA {ctaid} warp ")
        return name

    # ---- release and acquire
    def release(
        self, addresses: Sequence[int], gang: Accessor, m: Any, order: Order | None, atomic: bool
    ) -> None:
        """Record the knowledge that a store releases to later acquires of its addresses.

        A weak store releases nothing. Unless it is an atomic, a store ends the releases of earlier
        stores to these addresses.

        Args:
            addresses: addresses that the instruction stores to.
            gang: the warp.
            m: mask of the lanes that store there.
            order: modifiers of the store; None for a weak one.
            atomic: whether it is an atomic.
        """
        given: tuple[Knowledge | None, ...] = ()
        if order is not None:
            levels = range(order.scope + 1)
            given = tuple(gang.handed_on(m, not order.releases, s) for s in levels)
        if gang.clock is None or all(g is None for g in given):
            if not atomic:
                for address in addresses:
                    self.released.pop(address, None)
            return
        new = Released(gang.clock.knows.cluster, gang.cta.rank, given)
        for address in addresses:
            before = self.released.get(address, ()) if atomic else ()
            self.released[address] = self._with(before, new)

    def acquire(self, addresses: Sequence[int], gang: Accessor, order: Order) -> None:
        """Let `gang` acquire the knowledge that stores to `addresses` released.

        It acquires only knowledge of stores whose scope, like that of its own load, includes both
        threads.
        """
        clock = gang.clock
        if clock is None:
            return
        lists = {id(rs): rs for a in addresses if (rs := self.released.get(a)) is not None}
        for r in {id(r): r for rs in lists.values() for r in rs}.values():
            distance = GPU
            if r.cluster == clock.knows.cluster:
                distance = CTA if r.rank == gang.cta.rank else CLUSTER
            if distance > order.scope or distance >= len(r.by_scope):
                continue
            if (knowledge := r.by_scope[distance]) is not None:
                clock.learn(knowledge, not order.acquires, distance)

    def _with(self, before: tuple[Released, ...], new: Released) -> tuple[Released, ...]:
        """Return the releases `before` and `new`; releases of one CTA are joined to one.

        Equal arguments return the same object. Gradients are added to thousands of addresses
        between two fences, so that a join for each address would take most of the emulator's time.
        """
        key = (id(before), new.cluster, new.rank, *map(id, new.by_scope))
        if (found := self._joined.get(key)) is not None:
            return found[2]
        out, joint = [], new
        for r in before:
            if (r.cluster, r.rank) != (new.cluster, new.rank):
                out.append(r)
                continue
            n = max(len(r.by_scope), len(joint.by_scope))
            a, b = ((*x.by_scope, *[None] * (n - len(x.by_scope))) for x in (r, joint))
            joint = Released(new.cluster, new.rank, tuple(map(joined, a, b)))
        after = (*out, joint)
        if len(self._joined) >= _JOINED:
            self._joined.clear()
        self._joined[key] = before, new, after  # keeps the objects alive whose ids are the key
        return after

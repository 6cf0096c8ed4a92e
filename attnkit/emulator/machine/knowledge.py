"""Model the happens-before order of memory accesses by vector clocks with several rows.

An agent is a warp, a single lane of it, or an asynchronous unit. It has a time of its own. For each
other agent it has the time up to which the accesses of that agent are ordered before its own. These
times are its knowledge. Barriers, flags in global memory and completed asynchronous operations pass
knowledge on: one agent releases it, another acquires it.

Rows of a table of times, which has one column for each agent of the cluster:

- KNOWN: ordered by the memory model of threads (PTX ISA, "Causality Order").
- SHARED, GLOBAL: of these, generic accesses to shared or global memory that a proxy fence has made
  visible to the asynchronous proxy ("Proxies", fence.proxy.async).
- HANDED: accesses to tensor memory that tcgen05.fence::before_thread_sync orders before a barrier.
- TENSOR: accesses to tensor memory that are ordered before the agent's own tcgen05 operations: by
  tcgen05.wait, or by tcgen05.fence::after_thread_sync after a barrier.

A relaxed arrival releases only what its agent knew at its last fence. What a relaxed wait acquires
takes effect at the next fence of its agent ("Release and Acquire Patterns").
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.int32]
Table = NDArray[np.int32]
KNOWN, SHARED, GLOBAL, HANDED, TENSOR = range(5)
ROWS = 5
PASSED = slice(0, TENSOR)  # rows that a release passes on
ALWAYS = np.iinfo(np.int32).max
CTA, CLUSTER, GPU = range(3)  # scopes, from the smallest to the largest
_PIECES = 32  # most entries of `Clock.awaited` for one scope; `Clock.learn` joins them to one
SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "sys": GPU, "gl": GPU}


class Order(NamedTuple):
    """Holds the modifiers of a strong access: .acquire, .release or .relaxed, and the scope."""

    semantics: str
    scope: int

    @property
    def acquires(self) -> bool:
        """Return whether the access is an acquire operation."""
        return self.semantics in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        """Return whether the access is a release operation."""
        return self.semantics in ("release", "acq_rel")


@dataclass(eq=False)
class Knowledge:
    """Holds the knowledge of an agent at one time.

    Attributes:
        cluster: number of the cluster whose agents are the columns of `table`.
        table: a time for each row and agent.
        foreign: tables of the agents of other clusters, by number of the cluster.
        grids: whether the kernels before this one are known to be complete.
    """

    cluster: int
    table: Table
    foreign: dict[int, Table] = field(default_factory=dict)
    grids: bool = False

    def copy(self) -> Knowledge:
        """Return a deep copy."""
        foreign = {k: v.copy() for k, v in self.foreign.items()}
        return Knowledge(self.cluster, self.table.copy(), foreign, self.grids)

    def join(self, other: Knowledge) -> None:
        """Add the knowledge of another agent, except row TENSOR (its own tcgen05 operations)."""
        self.grids |= other.grids
        self._join_table(other.cluster, other.table)
        for cluster, table in other.foreign.items():
            self._join_table(cluster, table)

    def _join_table(self, cluster: int, table: Table) -> None:
        """Add the times in a table of the agents of a cluster, except row TENSOR."""
        if cluster != self.cluster and cluster not in self.foreign:
            self.foreign[cluster] = table.copy()
            return
        mine = self.table if cluster == self.cluster else self.foreign[cluster]
        np.maximum(mine[PASSED], table[PASSED], out=mine[PASSED])

    def of(self, cluster: int) -> Table | None:
        """Return the table of the agents of a cluster; None if nothing is known of them."""
        return self.table if cluster == self.cluster else self.foreign.get(cluster)

    def fence_proxy(self, seen: Knowledge, row: int) -> None:
        """Record in row SHARED or GLOBAL that a proxy fence covers all accesses in `seen`."""
        np.maximum(self.table[row], seen.table[KNOWN], out=self.table[row])
        for cluster, table in seen.foreign.items():
            mine = self.foreign[cluster]
            np.maximum(mine[row], table[KNOWN], out=mine[row])


def joined(a: Knowledge | None, b: Knowledge | None) -> Knowledge | None:
    """Return the union of two pieces of knowledge, as a new object."""
    if a is None or b is None:
        one = b if a is None else a
        return None if one is None else one.copy()
    return _union(a, b)


def _union(a: Knowledge, b: Knowledge) -> Knowledge:
    out = a.copy()
    out.join(b)
    return out


@dataclass(eq=False)
class Clock:
    """Holds the vector clock of a warp, or of one asynchronous operation.

    The accesses of a warp have agents of their own: one each for reads and writes of several lanes,
    and for those of each single lane. So an arrival of one lane need not release the accesses of
    other lanes.

    Attributes:
        agent: number of the agent.
        knows: knowledge of the agent, including its own time.
        line: PTX line of an asynchronous operation.
        common: for each access agent of this warp, the time up to which its accesses are ordered
            before those of all lanes; ALWAYS for other agents. None for asynchronous operations.
        accessors: number of each access agent of this warp, by (lane, whether it writes); lane is
            None for accesses of several lanes.
        published: by scope, the knowledge that a relaxed arrival releases.
        awaited: by scope, knowledge from relaxed waits that no fence has acquired yet, by identity.
    """

    agent: int
    knows: Knowledge
    line: int = 0
    common: Vector | None = None
    accessors: dict[tuple[int | None, bool], int] = field(default_factory=dict)
    published: list[Knowledge | None] = field(default_factory=lambda: [None] * 3)
    awaited: list[dict[int, Knowledge]] = field(default_factory=lambda: [{}, {}, {}])

    @property
    def known(self) -> Vector:
        """Return the row KNOWN."""
        row: Vector = self.knows.table[KNOWN]
        return row

    @property
    def now(self) -> int:
        """Return the agent's own time."""
        return int(self.known[self.agent])

    def tick(self) -> None:
        """Advance the agent's own time."""
        self.known[self.agent] += 1

    def join(self, knowledge: Knowledge) -> None:
        """Add knowledge at once, as a wait with acquire semantics does."""
        self.knows.join(knowledge)
        if self.common is not None and knowledge.cluster == self.knows.cluster:
            np.maximum(self.common, knowledge.table[KNOWN], out=self.common)

    def complete(self, operation: Clock) -> None:
        """Add the knowledge of an asynchronous operation that this agent has waited for itself."""
        self.knows.join(operation.knows)
        mine, other = self.knows.table[TENSOR], operation.knows.table[TENSOR]
        np.maximum(mine, other, out=mine)

    def seen_by(self, lane: int | None) -> Knowledge:
        """Return the knowledge of one lane of the warp; None: that of all its lanes together."""
        out = self.knows.copy()
        if lane is None or self.common is None:
            return out
        mine = [a for (other, _), a in self.accessors.items() if other != lane]
        for a in mine:
            np.minimum(out.table[:, a], self.common[a], out=out.table[:, a])
        return out

    def learn(self, knowledge: Knowledge, relaxed: bool, scope: int) -> None:
        """Add knowledge that a wait or load received; if `relaxed`, only at the next fence.

        That fence must have `scope` or a larger one.
        """
        if relaxed:
            pieces = self.awaited[scope]
            if len(pieces) >= _PIECES:
                one = functools.reduce(_union, pieces.values())
                pieces.clear()
                pieces[id(one)] = one
            pieces[id(knowledge)] = knowledge
        else:
            self.join(knowledge)

    def fence(self, scope: int, lane: int | None) -> None:
        """Execute fence.acq_rel, fence.sc or membar of a scope, by one lane or several (None)."""
        for s in range(scope + 1):
            for awaited in self.awaited[s].values():
                self.join(awaited)
            self.awaited[s].clear()
        seen = self.seen_by(lane)
        for s in range(scope + 1):
            self.published[s] = seen
        self.tick()

    def fence_initialisation(self, agent: int) -> None:
        """Execute fence.mbarrier_init; relaxed arrivals then release this warp's mbarrier.init.

        Args:
            agent: number of the agent of these mbarrier.init. The fence orders no other accesses.
        """
        table = np.zeros_like(self.knows.table)
        table[:, agent] = self.known[agent]
        self.knows.table[SHARED, agent] = self.known[agent]
        only = Knowledge(self.knows.cluster, table)
        for s in (CTA, CLUSTER):
            self.published[s] = joined(self.published[s], only)

    def sync_lanes(self) -> None:
        """Execute bar.warp.sync: order the accesses of all lanes before later ones of each lane."""
        assert self.common is not None
        mine = list(self.accessors.values())
        self.common[mine] = self.known[mine]
        self.tick()

    def meet_lanes(self) -> None:
        """Execute another instruction at which all lanes wait: order their earlier reads."""
        assert self.common is not None
        mine = [a for (_, writes), a in self.accessors.items() if not writes]
        self.common[mine] = self.known[mine]
        self.tick()

    def fence_tensor(self, after: bool) -> None:
        """Execute tcgen05.fence::after_thread_sync, or ::before_thread_sync."""
        table = self.knows.table
        to, source = (TENSOR, HANDED) if after else (HANDED, TENSOR)
        np.maximum(table[to], table[source], out=table[to])


def lane_of(lanes: Any) -> int | None:
    """Return the lane number if all elements of `lanes` are equal, else None."""
    first = int(lanes[0])
    return first if lanes.size == 1 or (lanes == first).all() else None

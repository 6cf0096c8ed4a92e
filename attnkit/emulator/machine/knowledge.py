"""Model what an agent knows of the memory accesses of others: vector clocks with several rows.

An agent is a warp, a single lane of it, or an asynchronous unit. It has a time of its own, and for
each other agent the time up to which the accesses of that agent are ordered before its own.
Barriers, flags in global memory and completed asynchronous operations hand this knowledge on.

Rows of a table, one column for each agent of the cluster:

- KNOWN: ordered by the memory model of threads (PTX ISA, "Causality Order").
- SHARED, GLOBAL: of these, generic accesses to shared or global memory that a proxy fence has made
  visible to the asynchronous proxy ("Proxies", fence.proxy.async).
- HANDED: accesses to tensor memory that tcgen05.fence::before_thread_sync puts before a barrier.
- TENSOR: accesses to tensor memory that are ordered before the agent's own tcgen05 operations: by
  tcgen05.wait, or by tcgen05.fence::after_thread_sync behind a barrier.

A relaxed arrival hands on only what its agent knew at its last fence. What an agent learns by a
relaxed wait counts from its next fence on ("Release and Acquire Patterns").
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
PASSED = slice(0, TENSOR)  # rows that a barrier hands on
ALWAYS = np.iinfo(np.int32).max
CTA, CLUSTER, GPU = range(3)  # scopes, each of which includes those before it
_PIECES = 32  # pieces of knowledge of one scope that a clock keeps before it joins them
SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "sys": GPU, "gl": GPU}


class Order(NamedTuple):
    """Holds the modifiers of a strong access: .acquire, .release or .relaxed, and the scope."""

    semantics: str
    scope: int

    @property
    def acquires(self) -> bool:
        """Return whether it is an acquire operation."""
        return self.semantics in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        """Return whether it is a release operation."""
        return self.semantics in ("release", "acq_rel")


@dataclass(eq=False)
class Knowledge:
    """Holds what an agent knows at one time.

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
        """Return a copy that does not change with this one."""
        foreign = {k: v.copy() for k, v in self.foreign.items()}
        return Knowledge(self.cluster, self.table.copy(), foreign, self.grids)

    def join(self, other: Knowledge) -> None:
        """Add what another agent knows, except the order of its own tcgen05 operations."""
        self.grids |= other.grids
        self._join_table(other.cluster, other.table)
        for cluster, table in other.foreign.items():
            self._join_table(cluster, table)

    def _join_table(self, cluster: int, table: Table) -> None:
        """Add a table of the agents of a cluster."""
        if cluster != self.cluster and cluster not in self.foreign:
            self.foreign[cluster] = table.copy()
            return
        mine = self.table if cluster == self.cluster else self.foreign[cluster]
        np.maximum(mine[PASSED], table[PASSED], out=mine[PASSED])

    def of(self, cluster: int) -> Table | None:
        """Return the table of the agents of a cluster; None if nothing is known of them."""
        return self.table if cluster == self.cluster else self.foreign.get(cluster)

    def fence_proxy(self, seen: Knowledge, row: int) -> None:
        """Let the asynchronous proxy see all that `seen` knows, in row SHARED or GLOBAL."""
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
    """Holds the vector clock of an agent, or of one asynchronous operation.

    Accesses of a warp have agents of their own: reads and writes of several lanes, and those of each
    single lane. So an arrival of one lane need not hand on accesses of other lanes.

    Attributes:
        agent: number of the agent.
        knows: what the agent knows, its own time included.
        line: PTX line of an asynchronous operation.
        common: for the agents of this warp, the time up to which all its lanes know their accesses;
            ALWAYS for other agents. None for asynchronous operations.
        accessors: agents of the accesses of this warp, by (lane or None, whether they write).
        published: by scope, what a relaxed arrival hands on.
        awaited: by scope, what relaxed waits learned and no fence has acquired, by identity.
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
        """Add the knowledge that a barrier hands on."""
        self.knows.join(knowledge)
        if self.common is not None and knowledge.cluster == self.knows.cluster:
            np.maximum(self.common, knowledge.table[KNOWN], out=self.common)

    def complete(self, operation: Clock) -> None:
        """Add what an asynchronous operation did, which this agent waited for itself."""
        self.knows.join(operation.knows)
        mine, other = self.knows.table[TENSOR], operation.knows.table[TENSOR]
        np.maximum(mine, other, out=mine)

    def seen_by(self, lane: int | None) -> Knowledge:
        """Return what a single lane of the warp knows; None: what all active lanes know."""
        out = self.knows.copy()
        if lane is None or self.common is None:
            return out
        mine = [a for (other, _), a in self.accessors.items() if other != lane]
        for a in mine:
            np.minimum(out.table[:, a], self.common[a], out=out.table[:, a])
        return out

    def learn(self, knowledge: Knowledge, relaxed: bool, scope: int) -> None:
        """Add the knowledge that a wait handed on."""
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
        """Execute fence.acq_rel, fence.sc or membar of a scope."""
        for s in range(scope + 1):
            for awaited in self.awaited[s].values():
                self.join(awaited)
            self.awaited[s].clear()
        seen = self.seen_by(lane)
        for s in range(scope + 1):
            self.published[s] = seen
        self.tick()

    def fence_initialisation(self, agent: int) -> None:
        """Execute fence.mbarrier_init: publish the mbarrier.init of this warp, and nothing else."""
        table = np.zeros_like(self.knows.table)
        table[:, agent] = self.known[agent]
        self.knows.table[SHARED, agent] = self.known[agent]
        only = Knowledge(self.knows.cluster, table)
        for s in (CTA, CLUSTER):
            self.published[s] = joined(self.published[s], only)

    def sync_lanes(self) -> None:
        """Execute bar.warp.sync: let all lanes know the accesses of all."""
        assert self.common is not None
        mine = list(self.accessors.values())
        self.common[mine] = self.known[mine]
        self.tick()

    def meet_lanes(self) -> None:
        """Execute another instruction for which all lanes wait: their earlier reads are done."""
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
    """Return the lane if all of `lanes` are the same one, else None."""
    first = int(lanes[0])
    return first if lanes.size == 1 or (lanes == first).all() else None

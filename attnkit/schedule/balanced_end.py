"""Order the last work tiles of a list so that all workers end at about the same time.

List scheduling lets workers end up to one work tile apart. In short lists this is much. This module
assigns the last work tiles anew: longest first, then by swaps between workers. It lists them in the
order in which they start. No work tile then starts later than planned, if the costs are right.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

ROUNDS = 3  # work tiles of each worker, on average, that are assigned anew
_SWAPS = 8  # most swaps, for each worker on average


def balanced_end(costs: Sequence[int], workers: int) -> tuple[list[int], int]:
    """Reorder the last work tiles of a list so that all workers end at about the same time.

    Args:
        costs: costs of the work tiles in list order.
        workers: number of workers, each of which takes the next work tile when it is free.

    Returns:
        The order of all work tiles, as indices into `costs`; and its makespan.
    """
    first = max(0, len(costs) - ROUNDS * workers)
    begin = [0] * workers
    for cost in costs[:first]:
        heapq.heapreplace(begin, begin[0] + cost)
    loads, own = _longest_first(begin, costs, first)
    for _ in range(_SWAPS * workers):
        if not _swap(loads, own, costs):
            break
    starts = []
    for time, tiles in zip(begin, own, strict=True):
        for tile in sorted(tiles):
            starts.append((time, tile))
            time += costs[tile]
    return [*range(first), *(tile for _, tile in sorted(starts))], max(loads)


def _longest_first(
    begin: list[int], costs: Sequence[int], first: int
) -> tuple[list[int], list[list[int]]]:
    """Assign the last work tiles: each time the longest to the least loaded worker.

    Args:
        begin: load of each worker before these work tiles.
        costs: costs of all work tiles.
        first: index of the first of these work tiles.

    Returns:
        The load of each worker after them; and the indices of its work tiles.
    """
    loads, own = list(begin), [list[int]() for _ in begin]
    free = [(load, worker) for worker, load in enumerate(loads)]
    heapq.heapify(free)
    for tile in sorted(range(first, len(costs)), key=lambda t: -costs[t]):
        load, worker = free[0]
        own[worker].append(tile)
        loads[worker] = load + costs[tile]
        heapq.heapreplace(free, (loads[worker], worker))
    return loads, own


def _swap(loads: list[int], own: list[list[int]], costs: Sequence[int]) -> bool:
    """Exchange a work tile of the most loaded worker for a cheaper one of another worker.

    The other worker is the least loaded one for which that lowers the higher of both loads.

    Returns:
        Whether there was such an exchange.
    """
    most = max(range(len(loads)), key=loads.__getitem__)
    for other in sorted(range(len(loads)), key=loads.__getitem__):
        gap = loads[most] - loads[other]
        if gap <= 1:
            return False
        pairs = [
            (abs(gap - 2 * (costs[a] - costs[b])), a, b)
            for a in own[most]
            for b in own[other]
            if 0 < costs[a] - costs[b] < gap
        ]
        if pairs:
            _, a, b = min(pairs)
            own[most].remove(a)
            own[other].remove(b)
            own[most].append(b)
            own[other].append(a)
            loads[most] += costs[b] - costs[a]
            loads[other] += costs[a] - costs[b]
            return True
    return False

"""Sums of dQ that nobody clears: the first kv tile at a q tile stores its part, all others add.

Zeros for the sums of dQ are written before the main kernel of a backward, as much memory as dQ in
float32, and read again by the first addition. Where the work list says beforehand which of the
kv tiles that visit a q tile is first, that one can store instead. It sets a mark when what it
stored has arrived, and the others add once they have seen the mark.

Nobody waits for a piece that comes after its own in the list, so that this cannot deadlock, by the
argument of `attnkit.turns`; sums in a fixed order have its turns, and need no marks. But to wait
costs time. In the order "falling" of a band, a causal mask or documents the first kv tile at a q
tile is the one on the diagonal, which begins with it, and all others come later; there nearly every
mark is set when it is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnkit.schedule import Schedule, schedule_backward
from attnkit.simulate import simulate
from attnkit.sparse import BlockRuns
from attnkit.turns import joined

# Measured on one H200: 134 MB of zeros take 28 us at 1.6 GHz.
BYTES_A_CLOCK = 3000
ARRIVAL = 4000  # clocks from a q tile's last product until its mark can be seen, an estimate
MOST = 128  # kv tiles that a q tile may meet on average; beyond, zeros are little beside the work


@dataclass(frozen=True, eq=False)
class Firsts:
    """Who is first at each q tile.

    Attributes:
        stop: int32 [pieces]: a piece is first at those of its q tiles that are below this.
        cycles: what pieces are predicted to wait for marks, on average over the workers.
        saved: cycles that all this is predicted to save.
    """

    stop: Tensor
    cycles: int
    saved: int = 0


def chosen(runs: BlockRuns, schedule: Schedule, floats: int) -> tuple[Schedule, Firsts] | str:
    """A schedule in which the first at each q tile stores, if that is predicted to save time.

    Args:
        runs: the mask's tiles.
        schedule: a backward's, in which sums are cleared before.
        floats: of the sums of dQ.

    Returns:
        The schedule and who is first in it, or why sums are to be cleared.
    """
    workers, cost = schedule.workers, schedule.prices
    other = schedule_backward(runs, schedule.shape, workers=workers, cost=cost, order="falling")
    found = firsts(runs, other)
    if isinstance(found, str):
        return found
    before = simulate(schedule).makespan
    after = simulate(other).makespan + found.cycles
    saved = before + 4 * floats // BYTES_A_CLOCK - after
    if saved <= 0:
        return f"without them the work would take {-saved} cycles more"
    return other, replace(found, saved=saved)


def firsts(runs: BlockRuns, schedule: Schedule) -> Firsts | str:
    """Who is first at each q tile in a schedule of whole kv tiles, or why that cannot be told.

    Args:
        runs: what was scheduled.
        schedule: a backward's.
    """
    if schedule.split.numel():
        return "kv tiles are split"
    count = int(runs.full_t.length.sum()) + int(runs.partial_t.length.sum())
    if count > MOST * runs.batch * runs.heads * runs.q_blocks:
        return f"a q tile meets more than {MOST} kv tiles"
    piece, at, q, row = _visits(runs, schedule)
    shape = schedule.shape
    first = piece.new_full((shape.batch * shape.heads * runs.q_blocks,), schedule.pieces)
    first = first.scatter_reduce(0, row, piece, "amin")
    if bool((first == schedule.pieces).any()):
        return "some q tiles meet no kv tile"
    own = first[row] == piece
    owned = torch.bincount(piece[own], minlength=schedule.pieces)
    if bool((own & (at >= owned[piece])).any()):
        return "a kv tile is first at q tiles that are not the first of its own"
    stop = torch.zeros(schedule.pieces, dtype=torch.int32, device=q.device)
    last = at == owned[piece] - 1
    stop[piece[last]] = (q[last] + 1).to(torch.int32)
    # when each piece has added to each of its q tiles, were there nothing to wait for; what it stores
    # arrives before the next leaves
    block = schedule.prices.full
    slower = max(0, ARRIVAL - block)
    begin = simulate(schedule).start.to(q.device)
    done = begin[piece] + (at + 1) * block + torch.minimum(at + 1, owned[piece]) * slower
    stored = torch.empty_like(first)
    stored[row[own]] = done[own]
    late = (stored[row] + ARRIVAL - done).clamp(min=0)
    late[own] = 0
    # a block's products hide what the sums are behind
    waits = (slower * owned - block).clamp(min=0).scatter_reduce(0, piece, late, "amax")
    return Firsts(stop, int(waits.sum()) // schedule.workers)


def _visits(runs: BlockRuns, schedule: Schedule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each visit of a kv tile to a q tile, by piece and ascending in q, int64.

    Returns:
        The piece; how many visits it has made before; the q tile; its row among those of all heads.
    """
    kept = joined(runs.full_t, runs.partial_t, runs.q_blocks)
    device = kept.start.device
    count = kept.length.to(torch.int64)
    ends = count.cumsum(0)
    run = torch.arange(count.numel(), device=device).repeat_interleave(count)
    within = torch.arange(run.numel(), device=device) - (ends - count)[run]
    tiles = kept.start.to(torch.int64)[run] + within  # of every row of the mask, one after another
    pointers = torch.cat([ends.new_zeros(1), ends])[kept.row_ptr.to(torch.int64)]
    b, h = schedule.b.to(torch.int64), schedule.h.to(torch.int64)
    mask_row = (b % runs.batch * runs.heads + h % runs.heads) * runs.kv_blocks + schedule.tile
    visits = pointers.diff()[mask_row]
    piece = torch.arange(schedule.pieces, device=device).repeat_interleave(visits)
    at = torch.arange(piece.numel(), device=device) - (visits.cumsum(0) - visits)[piece]
    q = tiles[pointers[mask_row][piece] + at]
    return piece, at, q, (b * schedule.shape.heads + h)[piece] * runs.q_blocks + q

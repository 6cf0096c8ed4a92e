"""Group work rows into sections whose keys and values fit L2 together.

The work tiles of one section run at about the same time, so the tiles that they share are read from
memory once. A *unit* consists of the heads that read the same tensors: a kv head and its group of
query heads. A section consists of several units or, if one unit is too large for L2, of a stretch
of neighbouring rows of one unit.

The longest work tiles of a section run first and read most of its keys and values from memory; the
others find them in L2. A section that fills L2 thus alternates between phases that wait for memory
and phases that leave it idle. With smaller sections these phases overlap, but workers end further
apart. So a section takes at most a quarter of L2 if that keeps all workers busy, and the last
section may take all of L2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnkit.sparsity.block_runs import Runs
from attnkit.util.csr import row_indices

_PARTS = 4  # small sections that fit L2 together
_GAIN = 0.9  # smaller sections balance load worse, so they must save a tenth of the traffic


def unit_of_rows(
    batch: int, heads: int, owners: tuple[int, int], rows: int, device: torch.device,
    batch_together: bool = False,
) -> Tensor:  # fmt: skip
    """Return the unit index of every work row; a unit is the heads that read the same tensors.

    The result is int64 [batch * heads * rows].

    Args:
        batch, heads, rows: work rows are numbered in the order (b, h, row).
        owners: batch and heads of the tensors that are read: `batch` or 1, and a divisor of
            `heads`.
        batch_together: whether a head's batch elements have neighbouring units.
    """
    b = torch.arange(batch, device=device)[:, None, None] * (owners[0] == batch)
    h = torch.arange(heads, device=device)[None, :, None] // (heads // owners[1])
    unit = h * owners[0] + b if batch_together else b * owners[1] + h
    return unit.expand(batch, heads, rows).reshape(-1)


def apart(batch: int, heads: int, owners: tuple[int, int], device: torch.device) -> Tensor:
    """Number the query heads so that those which share a kv head are as far apart as possible.

    In a backward that adds in a fixed order, work tiles of one kv tile wait for each other before
    they add to dK and dV. In different sections they run at different times, and need not wait.

    Args:
        batch, heads: of the query.
        owners: batch and heads of key and value: `batch` or 1, and a divisor of `heads`.
        device: device of the result.

    Returns:
        The number of each head b * heads + h, int64 [batch * heads]. Where no heads share a kv
        head, it is b * heads + h.
    """
    head = torch.arange(batch * heads, device=device).view(batch, owners[1], -1)
    in_order = head.permute(2, 0, 1) if owners[0] == batch else head.transpose(1, 2)
    return torch.argsort(in_order.reshape(-1))


def distinct(kinds: tuple[Runs, ...], rows: int, chunk: int, columns: int) -> tuple[Tensor, Tensor]:
    """Count the distinct tiles and the tile visits of each stretch of `chunk` rows of a head.

    Returns:
        The number of different tiles, and the number of visits: int64 [pairs, stretches] each,
        where a pair is a (b, h) of the runs.
    """
    pairs, stretches = kinds[0].rows // rows, -(-rows // chunk)
    lists = []
    for kind in kinds:
        row = row_indices(kind.row_ptr.to(torch.int64).diff())
        stretch = row // rows * stretches + row % rows // chunk
        lists.append(torch.stack([stretch, kind.start.to(torch.int64), kind.length]))
    stretch, start, length = torch.cat(lists, 1).unbind()
    keys, order = torch.sort(stretch * (columns + 1) + start, stable=True)
    stretch, length = stretch[order], length[order]
    covered = torch.cummax(keys + length, 0).values.roll(1) if keys.numel() else keys
    covered[:1] = 0
    new = (keys + length - torch.maximum(keys, covered)).clamp(min=0)
    none = length.new_zeros(pairs * stretches)
    different = none.index_add(0, stretch, new).view(pairs, stretches)
    return different, none.index_add(0, stretch, length).view(pairs, stretches)


def chunk_of(kinds: tuple[Runs, ...], rows: int, columns: int, capacity: int, least: int) -> int:
    """Choose the number of neighbouring rows in a section, for units that are too large for L2.

    The unit is halved as long as that saves traffic. A stretch whose tiles fit L2 reads each tile
    once; any other stretch reads a tile once for each visit. If single rows do not fit (the last
    rows of a long causal mask), halving saves nothing and the unit stays whole. Its rows still
    share tiles, because they run at the same time.

    Args:
        kinds, rows, columns: see `sections`.
        capacity: number of tiles that fit L2.
        least: the fewest rows of a stretch that keep all workers busy.
    """
    best, best_traffic = rows, torch.inf
    chunk = rows
    while chunk >= max(1, least):
        different, every = distinct(kinds, rows, chunk, columns)
        traffic = float(torch.where(different <= capacity, different, every).sum())
        if traffic < _GAIN * best_traffic:
            best, best_traffic = chunk, traffic
        chunk //= 2
    return best


def units_in_order(kinds: tuple[Runs, ...], rows: int, capacity: int, workers: int) -> int:
    """Choose how many heads run together in a backward that adds to dQ in a fixed order.

    A unit is a head here, and its rows are kv tiles, which visit q tiles. A row waits at each tile
    until the row before it has added there, which takes some time
    (`attnkit.schedule.deterministic_order`). With more units in a section, the rows of a unit begin
    further apart, so that they need not wait. But with too many of them, a tile has left L2 when the
    next row reads it.

    In descending order, each row begins d tiles before the one that ran before it. Between two reads of
    a tile, the workers then visit n * t + d * w tiles, for n units in a section, t tiles of a row, and
    w workers. An ascending order is treated alike; no kernel uses it by default. Where d is 0, rows
    begin at the same tile and only waits keep them apart, so that more units do no harm.

    Args:
        kinds, rows, capacity: see `sections`.
        workers: number of workers.
    """
    total = sum(int(kind.length.sum()) for kind in kinds)
    mean = max(1.0, total / kinds[0].rows)
    drift = _drift(kinds, rows)
    # without a drift, more than twice as many units no longer help (docs/notes/hopper.md)
    room = capacity - drift * workers if drift > 0 else 2 * capacity
    return max(-(-workers // rows), round(room / mean))


def _drift(kinds: tuple[Runs, ...], rows: int) -> float:
    """Return how many tiles later a row begins than the row before it, on average.

    The average is taken over neighbouring rows of a unit that both visit tiles. It is 0 if it would
    be negative.
    """
    none = torch.iinfo(torch.int64).max
    first = kinds[0].row_ptr.new_full((kinds[0].rows,), none, dtype=torch.int64)
    for kind in kinds:
        row = row_indices(kind.row_ptr.to(torch.int64).diff())
        first.scatter_reduce_(0, row, kind.start.to(torch.int64), "amin")
    first = first.view(-1, rows)
    steps, visits = first[:, 1:] - first[:, :-1], first < none
    both = visits[:, 1:] & visits[:, :-1]
    return max(0.0, float(steps[both].double().mean())) if bool(both.any()) else 0.0


def sections(
    kinds: tuple[Runs, ...],
    units: int,
    unit: Tensor,
    rows: int,
    columns: int,
    capacity: int,
    least: int,
    most_sections: int,
    large_end: bool,
) -> Tensor:
    """Group the work rows into sections, and return the section of each row, int64 [work rows].

    Sections are numbered in the order of their units.

    Args:
        kinds: the FULL and PARTIAL runs of the rows.
        units, unit: number of units, and the unit of each work row, from `unit_of_rows`.
        rows, columns: rows of tiles of a head, and the most tiles that a row can have.
        capacity: number of tiles that fit L2.
        least: the fewest rows into which a unit is cut; more than `rows` to leave units whole.
        most_sections: number of sections, with more of which one would not keep all workers busy.
        large_end: whether the last section takes as many units as fit L2.
    """
    size = columns
    if size > capacity:  # the mask may keep fewer tiles
        size = int(distinct(kinds, rows, rows, columns)[0].max())
    if size <= capacity:
        most = max(1, capacity // max(1, size))
        count = -(-units // max(1, most // _PARTS))
        count = max(min(count, most_sections), -(-units // most))  # more units exceed L2
        section = unit * count // units
        if large_end:
            begin = max(0, units - most)
            own = (begin - 1) * count // units + 1 if begin else 0
            section = torch.where(unit >= begin, own, section)
        return section
    chunk = chunk_of(kinds, rows, columns, capacity, least)
    row = torch.arange(unit.numel(), device=unit.device) % rows
    return unit * -(-rows // chunk) + row // chunk

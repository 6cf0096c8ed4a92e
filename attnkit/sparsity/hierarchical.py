"""Classify large grids of tiles in time proportional to the mask's boundary, not to its area.

A node is a square of tiles. Interval arithmetic evaluates nodes first, as if they were tiles. A
node that is EMPTY or FULL as a whole needs no more work. In every other node interval arithmetic
evaluates each tile, and runs are extracted from the node's small dense grid. So the interior of a
large EMPTY or FULL area costs neither time nor memory, and no dense grid of all tiles exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnkit.graph.affine import Side
from attnkit.sparsity.block_runs import (
    EMPTY,
    FULL,
    PARTIAL,
    BlockRuns,
    Runs,
    merge_segments,
    state_changes,
)
from attnkit.sparsity.ranges.boxes import Boxes
from attnkit.sparsity.ranges.eval_blocks import At, Blocks
from attnkit.sparsity.ranges.eval_interval import Interval
from attnkit.sparsity.ranges.tables import Tables
from attnkit.util.chunks import chunk_size

if TYPE_CHECKING:
    from attnkit.sparsity.witness import Resolver

# Bytes of intervals in one pass over tiles.
_PASS_BYTES = 24 << 20
# Largest number of tiles whose states are in memory together, at one byte each.
_MAX_TILES = 1 << 21
# If a larger share of the nodes is undecided, a dense grid is faster, up to this many tiles.
_DENSE_SHARE = 0.5
_MAX_DENSE_TILES = 1 << 23
# Above this number, segments of runs are merged immediately, to save memory.
_MAX_SEGMENTS = 1 << 16
# Largest number of undecided tiles that the resolver decides together.
_MAX_OPEN = 1 << 18


@dataclass
class Statistics:
    """Counts how `classify` decided the tiles.

    Attributes:
        tiles: number of tiles; shared batches and heads count once.
        nodes: squares of tiles that interval arithmetic found neither EMPTY nor FULL as a whole.
        open: tiles that interval arithmetic left undecided.
        dense: tiles in which some part was evaluated at every position.
    """

    tiles: int = 0
    nodes: int = 0
    open: int = 0
    dense: int = 0


@dataclass(frozen=True, eq=False)
class Grid:
    """Classifies the tiles of a mask over one domain.

    Attributes:
        blocks: the mask, compiled for evaluation on tiles.
        tables: ranges of the mask's keys in each block.
        boxes: range queries on the captured tensors of the same domain.
        resolver: classifies the tiles that interval arithmetic leaves undecided; None if there are
            no such tiles.
        statistics: receives the counts.
    """

    blocks: Blocks
    tables: Tables
    boxes: Boxes
    resolver: Resolver | None
    statistics: Statistics

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return (batches, heads, q blocks, kv blocks) of the domain."""
        domain, block = self.tables.domain, self.tables.block
        rows, columns = -(-domain.q_len // block[0]), -(-domain.kv_len // block[1])
        return domain.b.numel(), domain.h.numel(), rows, columns

    def runs_dense(self) -> BlockRuns:
        """Classify all tiles in one dense grid of states, and return their runs."""
        states = self.states(self.tables)
        self.statistics.tiles += states.numel()
        if self.resolver is not None:
            undecided, dense = self.resolver.resolve(states)
            self.statistics.open += undecided
            self.statistics.dense += dense
        domain = self.tables.domain
        return BlockRuns.from_states(states, domain.q_len, domain.kv_len, self.tables.block)

    def runs_by_nodes(self, side: int) -> BlockRuns:
        """Classify the tiles by nodes of `side` x `side` tiles, and return their runs."""
        batch, heads, rows, columns = self.shape
        top = self.states(self.tables.coarser(side))
        opened = torch.nonzero(top == PARTIAL)
        tiles = batch * heads * rows * columns
        if _DENSE_SHARE * top.numel() < len(opened) and tiles <= _MAX_DENSE_TILES:
            return self.runs_dense()
        segments = _Segments(batch * heads, side, (rows, columns), self.tables.domain.device)
        segments.add_full_nodes(top)
        self.statistics.tiles += tiles
        self.statistics.nodes += len(opened)
        for nodes in opened.split(max(1, _MAX_TILES // side**2)) if len(opened) else ():
            b, h, q, kv = nodes.unbind(1)
            segments.add(b * heads + h, q, kv, self._states_inside(b, h, q, kv, side))
        domain = self.tables.domain
        kinds = [(backward, kind) for backward in (False, True) for kind in (FULL, PARTIAL)]
        runs = [segments.runs(*kind) for kind in kinds]
        return BlockRuns(domain.q_len, domain.kv_len, self.tables.block, batch, heads, *runs)

    def states(self, tables: Tables) -> Tensor:
        """Evaluate the mask on every tile by interval arithmetic.

        Returns:
            int8 states [b, h, q blocks, kv blocks]; PARTIAL also for undecided tiles.
        """
        domain, block = tables.domain, tables.block
        rows, columns = -(-domain.q_len // block[0]), -(-domain.kv_len // block[1])
        shape = domain.b.numel(), domain.h.numel(), rows, columns
        states = torch.empty(shape, dtype=torch.int8, device=domain.device)
        step = max(1, self._at_once(states.numel()) // (domain.lead * columns))
        ki = torch.arange(columns, device=domain.device)[None]
        for first in range(0, rows, step):
            qi = torch.arange(first, min(first + step, rows), device=domain.device)[:, None]
            keep = self.blocks.run(tables, self.boxes, At(qi, ki))
            states[:, :, first : first + step] = _state(keep)
        return states

    def _at_once(self, tiles: int) -> int:
        domain = self.tables.domain
        varying = sum(domain.sides.side(n) is Side.MIXED for n, _ in self.blocks.steps)
        return min(_PASS_BYTES // (32 * (varying + 1)), chunk_size(tiles, domain.device))

    def _states_inside(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, side: int) -> Tensor:
        """Classify the tiles of nodes [n] exactly: int8 [n, side, side], EMPTY beyond the grid."""
        _, _, rows, columns = self.shape
        inside = torch.arange(side, device=q.device)
        states = torch.empty(len(q), side, side, dtype=torch.int8, device=q.device)
        step = max(1, self._at_once(states.numel()) // side**2)
        undecided = []
        for first in range(0, len(q), step):
            some = slice(first, first + step)
            qi, ki = (q[some] * side)[:, None] + inside, (kv[some] * side)[:, None] + inside
            beyond = (qi >= rows)[:, :, None] | (ki >= columns)[:, None]
            lead = b[some, None, None], h[some, None, None]
            at = At(qi.clamp(max=rows - 1)[:, :, None], ki.clamp(max=columns - 1)[:, None], lead)
            here = _state(self.blocks.run(self.tables, self.boxes, at))
            states[some] = here.masked_fill(beyond, EMPTY)
            if self.resolver is not None:
                undecided.append(
                    (states[some].flatten() == PARTIAL).nonzero()[:, 0] + first * side**2
                )
        if self.resolver is not None:
            self._decide(self.resolver, states, torch.cat(undecided), (b, h, q, kv))
        return states

    def _decide(
        self, resolver: Resolver, states: Tensor, places: Tensor, nodes: tuple[Tensor, ...]
    ) -> None:
        """Classify undecided tiles, and write their states into `states`.

        Args:
            resolver: classifies the tiles.
            states: int8 [n, side, side], states of the tiles of n nodes.
            places: flat indices of the undecided tiles in `states`.
            nodes: b, h, q and kv of the nodes, [n] each.
        """
        side = states.shape[-1]
        self.statistics.open += len(places)
        for part in places.split(min(_MAX_OPEN, chunk_size(len(places), places.device))):
            line = part // side
            n = line // side
            b, h, q, kv = (x.index_select(0, n) for x in nodes)
            q, kv = q * side + (line - n * side), kv * side + (part - line * side)
            decided, dense = resolver.decide(b, h, q, kv)
            states.view(-1).index_copy_(0, part, decided)
            self.statistics.dense += dense


def _state(keep: Interval) -> Tensor:
    must, may = keep
    return must.to(torch.int8) + may.to(torch.int8)


@dataclass(frozen=True, eq=False)
class _Segments:
    """Collects segments of runs by direction and state, and builds `Runs` from them.

    Attributes:
        pairs: number of (b, h) pairs.
        side: tiles along a side of a node.
        tiles: (q blocks, kv blocks).
        device: device of the runs.
        parts: (whether runs go along q, state) -> (first, last) of segments; see
            `Runs.from_segments`.
    """

    pairs: int
    side: int
    tiles: tuple[int, int]
    device: torch.device
    parts: dict[tuple[bool, int], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def add_full_nodes(self, top: Tensor) -> None:
        """Add the nodes that are FULL as a whole, given states [b, h, q nodes, kv nodes]."""
        grid = top.flatten(0, 1)
        for backward in (False, True):
            rows, blocks = self._sizes(backward)
            nodes = grid.transpose(1, 2) if backward else grid
            at, state = state_changes(nodes)
            mine = state == FULL
            length = at.diff(append=at.new_full((1,), nodes.numel())).masked_select(mine)
            place = at.masked_select(mine)
            line = place // nodes.shape[2]  # pair * rows of nodes + row of nodes
            start, pair = place - line * nodes.shape[2], line // nodes.shape[1]
            row = ((line - pair * nodes.shape[1]) * self.side)[:, None]
            row = row + torch.arange(self.side, device=row.device)
            base = (pair[:, None] * rows + row) * (blocks + 1)
            first = base + (start * self.side)[:, None]
            last = base + ((start + length) * self.side).clamp(max=blocks)[:, None]
            inside = row < rows
            self.parts.setdefault((backward, FULL), []).append(
                (first.masked_select(inside), last.masked_select(inside))
            )

    def add(self, pair: Tensor, q: Tensor, kv: Tensor, states: Tensor) -> None:
        """Add the tiles of nodes [n], given the states [n, side, side] of their tiles."""
        before = {key: len(parts) for key, parts in self.parts.items()}
        step = max(1, chunk_size(states.numel(), states.device) // self.side**2)
        for first in range(0, len(q), step):
            some = slice(first, first + step)
            self._add(pair[some], q[some], kv[some], states[some], backward=False)
            self._add(pair[some], kv[some], q[some], states[some].transpose(1, 2), backward=True)
        for key, parts in self.parts.items():
            new = parts[before.get(key, 0) :]
            if sum(first.numel() for first, _ in new) > _MAX_SEGMENTS:
                parts[before.get(key, 0) :] = [merge_segments(*_concatenate(new))]

    def _add(
        self, pair: Tensor, row: Tensor, column: Tensor, states: Tensor, *, backward: bool
    ) -> None:
        rows, blocks = self._sizes(backward)
        at, state = state_changes(states)
        length = at.diff(append=at.new_full((1,), states.numel()))
        corner = (pair * rows + row * self.side) * (blocks + 1) + column * self.side
        for kind in (FULL, PARTIAL):
            mine = state == kind
            place = at.masked_select(mine)
            line = place // self.side  # node * side + row inside the node
            node = line // self.side
            first = corner.index_select(0, node) + (line - node * self.side) * (blocks + 1)
            first = first + (place - line * self.side)
            last = first + length.masked_select(mine)
            self.parts.setdefault((backward, kind), []).append((first, last))

    def runs(self, backward: bool, kind: int) -> Runs:
        """Build the runs of one direction and of one state, FULL or PARTIAL."""
        rows, blocks = self._sizes(backward)
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        parts = self.parts.get((backward, kind), [(nothing, nothing)])
        return Runs.from_segments(*_concatenate(parts), self.pairs * rows, blocks)

    def _sizes(self, backward: bool) -> tuple[int, int]:
        return self.tiles[::-1] if backward else self.tiles


def _concatenate(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([first for first, _ in parts]), torch.cat([last for _, last in parts])

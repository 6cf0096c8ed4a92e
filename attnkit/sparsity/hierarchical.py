"""Classification of large grids of tiles, at a cost that follows the mask's boundary.

A node is a square of tiles. Nodes are evaluated on intervals first, as if they were tiles; what is
EMPTY or FULL as a whole is done. Of the others the tiles are evaluated, node by node, and their
runs are cut out of each node's small dense grid. So neither time nor memory is spent on the inside
of anything, and there is never a dense grid of all tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnkit.graph.affine import Side
from attnkit.sparsity.block_runs import EMPTY, FULL, PARTIAL, BlockRuns, Runs, merged, stretches
from attnkit.sparsity.ranges.boxes import Boxes
from attnkit.sparsity.ranges.eval_blocks import At, Blocks
from attnkit.sparsity.ranges.eval_interval import Interval
from attnkit.sparsity.ranges.tables import Tables
from attnkit.sparsity.witness import Resolver
from attnkit.util.chunks import at_once

# Bytes of intervals that one pass over tiles may hold.
_PASS_BYTES = 24 << 20
# Tiles of nodes whose states are held together, at one byte each.
_MAX_TILES = 1 << 21
# Where a larger share of the nodes is undecided, a dense grid is faster, up to so many tiles.
_MOSTLY = 0.5
_MAX_FLAT = 1 << 23
# More pieces of runs than these are merged before others are added.
_MANY_PIECES = 1 << 16
# Undecided tiles that are looked at together.
_MAX_OPEN = 1 << 18


@dataclass
class Statistics:
    """How the tiles of a classification were settled; filled by `classify`.

    Attributes:
        tiles: all of them, shared batches and heads counted once.
        nodes: squares of tiles that were opened, being neither empty nor full as a whole.
        open: tiles left open by intervals and looked at by position.
        dense: tiles of which some part was evaluated at every position.
    """

    tiles: int = 0
    nodes: int = 0
    open: int = 0
    dense: int = 0


@dataclass(frozen=True, eq=False)
class Grid:
    """The tiles of a mask over one domain.

    Attributes:
        blocks: the mask, compiled.
        tables: ranges of its keys over the blocks of a tile.
        boxes: range queries on the same domain.
        resolver: decides what intervals leave open; None: they leave nothing open.
        count: where to count.
    """

    blocks: Blocks
    tables: Tables
    boxes: Boxes
    resolver: Resolver | None
    count: Statistics

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batches, heads, q blocks, kv blocks)."""
        domain, block = self.tables.domain, self.tables.block
        rows, columns = -(-domain.q_len // block[0]), -(-domain.kv_len // block[1])
        return domain.b.numel(), domain.h.numel(), rows, columns

    def flat(self) -> BlockRuns:
        """The runs by way of a dense grid."""
        states = self.states(self.tables)
        self.count.tiles += states.numel()
        if self.resolver is not None:
            found, dense = self.resolver.resolve(states)
            self.count.open += found
            self.count.dense += dense
        domain = self.tables.domain
        return BlockRuns.from_states(states, domain.q_len, domain.kv_len, self.tables.block)

    def by_nodes(self, side: int) -> BlockRuns:
        """The runs by way of nodes of `side` x `side` tiles."""
        batch, heads, rows, columns = self.shape
        top = self.states(self.tables.coarser(side))
        opened = torch.nonzero(top == PARTIAL)
        tiles = batch * heads * rows * columns
        if _MOSTLY * top.numel() < len(opened) and tiles <= _MAX_FLAT:
            return self.flat()
        pieces = _Pieces(batch * heads, side, (rows, columns), self.tables.domain.device)
        pieces.add_whole(top)
        self.count.tiles += tiles
        self.count.nodes += len(opened)
        for nodes in opened.split(max(1, _MAX_TILES // side**2)) if len(opened) else ():
            b, h, q, kv = nodes.unbind(1)
            pieces.add(b * heads + h, q, kv, self._inside(b, h, q, kv, side))
        domain = self.tables.domain
        return BlockRuns(
            domain.q_len, domain.kv_len, self.tables.block, batch, heads,
            *(pieces.runs(backward, kind) for backward in (False, True) for kind in (FULL, PARTIAL)),
        )  # fmt: skip

    def states(self, tables: Tables) -> Tensor:
        """States by intervals, int8 [b, h, q blocks, kv blocks]; PARTIAL where undecided."""
        domain, block = tables.domain, tables.block
        rows, columns = -(-domain.q_len // block[0]), -(-domain.kv_len // block[1])
        shape = domain.b.numel(), domain.h.numel(), rows, columns
        states = torch.empty(shape, dtype=torch.int8, device=domain.device)
        step = max(1, self._at_once(states.numel()) // (domain.lead * columns))
        ki = torch.arange(columns, device=domain.device)[None]
        for first in range(0, rows, step):
            qi = torch.arange(first, min(first + step, rows), device=domain.device)[:, None]
            found = self.blocks.run(tables, self.boxes, At(qi, ki))
            states[:, :, first : first + step] = _state(found)
        return states

    def _at_once(self, tiles: int) -> int:
        domain = self.tables.domain
        varying = sum(domain.sides.side(n) is Side.MIXED for n, _ in self.blocks.steps)
        return min(_PASS_BYTES // (32 * (varying + 1)), at_once(tiles, domain.device))

    def _inside(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, side: int) -> Tensor:
        """Exact states of the tiles of nodes [n]: int8 [n, side, side]; EMPTY beyond the grid."""
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
            found = _state(self.blocks.run(self.tables, self.boxes, at))
            states[some] = found.masked_fill(beyond, EMPTY)
            if self.resolver is not None:
                undecided.append(
                    (states[some].flatten() == PARTIAL).nonzero()[:, 0] + first * side**2
                )
        if self.resolver is not None:
            self._settle(self.resolver, states, torch.cat(undecided), (b, h, q, kv))
        return states

    def _settle(
        self, resolver: Resolver, states: Tensor, places: Tensor, nodes: tuple[Tensor, ...]
    ) -> None:
        """Decide tiles of nodes [n], at places in their states [n, side, side]."""
        side = states.shape[-1]
        self.count.open += len(places)
        for part in places.split(min(_MAX_OPEN, at_once(len(places), places.device))):
            line = part // side
            n = line // side
            b, h, q, kv = (x.index_select(0, n) for x in nodes)
            q, kv = q * side + (line - n * side), kv * side + (part - line * side)
            found, dense = resolver.settle(b, h, q, kv)
            states.view(-1).index_copy_(0, part, found)
            self.count.dense += dense


def _state(found: Interval) -> Tensor:
    must, may = found
    return must.to(torch.int8) + may.to(torch.int8)


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Pieces of runs, by direction and state, until they are joined.

    Attributes:
        pairs: (b, h) pairs.
        side: tiles along a node.
        tiles: (q blocks, kv blocks).
        device: where the runs are.
    """

    pairs: int
    side: int
    tiles: tuple[int, int]
    device: torch.device
    found: dict[tuple[bool, int], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def add_whole(self, top: Tensor) -> None:
        """The nodes that are FULL, from states [b, h, nodes, nodes]."""
        grid = top.flatten(0, 1)
        for backward in (False, True):
            rows, blocks = self._sizes(backward)
            own = grid.transpose(1, 2) if backward else grid
            at, state = stretches(own)
            mine = state == FULL
            length = at.diff(append=at.new_full((1,), own.numel())).masked_select(mine)
            place = at.masked_select(mine)
            line = place // own.shape[2]  # pair * rows of nodes + row of nodes
            start, pair = place - line * own.shape[2], line // own.shape[1]
            row = ((line - pair * own.shape[1]) * self.side)[:, None]
            row = row + torch.arange(self.side, device=row.device)
            base = (pair[:, None] * rows + row) * (blocks + 1)
            first = base + (start * self.side)[:, None]
            last = base + ((start + length) * self.side).clamp(max=blocks)[:, None]
            inside = row < rows
            self.found.setdefault((backward, FULL), []).append(
                (first.masked_select(inside), last.masked_select(inside))
            )

    def add(self, pair: Tensor, q: Tensor, kv: Tensor, states: Tensor) -> None:
        """The tiles of nodes [n] from their states [n, side, side]."""
        known = {key: len(pieces) for key, pieces in self.found.items()}
        step = max(1, at_once(states.numel(), states.device) // self.side**2)
        for first in range(0, len(q), step):
            some = slice(first, first + step)
            self._add(pair[some], q[some], kv[some], states[some], backward=False)
            self._add(pair[some], kv[some], q[some], states[some].transpose(1, 2), backward=True)
        for key, pieces in self.found.items():
            new = pieces[known.get(key, 0) :]
            if sum(first.numel() for first, _ in new) > _MANY_PIECES:
                pieces[known.get(key, 0) :] = [merged(*_joined(new))]

    def _add(
        self, pair: Tensor, row: Tensor, column: Tensor, states: Tensor, *, backward: bool
    ) -> None:
        rows, blocks = self._sizes(backward)
        at, state = stretches(states)
        length = at.diff(append=at.new_full((1,), states.numel()))
        corner = (pair * rows + row * self.side) * (blocks + 1) + column * self.side
        for kind in (FULL, PARTIAL):
            mine = state == kind
            place = at.masked_select(mine)
            line = place // self.side  # node * side + row inside of it
            node = line // self.side
            first = corner.index_select(0, node) + (line - node * self.side) * (blocks + 1)
            first = first + (place - line * self.side)
            last = first + length.masked_select(mine)
            self.found.setdefault((backward, kind), []).append((first, last))

    def runs(self, backward: bool, kind: int) -> Runs:
        """All the pieces of one kind, joined."""
        rows, blocks = self._sizes(backward)
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        pieces = self.found.get((backward, kind), [(nothing, nothing)])
        return Runs.joined(*_joined(pieces), self.pairs * rows, blocks)

    def _sizes(self, backward: bool) -> tuple[int, int]:
        return self.tiles[::-1] if backward else self.tiles


def _joined(pieces: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([first for first, _ in pieces]), torch.cat([last for _, last in pieces])

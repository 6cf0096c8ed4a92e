"""Exact classification of a mask's tiles: EMPTY, PARTIAL or FULL, without the mask's N x N values.

The mask is evaluated on intervals, one value per tile, with exact tables for everything that
depends on one side only (`interp/blockwise.py`). What is proven true or false everywhere is
settled; in the rest a kept and a dropped position are looked for (`witness.py`), and only tiles
without them are evaluated whole. The method is conservative at each step and exact at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnkit.errors import BoundsError, DTypeError, OptionError, ShapeError
from attnkit.graph import ir
from attnkit.graph.affine import Sides
from attnkit.graph.ir import BOOL, Node
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.sparsity.hierarchical import Grid, Statistics
from attnkit.sparsity.index_bounds import check_bounds
from attnkit.sparsity.mask_rewrites import equated, gated, regrouped
from attnkit.sparsity.ranges.boxes import Boxes
from attnkit.sparsity.ranges.equality import settle_equalities
from attnkit.sparsity.ranges.eval_blocks import Blocks, compile_blocks, is_exact
from attnkit.sparsity.ranges.tables import Domain, Tables, shared_sides
from attnkit.sparsity.witness import Resolver

# (b, h) pairs are classified together while their points and tiles stay below these numbers.
_MAX_POINTS = 1 << 21
_MAX_TILES = 1 << 23
# Grids with more tiles go by nodes of _NODE x _NODE tiles, or larger ones if they were too many.
_FLAT_TILES = 1 << 17
_NODE = 16
_MAX_NODES = 1 << 18


def classify(
    root: Node,
    tensors: Sequence[Tensor],
    *,
    q_len: int,
    kv_len: int,
    block: tuple[int, int],
    batch: int,
    heads: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    names: Sequence[str] = (),
    statistics: Statistics | None = None,
) -> BlockRuns:
    """Find which tiles a mask keeps, exactly.

    Args:
        root: bool expression of b, h, q, kv.
        tensors: captured tensors by slot, on `device`.
        q_len, kv_len: lengths in positions, at least 1, any.
        block: (q, kv) positions of a tile, any positive sizes.
        batch, heads: how many the mask is asked for; the result has 1 instead where the
            expression does not read b, or h.
        device: where the work is done and the result lies.
        dtype: what the graph's f32 means, float32 or float64.
        names: names of the captured tensors by slot, for messages.
        statistics: filled, if given, with how the tiles were settled.

    Raises:
        BoundsError: an index can leave its captured tensor, or an integer can leave int32.
        DTypeError: the expression is not bool.
        OptionError, ShapeError: a block size or a length is not positive.
    """
    _check(root, q_len, kv_len, block, batch, heads)
    reads = ir.reads(root)
    batch, heads = (batch if "b" in reads else 1), (heads if "h" in reads else 1)
    check = partial(
        check_bounds,
        tensors=tensors,
        names=names,
        q_len=q_len,
        kv_len=kv_len,
        batch=batch,
        heads=heads,
        dtype=dtype,
    )
    classifier = _prepare(root, check, names)
    count = Statistics() if statistics is None else statistics
    parts = []
    with torch.no_grad():
        for b, h in _chunks(batch, heads, q_len, kv_len, block, device):
            domain = Domain(tensors, q_len, kv_len, b, h, dtype, classifier.sides)
            parts.append(classifier.runs(domain, block, count))
    return BlockRuns.stacked(parts, batch, heads)


@dataclass(frozen=True, eq=False)
class _Classifier:
    """A mask prepared for classification at any block size."""

    root: Node
    blocks: Blocks
    sides: Sides
    checked: frozenset[Node]
    names: tuple[str, ...]

    def runs(self, domain: Domain, block: tuple[int, int], count: Statistics) -> BlockRuns:
        """The runs of a domain; adds to the statistics."""
        tables = Tables(domain, block)
        tables.build(self.blocks.keys)
        settle_equalities(self.blocks, tables)
        resolver = None
        if not is_exact(self.blocks.root, self.sides, tables.equal):
            resolver = Resolver(self.root, self.blocks, tables, self.checked, self.names)
        grid = Grid(self.blocks, tables, Boxes(domain), resolver, count)
        _, _, rows, columns = grid.shape
        if rows * columns <= _FLAT_TILES:
            return grid.flat()
        side = _NODE
        while -(-rows // side) * -(-columns // side) > _MAX_NODES:
            side *= 2
        return grid.by_nodes(side)


def _prepare(
    root: Node, check: Callable[[Sequence[Node]], frozenset[Node]], names: Sequence[str]
) -> _Classifier:
    """Rewrite and compile a mask; `check` returns unproven loads or raises BoundsError."""
    sides = shared_sides()
    checked = check([root])
    better = equated(root, sides)
    if better is not root:
        try:
            sound = check([better]) <= checked
        except BoundsError:
            sound = False  # an index that only the equality keeps in range
        better = better if sound else root
    blocks = compile_blocks(gated(regrouped(better, sides), sides), sides)
    return _Classifier(root, blocks, sides, checked, tuple(names))


def _chunks(
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    block: tuple[int, int],
    device: torch.device | str,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batch and head numbers to classify together, in row order."""
    tiles = -(-q_len // block[0]) * -(-kv_len // block[1])
    pairs = max(1, min(_MAX_POINTS // (q_len + kv_len), _MAX_TILES // tiles))
    b_step, h_step = (max(1, pairs // heads), heads) if pairs >= heads else (1, pairs)
    all_b, all_h = (torch.arange(n, dtype=torch.int32, device=device) for n in (batch, heads))
    for b in all_b.split(b_step):
        for h in all_h.split(h_step):
            yield b, h


def _check(
    root: Node, q_len: int, kv_len: int, block: tuple[int, int], batch: int, heads: int
) -> None:
    if root.type != BOOL:
        raise DTypeError(f"a mask must be bool, got {root.type}: {root}")
    if min(block) < 1:
        raise OptionError(f"block must be two positive sizes (q, kv), got {block}")
    for name, value in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch), ("heads", heads)):
        if value < 1:
            raise ShapeError(f"{name} must be at least 1, got {value}")

"""Classify a mask's tiles exactly as EMPTY, PARTIAL or FULL, without evaluating every position.

Interval arithmetic evaluates the mask once per tile, with exact tables for every expression that
depends on one side only (`ranges.eval_blocks`). If the mask is proven True everywhere in a tile, or
False everywhere, the tile is decided. In other tiles `witness` looks for one unmasked and one
masked position, and evaluates every position only if it finds no such pair. The result is exact.
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
from attnkit.graph.eval_torch import indices
from attnkit.graph.ir import BOOL, Node
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.sparsity.hierarchical import Grid, Statistics
from attnkit.sparsity.index_bounds import check_bounds
from attnkit.sparsity.mask_rewrites import equate, gate, regroup
from attnkit.sparsity.ranges.boxes import Boxes
from attnkit.sparsity.ranges.equality import tabulate_equalities
from attnkit.sparsity.ranges.eval_blocks import Blocks, compile_blocks, is_exact
from attnkit.sparsity.ranges.tables import Domain, Tables, shared_sides

# (b, h) pairs are classified together while their points and tiles stay below these numbers.
_MAX_POINTS = 1 << 21
_MAX_TILES = 1 << 23
# Larger grids are classified by nodes of _NODE x _NODE tiles, or larger nodes beyond _MAX_NODES.
_DENSE_TILES = 1 << 17
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
    """Classify every tile of a mask and return the runs.

    Args:
        root: bool expression of b, h, q, kv.
        tensors: captured tensors by slot, on `device`.
        q_len, kv_len: lengths in positions, at least 1.
        block: (q, kv) positions of a tile, any positive sizes.
        batch, heads: batch size and number of query heads; the result has 1 instead where the
            expression does not read b, or h.
        device: device of the computation and of the result.
        dtype: dtype of the graph's f32, float32 or float64.
        names: names of the captured tensors by slot, for messages.
        statistics: receives counts of how the tiles were decided, unless None.

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
    statistics = Statistics() if statistics is None else statistics
    parts = []
    with torch.no_grad():
        for b, h in _chunks(batch, heads, q_len, kv_len, block, device):
            domain = Domain(tensors, q_len, kv_len, b, h, dtype, classifier.sides)
            parts.append(classifier.runs(domain, block, statistics))
    return BlockRuns.stack(parts, batch, heads)


@dataclass(frozen=True, eq=False)
class _Classifier:
    """Classifies the tiles of one mask at any block size.

    Attributes:
        root: the mask.
        blocks: the mask, rewritten and compiled for evaluation on tiles.
        sides: sides of its nodes.
        checked: loads of the root whose index is not proven to be in range.
        names: names of the captured tensors by slot, for messages.
    """

    root: Node
    blocks: Blocks
    sides: Sides
    checked: frozenset[Node]
    names: tuple[str, ...]

    def runs(self, domain: Domain, block: tuple[int, int], statistics: Statistics) -> BlockRuns:
        """Classify the tiles of `domain`, return their runs, and update `statistics`."""
        tables = Tables(domain, block)
        tables.build(self.blocks.keys)
        tabulate_equalities(self.blocks, tables)
        resolver = None
        if not is_exact(self.blocks.root, self.sides, tables.equal):
            from attnkit.sparsity.witness import Resolver  # most masks are exact

            resolver = Resolver(self.root, self.blocks, tables, self.checked, self.names)
        grid = Grid(self.blocks, tables, Boxes(domain), resolver, statistics)
        _, _, rows, columns = grid.shape
        if rows * columns <= _DENSE_TILES:
            return grid.runs_dense()
        side = _NODE
        while -(-rows // side) * -(-columns // side) > _MAX_NODES:
            side *= 2
        return grid.runs_by_nodes(side)


def _prepare(
    root: Node, check: Callable[[Sequence[Node]], frozenset[Node]], names: Sequence[str]
) -> _Classifier:
    """Rewrite and compile a mask, and return its classifier.

    Args:
        root: the mask.
        check: returns the loads that are not proven in range, or raises; see `check_bounds`.
        names: names of the captured tensors by slot.
    """
    sides = shared_sides()
    checked = check([root])
    rewritten = equate(root, sides)
    if rewritten is not root:
        try:
            sound = check([rewritten]) <= checked
        except BoundsError:
            sound = False  # only the equality, which was replaced, kept an index in range
        rewritten = rewritten if sound else root
    blocks = compile_blocks(gate(regroup(rewritten, sides), sides), sides)
    return _Classifier(root, blocks, sides, checked, tuple(names))


def _chunks(
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    block: tuple[int, int],
    device: torch.device | str,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the int32 batch and head indices (b, h) to classify together, in row order."""
    tiles = -(-q_len // block[0]) * -(-kv_len // block[1])
    pairs = max(1, min(_MAX_POINTS // (q_len + kv_len), _MAX_TILES // tiles))
    b_step, h_step = (max(1, pairs // heads), heads) if pairs >= heads else (1, pairs)
    all_b, all_h = (indices(n, device) for n in (batch, heads))
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

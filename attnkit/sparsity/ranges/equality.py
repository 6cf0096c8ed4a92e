"""Make equalities between a q value and a kv value exact on tiles.

If every block holds all integers between its least and its greatest value, as with sorted ids,
interval arithmetic is already exact. Otherwise the tiles that hold equal values are tabulated
(`equality_sets`). If there are too many such tiles to list, the tables hold a sample of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnkit.graph.affine import Side
from attnkit.graph.ir import Node
from attnkit.sparsity.ranges.eval_blocks import Blocks, Compare, Total
from attnkit.sparsity.ranges.tables import Domain, Tables

if TYPE_CHECKING:
    from attnkit.sparsity.ranges.equality_sets import BlockValues


def tabulate_equalities(blocks: Blocks, tables: Tables) -> None:
    """Fill `tables.equal` and `tables.samples` for the equalities of a compiled mask."""
    for n, recipe in blocks.steps:
        if n.op == "eq" and isinstance(recipe, Compare) and _is_two_sided(recipe):
            _tabulate(n, recipe, tables)


def _tabulate(n: Node, recipe: Compare, tables: Tables) -> None:
    """Fill `tables.equal` or `tables.samples` for the equality `n`."""
    from attnkit.sparsity.ranges.equality_sets import Pairs, find_matches  # few masks have any

    domain, block = tables.domain, tables.block
    q = _values_of(recipe.left, domain, Side.Q, block[0])
    kv = _values_of(recipe.right, domain, Side.KV, block[1])
    if bool(q.solid & kv.solid):
        tables.equal[n] = None
        return
    matches = find_matches(q, kv, block)
    if isinstance(matches, Pairs) and not matches.whole:
        tables.samples.append(matches)
    elif matches is not None:
        tables.equal[n] = matches


def _is_two_sided(recipe: Compare) -> bool:
    left = {key.side for key in recipe.left.keys}
    right = {key.side for key in recipe.right.keys}
    separate = Side.Q in left and Side.DIAGONAL not in left and right == {Side.KV}
    return separate and not recipe.left.others


def _values_of(total: Total, domain: Domain, side: Side, block: int) -> BlockValues:
    """Evaluate a sum of keys of one side, plus constant keys, at every position of the side."""
    from attnkit.sparsity.ranges.equality_sets import BlockValues

    varying = [key for key in total.keys if key.side is side]
    constant = [key for key in total.keys if key.side is not side]
    offset = sum(
        (value.to(torch.int64) for value in map(domain.all_values, constant)), total.offset
    )

    def pieces() -> Iterator[tuple[int, Tensor]]:
        nodes = [n for key in varying for n, _ in key.terms]
        for start, stop in domain.pieces(nodes, side, block):
            values = [v.to(torch.int64) for v in domain.values(varying, start, stop)]
            yield start, reduce(torch.add, values) + offset

    return BlockValues.of(pieces(), domain.span(side)[1], block)

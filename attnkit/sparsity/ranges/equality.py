"""Equalities between a value of q and a value of kv, made exact on tiles.

Where every block holds all the integers between its least and its greatest one, as sorted ids do,
intervals are exact already. Otherwise the tiles that hold equal values are found out and kept with
the tables (`matches.py`); of too many to list, samples are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from attnkit.graph.affine import Side
from attnkit.sparsity.ranges.equality_sets import Held, Pairs, matches
from attnkit.sparsity.ranges.eval_blocks import Blocks, Compare, Total
from attnkit.sparsity.ranges.tables import Domain, Tables


def settle_equalities(blocks: Blocks, tables: Tables) -> None:
    """Fill `tables.equal` and `tables.samples` for the equalities of a compiled mask."""
    domain, block = tables.domain, tables.block
    for n, recipe in blocks.steps:
        if n.op != "eq" or not isinstance(recipe, Compare) or not _is_two_sided(recipe):
            continue
        q = _held(recipe.left, domain, Side.Q, block[0])
        kv = _held(recipe.right, domain, Side.KV, block[1])
        if bool(q.solid & kv.solid):
            tables.equal[n] = None
        else:
            found = matches(q, kv, block)
            if isinstance(found, Pairs) and not found.whole:
                tables.samples.append(found)
            elif found is not None:
                tables.equal[n] = found


def _is_two_sided(recipe: Compare) -> bool:
    left = {key.side for key in recipe.left.keys}
    right = {key.side for key in recipe.right.keys}
    apart = Side.Q in left and Side.DIAGONAL not in left and right == {Side.KV}
    return apart and not recipe.left.others


def _held(total: Total, domain: Domain, side: Side, block: int) -> Held:
    """The values of a sum of keys of one side, and constant ones."""
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

    return Held.of(pieces(), domain.span(side)[1], block)

"""Tell which score_mods may read the positions of tokens in place of those in their sequences.

A score_mod of the distance alone, such as ALiBi or T5's bias, has the same value for both wherever a
sequence starts at the same position in queries and keys. With the positions of tokens it stays an
expression of q - kv, which attnkit evaluates once for each distance; with tables of positions it
would be evaluated for each score.
"""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias

import torch

from attnkit import BoundsError, ShapeError
from attnkit.graph import ir
from attnkit.graph.ir import F32, Node
from attnkit.graph.staging import is_relative
from attnkit.integrations.packed.options import Function
from attnkit.sparsity.mask_runs import check_lengths
from attnkit.tracing.axes import Sizes
from attnkit.tracing.built_for import check_built_for
from attnkit.tracing.guards import trace_cached
from attnkit.util import caches

Reads: TypeAlias = Literal["nothing", "distance", "positions"]

_NO_SLOT = 1 << 30  # of no captured tensor


def takes_token_positions(
    score_mod: Function,
    *,
    starts_agree: bool,
    lengths: tuple[int, int],
    heads: int,
    device: torch.device,
) -> bool:
    """Return whether a score_mod has the same value for positions of tokens, and fits them.

    The answer may change with what the function captures: ask at each call.

    Args:
        score_mod: the function.
        starts_agree: whether each sequence has its queries and keys at the same positions.
        lengths: number of query and key tokens.
        heads: number of query heads.
        device: device of the query.

    Raises:
        TraceError: the function cannot be traced.
    """
    traced = trace_cached(score_mod, "score", device)
    reads = _reads(traced.root)
    if reads == "nothing":
        return True
    if reads == "positions" or not starts_agree:
        return False
    try:
        check_built_for(score_mod, Sizes(q=lengths[0], kv=lengths[1]))
        return not check_lengths(traced, *lengths, 1, heads)
    except (BoundsError, ShapeError):  # a table for the longest sequence
        return False


@functools.lru_cache(maxsize=256)
def _reads(root: Node) -> Reads:
    """Return what a score_mod reads of the place of a score."""
    names = ir.reads(root)
    if "b" in names:  # the sequence, which depends on the position of the query
        return "positions"
    if not names & {"q", "kv"}:
        return "nothing"
    # the score is a number like any other here
    number = ir.load(_NO_SLOT, F32, ())
    return (
        "distance" if is_relative(ir.substitute(root, {ir.arg("score"): number})) else "positions"
    )


caches.register(_reads.cache_clear)

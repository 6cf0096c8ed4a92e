"""Integer safety: no i32 value leaves int32, no index leaves its captured tensor.

Ranges are propagated through the graph (`bounds_checker`). What is then still possible is refused,
except an index that depends on q and kv together, which can be checked at run time instead.

Every load is evaluated everywhere, also under a `where` that does not choose it, so its index must
be valid everywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import F32, I32, Node
from attnkit.sparsity.index_ranges import Checker, known_range, numbers
from attnkit.sparsity.ranges.tables import Domain, shared_sides
from attnkit.util import caches

_proofs: dict[Hashable, _Proof] = {}
caches.register(_proofs.clear)
_MOST_PROOFS = 256


def check_bounds(
    roots: Sequence[Node],
    tensors: Sequence[Tensor],
    names: Sequence[str] = (),
    *,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    dtype: torch.dtype = torch.float32,
) -> frozenset[Node]:
    """Prove that integer arithmetic and indices stay in range.

    Args:
        roots: expressions of score, b, h, q, kv, grad.
        tensors: captured tensors by slot.
        names: names of the captured tensors by slot, for messages.
        q_len, kv_len, batch, heads: b < batch, h < heads, q < q_len, kv < kv_len.
        dtype: what the graph's f32 means, float32 or float64.

    Returns:
        The loads whose index could be proven neither valid nor invalid; they must be checked
        where they are evaluated.

    Raises:
        BoundsError: an index certainly leaves its tensor; an integer leaves int32, a divisor is
            zero or a shift count is outside 0..31, or that cannot be excluded; a captured tensor
            holds integers outside int32.
    """
    like = tuple((t.shape, t.dtype, t.device) for t in tensors)
    key = (tuple(roots), tuple(names), q_len, kv_len, batch, heads, dtype, like)
    known = _proofs.get(key)
    if known is None or not known.holds(tensors, dtype):
        known = _prove(roots, tensors, names, (q_len, kv_len, batch, heads), dtype)
        if len(_proofs) >= _MOST_PROOFS:
            _proofs.clear()
        _proofs[key] = known
    return known.unproven


@dataclass(frozen=True)
class _Proof:
    """What was found, and what of the captured tensors' data it rests on.

    Attributes:
        unproven: loads to be checked at run time.
        ranges: least and greatest number of a tensor, by the loads whose values matter.
        by_data: whether more than those ranges was looked at.
    """

    unproven: frozenset[Node]
    ranges: tuple[tuple[Node, tuple[float, float]], ...]
    by_data: bool

    def holds(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """Whether data as it is now gives the same."""
        return not self.by_data and all(
            numbers(known_range(tensors[int(n.attr or 0)], n, dtype)) == ends
            for n, ends in self.ranges
        )


def _prove(
    roots: Sequence[Node],
    tensors: Sequence[Tensor],
    names: Sequence[str],
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> _Proof:
    q_len, kv_len, batch, heads = sizes
    device = tensors[0].device if tensors else torch.device("cpu")
    b = torch.arange(batch, dtype=torch.int32, device=device)
    h = torch.arange(heads, dtype=torch.int32, device=device)
    nodes = ir.topo(*roots)
    truncates = any(n.op == "cast" and (n.type, n.args[0].type) == (I32, F32) for n in nodes)
    domain = Domain(tensors, q_len, kv_len, b, h, dtype, shared_sides())
    checker = Checker(domain, tuple(names), truncates)
    with torch.no_grad():
        for n in nodes:
            checker.visit(n)
    ranges = tuple((n, numbers(ends)) for n, ends in checker.read.items())
    return _Proof(frozenset(checker.unproven), ranges, checker.by_data)

"""Prove integer safety: no i32 value leaves int32, no index leaves its captured tensor.

Ranges are propagated through the graph (`index_ranges`). A violation that is certain, or that
cannot be excluded, raises a BoundsError. There is one exception: an index that depends on q and kv
together can be checked at run time instead.

Every load is evaluated at every position, also if a `where` does not select it. So its index must
be valid at every position.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.eval_torch import indices
from attnkit.graph.ir import F32, I32, Node
from attnkit.sparsity.index_ranges import RangeChecker, known_range, to_numbers
from attnkit.sparsity.ranges.tables import Domain, shared_sides
from attnkit.util import caches

_proofs: dict[Hashable, _Proof] = {}
caches.register(_proofs.clear)
_MAX_PROOFS = 256


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
    """Prove that integers and indices stay in range, and return the loads that are not proven.

    Args:
        roots: expressions of score, b, h, q, kv, grad.
        tensors: captured tensors by slot.
        names: names of the captured tensors by slot, for messages.
        q_len, kv_len, batch, heads: b < batch, h < heads, q < q_len, kv < kv_len.
        dtype: dtype of the graph's f32, float32 or float64.

    Returns:
        The loads whose index is proven neither valid nor invalid; they must be checked where they
        are evaluated.

    Raises:
        BoundsError: an index leaves its tensor; an integer may leave int32, a divisor may be zero,
            or a shift count may be outside 0..31; a captured tensor holds integers outside int32.
    """
    properties = tuple((t.shape, t.dtype, t.device) for t in tensors)
    key = (tuple(roots), tuple(names), q_len, kv_len, batch, heads, dtype, properties)
    proof = _proofs.get(key)
    if proof is None or not proof.holds(tensors, dtype):
        proof = _prove(roots, tensors, names, (q_len, kv_len, batch, heads), dtype)
        if len(_proofs) >= _MAX_PROOFS:
            _proofs.clear()
        _proofs[key] = proof
    return proof.unproven


class _Proof(NamedTuple):
    """Holds a result of `check_bounds` and the properties of captured data on which it depends.

    Attributes:
        unproven: the loads that must be checked at run time.
        ranges: (load, least and greatest number of its tensor) for the loads whose values matter.
        uses_values: whether the result depends on the data by more than these ranges.
    """

    unproven: frozenset[Node]
    ranges: tuple[tuple[Node, tuple[float, float]], ...]
    uses_values: bool

    def holds(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """Return whether the proof is valid for the current data of the tensors."""
        return not self.uses_values and all(
            to_numbers(known_range(tensors[int(n.attr)], n, dtype)) == ends  # type: ignore[arg-type]
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
    b, h = indices(batch, device), indices(heads, device)
    nodes = ir.topo(*roots)
    truncates = any(n.op == "cast" and (n.type, n.args[0].type) == (I32, F32) for n in nodes)
    domain = Domain(tensors, q_len, kv_len, b, h, dtype, shared_sides())
    checker = RangeChecker(domain, tuple(names), truncates)
    with torch.no_grad():
        for n in nodes:
            checker.visit(n)
    ranges = tuple((n, to_numbers(ends)) for n, ends in checker.data_ranges.items())
    return _Proof(frozenset(checker.unproven), ranges, checker.uses_values)

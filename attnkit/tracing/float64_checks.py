"""Captured float64 tensors where scores are not float64: refused where their rounding would show.

A float64 number is rounded to float32 before a float32 or narrower attention reads it. As a factor
of a score or a term of it that costs no more than the score's own rounding. Where a mask decides
by it, or where it is first subtracted from a number of its size, nothing of it may remain.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from attnkit.errors import DTypeError
from attnkit.graph import ir
from attnkit.graph.ir import BOOL, F32, Node
from attnkit.tracing.tracer import Traced
from attnkit.util import caches
from attnkit.util.tensor_cache import VersionedCache

# Rounding an argument of these shows in the result beyond that result's own rounding.
_STEPS = frozenset("lt le eq floor fdiv mod sin cos".split())
# All arguments of these are terms of the result.
_TERMS = frozenset("add sub min max where".split())

_exact: VersionedCache[bool] = VersionedCache(256, copies=False)
caches.register(_exact.clear)


def check_precision(function: Traced, dtype: torch.dtype) -> None:
    """Captured float64 tensors survive being read as `dtype`, or it does not show.

    Args:
        function: a traced score_mod or mask_mod.
        dtype: what floats are computed in, float32 or float64.

    Raises:
        DTypeError: it would show, and the data is such that rounding changes it.
    """
    if dtype == torch.float64:
        return
    for slot in exposed(function.root, float64_slots(function.tensors)):
        if not _fits(function.tensors[slot]):
            name = function.names[slot] if slot < len(function.names) else f"t{slot}"
            does = "decides by" if function.kind == "mask" else "subtracts, rounds or compares"
            raise DTypeError(
                f"captured tensor {name!r} holds float64 numbers that float32 rounds, and the "
                f"{function.kind}_mod {does} them; floats are float32 here, as the query is not "
                "float64. Capture differences from a common offset, integers, or what .float() "
                "makes of the tensor, if its rounding is harmless"
            )


def float64_slots(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Slots of the float64 tensors."""
    return frozenset(i for i, t in enumerate(tensors) if t.dtype == torch.float64)


def own_dtype(function: Traced) -> torch.dtype:
    """What a function's floats are computed in where no query says it: float64 if it has such."""
    return torch.float64 if float64_slots(function.tensors) else torch.float32


def exposed(root: Node, slots: frozenset[int]) -> tuple[int, ...]:
    """Those of the float64 tensors whose rounding to float32 would show in the result."""
    if not slots:
        return ()
    loads = [n for n in ir.topo(root) if n.op == "load" and n.attr in slots]
    if root.type == BOOL:
        return ir.slots(*loads)
    found: set[Node] = set()
    scored = {ir.arg("score")}  # what is made of the score, and so rounded to float32 itself
    # the loads that a node is made of; of what is made of the score, those that are terms of it
    behind: dict[Node, frozenset[Node]] = {n: frozenset([n]) for n in loads}
    none = frozenset[Node]()
    for n in ir.topo(root):
        if n in behind or not n.args:
            continue
        own = [a for a in n.args if a in scored]
        terms = own if own and n.op not in _TERMS else n.args
        parts = [behind.get(a, none) for a in terms]
        behind[n] = none.union(*parts)
        if own:
            scored.add(n)
        sums = n.op in ("add", "sub")
        if sums and (all(parts) if own else not any(_small(a) for a in n.args)):
            found |= behind[n]
        if not own and (n.op in _STEPS or (n.op == "cast" and n.type != F32)):
            found |= behind[n]
    return ir.slots(*found)


def _small(n: Node) -> bool:
    """Whether a node is a number to which only as small a one is near: 1 + x loses nothing."""
    return n.op == "const" and n.type == F32 and abs(float(n.attr or 0)) <= 1


def _fits(tensor: Tensor) -> bool:
    """Whether float32 holds every number of a float64 tensor."""

    def compare() -> bool:
        with torch.no_grad():
            return bool(((tensor.float() == tensor) | tensor.isnan()).all())

    return _exact.get((), (tensor,), compare)

"""Refuse captured float64 tensors where rounding them to float32 would change the result.

Attention in float32 or narrower rounds a captured float64 number to float32 before it reads it.
Where the number is a factor or a term of a score, the error is no larger than the rounding of the
score itself. Where a mask compares it, or a function first subtracts it from a number of similar
size, rounding may remove every digit that matters. Such tensors must hold numbers that float32
represents exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from attnkit.errors import DTypeError
from attnkit.graph import ir
from attnkit.graph.eval_torch import mask_dtype
from attnkit.graph.ir import BOOL, F32, Node
from attnkit.tracing.tracer import Traced
from attnkit.util import caches
from attnkit.util.tensor_cache import VersionedCache

# Operations whose result changes by more than its own rounding if an argument is rounded.
_STEPS = frozenset("lt le eq floor fdiv mod sin cos".split())
# Operations whose arguments are all terms of the result.
_TERMS = frozenset("add sub min max where".split())

_exact: VersionedCache[bool] = VersionedCache(256, copies=False)
caches.register(_exact.clear)


def check_precision(function: Traced, dtype: torch.dtype) -> None:
    """Check that reading captured float64 tensors as `dtype` does not change the result.

    Args:
        function: a traced score_mod or mask_mod.
        dtype: dtype in which floats are computed, float32 or float64.

    Raises:
        DTypeError: the result depends on digits that rounding removes.
    """
    if dtype == torch.float64:
        return
    for slot in rounding_sensitive_slots(function.root, float64_slots(function.tensors)):
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
    """Return the slots of the float64 tensors."""
    return frozenset(i for i, t in enumerate(tensors) if t.dtype == torch.float64)


def compute_dtype(function: Traced) -> torch.dtype:
    """Choose the dtype of a function's floats without a query: float64 if it captures float64.

    A mask has the same dtype with every query, see `mask_dtype`.
    """
    if function.kind == "mask":
        return mask_dtype(function.root, function.tensors)
    return torch.float64 if float64_slots(function.tensors) else torch.float32


def rounding_sensitive_slots(root: Node, slots: frozenset[int]) -> tuple[int, ...]:
    """Find the float64 tensors whose rounding to float32 may change the result.

    Args:
        root: the graph of a score_mod or mask_mod.
        slots: slots of its float64 tensors.
    """
    if not slots:
        return ()
    loads = [n for n in ir.topo(root) if n.op == "load" and n.attr in slots]
    if root.type == BOOL:
        return ir.slots(*loads)
    sensitive: set[Node] = set()
    scored = {ir.arg("score")}  # nodes computed from the score, so rounded to float32 themselves
    # The loads that each node depends on. For nodes computed from the score: only those loads that
    # are terms of it.
    behind: dict[Node, frozenset[Node]] = {n: frozenset([n]) for n in loads}
    none = frozenset[Node]()
    for n in ir.topo(root):
        if n in behind or not n.args:
            continue
        from_score = [a for a in n.args if a in scored]
        terms = from_score if from_score and n.op not in _TERMS else n.args
        parts = [behind.get(a, none) for a in terms]
        behind[n] = none.union(*parts)
        if from_score:
            scored.add(n)
        cancels = all(parts) if from_score else not any(_small(a) for a in n.args)
        if n.op in ("add", "sub") and cancels:
            sensitive |= behind[n]
        if not from_score and (n.op in _STEPS or (n.op == "cast" and n.type != F32)):
            sensitive |= behind[n]
    return ir.slots(*sensitive)


def _small(n: Node) -> bool:
    """Return whether a node is a constant of magnitude at most 1.

    Where such a constant cancels a number, the number is about 1 too, and its rounding 1e-7 at
    most.
    """
    return n.op == "const" and n.type == F32 and abs(float(n.attr or 0)) <= 1


def _fits(tensor: Tensor) -> bool:
    """Return whether float32 represents every number of a float64 tensor exactly."""

    def compare() -> bool:
        with torch.no_grad():
            return bool(((tensor.float() == tensor) | tensor.isnan()).all())

    return _exact.get((), (tensor,), compare)

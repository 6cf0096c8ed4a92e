"""Reject captured float64 tensors if rounding them to float32 would change the result.

Attention in float32 or narrower dtypes rounds captured float64 numbers to float32. If the number is
a factor or a term of a score, the error is no larger than the rounding of the score itself. But if
a mask compares it, or a function subtracts it from a number of similar size, rounding may remove
all significant digits. Such tensors must hold numbers that float32 represents exactly.
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

# Operations whose result may change by more than its own rounding error if an argument is rounded.
_STEPS = frozenset("lt le eq floor fdiv mod sin cos".split())
# Operations whose arguments are additive terms of the result.
_TERMS = frozenset("add sub min max where".split())

_exact: VersionedCache[bool] = VersionedCache(256, copies=False)
caches.register(_exact.clear)


def check_precision(function: Traced, dtype: torch.dtype) -> None:
    """Raise a DTypeError if rounding captured float64 tensors to `dtype` may change the result.

    Args:
        function: a traced score_mod or mask_mod.
        dtype: dtype in which floats are computed, float32 or float64.

    Raises:
        DTypeError: the result may depend on digits that rounding removes.
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
    """Return the indices of the float64 tensors among `tensors`."""
    return frozenset(i for i, t in enumerate(tensors) if t.dtype == torch.float64)


def compute_dtype(function: Traced) -> torch.dtype:
    """Return the dtype in which the floats of a function are evaluated without a query.

    For a score_mod it is float64 if it captures a float64 tensor, else float32. The dtype of a mask
    never depends on the query, see `mask_dtype`.
    """
    if function.kind == "mask":
        return mask_dtype(function.root, function.tensors)
    return torch.float64 if float64_slots(function.tensors) else torch.float32


def rounding_sensitive_slots(root: Node, slots: frozenset[int]) -> tuple[int, ...]:
    """Return the slots of the float64 tensors whose rounding to float32 may change the result.

    Args:
        root: the graph of a score_mod or mask_mod.
        slots: slots of the float64 tensors of the graph.
    """
    if not slots:
        return ()
    loads = [n for n in ir.topo(root) if n.op == "load" and n.attr in slots]
    if root.type == BOOL:
        return ir.slots(*loads)
    sensitive: set[Node] = set()
    scored = {ir.arg("score")}  # nodes computed from the score, which are rounded to float32 anyway
    # node -> the loads that it depends on; for nodes computed from the score, only the loads that
    # are additive terms
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
    """Return whether a node is a float constant of magnitude at most 1.

    If adding such a constant cancels a number, the number is about 1 too, so that its rounding
    error is at most 1e-7.
    """
    return n.op == "const" and n.type == F32 and abs(float(n.attr)) <= 1  # type: ignore[arg-type]


def _fits(tensor: Tensor) -> bool:
    """Return whether float32 represents every number of a float64 tensor exactly (cached)."""

    def compare() -> bool:
        with torch.no_grad():
            return bool(((tensor.float() == tensor) | tensor.isnan()).all())

    return _exact.get((), (tensor,), compare)

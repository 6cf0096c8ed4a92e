"""Index traced values with the semantics of torch: integers, slices, None, ... and index tensors.

Only integer index tensors of rank 0, or with one common broadcast shape, are supported. A Python
integer next to an index tensor counts as an index tensor, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch

from attnkit.graph.ir import BOOL, F32, Node, const
from attnkit.graph.simplify import build
from attnkit.tracing.ops.registry import PARTS
from attnkit.tracing.proxy import Part, Tracer, Value
from attnkit.util.shapes import broadcast
from attnkit.util.torch_private import DisableTorchFunction


def index(tracer: Tracer, source: Value, at: tuple[Any, ...]) -> Value:
    """Return `source[at]` as a Value. Indexing by constants alone preserves `origin`."""
    items = _expand(source, at)
    if source.part and not all(_same_in_whole(tracer, i, source.part) for i in items):
        source = whole(tracer, source)
    picks: list[Any] = []  # for each dimension of the source: a Value, or (slice start, step, size)
    layout: list[Any] = []  # for each item of the index: None, "index", or the dim of a slice
    dim = 0
    for item in items:
        if item is None:
            layout.append(None)
            continue
        if isinstance(item, slice):
            span = range(*item.indices(source.sizes[dim]))
            picks.append((span.start, span.step, len(span)))
            layout.append(dim)
        else:
            picks.append(_position(tracer, item, dim, source.sizes[dim]))
            layout.append("index")
        dim += 1
    return _assemble(tracer, source, at, picks, layout)


def whole(tracer: Tracer, source: Value) -> Value:
    """Return a Value whose elements are those of `source`, and which is no part of a tensor.

    Raises:
        TraceError: `source` is computed from a part.
    """
    if not source.part:
        return source
    if source.origin is None:
        tracer.fail(
            "a part of a tensor is computed with, and the result indexed by a traced value; "
            "index the part first, or the whole tensor"
        )
    return tracer.capture_view(source.origin)


def _same_in_whole(tracer: Tracer, item: Any, part: Part) -> bool:
    """Return whether an index into a part may be replaced by an index into the whole tensor.

    Both must select the same elements, and be out of bounds in the same cases. Constants and slices
    qualify. An index that is never negative qualifies if the part reaches the end of the tensor,
    because an index beyond the part is then also beyond the tensor.
    """
    if item is None or isinstance(item, slice):
        return True
    value = tracer.lift(item)
    if value.sizes:
        return False
    return value.node.op == "const" or (part == "end" and never_negative(value.node))


def never_negative(n: Node) -> bool:
    """Return whether an integer expression is provably at least 0, by its operations alone."""
    if n.op == "const":
        return float(n.attr) >= 0  # type: ignore[arg-type]
    if n.op == "arg":
        return n.attr in ("b", "h", "q", "kv")
    if n.op in ("add", "mul", "min", "fdiv", "mod"):
        positive = n.op not in ("fdiv", "mod") or (n.args[1].op == "const" and n.args[1].attr != 0)
        return positive and all(never_negative(a) for a in n.args)
    return n.op == "max" and any(never_negative(a) for a in n.args)


def _expand(source: Value, at: tuple[Any, ...]) -> list[Any]:
    """Return the index `at` with the ellipsis and missing trailing dimensions as full slices."""
    used = sum(i is not None and i is not Ellipsis for i in at)
    if used > len(source.sizes):
        raise IndexError(f"too many indices ({used}) for a tensor of shape {source.sizes}")
    fill = [slice(None)] * (len(source.sizes) - used)
    where = next((n for n, i in enumerate(at) if i is Ellipsis), None)
    if where is None:
        return [*at, *fill]
    return [*at[:where], *fill, *at[where + 1 :]]


def _position(tracer: Tracer, item: Any, dim: int, size: int) -> Value:
    value = tracer.lift(item)
    if value.kind == F32:
        raise TypeError("an index must be an integer, got a float; convert with .int()")
    if value.kind == BOOL:
        raise TypeError("indexing by a bool is not supported; use torch.where")
    if not value.sizes and value.node.op == "const":
        place = int(value.node.attr)  # type: ignore[arg-type]
        if not -size <= place < size:
            raise IndexError(f"index {place} is out of range for dimension {dim} of size {size}")
        return Value(tracer, const(place % size), torch.int64)
    return value


def _assemble(
    tracer: Tracer, source: Value, at: tuple[Any, ...], picks: list[Any], layout: list[Any]
) -> Value:
    vectors = [p for p in picks if isinstance(p, Value) and p.sizes]
    common = tuple(broadcast(*(v.sizes for v in vectors)))
    places = [n for n, kind in enumerate(layout) if kind == "index"]
    # torch keeps the dimensions of adjacent index tensors in place, but moves those of separated
    # index tensors to the front
    together = bool(places) and places[-1] - places[0] < len(places)
    front = places[0] if together else 0
    kept = [k for k in layout if k != "index"]
    sizes = [1 if k is None else picks[k][2] for k in kept]
    part = max((source.part, _part(source, picks)), key=PARTS.index)
    sizes[front:front] = common

    def pick(*position: Node) -> Node:
        inner = position[front : front + len(common)]
        outer = dict(
            zip(_keys(kept), position[:front] + position[front + len(common) :], strict=True)
        )
        return source.pick(*(_at(p, d, inner, outer) for d, p in enumerate(picks)))

    if not sizes:
        return Value(tracer, pick(), source.dtype)
    origin = None
    static = not vectors and all(p.node.op == "const" for p in picks if isinstance(p, Value))
    if source.origin is not None and static:
        with DisableTorchFunction():  # a tracing mode may still be active here
            origin = source.origin[at]
    return Value(tracer, None, source.dtype, tuple(sizes), pick, origin, part)


def _part(source: Value, picks: list[Any]) -> Part:
    """Return which part of a Value the slices among `picks` cover."""
    cuts = [(p, n) for p, n in zip(picks, source.sizes, strict=True) if not isinstance(p, Value)]
    if all(start == 0 and step == 1 and size == n for (start, step, size), n in cuts):
        return ""
    to_end = all(step == 1 and start + size == n for (start, step, size), n in cuts)
    return "end" if to_end else "inner"


def _keys(dims: list[Any]) -> list[Any]:
    return [("new", n) if k is None else k for n, k in enumerate(dims)]


def _at(p: Any, dim: int, inner: tuple[Node, ...], outer: dict[Any, Node]) -> Node:
    if isinstance(p, Value):
        index = inner[len(inner) - len(p.sizes) :]
        return p.pick(*(const(0) if n == 1 else i for n, i in zip(p.sizes, index, strict=True)))
    start, step, _ = p
    return build("add", build("mul", outer[dim], const(step)), const(start))

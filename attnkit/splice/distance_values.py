"""Evaluate tables by distance with torch operators, and compute gradients through them.

`codegen.distance_tables` replaces expressions of q - kv in a score_mod by tables. This module
computes their values before the kernels of each call, because captured tensors change from step to
step. What cannot change between calls (distances, the indices of loads) is computed once. No
function that runs in every call synchronizes with the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from attnkit.codegen.distance_tables import DistanceTables, axes
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.eval_torch import apply, evaluate, kinds_of
from attnkit.graph.ir import F32, Node, arg
from attnkit.splice.kept_distances import CallSizes
from attnkit.splice.load_places import Places, places_of
from attnkit.util import caches

Memo: TypeAlias = dict[Node, Tensor]

_GRAD = arg("grad")
_KINDS = kinds_of(torch.float32)
_adjoint = functools.lru_cache(maxsize=1024)(adjoint)
caches.register(_adjoint.cache_clear)


class Points(NamedTuple):
    """Holds the points (b, h, q - kv) at which expressions are evaluated.

    Attributes:
        env: the arguments b, h, q (the distance) and kv (zero), which broadcast together.
        shape: their broadcast shape, [batch, heads, distances] or [points].
    """

    env: dict[str, Tensor]
    shape: tuple[int, ...]

    @staticmethod
    def grid(sizes: CallSizes, device: torch.device, first: int, last: int) -> Points:
        """Return all heads and the distances number `first` to `last` - 1, from 1 - kv_len on."""
        b, h, q = (
            torch.arange(*ends, dtype=torch.int32, device=device)
            for ends in (
                (sizes.batch,),
                (sizes.heads,),
                (first + 1 - sizes.kv_len, last + 1 - sizes.kv_len),
            )
        )
        env = {"b": b.view(-1, 1, 1), "h": h.view(-1, 1), "q": q, "kv": torch.zeros_like(q[:1])}
        return Points(env, (sizes.batch, sizes.heads, last - first))

    @staticmethod
    def listed(b: Tensor, h: Tensor, distance: Tensor) -> Points:
        """Return single points; the arguments are int64 [points], `distance` is q - kv."""
        env = {"b": b, "h": h, "q": distance, "kv": torch.zeros_like(distance[:1])}
        return Points({name: t.int() for name, t in env.items()}, tuple(b.shape))


class Evaluator:
    """Evaluates expressions at fixed points, in as few operators as possible.

    Values that cannot change are computed when the evaluator is made: those that read no captured
    tensor, or only tensors whose data the guard of a prepared call watches.

    Attributes:
        roots: the expressions.
        places: what each load of the argument `places` reads.
        constants: values that cannot change.
        taken: nodes whose values each call of `run` must pass.
    """

    def __init__(
        self,
        roots: Sequence[Node],
        points: Points,
        tensors: Sequence[Tensor],
        given: Collection[Node] = (),
        places: Sequence[Node] = (),
    ) -> None:
        """Prepare the evaluation of `roots`.

        Args:
            roots: the expressions.
            points: where to evaluate them.
            tensors: captured tensors by slot, on the device of the points; later calls may pass
                others of the same shapes, but with the same data if indices depend on it.
            given: nodes whose values each call passes.
            places: loads for which the attribute `places` says what they read.
        """
        order = ir.topo(*roots)
        fixed = watched_slots([*roots, *places])
        self.roots = tuple(roots)
        memo: Memo = {}

        def values_of(nodes: Sequence[Node]) -> list[Tensor]:
            return evaluate(nodes, points.env, tensors, memo=memo, clamps=True)

        def find(load: Node) -> Places:
            tensor = tensors[int(str(load.attr))]
            return places_of(load, values_of(load.args), tensor, points.shape)

        self.places = [find(n) for n in places]
        constant = {n for n in order if _is_fixed(n, fixed)}
        users = [(r, None) for r in roots] + [(a, n) for n in order for a in n.args]
        used = {n for n, user in users if n in constant and user not in constant}
        loads = [n for n in order if n.op == "load" and n not in constant and n not in given]
        indices = {a for n in loads for a in n.args}
        skipped = constant.union(given, loads)
        self._order = [n for n in order if n not in skipped]
        operands = {a for n in self._order for a in n.args}.union(roots)
        kept = [n for n in used if n in operands or n not in indices]
        # `torch.where` copies a number from the CPU to the GPU, and waits for the copy
        device = points.env["q"].device
        self.constants: Memo = {n: t.to(device) for n, t in zip(kept, values_of(kept), strict=True)}
        self._loads = [(n, find(n)) for n in loads]
        self.taken = operands.intersection(given)

    @property
    def computed(self) -> frozenset[Node]:
        """Return the nodes that `run` computes from captured tensors."""
        return frozenset([n for n, _ in self._loads] + self._order)

    def run(self, tensors: Sequence[Tensor], given: Mapping[Node, Tensor] | None = None) -> Memo:
        """Evaluate the expressions; return the values of all nodes that were needed.

        Args:
            tensors: captured tensors by slot.
            given: values of the nodes `taken`.
        """
        values = self.constants | dict(given or {})
        for n, places in self._loads:
            values[n] = places.read(tensors[int(str(n.attr))]).to(_KINDS[n.type])
        for n in self._order:
            values[n] = apply(n, [values[a] for a in n.args], torch.float32)
        return values


def watched_slots(roots: Iterable[Node]) -> frozenset[int]:
    """Return the slots from which integers are computed: a data guard watches their data."""
    integers = [n for n in ir.topo(*roots) if n.type == ir.I32]
    return frozenset(ir.slots(*integers)) if integers else frozenset()


def _is_fixed(n: Node, slots: frozenset[int]) -> bool:
    return "grad" not in ir.reads(n) and slots.issuperset(ir.slots(n))


@dataclass(frozen=True, eq=False)
class _Gradient:
    """Computes the gradients of captured tensors from that of one table.

    Attributes:
        evaluator: evaluates the cotangents of the loads.
        slots: the slot that each load reads, in the order of the evaluator's roots.
        span: the distances to take from the table's gradient; None if `flat` says which.
        flat: elements to take from the table's gradient, as flat indices.
    """

    evaluator: Evaluator
    slots: Sequence[int]
    span: tuple[int, int] | None
    flat: Tensor | None

    def add(
        self,
        tensors: Sequence[Tensor],
        memo: Memo,
        grad: Tensor,
        totals: dict[int, Tensor],
        ordered: bool,
    ) -> None:
        """Add the gradients of captured tensors to `totals`, by slot."""
        evaluator, count = self.evaluator, grad.shape[-1]
        if self.span is not None:
            grad = grad[..., slice(*self.span)]
        elif self.flat is not None:
            grad = grad.reshape(-1)[self.flat]
        given = {n: grad if n is _GRAD else self._cut(memo[n], count) for n in evaluator.taken}
        values = evaluator.run(tensors, given)
        for slot, places, root in zip(self.slots, evaluator.places, evaluator.roots, strict=True):
            part = places.sum(values[root].expand(grad.shape), tensors[slot].shape, ordered)
            totals[slot] = totals[slot] + part if slot in totals else part

    def _cut(self, value: Tensor, distances: int) -> Tensor:
        """Return the part of a value of the whole grid that belongs to `span`."""
        if self.span is None or value.ndim == 0 or value.shape[-1] != distances:
            return value
        return value[..., slice(*self.span)]


@dataclass(frozen=True, eq=False)
class DistanceValues:
    """Computes the tables of calls of one geometry, and the gradients of captured tensors.

    Attributes:
        tables: the rewritten score_mod and its tables.
        sizes: sizes of the calls.
        device: device of the query.
        tensors: example tensors that the score_mod captures, on `device`.
    """

    tables: DistanceTables
    sizes: CallSizes
    device: torch.device
    tensors: Sequence[Tensor]
    forward: Evaluator = field(init=False)
    _fixed: dict[Node, Tensor] = field(default_factory=dict)  # tables that never change
    _gradients: dict[tuple[bool, ...], list[_Gradient | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        points = Points.grid(self.sizes, self.device, 0, self.sizes.distances)
        roots = self.tables.expressions
        object.__setattr__(self, "forward", Evaluator(roots, points, self.tensors))
        known = self.forward.constants
        self._fixed.update({e: self._shaped(e, known[e]) for e in roots if e in known})

    def shape(self, expression: Node) -> tuple[int, ...]:
        """Return the shape of the table of an expression."""
        return (*[self._size(name) for name in axes(expression)], self.sizes.distances)

    def _size(self, name: str) -> int:
        return self.sizes.batch if name == "b" else self.sizes.heads

    def values(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Memo]:
        """Compute the tables.

        Args:
            tensors: tensors that the score_mod captures, on the device of the query.

        Returns:
            The tables, contiguous float32; and the values of all nodes, for `gradients`.
        """
        memo = self.forward.run(tensors)
        tables = self.tables.expressions
        return [
            self._fixed[e] if e in self._fixed else self._shaped(e, memo[e]) for e in tables
        ], memo

    def _shaped(self, expression: Node, value: Tensor) -> Tensor:
        grid = self._grid(axes(expression))
        return (
            value.expand(*grid, self.sizes.distances).reshape(self.shape(expression)).contiguous()
        )

    def _grid(self, names: tuple[str, ...]) -> list[int]:
        """Return the batch size and the number of heads in a table; 1 where it has no such axis."""
        return [self._size(name) if name in names else 1 for name in ("b", "h")]

    def needs_grad(self, needs: Sequence[bool]) -> list[bool]:
        """Return whether the gradient of each table is needed, given that of captured tensors."""
        return [any(self._learned(e, needs)) for e in self.tables.expressions]

    def _learned(self, expression: Node, needs: Sequence[bool]) -> list[tuple[Node, Node]]:
        """Return the loads with a needed gradient, with their cotangents."""
        return [(n, c) for n, c in _adjoint(expression).loads if needs[int(str(n.attr))]]

    def is_fragile(self, needs: Sequence[bool]) -> bool:
        """Return whether a gradient of 0 of a table may become NaN in a captured tensor."""
        pairs = [p for e in self.tables.expressions for p in self._learned(e, needs)]
        return not all(_keeps_zero(c) for _, c in pairs)

    def gradients(
        self,
        tensors: Sequence[Tensor],
        memo: Memo,
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
        ordered: bool,
    ) -> dict[int, Tensor]:
        """Compute the gradients of captured tensors from those of the tables.

        Args:
            tensors: tensors that the score_mod captures, on the device of the query.
            memo: second result of `values`.
            grads: gradients of the tables, float32; None where none is needed.
            needs: for each captured tensor, whether its gradient is needed. `prepare_gradients` has
                been called for it.
            ordered: whether sums must have a fixed order.

        Returns:
            Slot -> gradient, float32, of the tensors that a table reads differentiably.
        """
        totals: dict[int, Tensor] = {}
        pairs = zip(self.tables.expressions, self._gradients[tuple(needs)], grads, strict=True)
        for expression, gradient, grad in pairs:
            if gradient is not None and grad is not None:
                grid = self._grid(axes(expression))
                gradient.add(tensors, memo, grad.view(*grid, -1), totals, ordered)
        return totals

    def has_gradients(self, needs: Sequence[bool]) -> bool:
        """Return whether `prepare_gradients` has been called for `needs`."""
        return tuple(needs) in self._gradients

    def prepare_gradients(self, needs: Sequence[bool], kept: Tensor | None) -> None:
        """Prepare `gradients`.

        Args:
            needs: for each captured tensor, whether its gradient is needed.
            kept: bool [batch or 1, heads or 1, distances], the distances at which the mask keeps a
                score; None to use all.
        """
        parts = [self._gradient(e, needs, kept) for e in self.tables.expressions]
        self._gradients[tuple(needs)] = parts

    def _gradient(
        self, expression: Node, needs: Sequence[bool], kept: Tensor | None
    ) -> _Gradient | None:
        learned = self._learned(expression, needs)
        if not learned:
            return None
        cotangents = [c for _, c in learned]
        points, span, flat = self._points(axes(expression), kept)
        # where the points are a part of the forward's grid, its values need not be computed again
        given = {_GRAD, *(self.forward.computed if flat is None else ())}
        loads = [n for n, _ in learned]
        evaluator = Evaluator(cotangents, points, self.tensors, given, loads)
        return _Gradient(evaluator, [int(str(n.attr)) for n in loads], span, flat)

    def _points(
        self, names: tuple[str, ...], kept: Tensor | None
    ) -> tuple[Points, tuple[int, int] | None, Tensor | None]:
        """Return the points at which a table's gradient is used, and how to take them from it."""
        count = self.sizes.distances
        if kept is not None:
            for axis, name in enumerate(("b", "h")):
                if name not in names:
                    kept = kept.any(axis, keepdim=True)
        if kept is None or kept.shape[:2] == (1, 1):
            found = None if kept is None else kept.view(-1).nonzero().view(-1).tolist()
            first, last = (0, count) if found is None else (0, 0)
            if found:
                first, last = found[0], found[-1] + 1
            if found is None or last - first == len(found):
                return Points.grid(self.sizes, self.device, first, last), (first, last), None
        assert kept is not None
        grid = self._grid(names)
        b, h, at = kept.expand(*grid, count).nonzero().to(self.device).unbind(1)
        flat = (b * grid[1] + h) * count + at
        return Points.listed(b, h, at - (self.sizes.kv_len - 1)), None, flat


def _keeps_zero(cotangent: Node) -> bool:
    """Return whether a cotangent is 0 where `grad` is 0, whatever the captured tensors hold."""
    zero: dict[Node, bool] = {}
    for n in ir.topo(cotangent):
        if n is _GRAD or (n.op == "const" and n.type == F32 and float(str(n.attr)) == 0.0):
            zero[n] = True
        elif n.op in ("neg", "add", "sub"):
            zero[n] = all(zero[a] for a in n.args)
        elif n.op == "where":
            zero[n] = zero[n.args[1]] and zero[n.args[2]]
        elif n.op in ("mul", "div") and n.args[1].op == "const":
            factor = float(str(n.args[1].attr))
            fits = abs(factor) < float("inf") and (n.op == "mul" or factor != 0.0)
            zero[n] = zero[n.args[0]] and fits
        else:
            zero[n] = False
    return zero[cotangent]

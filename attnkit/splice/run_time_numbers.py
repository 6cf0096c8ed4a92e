"""Decide which numbers of a kernel are constants, and which it reads from tables at run time.

A Python number that a score_mod or a mask reads is a constant of its graph. The first calls compile
kernels with their numbers as constants, the fastest code. Another call whose graphs differ from
theirs in numbers alone gets a kernel that reads these numbers from tables; it serves all values.
So a loop over values of a temperature or a window compiles three kernels.

Tiles, proofs of indices and the plan do not take part: they use the real numbers in all cases. The
tables belong to the prepared call of one value, which never changes them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from attnkit.codegen.number_tables import Number, numbers_of, with_tables
from attnkit.codegen.score_form import NumberFacts, number_facts, score_form, weight_form
from attnkit.graph import ir
from attnkit.graph.ir import Node, const
from attnkit.graph.simplify import TRUE
from attnkit.jit.kernel import Source, is_compiled
from attnkit.splice.forward_variant import KnownLoads
from attnkit.splice.mask_intervals import Bounds
from attnkit.splice.runs_cache import wait_for_tables
from attnkit.util import caches

MOST_CONSTANTS = 2  # kernels that differ in numbers alone, before one reads them at run time

_log = logging.getLogger("attnkit.splice")

Sources: TypeAlias = tuple[Source, ...]
Values: TypeAlias = tuple[int | float, ...]
Positions: TypeAlias = frozenset[int]  # of numbers, among those of the graphs


@dataclass(frozen=True, eq=False)
class KernelGraphs:
    """Holds the graphs of a kernel and the tensors that they read.

    Attributes:
        score, mask: the graphs; None if there is none.
        bounds: bounds of the intervals that the mask keeps; None if it has no such form. A kernel
            evaluates them in place of the mask.
        scores: tensors that the score reads, by slot.
        masks: tensors that the mask or its bounds read, by slot.
        softmax: whether a softmax makes the weights.
        facts: what is known of the score's numbers in tables; None if there are no tables.
        known: integers that score and mask read from tables.
    """

    score: Node | None
    mask: Node | None
    bounds: Bounds | None
    scores: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]
    softmax: bool = True
    facts: NumberFacts | None = None
    known: tuple[KnownLoads, KnownLoads] = ((), ())

    @functools.cached_property
    def numbers(self) -> tuple[Number, ...]:
        """Return the numbers that the kernel may read at run time: those of the score first."""
        return numbers_of([self.score]) + numbers_of(self._mask_roots())

    def _mask_roots(self) -> list[Node | None]:
        """Return what the kernel evaluates of the mask, each bound as a sum with an integer."""
        if self.bounds is None:
            return [self.mask]
        return [_as_sum(n) for pair in self.bounds for n in pair]

    def reading(self, positions: Collection[int], device: torch.device) -> KernelGraphs:
        """Return the graphs of a kernel that reads some `numbers` from tables on `device`."""
        own = len(numbers_of([self.score]))
        numbers = self.numbers
        of_score = [numbers[i] for i in sorted(positions) if i < own]
        of_mask = [numbers[i] for i in sorted(positions) if i >= own]
        score = with_tables([self.score], of_score, len(self.scores))
        mask = with_tables(self._mask_roots(), of_mask, len(self.masks))
        scores = (*self.scores, *_tensors(score.floats, score.ints, device))
        ends = [_plain(n) for n in mask.roots if n is not None]
        pairs = zip(ends[::2], ends[1::2], strict=True)
        form = (score_form if self.softmax else weight_form)(self.score)
        return replace(
            self,
            score=score.roots[0],
            # with bounds, a kernel asks of the mask only whether there is one
            mask=mask.roots[0] if self.bounds is None else TRUE,
            bounds=None if self.bounds is None else tuple(pairs),
            scores=scores,
            masks=(*self.masks, *_tensors(mask.floats, mask.ints, device)),
            facts=number_facts(form, frozenset(range(len(self.scores), len(scores)))),
            known=(score.known, mask.known),
        )


_ZERO = const(0)


def _as_sum(bound: Node) -> Node:
    """Return a bound as the sum of something and an integer, which may be 0 for some windows."""
    is_sum = bound.op in ("add", "sub") and bound.args[1].op == "const"
    return bound if is_sum else ir.node("add", bound, _ZERO)


def _plain(bound: Node) -> Node:
    """Return a bound without the sum with 0 that `_as_sum` made."""
    return bound.args[0] if bound.op == "add" and bound.args[1] is _ZERO else bound


def _tensors(
    floats: Sequence[float], ints: Sequence[int], device: torch.device
) -> tuple[Tensor, ...]:
    """Return the tables of numbers that are not empty."""
    contents = (floats, torch.float32), (ints, torch.int32)
    with torch.inference_mode(False):
        tables = [torch.tensor(c, dtype=d, device="cpu").to(device) for c, d in contents if c]
    if tables:
        wait_for_tables(device)
    return tuple(tables)


class Kernels(Protocol):
    """Describes the kernels that `kernels_for` builds from graphs; they are not compiled yet."""

    @property
    def sources(self) -> Sources:
        """Return the kernels that depend on the graphs."""
        ...


K = TypeVar("K", bound=Kernels)


@dataclass
class Family:
    """Holds the kernels of graphs that differ in numbers alone.

    Attributes:
        constants: the numbers of each kernel with constants.
        tables: which numbers each other kernel reads at run time, and the numbers of the call for
            which it was made, from which the kernel has the others.
    """

    constants: list[Values] = field(default_factory=list)
    tables: list[tuple[Positions, Values]] = field(default_factory=list)

    def find(self, values: Values) -> Positions | None:
        """Return what a kernel that serves these numbers reads; None if no kernel reads enough."""
        found = (read for read, others in self.tables if _changed(values, others) <= read)
        return next(found, None)

    def add(self, values: Values) -> Positions:
        """Add a kernel that serves these numbers, and return what it reads at run time.

        It reads the numbers that differ among the kernels so far; all, if there is no other kernel.
        """
        if not self.constants and not self.tables:
            self.tables.append((frozenset(range(len(values))), values))
            return self.tables[0][0]
        read = frozenset[int]().union(
            *(_changed(values, others) for others in self.constants),
            *(positions | _changed(values, others) for positions, others in self.tables),
        )
        self.tables.append((read, values))
        return read


def _changed(one: Values, other: Values) -> Positions:
    return frozenset(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


_SIZE = 1024
_lock = caches.fork_safe_lock()
_families: dict[Sources, Family] = {}  # by the kernels that read all numbers at run time
_decisions: dict[Hashable, Positions] = {}  # by graphs and their kernels with constants


def _clear() -> None:
    with _lock:
        _families.clear()
        _decisions.clear()


caches.register(_clear)


def kernels_for(
    graphs: KernelGraphs, build: Callable[[KernelGraphs], K], device: torch.device
) -> K:
    """Return what `build` makes of the graphs, with numbers as constants or in tables.

    Args:
        graphs: the graphs, with constants.
        build: function that describes the kernels of graphs, without compiling them. Its results
            for equal graphs have equal sources.
        device: device of the tables.
    """
    own = build(graphs)
    key = own.sources, graphs.score, graphs.mask, graphs.bounds
    positions = _decisions.get(key)
    if positions is None:
        if not graphs.numbers:
            return own
        every = build(graphs.reading(range(len(graphs.numbers)), device))
        positions = _decide(graphs.numbers, own.sources, every.sources)
        with _lock:
            _decisions[key] = positions
            if len(_decisions) > _SIZE:
                caches.drop_oldest(_decisions)
    return build(graphs.reading(positions, device)) if positions else own


def _decide(numbers: Sequence[Number], own: Sources, every: Sources) -> Positions:
    """Return the positions of the numbers that the kernels read at run time.

    Args:
        numbers: the numbers of the graphs.
        own: the kernels with constants.
        every: the kernels that read all numbers at run time.
    """
    values = tuple(n.value for n in numbers)
    with _lock:
        family = _families.pop(every, None) or Family()
        _families[every] = family  # the most recent one is the last
        if len(_families) > _SIZE:
            caches.drop_oldest(_families)
        if values in family.constants:
            return frozenset()
        # a kernel that was compiled ahead of time is there to be used
        if len(family.constants) < MOST_CONSTANTS or all(map(is_compiled, own)):
            family.constants.append(values)
            return frozenset()
        positions = family.find(values)
        if positions is None:
            positions = family.add(values)
            _log_numbers(numbers, positions, own)
        return positions


def _log_numbers(numbers: Sequence[Number], positions: Positions, own: Sources) -> None:
    if _log.isEnabledFor(logging.INFO):
        shown = ", ".join(dict.fromkeys(str(numbers[i].constant.attr) for i in sorted(positions)))
        _log.info(
            "kernel %s for %s differs from %d others in numbers alone: one kernel that reads them at "
            "run time (now %s) serves all further values",
            own[0].name,
            own[0].arch,
            MOST_CONSTANTS,
            shown,
        )

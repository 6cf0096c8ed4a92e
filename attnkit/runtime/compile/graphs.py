"""Insert the numbers of a call into the graphs that an operator of torch.compile carries as text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.splice import Captured
from attnkit.tracing.float64_checks import float64_slots
from attnkit.tracing.guards import data_slots
from attnkit.tracing.numbers import with_numbers
from attnkit.tracing.tracer import Kind, Traced


@dataclass(frozen=True)
class Graph:
    """Holds a graph without number nodes.

    Attributes:
        root: the graph. Its slots are 0, 1, ... for the tensors that it still reads.
        slots: for each of these, the position of its tensor among those of the operator. A graph
            may read fewer tensors than the operator has, for example after `ids[q] * 0`.
    """

    root: Node
    slots: tuple[int, ...]

    def traced(self, kind: Kind, tensors: Sequence[Tensor], names: Sequence[str]) -> Traced:
        """Return the graph as a trace of the `tensors` that it reads.

        `names` are those of all tensors of the operator.
        """
        return Traced(kind, self.root, tuple(tensors), tuple(names[i] for i in self.slots))

    def data_slots(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the slots of the tensors on whose values checks depend, see `guards.data_slots`."""
        return data_slots(self.root, float64_slots(tuple(tensors)))


@dataclass(frozen=True)
class Graphs:
    """Holds the score graph and the mask graph of a call; None without the function."""

    score: Graph | None
    mask: Graph | None

    @property
    def score_slots(self) -> tuple[int, ...]:
        """Return the positions of the tensors that the score reads among those of the operator."""
        return () if self.score is None else self.score.slots

    def select(self, scores: Sequence[Tensor], masks: Sequence[Tensor]) -> Captured:
        """Return the tensors that the graphs read among all `scores` and `masks`."""
        mask_slots = () if self.mask is None else self.mask.slots
        return Captured(
            tuple(scores[i] for i in self.score_slots), tuple(masks[i] for i in mask_slots)
        )


@functools.lru_cache(maxsize=1024)
def graphs_of(score: str, mask: str, ints: tuple[int, ...], floats: tuple[str, ...]) -> Graphs:
    """Parse the graphs of an operator and insert numbers into them.

    Args:
        score, mask: text of the graphs; "" without the function.
        ints: values of the number nodes of type int.
        floats: values of those of type float, as `float.hex` writes them.

    Raises:
        BoundsError: an int needs more than 32 bits.
    """
    values = [float.fromhex(x) for x in floats]
    return Graphs(*(_graph(text, ints, values) for text in (score, mask)))


def _graph(text: str, ints: Sequence[int], floats: Sequence[float]) -> Graph | None:
    if not text:
        return None
    root = with_numbers(ir.parse(text), ints, floats)
    slots = ir.slots(root)
    place = {slot: i for i, slot in enumerate(slots)}
    return Graph(ir.renumber(root, place.__getitem__), slots)

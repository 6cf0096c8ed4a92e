"""Convert the graphs of a variant to the form that a forward kernel computes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import Tensor

from attnkit.codegen.load_indices import LoadIndices, data_bound
from attnkit.codegen.nonnegative import wrapping
from attnkit.codegen.score_form import NumberFacts, ScoreForm, score_form, weight_form
from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.util import caches

if TYPE_CHECKING:
    from attnkit.templates.common.hooks import ForwardHooks

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
KnownLoads: TypeAlias = tuple[tuple[Node, int], ...]  # integers in tables of numbers

_NO_WRAP = LoadIndices(frozenset())


class ForwardVariant(NamedTuple):
    """Holds the graphs of a variant in the form that a forward kernel computes.

    Attributes:
        form: the score_mod.
        mask: bool expression; None to keep everything.
        ends: bounds of the intervals of kv that the mask keeps in a row; None if the mask has no
            such form.
        slots: slots of the captured tensors that the kernel reads, for the score and for the mask.
        indices: the loads whose index may be negative at the sizes of the call, and the loads whose
            index is clamped.
        lists_override_mask: whether block lists override the mask.
        sink: whether each softmax has an attention sink, which is the last captured tensor.
        dropout: whether elements of the softmax are dropped. The state of dropout is the last
            captured tensor, or the last but the sink.
    """

    form: ScoreForm
    mask: Node | None
    ends: tuple[tuple[Node, Node], ...] | None
    slots: tuple[tuple[int, ...], tuple[int, ...]]
    indices: LoadIndices = _NO_WRAP
    lists_override_mask: bool = False
    sink: bool = False
    dropout: bool = False

    def nodes(self) -> list[Node]:
        """Return all expressions that the kernel computes."""
        form = self.form
        parts = [form.factor, form.bias, form.slope, form.row]
        parts += [n for pair in self.ends or () for n in pair] or [self.mask]
        return [n for n in parts if n is not None]

    def hooks(
        self,
        positive: bool,
        slope_in_mma: bool = False,
        bias_first: bool = False,
        columns_in_mma: bool = False,
    ) -> ForwardHooks:
        """Build the hooks that the kernel calls.

        Args:
            positive: whether the softmax scale is above 0.
            slope_in_mma: whether the kernel adds slope * column by an MMA.
            bias_first: whether the kernel initialises the accumulator of S to the bias.
            columns_in_mma: whether the kernel adds the bias of each column by an MMA.
        """
        from attnkit.codegen.forward_hooks import GraphForward

        return GraphForward(
            self.form,
            self.mask,
            self.ends,
            scores=len(self.slots[0]),
            lists_override_mask=self.lists_override_mask,
            sink=self.sink,
            dropout=self.dropout,
            positive=positive,
            slope_in_mma=slope_in_mma,
            bias_first=bias_first,
            columns_in_mma=columns_in_mma,
            indices=self.indices,
        )


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Return the shapes of tensors as a hashable tuple of tuples."""
    return tuple(tuple(t.shape) for t in tensors)


@functools.lru_cache(maxsize=256)
def forward_variant(
    score: Node | None,
    mask: Node | None,
    ends: tuple[tuple[Node, Node], ...] | None,
    sizes: tuple[int, int, int, int],
    shapes: tuple[Shapes, Shapes],
    softmax: bool = True,
    facts: NumberFacts | None = None,
    known: tuple[KnownLoads, KnownLoads] = ((), ()),
) -> ForwardVariant:
    """Convert the graphs of a variant to a `ForwardVariant`, whose slots are renumbered from 0.

    Args:
        score, mask: the graphs.
        ends: bounds of the intervals that the mask keeps in a row; None if the mask has no such
            form.
        sizes: batch, heads, query and kv length.
        shapes: shapes of the tensors that the score reads, and of those that mask or ends read.
        softmax: whether a softmax makes the weights; otherwise the modified scores are the weights.
        facts, known: what is known of numbers that the graphs read from tables: of the score_mod,
            and the integers of score_mod and mask.
    """
    form = (score_form if softmax else weight_form)(score, facts=facts)
    parts = {"factor": form.factor, "bias": form.bias, "slope": form.slope, "row": form.row}
    score_slots = ir.slots(*(n for n in parts.values() if n is not None))
    parts = {name: n and ir.renumber(n, score_slots.index) for name, n in parts.items()}
    form = form._replace(
        factor=parts["factor"], bias=parts["bias"], slope=parts["slope"], row=parts["row"]
    )
    nodes = [n for pair in ends or () for n in pair]
    if ends is None and mask is not None:
        nodes = [mask]
    mask_slots = ir.slots(*nodes)
    nodes = [ir.renumber(n, mask_slots.index) for n in nodes]
    slots = score_slots, mask_slots
    if ends is None:
        variant = ForwardVariant(form, nodes[0] if nodes else None, None, slots)
    else:
        pairs = tuple(zip(nodes[::2], nodes[1::2], strict=True))
        variant = ForwardVariant(form, mask, pairs, slots)
    ranges = dict(zip(("b", "h", "q", "kv"), sizes, strict=True))
    score_nodes = [n for name, n in parts.items() if n is not None]
    graphs = (score_nodes, score_slots), (nodes, mask_slots)
    wrap: frozenset[Node] = frozenset()
    clamp: frozenset[Node] = frozenset()
    for (roots, read), own, loads in zip(graphs, shapes, known, strict=True):
        # apart, because equal loads of the two graphs read different tables
        values = {ir.renumber(n, read.index): v for n, v in loads if n.attr in read}
        wrap |= wrapping(roots, ranges, values)
        clamp |= data_bound(roots, ranges, [own[i] for i in read], values)
    return variant._replace(indices=LoadIndices(wrap, clamp))


caches.register(forward_variant.cache_clear)

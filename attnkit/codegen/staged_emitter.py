"""Emit expressions into a kernel in stages: per head, row, column, distance and score.

`graph.staging` decides the level of each sub-expression. The methods are plain Python that runs
while a kernel is traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from attnkit.codegen.emit_cute import LOAD_INDICES, emit
from attnkit.codegen.load_indices import LoadIndices
from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.graph.staging import Level, hoisted

Values: TypeAlias = tuple[Any, ...]
Key: TypeAlias = Any


@dataclass(frozen=True)
class Element:
    """Holds one score of a thread: its position, the values of its row and column, and q . k.

    Attributes:
        q, kv: positions.
        row, column: results of `Stages.row` and `Stages.column`.
        step: key of q - kv among the thread's elements. Elements with equal steps have equal
            q - kv. None if not known.
        score: q . k; None if not needed.
        grad: gradient of the modified score, for adjoints; None if not needed.
        known: values of further sub-expressions, by node; None if there are none.
    """

    q: Any
    kv: Any
    row: Values
    column: Values
    step: Key = None
    score: Any = None
    grad: Any = None
    known: Mapping[Node, Any] | None = None


def head_arguments(site: Any, roots: Sequence[Node]) -> dict[str, Any]:
    """Return the arguments of `roots` that are known for a whole tile, by name.

    Args:
        site: position of the tile, see `templates.common.hooks.Site`.
        roots: expressions.
    """
    env = {"b": site.b, "h": site.h, "scale": site.scale}
    if "kv_last" in ir.reads(*roots):  # an operation, so only where it is needed
        env["kv_last"] = site.kv_len - 1
    return env


class Stages:
    """Emits expressions in stages, one for each staging level, so that values are reused.

    Args:
        roots: the expressions.
        indices: which loads wrap negative indices, and which are clamped.
        fast: whether to use the approximate instructions of the GPU, as in `emit`.
        flush: whether sigmoids below 2^-126 may become 0, as in `emit`.
    """

    def __init__(
        self,
        roots: Sequence[Node],
        indices: LoadIndices = LOAD_INDICES,
        *,
        fast: bool = True,
        flush: bool = False,
    ) -> None:
        self.roots = tuple(roots)
        self._indices = indices
        self._fast = fast
        self._flush = flush
        self._nodes = hoisted(self.roots)

    def nodes_at(self, level: Level) -> tuple[Node, ...]:
        """Return the sub-expressions that are emitted at `level`."""
        return self._nodes[level]

    def head(self, site: Any, tensors: Sequence[Any]) -> Values:
        """Emit the values that depend on the head alone; called once per tile."""
        env = head_arguments(site, self.roots)
        return tuple(self._emit(self._nodes[Level.HEAD], env, tensors, {}))

    def row(self, site: Any, tensors: Sequence[Any], head: Values, q: Any) -> Values:
        """Emit the values that depend on row `q` and the head."""
        env = head_arguments(site, self.roots) | {"q": q}
        return tuple(self._emit(self._nodes[Level.ROW], env, tensors, self._memo(head)))

    def column(self, site: Any, tensors: Sequence[Any], head: Values, kv: Any) -> Values:
        """Emit the values that depend on column `kv` and the head."""
        env = head_arguments(site, self.roots) | {"kv": kv}
        return tuple(self._emit(self._nodes[Level.COLUMN], env, tensors, self._memo(head)))

    def relatives(
        self, site: Any, tensors: Sequence[Any], head: Values, elements: Sequence[Element]
    ) -> dict[Key, Values]:
        """Emit the values that depend on q - kv alone; return them by step.

        The values of a step are emitted for the first element with that step. Its positions must be
        in range if those of any other element of the step are. Elements without a step are skipped.
        """
        nodes = self._nodes[Level.RELATIVE]
        values: dict[Key, Values] = {}
        for e in elements if nodes else ():
            if e.step is not None and e.step not in values:
                env = self._positions(site, e)
                values[e.step] = tuple(self._emit(nodes, env, tensors, self._memo(head)))
        return values

    def elements(
        self,
        site: Any,
        tensors: Sequence[Any],
        head: Values,
        elements: Sequence[Element],
        relatives: Mapping[Key, Values],
    ) -> list[list[Any]]:
        """Emit the roots for each element; return a list of root values per element.

        Args:
            site: position of the tile, see `templates.common.hooks.Site`.
            tensors: captured tensors by slot.
            head: result of `head`.
            elements: the elements.
            relatives: result of `relatives`. Elements of other steps compute these values.
        """
        values = []
        for e in elements:
            memo = self._memo(head)
            memo.update(zip(self._nodes[Level.ROW], e.row, strict=True))
            memo.update(zip(self._nodes[Level.COLUMN], e.column, strict=True))
            if e.step in relatives:
                memo.update(zip(self._nodes[Level.RELATIVE], relatives[e.step], strict=True))
            env = self._positions(site, e)
            if e.score is not None:
                env["score"] = e.score
            if e.grad is not None:
                env["grad"] = e.grad
            memo.update(e.known or {})
            values.append(self._emit(self.roots, env, tensors, memo))
        return values

    def _positions(self, site: Any, e: Element) -> dict[str, Any]:
        return head_arguments(site, self.roots) | {"q": e.q, "kv": e.kv}

    def _memo(self, head: Values) -> dict[Node, Any]:
        return dict(zip(self._nodes[Level.HEAD], head, strict=True))

    def _emit(
        self, roots: Sequence[Node], env: dict[str, Any], tensors: Sequence[Any], memo: Any
    ) -> list[Any]:
        options = {"fast": self._fast, "flush": self._flush}
        return emit(roots, env, tensors, **options, indices=self._indices, memo=memo)

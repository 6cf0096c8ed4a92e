"""Build the `Source` of each backward kernel, from which `jit` compiles the kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from attnkit.codegen.load_indices import LoadIndices, wrapping_unless_tables
from attnkit.codegen.score_form import NumberFacts
from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.jit.kernel import Build, Source
from attnkit.splice.backward_template import BackwardSettings
from attnkit.splice.captured_arguments import DROPOUT_STATE, TensorKind
from attnkit.splice.entropy_gradient import ENTROPY_GRADS
from attnkit.splice.mask_intervals import Bounds
from attnkit.splice.program import Program
from attnkit.util import caches


def _title(settings: BackwardSettings) -> str:
    return f"{settings.values['dtype']} {settings.head_dims[0]}x{settings.head_dims[1]}"


@dataclass(frozen=True)
class RowWork:
    """Describes the score_mod to a kernel that computes values of whole rows.

    Attributes:
        score: the score_mod.
        captured: kinds of the tensors that it captures.
        needs_grad: for each of them, whether its gradient is needed.
        clamp: loads whose index the kernel clamps to the tensor's bounds.
    """

    score: Node
    captured: tuple[TensorKind, ...]
    needs_grad: tuple[bool, ...]
    clamp: frozenset[Node]

    @property
    def key(self) -> str:
        """Return a text that identifies the kernel's code and arguments."""
        flags = self._indices().flags(ir.topo(self.score))
        return f"{ir.text(self.score)}\n{self.captured} {self.needs_grad} {flags}"

    def hooks(self, settings: BackwardSettings, after: bool) -> Any:
        """Build the hooks of the preprocess, or of the postprocess if `after`."""
        from attnkit.codegen.row_hooks import row_factors, row_shifts

        build = row_factors if after else row_shifts
        return build(self.score, self.needs_grad, settings.row_sums, self._indices())

    def _indices(self) -> LoadIndices:
        return LoadIndices(wrapping_unless_tables((self.score,)), self.clamp)

    def arguments(self, settings: BackwardSettings) -> tuple[list[Any], list[Any]]:
        """Build fake captured tensors, and gradients of those that need one."""
        from attnkit.splice.fake_backward_arguments import learned_arguments

        totals = [n for (_, n, _), need in zip(self.captured, self.needs_grad, strict=True) if need]
        return learned_arguments(self.captured, totals, settings.deterministic)


@functools.lru_cache(maxsize=1024)
def preprocess_source(
    settings: BackwardSettings,
    with_lse: bool,
    rows: RowWork | None = None,
    checks: tuple[TensorKind, ...] = (),
    sinks: int = 0,
) -> Source:
    """Return the source of the preprocess kernel, which computes the LSE and delta of every row.

    Args:
        settings: compile-time settings of the kernels.
        with_lse: whether the LSE has a gradient.
        rows: the score_mod, if it has terms that shift whole rows.
        checks: kind of the table of checked data, if there is one.
        sinks: number of tensors of an attention sink that the kernel takes: the sink, and the sums
            of its gradient. With dropout the state follows, and with entropies what
            `entropy_gradient.of_shifts` returns, if a tensor of `rows` needs a gradient.
    """

    def build() -> Build:
        from attnkit.splice.fake_backward_arguments import preprocess_arguments

        learned = None if rows is None else rows.arguments(settings)
        dtype, value_dim = settings.values["dtype"], settings.head_dims[1]
        more = DROPOUT_STATE if settings.with_dropout else ()
        if settings.with_entropy and rows is not None and any(rows.needs_grad):
            more = (*more, *ENTROPY_GRADS)
        arguments = preprocess_arguments(dtype, value_dim, learned, checks, sinks, more)
        hooks = None if rows is None else rows.hooks(settings, after=False)
        return Build(settings.template.preprocess(settings, with_lse, hooks), arguments)

    key = f"backward preprocess\n{settings} {with_lse} {checks} {sinks}"
    key += "" if rows is None else f"\n{rows.key}"
    return Source(key, settings.target.arch, build, f"prepare {_title(settings)}")


caches.register(preprocess_source.cache_clear)


@functools.lru_cache(maxsize=1024)
def postprocess_source(
    settings: BackwardSettings, head_dim: int, width: int, block: int, rows: RowWork | None = None
) -> Source:
    """Return the source of the postprocess kernel, which rounds float32 sums to a gradient.

    Args:
        settings: compile-time settings of the kernels.
        head_dim: head dim of the gradient.
        width: the same as the kernels compute it.
        block: positions per block.
        rows: the score_mod, if dQ is to be multiplied by its factors of rows.
    """

    def build() -> Build:
        from attnkit.splice.fake_backward_arguments import postprocess_arguments

        learned = None if rows is None else rows.arguments(settings)
        arguments = postprocess_arguments(settings.values["dtype"], head_dim, learned)
        hooks = None if rows is None else rows.hooks(settings, after=True)
        return Build(settings.template.postprocess(settings, width, block, hooks), arguments)

    key = f"backward postprocess\n{settings} {head_dim} {width} {block}"
    key += "" if rows is None else f"\n{rows.key}"
    return Source(key, settings.target.arch, build, f"finish {_title(settings)}")


caches.register(postprocess_source.cache_clear)


@functools.lru_cache(maxsize=1024)
def main_source(
    program: Program,
    bounds: Bounds | None,
    settings: BackwardSettings,
    captured: tuple[TensorKind, ...],
    needs_grad: tuple[bool, ...],
    large: tuple[int, ...],
    indices: LoadIndices,
    facts: NumberFacts | None = None,
    stored: tuple[int, ...] = (),
    led: tuple[int, ...] = (),
) -> Source:
    """Return the source of the main backward kernel, which computes the gradients.

    Args:
        program: the score and mask graphs.
        bounds: the intervals of q that the mask keeps in each column; None if it has no such form.
        settings: compile-time settings of the kernels.
        captured: kinds of the captured tensors that the kernel reads.
        needs_grad: for each tensor that the score captures, whether its gradient is needed.
        large: numbers of the score's tensors whose gradient has offsets of more than 31 bits.
        indices: the loads of the graphs and bounds whose index the kernel wraps or clamps.
        facts: what is known of numbers that the score_mod reads from tables.
        stored: numbers of the score's tensors whose gradient is stored, see `stored_gradients`.
        led: those whose gradient batch element 0 stores.
    """

    roots = [n for n in (program.score, program.mask) if n is not None]
    roots += [n for pair in bounds or () for n in pair]

    def build() -> Build:
        from attnkit.codegen.backward_hooks import GraphBackward
        from attnkit.splice.fake_backward_arguments import main_arguments

        hooks = GraphBackward(
            program.score,
            program.mask,
            bounds,
            scores=len(needs_grad),
            lists_override_mask=program.lists_override_mask,
            needs_grad=needs_grad,
            row_sums=settings.row_sums,
            large=large,
            indices=indices,
            softmax=program.has_softmax,
            facts=facts,
            one_hot=settings.one_hot,
            bias_first=settings.bias_first,
            stored=stored,
            led=led,
        )
        totals = [ndim for (_, ndim, _), need in zip(captured, needs_grad, strict=False) if need]
        arguments = main_arguments(
            settings.values["dtype"],
            settings.head_dims,
            (
                *captured,
                *(ENTROPY_GRADS if settings.with_entropy else ()),
                *(DROPOUT_STATE if settings.with_dropout else ()),
            ),
            totals,
            deterministic=settings.deterministic,
            first_writer=settings.first_writer,
            whole_heads=settings.whole_heads,
            arrivals=settings.arrivals,
            leaders=settings.leaders,
        )
        return Build(settings.template.main(settings, hooks), arguments, settings.template.options)

    intervals = "" if bounds is None else ir.text(*(n for pair in bounds for n in pair))
    shape = (len(bounds) if bounds is not None else None, captured, needs_grad, large)
    flags = indices.flags(ir.topo(*roots))
    parts = ["backward", program.text, intervals, str(settings), str(shape), str(flags)]
    if facts is not None:
        parts.append(f"numbers {sorted(facts.tables)} {facts.positive}")
    if stored or led:
        parts.append(f"stored {stored} {led}")
    key = "\n".join(parts)
    return Source(key, settings.target.arch, build, f"backward {_title(settings)}")


caches.register(main_source.cache_clear)

"""Build the `Source` of each backward kernel, from which `jit` compiles the kernel."""

from __future__ import annotations

import functools

from attnkit.codegen.load_indices import LoadIndices
from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.jit.kernel import Build, Source
from attnkit.splice.backward_template import BackwardSettings
from attnkit.splice.captured_arguments import TensorKind
from attnkit.splice.mask_intervals import Bounds
from attnkit.splice.program import Program
from attnkit.util import caches


def _title(settings: BackwardSettings) -> str:
    return f"{settings.values['dtype']} {settings.head_dims[0]}x{settings.head_dims[1]}"


@functools.lru_cache(maxsize=64)
def preprocess_source(settings: BackwardSettings, with_lse: bool) -> Source:
    """Return the source of the preprocess kernel, which computes the LSE and delta of every row."""

    def build() -> Build:
        from attnkit.splice.fake_backward_arguments import preprocess_arguments

        arguments = preprocess_arguments(settings.values["dtype"], settings.head_dims[1])
        return Build(settings.template.preprocess(settings, with_lse), arguments)

    key = f"backward preprocess\n{settings} {with_lse}"
    return Source(key, settings.target.arch, build, f"prepare {_title(settings)}")


caches.register(preprocess_source.cache_clear)


@functools.lru_cache(maxsize=64)
def postprocess_source(settings: BackwardSettings, head_dim: int, width: int, block: int) -> Source:
    """Return the source of the postprocess kernel, which rounds float32 sums to a gradient."""

    def build() -> Build:
        from attnkit.splice.fake_backward_arguments import postprocess_arguments

        arguments = postprocess_arguments(settings.values["dtype"], head_dim)
        return Build(settings.template.postprocess(settings, width, block), arguments)

    key = f"backward postprocess\n{settings} {head_dim} {width} {block}"
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
    clamp: frozenset[Node],
) -> Source:
    """Return the source of the main backward kernel, which computes the gradients.

    Args:
        program: the score and mask graphs.
        bounds: the intervals of q that the mask keeps in each column; None if it has no such form.
        settings: compile-time settings of the kernels.
        captured: kinds of the captured tensors that the kernel reads.
        needs_grad: for each tensor that the score captures, whether its gradient is needed.
        large: numbers of the score's tensors whose gradient has offsets of more than 31 bits.
        clamp: loads of the graphs and bounds whose index the kernel clamps to the tensor's bounds.
    """

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
            large=large,
            indices=LoadIndices(None, clamp),
        )
        totals = [ndim for (_, ndim, _), need in zip(captured, needs_grad, strict=False) if need]
        arguments = main_arguments(
            settings.values["dtype"],
            settings.head_dims,
            captured,
            totals,
            deterministic=settings.deterministic,
            first_writer=settings.first_writer,
        )
        return Build(settings.template.main(settings, hooks), arguments, settings.template.options)

    intervals = "" if bounds is None else ir.text(*(n for pair in bounds for n in pair))
    shape = (len(bounds) if bounds is not None else None, captured, needs_grad, large)
    roots = [n for n in (program.score, program.mask) if n is not None]
    roots += [n for pair in bounds or () for n in pair]
    clamped = [clamp for _, clamp in LoadIndices(None, clamp).flags(ir.topo(*roots))]
    key = "\n".join(["backward", program.text, intervals, str(settings), str(shape), str(clamped)])
    return Source(key, settings.target.arch, build, f"backward {_title(settings)}")


caches.register(main_source.cache_clear)

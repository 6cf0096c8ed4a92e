"""The kernels of a backward: what they are compiled from."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.jit.kernel import Build, Source
from attnkit.splice.program import Program

if TYPE_CHECKING:
    from attnkit.splice.backward_settings import Settings


def _title(settings: Settings) -> str:
    return f"{settings.values['dtype']} {settings.head_dims[0]}x{settings.head_dims[1]}"


@functools.lru_cache(maxsize=64)
def prepare_source(settings: Settings, with_lse: bool) -> Source:
    """The kernel of the rows' statistics."""

    def build() -> Build:
        from attnkit.splice.fakes_backward import prepare_arguments

        arguments = prepare_arguments(settings.values["dtype"], settings.head_dims[1])
        return Build(settings.template.prepare(settings, with_lse), arguments)

    key = f"backward prepare\n{settings} {with_lse}"
    return Source(key, settings.target.arch, build, f"prepare {_title(settings)}")


@functools.lru_cache(maxsize=64)
def finish_source(settings: Settings, head_dim: int, width: int, block: int) -> Source:
    """The kernel that rounds a gradient."""

    def build() -> Build:
        from attnkit.splice.fakes_backward import finish_arguments

        arguments = finish_arguments(settings.values["dtype"], head_dim)
        return Build(settings.template.finish(settings, width, block), arguments)

    key = f"backward finish\n{settings} {head_dim} {width} {block}"
    return Source(key, settings.target.arch, build, f"finish {_title(settings)}")


@functools.lru_cache(maxsize=1024)
def main_source(
    program: Program,
    ends: tuple[tuple[Node, Node], ...] | None,
    settings: Settings,
    captured: tuple[tuple[str, int, bool], ...],
    wanted: tuple[bool, ...],
) -> Source:
    """The kernel of the gradients.

    Args:
        program: the graphs.
        ends: the intervals of q that every column keeps, if the mask has that form.
        settings: what is fixed.
        captured: (dtype, rank, whether rows are contiguous) of the tensors that it reads.
        wanted: for each tensor of the score, whether its gradient is.
    """

    def build() -> Build:
        from attnkit.codegen.backward_hooks import GraphBackward
        from attnkit.splice.fakes_backward import main_arguments

        hooks = GraphBackward(
            program.score,
            program.mask,
            ends,
            scores=len(wanted),
            listed=program.listed,
            wanted=wanted,
        )
        totals = [ndim for (_, ndim, _), need in zip(captured, wanted, strict=False) if need]
        config = settings.values
        kinds = bool(config["turns"]), bool(config.get("firsts"))
        arguments = main_arguments(config["dtype"], settings.head_dims, captured, totals, *kinds)
        return Build(settings.template.main(settings, hooks), arguments, settings.template.OPTIONS)

    bounds = "" if ends is None else ir.text(*(n for pair in ends for n in pair))
    shape = (len(ends) if ends is not None else None, captured, wanted)
    key = "\n".join(["backward", program.text, bounds, str(settings), str(shape)])
    return Source(key, settings.target.arch, build, f"backward {_title(settings)}")

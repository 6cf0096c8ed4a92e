"""Define the interface between splice and the forward of a template.

`FORWARD` of the modules `sm90` and `sm100` implements it; `template_registry` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from attnkit.codegen.score_form import ScoreForm
    from attnkit.jit.artifact import Build
    from attnkit.schedule.kernel_table import Kernel
    from attnkit.sparsity.block_runs import BlockRuns
    from attnkit.splice.captured_arguments import TensorKind
    from attnkit.splice.forward_variant import ForwardVariant
    from attnkit.splice.kernel_layout import Layout

HeadDims: TypeAlias = tuple[int, int]  # head dims of query and key, and of value


class ForwardTemplate(NamedTuple):
    """Holds the functions in which the forward of one template differs from that of another.

    Attributes:
        choose: (kernels for these head dims, best first; head dims; tiles to visit, None for all;
            whether block lists override the mask, so that tiles cannot be joined; the score_mod)
            -> the kernel, and the reason.
        fit: (kernel, score_mod, whether there is a mask) -> the kernel, adapted to the registers
            that the variant needs.
        config: (score_mod, kernel, dtype, head dims, whether row maxima are needed, architecture)
            -> arguments of its `ForwardConfig`.
        tile: (kernel, head dims) -> rows and columns of an output tile; the parts of split rows
            have this size.
        build: (variant, config, head dims, captured tensors, whether the softmax scale is positive)
            -> the kernel with fake arguments.
        layout: config -> roles and memory of the kernel.
    """

    choose: Callable[
        [Sequence[Kernel], HeadDims, BlockRuns | None, bool, ScoreForm], tuple[Kernel, str]
    ]
    fit: Callable[[Kernel, ScoreForm, bool], Kernel]
    config: Callable[[ScoreForm, Kernel, str, HeadDims, bool, str], dict[str, Any]]
    tile: Callable[[Kernel, HeadDims], tuple[int, int]]
    build: Callable[[ForwardVariant, dict[str, Any], HeadDims, tuple[TensorKind, ...], bool], Build]
    layout: Callable[[dict[str, Any]], Layout]

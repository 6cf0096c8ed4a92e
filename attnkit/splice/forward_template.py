"""Define `ForwardTemplate`, the interface between splice and the forward of an architecture.

The modules `sm90` and `sm100` each define an instance `FORWARD`, which `template_registry` looks
up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from attnkit.codegen.score_form import ScoreForm
    from attnkit.jit.artifact import Build
    from attnkit.schedule.kernel_table import Kernel
    from attnkit.sparsity.block_runs import BlockRuns
    from attnkit.splice.captured_arguments import TensorKind
    from attnkit.splice.forward_variant import ForwardVariant
    from attnkit.splice.kernel_layout import Layout

HeadDims: TypeAlias = tuple[int, int]  # head dims of query and key, and of value


class ForwardTemplate(NamedTuple):
    """Holds the architecture-specific functions of a forward.

    Attributes:
        choose: (kernels for these head dims, best first; head dims; tiles to visit, None for all;
            whether block lists override the mask, so that tiles cannot be joined; the score_mod)
            -> the kernel, and the reason as text.
        fit: (kernel, score_mod, whether there is a mask, whether there is dropout) -> the kernel,
            adapted to the registers that the variant needs.
        config: (score_mod, kernel, dtype, head dims, whether row maxima are needed, whether
            entropies are needed, architecture) -> arguments of the template's `ForwardConfig`.
        tile: (kernel, head dims) -> (rows, columns) of an output tile, also the size of a partial
            result of split KV.
        build: (variant, config, head dims, captured tensors, whether the softmax scale is positive)
            -> the kernel and fake arguments to compile it with.
        layout: config -> warp roles and memory layout of the kernel.
        pair_table: (config, shape of a table of pairs, see `pair_load`) -> whether the
            kernel has room for a copy of it in shared memory.
        edge_only: (score_mod, config) -> whether the config of a call without a mask gets the
            argument `edge_only`.
        checks_data: whether the kernel can compare captured data with its fingerprints.
        copy_bias: (kernel with `bias_first`, head dims, variant, tensors that its score_mod reads,
            by slot) -> the kernel, adapted to copy the bias to shared memory if it can. None if no
            kernel can.
    """

    choose: Callable[
        [Sequence[Kernel], HeadDims, BlockRuns | None, bool, ScoreForm], tuple[Kernel, str]
    ]
    fit: Callable[[Kernel, ScoreForm, bool, bool], Kernel]
    config: Callable[[ScoreForm, Kernel, str, HeadDims, bool, bool, str], dict[str, Any]]
    tile: Callable[[Kernel, HeadDims], tuple[int, int]]
    build: Callable[[ForwardVariant, dict[str, Any], HeadDims, tuple[TensorKind, ...], bool], Build]
    layout: Callable[[dict[str, Any]], Layout]
    pair_table: Callable[[dict[str, Any], Sequence[int]], bool]
    edge_only: Callable[[ScoreForm, dict[str, Any]], bool]
    checks_data: bool
    copy_bias: Callable[[Kernel, HeadDims, ForwardVariant, Sequence[Tensor]], Kernel] | None = None

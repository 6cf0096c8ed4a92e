"""What a template's forward and backward have of their own, as objects that splice binds.

`FORWARD` and `BACKWARD` of `sm90`, `sm90_backward`, `sm100` and `sm100_backward` are such objects;
`template_registry` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from attnkit.codegen.score_form import ScoreForm
from attnkit.graph.staging import Level
from attnkit.jit.kernel import Build
from attnkit.schedule.kernel_table import Kernel
from attnkit.schedule.split_kv import Cost
from attnkit.schedule.targets import Target
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.captured_arguments import TensorKind
from attnkit.splice.forward_variant import ForwardVariant
from attnkit.splice.kernel_layout import Layout

if TYPE_CHECKING:
    from attnkit.templates.common.hooks import BackwardHooks

HeadDims: TypeAlias = tuple[int, int]  # of query and key, and of value


@dataclass(frozen=True)
class ForwardTemplate:
    """The functions in which the forward of one template differs from that of another.

    Attributes:
        choose: (kernels for these head dims, best first; head dims; tiles to visit, None for all;
            whether block lists overrule the mask, so that tiles cannot be joined; the score_mod)
            -> the kernel, and why.
        fit: (kernel, score_mod, whether there is a mask) -> the kernel as the registers allow it.
        config: (score_mod, kernel, dtype, head dims, whether row maxima are needed, architecture)
            -> arguments of its `ForwardConfig`.
        tile: (kernel, head dims) -> rows and columns of a tile of the output, as parts of split
            rows are stored.
        build: (variant, config, head dims, captured tensors, whether the softmax scale is positive)
            -> the kernel with fake arguments.
        layout: config -> the inside of the kernel.
    """

    choose: Callable[
        [Sequence[Kernel], HeadDims, BlockRuns | None, bool, ScoreForm], tuple[Kernel, str]
    ]
    fit: Callable[[Kernel, ScoreForm, bool], Kernel]
    config: Callable[[ScoreForm, Kernel, str, HeadDims, bool, str], dict[str, Any]]
    tile: Callable[[Kernel, HeadDims], tuple[int, int]]
    build: Callable[[ForwardVariant, dict[str, Any], HeadDims, tuple[TensorKind, ...], bool], Build]
    layout: Callable[[dict[str, Any]], Layout]


@dataclass(frozen=True, eq=False)
class BackwardCase:
    """The facts on which a backward's config depends.

    Attributes:
        widths: head dims as computed.
        runs: tiles to visit.
        additive: whether the mod adds to the score what does not depend on it.
        learned: levels of the loads that have gradients, see `GraphBackward`.
        lists_override_mask: whether block lists overrule the mask.
    """

    widths: HeadDims
    runs: BlockRuns
    additive: bool
    learned: frozenset[Level]
    lists_override_mask: bool


@dataclass(frozen=True)
class BackwardTemplate:
    """The functions in which the backward of one template differs from that of another.

    Attributes:
        roles: warps by role, for reports of the emulator.
        options: of the compilation of the main kernel.
        semaphores: of a tile of dQ whose sums have an order, and of a tile of dK or dV, for each
            CTA that shares it.
        widths: head dims -> head dims as they are computed, None where they are too wide.
        block_q: (widths, whether dS is P (dP - delta) and no tensor has a gradient) -> rows of a
            q tile.
        block_kv: widths -> columns of a kv tile, of one CTA.
        switches: what of its `BackwardConfig` depends on more of a call than its head dims.
        splits: whether several work tiles may share a kv tile.
        cost: what the work costs.
        first_writer: whether the first CTA of a row may store its part of dQ, which is not
            cleared then.
        config: its `BackwardConfig`.
        row_words: float32 words of a row's LSE and of its delta, as `preprocess` writes them.
        preprocess: (settings, whether LSE has a gradient) -> the kernel of the rows' statistics.
        postprocess: (settings, width, block) -> the kernel that rounds a gradient.
        main: the kernel of the gradients.
    """

    roles: dict[str, range]
    options: str
    semaphores: tuple[int, int]
    widths: Callable[[HeadDims], HeadDims | None]
    block_q: Callable[[HeadDims, bool], int]
    block_kv: Callable[[HeadDims], int]
    switches: Callable[[BackwardCase], dict[str, Any]]
    splits: Callable[[BackwardSettings], bool]
    cost: Callable[[BackwardSettings], Cost]
    first_writer: Callable[[BackwardSettings], bool]
    config: Callable[[BackwardSettings], Any]
    row_words: Callable[[BackwardSettings], tuple[int, int]]
    preprocess: Callable[[BackwardSettings, bool], Any]
    postprocess: Callable[[BackwardSettings, int, int], Any]
    main: Callable[[BackwardSettings, BackwardHooks], Any]


@dataclass(frozen=True)
class BackwardSettings:
    """The settings that are fixed when the kernels of a backward are compiled.

    Attributes:
        target: what they are compiled for.
        items: arguments of a `BackwardConfig`, in order of their names.
        head_dims: of query and value.
        template: what the template of the target has of its own.
    """

    target: Target
    items: tuple[tuple[str, Any], ...]
    head_dims: HeadDims
    template: BackwardTemplate = field(repr=False, compare=False)

    @property
    def values(self) -> dict[str, Any]:
        """The arguments as a dictionary."""
        return dict(self.items)

    def with_first_writer(self) -> BackwardSettings:
        """The same, but the first CTA of a row stores its part of dQ."""
        return replace(self, items=tuple(sorted((self.values | {"first_writer": True}).items())))

    @property
    def widths(self) -> HeadDims:
        """Head dims as they are computed."""
        values = self.values
        return values["head_dim"], values["head_dim_v"]

    @property
    def deterministic(self) -> bool:
        """Whether the sums are formed in a fixed order."""
        return bool(self.values["sum_order"])

    @property
    def first_writer(self) -> bool:
        """Whether the first CTA of a row stores its part of dQ."""
        return bool(self.values.get("first_writer"))

    @property
    def block(self) -> tuple[int, int]:
        """Rows of a q tile, and columns of a kv tile."""
        return self.values["block_q"], self.ctas * self.template.block_kv(self.widths)

    @property
    def ctas(self) -> int:
        """CTAs that share a tile."""
        return 2 if self.values.get("two_cta") else 1

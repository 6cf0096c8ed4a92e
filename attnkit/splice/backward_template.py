"""Define the interface between splice and the backward of a template.

`BACKWARD` of the modules `sm90_backward` and `sm100_backward` implements it; `template_registry` finds
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from attnkit.graph.staging import Level
    from attnkit.schedule.split_kv import Cost
    from attnkit.schedule.targets import Target
    from attnkit.sparsity.block_runs import BlockRuns
    from attnkit.templates.common.hooks import BackwardHooks

HeadDims: TypeAlias = tuple[int, int]  # head dims of query and key, and of value


@dataclass(frozen=True, eq=False)
class BackwardCase:
    """Holds the facts on which a backward's config depends.

    Attributes:
        widths: head dims with which the kernels compute.
        runs: tiles to visit.
        additive: whether the mod only adds a term that does not depend on the score.
        learned: levels of the loads that have gradients, see `GraphBackward`.
        lists_override_mask: whether block lists override the mask.
    """

    widths: HeadDims
    runs: BlockRuns
    additive: bool
    learned: frozenset[Level]
    lists_override_mask: bool


@dataclass(frozen=True, eq=False)
class BackwardTemplate:
    """Holds the functions in which the backward of one template differs from that of another.

    Attributes:
        roles: warps by role, for reports of the emulator.
        options: compiler options of the main kernel.
        semaphores: number of semaphores that order the sums of a tile of dQ, and of a tile of dK or
            dV, for each CTA that shares it.
        widths: head dims -> head dims with which the kernels compute, None if they are too wide.
        block_q: (widths, whether dS is P (dP - delta) and no tensor has a gradient) -> rows of a
            q tile.
        block_kv: widths -> columns of a kv tile, of one CTA.
        switches: case -> arguments of the `BackwardConfig` that depend on more than head dims.
        splits: settings -> whether several work tiles may share a kv tile.
        cost: settings -> cost of blocks and tiles in cycles.
        first_writer: settings -> whether the first CTA of a row may store its part of dQ, so that
            nobody clears dQ.
        config: settings -> the `BackwardConfig`.
        row_words: settings -> float32 words of a row's LSE and of its delta, as `preprocess` writes
            them.
        preprocess: (settings, whether LSE has a gradient) -> the preprocess kernel.
        postprocess: (settings, width, block) -> the postprocess kernel.
        main: (settings, hooks) -> the main kernel, which computes the gradients.
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
    """Holds the compile-time settings of the kernels of a backward.

    Attributes:
        target: the target that they are compiled for.
        items: arguments of a `BackwardConfig`, in order of their names.
        head_dims: head dims of query and value.
        template: functions of the target's template.
    """

    target: Target
    items: tuple[tuple[str, Any], ...]
    head_dims: HeadDims
    template: BackwardTemplate = field(repr=False, compare=False)

    @property
    def values(self) -> dict[str, Any]:
        """Return the arguments of the `BackwardConfig` as a dictionary."""
        return dict(self.items)

    def with_first_writer(self) -> BackwardSettings:
        """Return these settings, but with the first CTA of a row storing its part of dQ."""
        return replace(self, items=tuple(sorted((self.values | {"first_writer": True}).items())))

    @property
    def widths(self) -> HeadDims:
        """Return the head dims with which the kernels compute."""
        values = self.values
        return values["head_dim"], values["head_dim_v"]

    @property
    def deterministic(self) -> bool:
        """Return whether the sums are added in a fixed order."""
        return bool(self.values["sum_order"])

    @property
    def first_writer(self) -> bool:
        """Return whether the first CTA of a row stores its part of dQ."""
        return bool(self.values.get("first_writer"))

    @property
    def block(self) -> tuple[int, int]:
        """Return the rows of a q tile, and the columns of a kv tile."""
        return self.values["block_q"], self.ctas * self.template.block_kv(self.widths)

    @property
    def ctas(self) -> int:
        """Return how many CTAs share a tile."""
        return 2 if self.values.get("two_cta") else 1

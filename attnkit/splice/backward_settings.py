"""What a template's backward has of its own, and what is fixed when its kernels are compiled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from attnkit.graph.staging import Level
from attnkit.schedule.split_kv import Cost
from attnkit.schedule.targets import Target
from attnkit.sparsity.block_runs import BlockRuns

if TYPE_CHECKING:
    from attnkit.templates.common.hooks import BackwardHooks


class Template(Protocol):
    """What a template's backward has of its own; a module is one.

    Attributes:
        ROLES: warps by role, for reports of the emulator.
        OPTIONS: of the compilation of the main kernel.
        SEMAPHORES: of a tile of dQ whose sums have an order, and of a tile of dK or dV, for each CTA
            that shares it.
    """

    ROLES: dict[str, range]
    OPTIONS: str
    SEMAPHORES: tuple[int, int]

    def widths(self, head_dims: tuple[int, int]) -> tuple[int, int] | None:
        """Head dims as they are computed, None where they are too wide."""

    def block_q(self, widths: tuple[int, int], light: bool) -> int:
        """Rows of a q tile; `light`: dS is P (dP - delta), and no tensor has a gradient."""

    def block_kv(self, widths: tuple[int, int]) -> int:
        """Columns of a kv tile, of one CTA."""

    def switches(
        self,
        widths: tuple[int, int],
        runs: BlockRuns,
        *,
        additive: bool,
        learned: frozenset[Level],
        listed: bool,
    ) -> dict[str, Any]:
        """What of its `BackwardConfig` depends on more of a call than its head dims.

        Args:
            widths: head dims as computed.
            runs: tiles to visit.
            additive: whether the mod adds to the score what does not depend on it.
            learned: levels of the loads that have gradients, see `GraphBackward`.
            listed: whether block lists overrule the mask.
        """

    def splits(self, settings: Settings) -> bool:
        """Whether several pieces of work may share a kv tile."""

    def prices(self, settings: Settings) -> Cost:
        """What the work costs."""

    def stores(self, settings: Settings) -> bool:
        """Whether the first part of a sum of dQ may be stored, where nobody has cleared it."""

    def config(self, settings: Settings) -> Any:
        """Its `BackwardConfig`."""

    def words(self, settings: Settings) -> tuple[int, int]:
        """Float32 words of a row's LSE and of its delta, as `prepare` writes them."""

    def prepare(self, settings: Settings, with_lse: bool) -> Any:
        """The kernel of the rows' statistics."""

    def finish(self, settings: Settings, width: int, block: int) -> Any:
        """The kernel that rounds a gradient."""

    def main(self, settings: Settings, hooks: BackwardHooks) -> Any:
        """The kernel of the gradients."""


@dataclass(frozen=True)
class Settings:
    """What is fixed when the kernels are compiled.

    Attributes:
        target: what they are compiled for.
        config: arguments of a `BackwardConfig`.
        head_dims: of query and value.
        template: what the template of the target has of its own.
    """

    target: Target
    config: tuple[tuple[str, Any], ...]
    head_dims: tuple[int, int]
    template: Template = field(repr=False, compare=False)

    @property
    def values(self) -> dict[str, Any]:
        """The config as a dictionary."""
        return dict(self.config)

    def storing(self) -> Settings:
        """The same, but the first part of a sum of dQ is stored."""
        return replace(self, config=tuple(sorted((self.values | {"firsts": True}).items())))

    @property
    def block(self) -> tuple[int, int]:
        """Rows of a q tile, and columns of a kv tile."""
        config = self.values
        widths = config["width"], config["value_width"]
        return config["block_q"], self.ctas * self.template.block_kv(widths)

    @property
    def ctas(self) -> int:
        """CTAs that share a tile."""
        return 2 if self.values.get("pair") else 1

"""Define `BackwardTemplate`, the interface between splice and the backward of an architecture.

The modules `sm90_backward` and `sm100_backward` each define an instance `BACKWARD`, which
`template_registry` looks up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from attnkit.graph.staging import Level
    from attnkit.schedule.split_kv import Cost
    from attnkit.schedule.targets import Target
    from attnkit.sparsity.block_runs import BlockRuns
    from attnkit.templates.common.hooks import BackwardHooks, RowHooks

HeadDims: TypeAlias = tuple[int, int]  # head dims of query and key, and of value


@dataclass(frozen=True, eq=False)
class BackwardCase:
    """Holds the properties of a variant and a call on which the backward's config depends.

    Attributes:
        widths: head dims as the kernels compute them, rounded up.
        runs: tiles to visit.
        additive: whether the score_mod only adds a term that does not depend on the score.
        learned: staging levels of the indices of loads whose gradients are summed score by score,
            see `GraphBackward`.
        lists_override_mask: whether block lists override the mask.
        deterministic: whether gradients are accumulated in a fixed order.
        dropout: whether elements of the softmax are dropped.
        full_bias: whether the score_mod only adds a bias, which has an element for each score.
        shared: whether dK and dV are sums over several query heads or batch elements.
    """

    widths: HeadDims
    runs: BlockRuns
    additive: bool
    learned: frozenset[Level]
    lists_override_mask: bool
    deterministic: bool = False
    dropout: bool = False
    full_bias: bool = False
    shared: bool = False


@dataclass(frozen=True, eq=False)
class BackwardTemplate:
    """Holds the architecture-specific functions and constants of a backward.

    Attributes:
        roles: warps of each role, for reports of the emulator.
        options: compiler options of the main kernel.
        semaphores: settings -> number of semaphores that order the additions to a tile of dQ, and to
            a tile of dK or dV, for each CTA and each part of the columns that share the tile.
        column_parts: widths -> number of work tiles of the kernel for each row of the work list.
            Each computes a part of the columns of dQ, dK and dV.
        widths: head dims -> head dims as the kernels compute them; None if they are too wide.
        block_q: (widths, whether dS = P (dP - delta) and the main kernel sums no gradient of a
            captured tensor) -> rows of a q tile.
        row_sums: widths -> whether the kernels sum gradients times scores over rows, see
            `graph.learned_loads`.
        block_kv: (widths, result of `switches` or of a `BackwardConfig`'s arguments) -> columns of a
            kv tile of one CTA.
        switches: case -> arguments of the `BackwardConfig` that depend on more than head dims.
        one_hot: case -> how many classes of columns the kernels can sum a gradient
            over in an MMA, see `GraphBackward`; 0 if they cannot.
        entropies: (widths, whether a captured tensor needs a gradient, whether elements are dropped)
            -> whether the kernels can add the gradient of the rows' entropies.
        weights: (widths, whether a captured tensor needs a gradient) -> whether the kernels can
            compute a backward without a softmax.
        ordered: widths -> whether the kernels can add to sums in a fixed order.
        packs: case -> whether one work tile can compute all query heads that share its kv head.
        splits: settings -> whether several work tiles may share a kv tile.
        cost: settings -> cost of blocks and tiles in cycles.
        first_writer: settings -> whether the first kv tile of a row may store its part of dQ, so
            that dQ needs no memset.
        whole_heads: settings -> whether a CTA may compute all kv tiles of a head, so that dQ needs no
            memset and no postprocess.
        arrivals: settings -> whether the main kernel can sum dQ in the order in which its parts
            arrive, so that dQ needs no memset and no postprocess.
        config: settings -> the `BackwardConfig`.
        row_words: settings -> number of float32 words in which `preprocess` writes the LSE, and the
            delta, of one row.
        preprocess: (settings, whether LSE has a gradient, hooks of the terms that shift rows, None
            without them) -> the preprocess kernel.
        postprocess: (settings, width, block, hooks of the factors of rows, None without them) ->
            the postprocess kernel.
        main: (settings, hooks) -> the main kernel, which computes the gradients.
    """

    roles: dict[str, range]
    options: str
    semaphores: Callable[[BackwardSettings], tuple[int, int]]
    column_parts: Callable[[HeadDims], int]
    widths: Callable[[HeadDims], HeadDims | None]
    block_q: Callable[[HeadDims, bool], int]
    block_kv: Callable[[HeadDims, Mapping[str, Any]], int]
    row_sums: Callable[[HeadDims], bool]
    switches: Callable[[BackwardCase], dict[str, Any]]
    one_hot: Callable[[BackwardCase], int]
    entropies: Callable[[HeadDims, bool, bool], bool]
    weights: Callable[[HeadDims, bool], bool]
    ordered: Callable[[HeadDims], bool]
    packs: Callable[[BackwardCase], bool]
    splits: Callable[[BackwardSettings], bool]
    cost: Callable[[BackwardSettings], Cost]
    first_writer: Callable[[BackwardSettings], bool]
    whole_heads: Callable[[BackwardSettings], bool]
    arrivals: Callable[[BackwardSettings], bool]
    config: Callable[[BackwardSettings], Any]
    row_words: Callable[[BackwardSettings], tuple[int, int]]
    preprocess: Callable[[BackwardSettings, bool, RowHooks | None], Any]
    postprocess: Callable[[BackwardSettings, int, int, RowHooks | None], Any]
    main: Callable[[BackwardSettings, BackwardHooks], Any]


@dataclass(frozen=True)
class BackwardSettings:
    """Holds the compile-time settings of the kernels of a backward.

    Attributes:
        target: the target that the kernels are compiled for.
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
        """Return a copy of the settings with `first_writer` set to True."""
        return self._with("first_writer")

    def with_whole_heads(self) -> BackwardSettings:
        """Return a copy of the settings with `whole_heads` set to True.

        Their sums need no `sum_order`, because a CTA adds the parts of a head in a fixed order.
        """
        return self._with("whole_heads").in_any_order()

    def with_arrivals(self) -> BackwardSettings:
        """Return a copy of the settings with `arrivals` set to True."""
        return self._with("arrivals")

    def in_any_order(self) -> BackwardSettings:
        """Return a copy of the settings that lets kv tiles add to dQ in any order."""
        return self._with("sum_order", "")

    def with_leaders(self) -> BackwardSettings:
        """Return a copy of the settings with `leaders` set to True."""
        return self._with("leaders")

    def with_copied_bias(self, size: int) -> BackwardSettings:
        """Return a copy of the settings whose `bias_bytes` is `size`."""
        return self._with("bias_bytes", size)

    def _with(self, switch: str, value: bool | int | str = True) -> BackwardSettings:
        return replace(self, items=tuple(sorted((self.values | {switch: value}).items())))

    @property
    def widths(self) -> HeadDims:
        """Return (head_dim, head_dim_v) as the kernels compute them, rounded up."""
        values = self.values
        return values["head_dim"], values["head_dim_v"]

    @property
    def with_entropy(self) -> bool:
        """Return whether the kernels add the gradient of the rows' entropies."""
        return bool(self.values.get("with_entropy"))

    @property
    def weights(self) -> bool:
        """Return whether there is no softmax, so that the modified scores are the weights."""
        return bool(self.values.get("weights"))

    @property
    def one_hot(self) -> bool:
        """Return whether the main kernel sums a gradient over classes of columns in an MMA."""
        return bool(self.values.get("one_hot"))

    @property
    def bias_first(self) -> bool:
        """Return whether the main kernel loads a full bias to the accumulator of S."""
        return bool(self.values.get("bias_first"))

    @property
    def leaders(self) -> bool:
        """Return whether batch element 0 stores the gradient of a bias before others add theirs."""
        return bool(self.values.get("leaders"))

    @property
    def pack_gqa(self) -> bool:
        """Return whether a work tile computes all query heads of its kv head, one by one."""
        return bool(self.values.get("pack_gqa"))

    @property
    def with_dropout(self) -> bool:
        """Return whether elements of the softmax are dropped."""
        return bool(self.values.get("with_dropout"))

    @property
    def row_sums(self) -> bool:
        """Return whether the kernels sum gradients times scores over rows."""
        return self.template.row_sums(self.widths)

    @property
    def deterministic(self) -> bool:
        """Return whether semaphores fix the order in which CTAs add to gradients."""
        return bool(self.values["sum_order"])

    @property
    def first_writer(self) -> bool:
        """Return whether the first kv tile of a row stores its part of dQ instead of adding it."""
        return bool(self.values.get("first_writer"))

    @property
    def whole_heads(self) -> bool:
        """Return whether a CTA computes all kv tiles of a head, one after another."""
        return bool(self.values.get("whole_heads"))

    @property
    def arrivals(self) -> bool:
        """Return whether the main kernel sums dQ in the order in which its parts arrive."""
        return bool(self.values.get("arrivals"))

    @property
    def block(self) -> tuple[int, int]:
        """Return (rows of a q tile, columns of a kv tile); the columns are those of all CTAs."""
        columns = self.template.block_kv(self.widths, self.values)
        return self.values["block_q"], 2 * columns if self.values.get("two_cta") else columns

    @property
    def split_columns(self) -> bool:
        """Return whether two CTAs share a tile, each with half of the columns of the head dims."""
        return bool(self.values.get("split_columns"))

    @property
    def ctas(self) -> int:
        """Return the number of CTAs that share a tile, 1 or 2."""
        return 2 if self.values.get("two_cta") or self.split_columns else 1

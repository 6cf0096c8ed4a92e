"""The kernels of a forward: what each template has of its own, and their sources."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

from attnkit.codegen.score_form import ScoreForm
from attnkit.graph import ir
from attnkit.jit.kernel import Build, Source
from attnkit.schedule.kernel_table import Kernel
from attnkit.schedule.targets import Target
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.layout import Layout
from attnkit.splice.spliced import Spliced


class Template(Protocol):
    """What a template's forward has of its own; a module is one."""

    def chosen(
        self,
        found: Sequence[Kernel],
        head_dims: tuple[int, int],
        runs: BlockRuns | None,
        listed: bool,
        form: ScoreForm,
    ) -> tuple[Kernel, str]:
        """The kernel for the tiles of a mask, and why.

        Args:
            found: kernels for these head dims, best first.
            head_dims: of query and value.
            runs: tiles to visit, None for all.
            listed: block lists overrule the mask, so that tiles cannot be joined.
            form: the score_mod.
        """

    def fitted(self, chosen: Kernel, form: ScoreForm, masked: bool) -> Kernel:
        """The kernel as the registers allow it for a score_mod, with or without a mask."""

    def config_of(
        self,
        form: ScoreForm,
        chosen: Kernel,
        dtype: str,
        head_dims: tuple[int, int],
        need_max: bool,
        arch: str,
    ) -> dict[str, Any]:
        """The arguments of its `ForwardConfig`."""

    def tile_of(self, chosen: Kernel, head_dims: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a tile of the output, as parts of split rows are kept."""

    def build(
        self,
        variant: Spliced,
        config: dict[str, Any],
        head_dims: tuple[int, int],
        captured: tuple[tuple[str, int, bool], ...],
        positive: bool,
    ) -> Build:
        """The kernel with stand-ins of its arguments."""

    def layout_of(self, config: dict[str, Any]) -> Layout:
        """The inside of the kernel."""


def template_of(target: Target) -> Template:
    """What the template of a target has of its own; what that needs is not installed everywhere."""
    from attnkit.splice import sm90, sm100

    modules: dict[str, Template] = {"sm90": sm90, "sm100": sm100}
    return modules[target.template]


@functools.lru_cache(maxsize=1024)
def source_of(
    target: Target,
    variant: Spliced,
    config: tuple[tuple[str, Any], ...],
    head_dims: tuple[int, int],
    captured: tuple[tuple[str, int, bool], ...],
    positive: bool,
) -> Source:
    """The kernel of a variant; compiled where it is first called."""
    template = template_of(target)
    parts = [variant.form.factor, variant.form.rest, variant.form.slope, variant.form.row]
    parts += [variant.mask, *(n for pair in variant.ends or () for n in pair)]
    graph = "|".join("" if n is None else ir.text(n) for n in parts)
    ends = None if variant.ends is None else len(variant.ends)
    loads = [n in variant.wraps for n in ir.topo(*variant.nodes()) if n.op == "load"]
    rest = (head_dims, captured, len(variant.slots[0]), positive, ends, loads, variant.listed)
    return Source(
        "\n".join([f"{target.template} forward", graph, repr(list(config)), repr(rest)]),
        target.arch,
        lambda: template.build(variant, dict(config), head_dims, captured, positive),
        f"forward {dict(config)['dtype']} {head_dims[0]}x{head_dims[1]}",
    )


@functools.lru_cache(maxsize=64)
def combine_source(dtype: str, value_dim: int, tile: tuple[int, int], arch: str) -> Source:
    """The kernel that puts split rows together."""

    def build() -> Build:
        from attnkit.splice.fakes import combine_arguments
        from attnkit.templates.common.combine import Combine

        return Build(Combine(dtype, value_dim), combine_arguments(dtype, value_dim, tile))

    key = f"sm90 combine\n{dtype} {value_dim} {tile}"
    return Source(key, arch, build, f"combine {dtype} {value_dim}")

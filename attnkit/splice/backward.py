"""Running the backward of a variant with GPU kernels.

What differs between templates is in a module of their own: a `Template`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnkit.codegen.levels import index_level
from attnkit.codegen.score_form import score_form
from attnkit.graph import ir
from attnkit.graph.adjoint import adjoint
from attnkit.graph.ir import Node
from attnkit.schedule.targets import SM90, Target
from attnkit.schedule.work_list import fitted, full_runs
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.backward_call import Call, prepare
from attnkit.splice.backward_settings import Settings, Template
from attnkit.splice.backward_work import scheduled
from attnkit.splice.program import Lists, Program

if TYPE_CHECKING:
    pass


@functools.cache
def template_of(target: Target) -> Template:
    """What the template of a target has of its own."""
    from attnkit.splice import sm90_backward, sm100_backward

    modules: dict[str, Template] = {"sm90": sm90_backward, "sm100": sm100_backward}
    return modules[target.template]


def supports(
    target: Target,
    program: Program,
    query: Tensor,
    value: Tensor,
    runs: BlockRuns | None,
    emulated: bool,
) -> bool:
    """Whether the kernels of a target can compute this backward."""
    template = template_of(target)
    widths = template.widths((query.shape[-1], value.shape[-1]))
    if query.dtype not in (torch.bfloat16, torch.float16) or widths is None:
        return False
    if program.checked or not (emulated or query.is_cuda):
        return False
    columns = template.block_kv(widths)
    fits = runs is None or not (runs.block[0] % 64 or runs.block[1] % columns)
    return fits or not program.listed  # lists that overrule the mask cannot be joined to tiles


def backward(
    program: Program,
    grads: tuple[Tensor, Tensor | None],
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    captured: Lists,
    runs: BlockRuns | None,
    scale: float,
    wanted: Sequence[bool],
    *,
    target: Target = SM90,
    deterministic: bool = False,
    emulated: bool = False,
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:
    """Gradients of attention.

    Args:
        program: the graphs; `supports` must hold.
        grads: of the output and of the LSE; None for none.
        saved: query, key, value, output and LSE of the forward.
        captured: tensors of the score and of the mask.
        runs: tiles to visit; None for all.
        scale: softmax scale.
        wanted: for each tensor of the score, whether its gradient is.
        target: what the kernels are compiled for.
        deterministic: form the sums of dQ, dK and dV in a fixed order, and those of captured
            tensors exactly; `exact_sums.fit` must hold.
        emulated: execute the kernels on the CPU.

    Returns:
        The gradients of query, key and value; float32 gradients of the score's tensors, None where
        not wanted.
    """
    call = prepared(
        *(program, grads, saved, captured, runs, wanted),
        target=target,
        deterministic=deterministic,
        emulated=emulated,
    )
    return call(grads, saved, captured, scale)


def prepared(
    program: Program,
    grads: tuple[Tensor, Tensor | None],
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    captured: Lists,
    runs: BlockRuns | None,
    wanted: Sequence[bool],
    *,
    target: Target,
    deterministic: bool,
    emulated: bool = False,
) -> Call:
    """What computes the gradients of tensors like these; arguments are those of `backward`."""
    query, key, value = saved[:3]

    def chosen() -> Settings:
        template = template_of(target)
        widths = template.widths((query.shape[-1], value.shape[-1]))
        assert widths is not None
        switches = template.switches(
            widths,
            runs or full_runs(query.shape[2], key.shape[2], (128, 128), query.device),
            additive=score_form(program.score).additive,
            learned=_levels(program.score, tuple(wanted)),
            listed=program.listed,
        )
        light = _light(program, wanted)
        return _settings(target, query, key, value, deterministic, light, switches)

    return prepare(
        program,
        (target, deterministic),
        chosen,
        grads,
        saved,
        captured,
        runs,
        wanted,
        emulated=emulated,
    )


def first_parts(
    program: Program,
    runs: BlockRuns,
    lengths: tuple[int, int, int, int],
    head_dim: int,
    workers: int,
) -> str:
    """How the sums of dQ begin on Hopper, and why; see `attnkit.splice.first_parts`."""
    widths = template_of(SM90).widths((head_dim, head_dim))
    if widths is None:
        return f"no kernel for head_dim={head_dim}"
    batch, heads, q_len, kv_len = lengths
    query, key = (
        torch.empty(batch, heads, n, head_dim, dtype=torch.bfloat16, device="meta")
        for n in (q_len, kv_len)
    )
    settings = _settings(SM90, query, key, key, False, _light(program, ()), {})
    _, found = scheduled(fitted(runs, settings.block), settings, query, key, workers)
    if isinstance(found, str):
        return f"zeros are written before: {found}"
    return f"the first kv tile at each q tile stores, {found.saved} cycles less than with zeros"


@functools.lru_cache(maxsize=1024)
def _has_slope(score: Node) -> bool:
    return adjoint(score).dscore is not ir.arg("grad")


def block_of(
    target: Target, program: Program, head_dims: tuple[int, int], runs: BlockRuns
) -> tuple[int, int] | None:
    """Rows and columns of a block, without gradients of captured tensors; None for no kernel."""
    template = template_of(target)
    widths = template.widths(head_dims)
    if widths is None:
        return None
    additive = score_form(program.score).additive
    switches = template.switches(
        widths, runs, additive=additive, learned=frozenset(), listed=program.listed
    )
    ctas = 2 if switches.get("pair") else 1
    return template.block_q(widths, _light(program, ())), ctas * template.block_kv(widths)


@functools.lru_cache(maxsize=1024)
def _levels(score: Node | None, wanted: tuple[bool, ...]) -> frozenset[str]:
    """The levels at which the indices of loads with gradients are known."""
    if score is None or not any(wanted):
        return frozenset()
    loads = (load for load, _ in adjoint(score).loads)
    return frozenset(index_level(load) for load in loads if wanted[int(str(load.attr))])


def _light(program: Program, wanted: Sequence[bool]) -> bool:
    """Whether dS is P (dP - delta), and no tensor has a gradient."""
    return not any(wanted) and (program.score is None or not _has_slope(program.score))


def _settings(
    target: Target,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    deterministic: bool,
    light: bool,
    switches: dict[str, Any],
) -> Settings:
    template, dims = template_of(target), (query.shape[-1], value.shape[-1])
    widths = template.widths(dims)
    assert widths is not None
    config = {
        "dtype": str(query.dtype).removeprefix("torch."),
        "width": widths[0],
        "value_width": widths[1],
        "block_q": template.block_q(widths, light),
        "accumulate": key.shape[:2] != query.shape[:2],
        "turns": "descending" if deterministic else "",
    } | switches
    return Settings(target, tuple(sorted(config.items())), dims, template)

"""Running the backward of a variant with GPU kernels: hooks, work list, launch.

What differs between templates is in a module of their own: a `Template`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from attnkit import emulation, expr
from attnkit.adjoint import adjoint
from attnkit.compiled import Build, Source, kernel
from attnkit.emulator import Undefined
from attnkit.expr import Node
from attnkit.intervals import Intervals, find_intervals
from attnkit.sparse import BlockRuns
from attnkit.splice.backward_work import UNIT, work_of
from attnkit.splice.call import loadable, readable, steps
from attnkit.splice.program import Lists, Program
from attnkit.targets import SM90, Target
from attnkit.trace import Traced
from attnkit.versions import VersionedCache

if TYPE_CHECKING:
    from attnkit.templates.sm90.hooks import BackwardHooks

_bounds: VersionedCache[Any] = VersionedCache(128)
# A CUDA graph reads the tables of the calls in it at every replay, and does not say when it is gone.
_in_graphs: dict[tuple[int, ...], Any] = {}


class Template(Protocol):
    """What a template's backward has of its own; a module is one.

    Attributes:
        ROLES: warps by role, for reports of the emulator.
        OPTIONS: of the compilation of the main kernel.
        SEMAPHORES: of a tile of dQ whose sums have an order, and of a tile of dK or dV.
    """

    ROLES: dict[str, range]
    OPTIONS: str
    SEMAPHORES: tuple[int, int]

    def widths(self, head_dims: tuple[int, int]) -> tuple[int, int] | None:
        """Head dims as they are computed, None where they are too wide."""

    def block_q(self, widths: tuple[int, int], light: bool) -> int:
        """Rows of a q tile; `light`: dS is P (dP - delta), and no tensor has a gradient."""

    def block_kv(self, widths: tuple[int, int]) -> int:
        """Columns of a kv tile."""

    def config(self, settings: Settings) -> Any:
        """Its `BackwardConfig`."""

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
    """

    target: Target
    config: tuple[tuple[str, Any], ...]
    head_dims: tuple[int, int]

    @property
    def template(self) -> Template:
        """What the template has of its own."""
        return template_of(self.target)

    @property
    def values(self) -> dict[str, Any]:
        """The config as a dictionary."""
        return dict(self.config)

    @property
    def block(self) -> tuple[int, int]:
        """Rows of a q tile, and columns of a kv tile."""
        config = self.values
        widths = config["width"], config["value_width"]
        return config["block_q"], self.template.block_kv(widths)


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
        deterministic: form the sums of dQ, dK and dV in a fixed order. Those of captured tensors
            are not.
        emulated: execute the kernels on the CPU.

    Returns:
        The gradients of query, key and value; float32 gradients of the score's tensors, None where
        not wanted.
    """
    query, key, value, out = (loadable(t) for t in saved[:4])
    grad_out, lse = loadable(grads[0]), saved[4].detach().contiguous()
    grad_lse = lse if grads[1] is None else grads[1].detach().contiguous()
    settings = _settings(target, query, key, value, deterministic, _light(program, wanted))
    work = work_of(runs, settings, query, key, value, emulated)
    config, device = settings.values, query.device
    empty = functools.partial(torch.empty, dtype=torch.float32, device=device)
    units = work.units
    sums = empty(sum(units) * UNIT)
    sums[units[0] * UNIT :].zero_()
    rows_lse, rows_delta = empty(work.rows), empty(work.rows)
    own = [torch.empty_like(t) for t in saved[:3]]
    dq, dk, dv = (
        t if _writable(t) else torch.empty(t.shape, dtype=t.dtype, device=device) for t in own
    )
    roles = settings.template.ROLES if emulated else None
    run = functools.partial(_run, roles=roles)
    run(
        _prepare(settings, grads[1] is not None),
        (out, grad_out, lse, grad_lse, rows_lse, rows_delta, sums),
    )
    kept = (program, query.shape, key.shape, device)
    ends, mask_tensors = _bounds.get(
        kept, captured[1], lambda: _column_intervals(program, captured[1], query, key)
    )
    tensors = [readable(t, device) for t in (*captured[0], *mask_tensors)]
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        read = [*mask_tensors, *(t for t in tensors if t.numel() == 1)]
        _in_graphs[tuple(map(id, (work, *read)))] = work, read
    totals = [
        torch.zeros(t.shape, dtype=torch.float32, device=device) if need else None
        for t, need in zip(captured[0], wanted, strict=True)
    ]
    added = [t.reshape(1) if t.ndim == 0 else t for t in totals if t is not None]
    source = _main(
        program,
        ends,
        settings,
        tuple((str(t.dtype).removeprefix("torch."), t.ndim, t.stride(-1) == 1) for t in tensors),
        tuple(wanted),
    )
    outputs = (dk, dv) if config["accumulate"] or not emulated else (Undefined(dk), Undefined(dv))
    run(
        source,
        (
            *(query, key, value, grad_out, *outputs, rows_lse, rows_delta, sums),
            *(work.pieces, work.partial, work.full),
            torch.zeros(1, dtype=torch.int32, device=device),
            *(*tensors, *added, *work.turn_tables()),
            *(scale, query.shape[1] // key.shape[1], work.workers),
        ),
        work=work.cost,
    )
    first = 0
    wide, deep = config["width"], config["value_width"]
    for grad, count, factor, width, block in (
        (dq, units[0], scale, wide, config["block_q"]),
        (dk, units[1], scale, wide, settings.block[1]),
        (dv, units[2], 1.0, deep, settings.block[1]),
    ):
        if count:
            run(_finish(settings, grad.shape[-1], width, block), (sums, grad, first, factor))
        first += count
    found = [t if t is g else t.copy_(g) for t, g in zip(own, (dq, dk, dv), strict=True)]
    return (found[0], found[1], found[2]), totals


def _column_intervals(
    program: Program, tensors: Sequence[Tensor], query: Tensor, key: Tensor
) -> tuple[tuple[tuple[Node, Node], ...] | None, Sequence[Tensor]]:
    """The intervals of q that every column keeps, if the mask has that form; and its tensors."""
    if program.mask is None:
        return None, ()
    q, kv = expr.arg("q"), expr.arg("kv")
    turned = Traced(
        "mask",
        expr.substitute(program.mask, {q: kv, kv: q}),
        tuple(tensors),
        tuple(f"t{i}" for i in range(len(tensors))),
    )
    found = find_intervals(
        turned,
        q_len=key.shape[2],
        kv_len=query.shape[2],
        batch=query.shape[0],
        heads=query.shape[1],
        device=query.device,
    )
    if isinstance(found, Intervals):
        return found.bounds, found.tensors
    return None, tensors


def _writable(t: Tensor) -> bool:
    """Whether the kernels can write a gradient that lies in memory like this."""
    return steps(t.shape, t.stride(), t.element_size())


@functools.lru_cache(maxsize=1024)
def _has_slope(score: Node) -> bool:
    return adjoint(score).dscore is not expr.arg("grad")


def _light(program: Program, wanted: Sequence[bool]) -> bool:
    """Whether dS is P (dP - delta), and no tensor has a gradient."""
    return not any(wanted) and (program.score is None or not _has_slope(program.score))


def _settings(
    target: Target, query: Tensor, key: Tensor, value: Tensor, deterministic: bool, light: bool
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
    }
    return Settings(target, tuple(sorted(config.items())), dims)


def _run(
    source: Source,
    arguments: Sequence[Any],
    *,
    roles: dict[str, range] | None,
    work: float = 0.0,
) -> None:
    """Run a kernel; roles: execute it on the CPU."""
    if roles is not None:
        code = kernel(source, lines=True)
        emulation.run_emulated(code, arguments, work=work, roles=roles)
    else:
        kernel(source)(*arguments)


def _title(settings: Settings) -> str:
    return f"{settings.values['dtype']} {settings.head_dims[0]}x{settings.head_dims[1]}"


@functools.lru_cache(maxsize=64)
def _prepare(settings: Settings, with_lse: bool) -> Source:
    """The kernel of the rows' statistics."""

    def build() -> Build:
        from attnkit.splice.fakes_backward import prepare_arguments

        arguments = prepare_arguments(settings.values["dtype"], settings.head_dims[1])
        return Build(settings.template.prepare(settings, with_lse), arguments)

    key = f"backward prepare\n{settings} {with_lse}"
    return Source(key, settings.target.arch, build, f"prepare {_title(settings)}")


@functools.lru_cache(maxsize=64)
def _finish(settings: Settings, head_dim: int, width: int, block: int) -> Source:
    """The kernel that rounds a gradient."""

    def build() -> Build:
        from attnkit.splice.fakes_backward import finish_arguments

        arguments = finish_arguments(settings.values["dtype"], head_dim)
        return Build(settings.template.finish(settings, width, block), arguments)

    key = f"backward finish\n{settings} {head_dim} {width} {block}"
    return Source(key, settings.target.arch, build, f"finish {_title(settings)}")


@functools.lru_cache(maxsize=1024)
def _main(
    program: Program,
    ends: tuple[tuple[Node, Node], ...] | None,
    settings: Settings,
    captured: tuple[tuple[str, int, bool], ...],
    wanted: tuple[bool, ...],
) -> Source:
    """The kernel of the gradients."""

    def build() -> Build:
        from attnkit.cute_hooks_backward import GraphBackward
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
        arguments = main_arguments(
            config["dtype"], settings.head_dims, captured, totals, bool(config["turns"])
        )
        return Build(settings.template.main(settings, hooks), arguments, settings.template.OPTIONS)

    bounds = "" if ends is None else expr.text(*(n for pair in ends for n in pair))
    shape = (len(ends) if ends is not None else None, captured, wanted)
    key = "\n".join(["backward", program.text, bounds, str(settings), str(shape)])
    return Source(key, settings.target.arch, build, f"backward {_title(settings)}")

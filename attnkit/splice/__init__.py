"""Binding a variant's graphs to the hooks of a template, and running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit.errors import ArgumentError
from attnkit.schedule.targets import EMULATED, ORDERED, of_template
from attnkit.schedule.work_list import full_runs
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.cpu import CpuHooks
from attnkit.splice.layout import Layout
from attnkit.splice.program import Lists, Program, compute_dtype
from attnkit.splice.replay import Replay
from attnkit.templates import cpu
from attnkit.templates.cpu import output_like, output_strides

_BLOCK, _MANY = (128, 128), 4096
__all__ = [
    "Attention",
    "CpuHooks",
    "Layout",
    "Lists",
    "Program",
    "backward_block",
    "compute_dtype",
    "first_parts",
    "forward_block",
    "layout_of",
    "output_like",
    "prepare",
    "repeated_backward",
    "run_backward",
    "run_forward",
]


Attention: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Lists, float], tuple[Tensor, Tensor, Tensor | None]
]  # query, key, value, captured tensors, scale -> out, LSE, row maxima


def run_forward(
    template: str,
    program: Program,
    qkv: tuple[Tensor, Tensor, Tensor],
    captured: Lists,
    runs: BlockRuns | None,
    scale: float,
    need_max: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a template's forward: out, LSE, and the row maxima if they are needed."""
    attention = prepare(
        template, program, qkv, captured, runs, positive=scale > 0, need_max=need_max
    )
    return attention(*qkv, captured, scale)


def prepare(
    template: str,
    program: Program,
    qkv: tuple[Tensor, Tensor, Tensor],
    captured: Lists,
    runs: BlockRuns | None,
    *,
    positive: bool,
    need_max: bool,
) -> Attention:
    """A template's forward for tensors like these.

    It may be called with other tensors of the same shapes, strides, dtypes and devices, and a scale
    that is `positive` or not as here; but only with the same mask tensors holding the same data, as
    the runs come from that.
    """
    query = qkv[0]
    target = of_template(template)
    if target is not None:
        from attnkit.splice import forward  # what it needs is not installed everywhere

        return forward.prepare(
            *(program, qkv, captured, runs, output_strides(query, qkv[2].shape[-1])),
            positive=positive,
            need_max=need_max,
            target=target,
            emulated=template.startswith(EMULATED),
        )

    def attention(
        query: Tensor, key: Tensor, value: Tensor, captured: Lists, scale: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.no_grad(), _as_written(query):
            hooks = CpuHooks(program, *captured, compute_dtype(query), query.device)
            return cpu.forward(query, key, value, runs, hooks, scale, need_max=need_max)

    return attention


def layout_of(
    template: str,
    program: Program,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    block: tuple[int, int],
) -> Layout:
    """The inside of a GPU template's forward kernel.

    Args:
        template: a plan's.
        program: the graphs.
        dtype: of query, key and value.
        head_dims: of query and key, and of value.
        block: the plan's tile sizes.
    """
    from attnkit.splice import forward

    target = of_template(template)
    if target is None:
        raise ArgumentError(f"template={template!r} is no GPU kernel")
    name = str(dtype).removeprefix("torch.")
    return forward.layout(target, program.score, name, head_dims, block)


def forward_block(
    template: str,
    program: Program,
    head_dims: tuple[int, int],
    runs: BlockRuns | None = None,
    q_len: int | None = None,
) -> tuple[tuple[int, int], str]:
    """Rows and columns of a block of a GPU template's forward kernel, and why that kernel.

    If two CTAs work on a block, the rows are of both.

    Args:
        template: a plan's.
        program: the graphs.
        head_dims: of query and key, and of value.
        runs: tiles to visit; None for all.
        q_len: length of the query, None for a long one.
    """
    from attnkit.splice import forward

    target = of_template(template)
    if target is None:
        raise ArgumentError(f"template={template!r} is no GPU kernel")
    found, why = forward.kernel_of(head_dims, runs, program, target, q_len)
    return found.block, why


def first_parts(
    program: Program,
    runs: BlockRuns,
    lengths: tuple[int, int, int, int],
    head_dim: int,
    workers: int,
) -> str:
    """How the sums of dQ begin in the Hopper backward, and why.

    Args:
        program: the graphs; no captured tensor has a gradient.
        runs: tiles to visit.
        lengths: batch, heads and length of query, and length of key and value.
        head_dim: of query, key and value.
        workers: CTAs that run at once.
    """
    from attnkit.splice import backward

    return backward.first_parts(program, runs, lengths, head_dim, workers)


def backward_block(
    template: str,
    program: Program,
    head_dims: tuple[int, int],
    runs: BlockRuns | None = None,
) -> tuple[int, int] | None:
    """Rows and columns of a block of a GPU template's backward, None where it has none.

    Without captured tensors that have gradients. If two CTAs work on a block, the columns are of
    both.

    Args:
        template: a plan's.
        program: the graphs.
        head_dims: of query and key, and of value.
        runs: tiles to visit; None for those of long sequences without a mask.
    """
    from attnkit.splice import backward

    target = of_template(template)
    if target is None:
        raise ArgumentError(f"template={template!r} is no GPU kernel")
    return backward.block_of(target, program, head_dims, runs or _long())


def _long() -> BlockRuns:
    return full_runs(_MANY, _MANY, _BLOCK, torch.device("cpu"))


def run_backward(
    template: str,
    program: Program,
    grads: tuple[Tensor, Tensor | None],
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    captured: Lists,
    runs: BlockRuns | None,
    scale: float,
    wanted: Sequence[bool],
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:
    """Run a template's backward; the same bits at every run if the template is ordered.

    Returns:
        The gradients of query, key and value; and by slot of the score graph the gradients of the
        captured tensors in the compute dtype, None where none is wanted.
    """
    query = saved[0]
    target = of_template(template)
    if target is not None:
        from attnkit.splice import backward, exact_sums

        emulated, deterministic = template.startswith(EMULATED), template.endswith(ORDERED)
        learned = [t for t, need in zip(captured[0], wanted, strict=True) if need]
        fixed = not deterministic or exact_sums.fit(query, saved[1], learned)
        if fixed and backward.supports(target, program, query, saved[2], runs, emulated):
            return backward.backward(
                *(program, grads, saved, captured, runs, scale, wanted),
                target=target,
                deterministic=deterministic,
                emulated=emulated,
            )
    with _as_written(query):
        hooks = CpuHooks(program, *captured, compute_dtype(query), query.device, wanted)
        return cpu.backward(*grads, *saved, runs, hooks, scale), hooks.gradients


def repeated_backward(
    template: str,
    program: Program,
    grads: tuple[Tensor, Tensor | None],
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    captured: Lists,
    runs: BlockRuns | None,
    scale: float,
    wanted: Sequence[bool],
) -> Replay | None:
    """How a backward that was run is run again, for other tensors like these; None if no quicker.

    Returns:
        A function of query, key, value, output, its gradient, LSE, captured tensors and the LSE's
        gradient if there is one. It gives the gradients of query, key and value, and float32
        gradients of the score's tensors where they are wanted.
    """
    target = of_template(template)
    if target is None or template.startswith(EMULATED) or template.endswith(ORDERED):
        return None  # semaphores are made anew for every run
    from attnkit.splice import backward

    if not backward.supports(target, program, saved[0], saved[2], runs, False):
        return None
    call = backward.prepared(
        *(program, grads, saved, captured, runs, wanted), target=target, deterministic=False
    )
    return call.again if call.scale == scale else None


def _as_written(query: Tensor) -> AbstractContextManager[Any]:
    """Without autocast, which would round the operands of every product inside."""
    if torch._C._is_any_autocast_enabled():
        return torch.autocast(query.device.type, enabled=False)
    return nullcontext()

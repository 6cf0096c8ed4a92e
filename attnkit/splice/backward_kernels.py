"""Describe the kernels of a backward: their settings, sources and captured arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from attnkit.codegen.load_indices import LoadIndices, data_bound
from attnkit.codegen.nonnegative import wrapping
from attnkit.graph.ir import Node
from attnkit.jit.kernel import Source
from attnkit.splice import exact_sums
from attnkit.splice.backward_rows import cached_learned_loads, row_work
from attnkit.splice.backward_sources import (
    RowWork,
    main_source,
    postprocess_source,
    preprocess_source,
)
from attnkit.splice.backward_template import BackwardSettings
from attnkit.splice.backward_work import BackwardWork, backward_work
from attnkit.splice.captured_arguments import (
    MASK,
    SCORE,
    CapturedArgument,
    captured_slot,
    read_captured,
    readable,
    tensor_kinds,
)
from attnkit.splice.copied_bias import backward_bias
from attnkit.splice.kernel_call import BackwardInputs, Captured, KernelCall
from attnkit.splice.program import Program
from attnkit.splice.run_time_numbers import KernelGraphs
from attnkit.splice.stored_gradients import (
    CallSizes,
    StoredGradient,
    stored_gradients,
    unwritten,
)

# Function that returns the compile-time settings of kernels: (graphs, whether each tensor that the
# score reads needs a gradient) -> settings.
SettingsOf: TypeAlias = Callable[[Program, tuple[bool, ...]], BackwardSettings]


@dataclass(frozen=True)
class Postprocess:
    """Describes a launch of the postprocess kernel, which rounds float32 sums to a gradient.

    Attributes:
        source: the kernel.
        which: which gradient it writes: 0 for dQ, 1 for dK, 2 for dV.
        first: index of the first unit (of `UNIT` floats) of this gradient among the sums.
        scaled: whether the sums are multiplied by the softmax scale.
        factors: whether they are also multiplied by factors of rows.
    """

    source: Source
    which: int
    first: int
    scaled: bool
    factors: bool = False


class BackwardKernels(NamedTuple):
    """Holds the settings, tables and sources of a backward's kernels, which are not compiled yet.

    The attributes that are not described here are those of `BackwardCall`.

    Attributes:
        arguments: the captured tensors that the main kernel reads.
        needs_grad: for each tensor that the score reads, tables of numbers included, whether its
            gradient is needed.
        table: see `BackwardCall`.
        reads_sink: whether the preprocess reads an attention sink.
    """

    settings: BackwardSettings
    work: BackwardWork
    preprocess: Source
    main: Source
    postprocess: tuple[Postprocess, ...]
    shifts: bool
    arguments: tuple[CapturedArgument, ...]
    needs_grad: tuple[bool, ...]
    table: int | None
    reads_sink: bool
    stored: tuple[StoredGradient, ...]

    @property
    def sources(self) -> tuple[Source, ...]:
        """Return the kernels, the main one first."""
        clearing = (s.unwritten.source for s in self.stored if s.unwritten is not None)
        return (self.main, self.preprocess, *(p.source for p in self.postprocess), *clearing)


def describe_kernels(
    kernel_call: KernelCall,
    inputs: BackwardInputs,
    graphs: KernelGraphs,
    settings_of: SettingsOf,
    workers: int,
) -> BackwardKernels:
    """Choose the settings, tables and sources of a backward's kernels, without compiling them.

    Args:
        kernel_call: the template, graphs and tiles.
        inputs: example tensors of the call.
        graphs: the score_mod and mask_mod, which may read numbers from tables.
        settings_of: see `SettingsOf`.
        workers: number of CTAs that run at once.
    """
    query, key, value, captured = inputs.query, inputs.key, inputs.value, inputs.captured
    program = kernel_call.program.without_sink()  # the LSE includes the sink
    program = replace(program, score=graphs.score, mask=graphs.mask)
    emulated, device, own = kernel_call.spec.emulated, query.device, len(captured.scores)
    needs_grad = (*inputs.needs_grad, *(False for _ in graphs.scores[own:]))
    settings = settings_of(program, needs_grad)
    check = None if kernel_call.check is None else kernel_call.check.backward
    checks = () if check is None else tensor_kinds([check.rows])
    arguments = _arguments(graphs, captured, device)
    kinds = tensor_kinds(read_captured(arguments, captured, device))
    indices = _load_indices(graphs, query, key)
    before, after = row_work(program.score, settings, kinds, needs_grad, indices.clamp)
    runs, learned = kernel_call.runs, any(needs_grad)
    call = CallSizes.of(query, key)
    alone, shared = stored_gradients(program.score, needs_grad, settings, indices, call)
    leads = bool(shared) and (runs is None or runs.batch == 1)
    work = backward_work(runs, settings, query, key, value, workers, emulated, learned, leads)
    rounding = settings  # of the postprocess, which does not depend on who writes dQ first
    bias = None
    if settings.bias_first and not settings.deterministic:
        tensors = (*captured.scores, *graphs.scores[own:])
        bias = backward_bias(program.score, graphs.facts, tensors, indices)
    settings = _with_switches(settings, work, bias)
    if not work.leaders:
        shared = {}
    stored = []
    for i, index in (alone | shared).items():
        gap = unwritten(index, captured.scores[i].shape, runs, settings, call, device)
        stored.append(StoredGradient(i, i in shared, gap))
    with_lse = inputs.grad_lse is not None or settings.with_entropy
    with_sink = inputs.needs_sink_grad
    # terms that shift a row do not shift its sink: their gradients are less than dLSE by the sink's
    reads_sink = with_sink or (inputs.sink is not None and before is not None)
    return BackwardKernels(
        settings=settings,
        work=work,
        preprocess=preprocess_source(settings, with_lse, before, checks, reads_sink + with_sink),
        main=main_source(
            program,
            graphs.bounds,
            settings,
            kinds,
            needs_grad,
            _large(captured.scores, settings),
            indices,
            graphs.facts,
            tuple(alone),
            tuple(shared),
        ),
        postprocess=_postprocess(rounding, work, after),
        shifts=before is not None,
        arguments=arguments,
        needs_grad=needs_grad,
        table=_one_hot_table(program, needs_grad, settings),
        reads_sink=reads_sink,
        stored=tuple(stored),
    )


def _arguments(
    graphs: KernelGraphs, captured: Captured, device: torch.device
) -> tuple[CapturedArgument, ...]:
    """Return the captured tensors that the main kernel reads: of the score, then of the mask."""
    own = len(captured.scores)
    return (
        *(captured_slot(SCORE, i, captured, device) for i in range(own)),
        *(readable(t, device) for t in graphs.scores[own:]),
        *(_mask_argument(t, captured, device) for t in graphs.masks),
    )


def _with_switches(
    settings: BackwardSettings, work: BackwardWork, bias: Tensor | None
) -> BackwardSettings:
    """Return the settings of kernels that read the tables `work` and copy `bias`, if there is one."""
    if bias is not None:
        settings = settings.with_copied_bias(bias.element_size())
    if work.leaders:
        settings = settings.with_leaders()
    if work.first_writer:
        return settings.with_first_writer()
    if work.visits is not None:
        return settings.with_arrivals()
    return settings if work.starts is None else settings.with_whole_heads()


def _large(scores: Sequence[Tensor], settings: BackwardSettings) -> tuple[int, ...]:
    """Return the numbers of the tensors whose gradient has offsets of more than 31 bits."""
    numbers = exact_sums.BINS if settings.deterministic else 1  # of one sum
    return tuple([i for i, t in enumerate(scores) if t.numel() * numbers >= 2**31])


def _one_hot_table(
    program: Program, needs_grad: tuple[bool, ...], settings: BackwardSettings
) -> int | None:
    """Return the number of the tensor whose gradient the main kernel sums by class, if any."""
    if not settings.one_hot:
        return None
    ((load, _),) = cached_learned_loads(program.score, needs_grad, settings.row_sums).scores
    return int(str(load.attr))


def _load_indices(graphs: KernelGraphs, query: Tensor, key: Tensor) -> LoadIndices:
    """Return the loads whose index may be negative, and those whose index is clamped.

    In the bounds the argument `q` stands for the kv position of a column.
    """
    batch, heads, q_len = query.shape[:3]
    sizes = {"b": batch, "h": heads, "q": q_len, "kv": key.shape[2]}
    (of_score, of_mask), bounds = graphs.known, graphs.bounds
    score = [] if graphs.score is None else [graphs.score]
    parts = [(score, graphs.scores, sizes, of_score)]
    ends = [n for pair in bounds or () for n in pair]
    parts.append((ends, graphs.masks, sizes | {"q": key.shape[2]}, of_mask))
    if bounds is None and graphs.mask is not None:
        parts.append(([graphs.mask], graphs.masks, sizes, of_mask))
    wrap, clamp = frozenset[Node](), frozenset[Node]()
    for roots, tensors, own, known in parts:
        wrap |= wrapping(roots, own, dict(known))
        clamp |= data_bound(roots, own, [t.shape for t in tensors], dict(known))
    return LoadIndices(wrap, clamp)


def _mask_argument(t: Tensor, captured: Captured, device: torch.device) -> CapturedArgument:
    """Return the kernel argument for a mask tensor: a slot if captured, else `t` itself."""
    slot = next((i for i, own in enumerate(captured.masks) if own is t), None)
    return readable(t, device) if slot is None else captured_slot(MASK, slot, captured, device)


def _postprocess(
    settings: BackwardSettings, work: BackwardWork, rows: RowWork | None
) -> tuple[Postprocess, ...]:
    """Return the postprocess launches: one for each of dQ, dK, dV that has float32 sums.

    Args:
        settings: compile-time settings of the kernels.
        work: tables that the kernels read.
        rows: the score_mod, if dQ is to be multiplied by its factors of rows.
    """
    (wide, deep), (block_q, columns) = settings.widths, settings.block
    kernels, first = [], 0
    for which, (count, width, block) in enumerate(
        zip(work.units, (wide, wide, deep), (block_q, columns, columns), strict=False)
    ):
        if count and not (which == 0 and work.writes_dq):
            own = rows if which == 0 else None
            head_dim = settings.head_dims[which == 2]
            source = postprocess_source(settings, head_dim, width, block, own)
            kernels.append(Postprocess(source, which, first, which < 2, own is not None))
        first += count
    return tuple(kernels)

"""Prepare the GPU forward of a variant: choose the kernel, build its source and its work list.

The parts that are specific to an architecture are in a `ForwardTemplate`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnkit.codegen.score_form import score_form
from attnkit.graph.staging import pair_load
from attnkit.jit.kernel import Source, kernel
from attnkit.jit.relaunch import Relaunch
from attnkit.schedule.kernel_table import Kernel, kernels
from attnkit.schedule.targets import Target, gpu_target
from attnkit.schedule.work_list import WorkList
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.captured_arguments import (
    MASK,
    SCORE,
    CapturedArgument,
    captured_slot,
    read_captured,
    readable,
    tensor_kinds,
)
from attnkit.splice.data_check import CheckTable
from attnkit.splice.forward_call import COUNTER, CombineKernel, ForwardCall
from attnkit.splice.forward_sources import combine_source, forward_source
from attnkit.splice.forward_variant import ForwardVariant, forward_variant, shapes_of
from attnkit.splice.forward_work import choose_kernel, forward_work, near_runs
from attnkit.splice.kernel_call import Captured, ForwardInputs, KernelCall
from attnkit.splice.mask_intervals import row_intervals
from attnkit.splice.program import Program
from attnkit.splice.run_time_numbers import KernelGraphs, kernels_for
from attnkit.splice.runs_cache import wait_for_tables
from attnkit.splice.template_registry import forward_template
from attnkit.splice.tma import begins_aligned, has_tma_strides, have_tma_strides
from attnkit.splice.workers import worker_count
from attnkit.util import caches
from attnkit.util.outputs import output_strides
from attnkit.util.tensor_cache import VersionedCache

if TYPE_CHECKING:
    from attnkit.splice.kernel_layout import Layout

_log = logging.getLogger("attnkit.splice")
_calls: VersionedCache[ForwardCall] = VersionedCache(128)
caches.register(_calls.clear)


def layout_of(
    template: str,
    program: Program,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    block: tuple[int, int],
) -> Layout:
    """Return the warp roles and the memory layout of the forward kernel of a GPU template.

    Args:
        template: a plan's template.
        program: the score and mask graphs.
        dtype: dtype of query, key and value.
        head_dims: head dims of query and key, and of value.
        block: the plan's tile sizes.

    Raises:
        ArgumentError: `template` is not a GPU kernel.
    """
    target, form = gpu_target(template), score_form(program.score)
    settings = forward_template(target)
    candidates = kernels(
        *head_dims,
        program.score is not None,
        target.template,
        only_slope=program.has_softmax and form.only_slope and block[0] > 128,
        dropout=program.dropout,
    )
    kernel = next(k for k in candidates if k.block == block)
    chosen = settings.fit(kernel, form, False, program.dropout)
    name = str(dtype).removeprefix("torch.")
    config = settings.config(form, chosen, name, head_dims, False, False, target.arch)
    return settings.layout(config)


def forward_block(
    template: str,
    program: Program,
    head_dims: tuple[int, int],
    runs: BlockRuns | None = None,
    q_len: int | None = None,
) -> tuple[tuple[int, int], str]:
    """Return the (rows, columns) of a block of the forward kernel, and the reason as text.

    If two CTAs share a block, the rows are those of both CTAs.

    Args:
        template: a plan's template.
        program: the score and mask graphs.
        head_dims: head dims of query and key, and of value.
        runs: tiles to visit; None for all.
        q_len: length of the query, None for a long one.

    Raises:
        ArgumentError: `template` is not a GPU kernel.
    """
    chosen, why = choose_kernel(head_dims, runs, program, gpu_target(template), q_len)
    return chosen.block, why


def checks_data(target: Target) -> bool:
    """Return whether the forward kernel of a target can compare data with its fingerprints."""
    return forward_template(target).checks_data


def prepare(kernel_call: KernelCall, inputs: ForwardInputs) -> ForwardCall:
    """Return the cached or new `ForwardCall` for tensors like `inputs`.

    Later calls must pass tensors of the same device, dtypes, shapes and strides, and a scale of the
    same sign. The tensors that the mask captures must be the same, with the same data.
    """
    qkv, captured = (inputs.query, inputs.key, inputs.value), inputs.captured
    sizes = tuple((t.shape, t.stride()) for t in qkv)
    kinds = tuple(
        (t.dtype, t.device, t.shape, t.stride(), begins_aligned(t)) for l in captured for t in l
    )
    device = inputs.query.device
    workers = worker_count(device, kernel_call.spec.emulated)
    key = kernel_call, sizes, inputs.query.dtype, device, kinds, inputs.scale > 0, workers
    return _calls.get(key, captured.masks, lambda: build_call(kernel_call, inputs, workers))


def build_call(kernel_call: KernelCall, inputs: ForwardInputs, workers: int) -> ForwardCall:
    """Build a `ForwardCall` without the cache of `prepare`, for `workers` concurrent CTAs."""
    query, key, value, captured = inputs.query, inputs.key, inputs.value, inputs.captured
    program, runs, need_max = kernel_call.program, kernel_call.runs, kernel_call.need_max
    target = gpu_target(kernel_call.template)
    batch, heads, q_len, head_dim = query.shape
    head_dims = head_dim, value.shape[-1]
    device, dtype = query.device, str(query.dtype).removeprefix("torch.")
    template = forward_template(target)
    near = None if runs is None else near_runs(runs, query)
    light = not (need_max or kernel_call.need_entropy) and inputs.scale > 0
    chosen, _ = choose_kernel(head_dims, near, program, target, q_len, light)
    workers = max(1, workers // (chosen.ctas * chosen.value_parts))

    bounds, mask_tensors = row_intervals(program.mask, captured.masks, query, key)
    scores, sink = program.split_sink(captured.scores)
    scores, _ = program.split_dropout(scores)
    graphs = KernelGraphs(
        program.score,
        program.mask,
        bounds,
        tuple(scores),
        tuple(mask_tensors),
        program.has_softmax,
    )
    kernel = kernels_for(graphs, lambda g: _kernel(kernel_call, inputs, g, chosen), device)
    chosen, config, check = kernel.chosen, kernel.config, kernel.check

    # the statistics of the parts of split rows are not combined
    split = not (need_max or kernel_call.need_entropy)
    work = forward_work(
        runs, chosen, query, key, value, workers, split=split,
        batch_together=chosen.bias_first,
    )  # fmt: skip
    tile = template.tile(chosen, head_dims)
    combine = None
    if work.slots:
        tables = work.split, work.split_ptr
        slot = len(kernel.arguments) - 1 - (check is not None)  # of the sink, if there is one
        kind = None if sink is None else tensor_kinds([sink])[0]
        merge = combine_source(dtype, head_dims[1], tile, target.arch, kind, program.has_softmax)
        combine = CombineKernel(merge, tables, None if sink is None else slot)
    wait_for_tables(device)
    emulated, slots = kernel_call.spec.emulated, max(1, work.slots)
    run = None
    if emulated:
        run = functools.partial(_emulate, template.layout(config), work, chosen, check)
    shape, strides = (batch, heads, q_len, head_dims[1]), output_strides(query, head_dims[1])
    if _log.isEnabledFor(logging.INFO):
        _log_copies(query, key, value)
    return ForwardCall(
        run=run or _launch,
        source=kernel.source,
        device=device,
        dtype=query.dtype,
        shape=shape,
        strides=strides,
        direct=has_tma_strides(shape, strides, query.element_size()),
        tma_strides=have_tma_strides((query, key, value)),
        tables=(work.work_tiles, work.partial, work.full),
        parts=((slots, *tile), (slots, tile[0])),
        captured=kernel.arguments,
        numbers=(heads // key.shape[1], min(workers, work.work_tiles.shape[0])),
        combine=combine,
        need_max=need_max,
        need_entropy=kernel_call.need_entropy,
        check=check,
    )


class _Kernel(NamedTuple):
    """Describes a forward kernel, which is not compiled yet, and the captured tensors it reads.

    Attributes:
        source: the kernel.
        chosen: its tile sizes, adapted to the registers that the variant needs.
        config: arguments of the template's `ForwardConfig`.
        arguments: the captured tensors; the last one is the table of `check`, if there is one.
        check: what the kernel compares with fingerprints.
    """

    source: Source
    chosen: Kernel
    config: dict[str, Any]
    arguments: tuple[CapturedArgument, ...]
    check: CheckTable | None

    @property
    def sources(self) -> tuple[Source, ...]:
        """Return the kernel as a tuple."""
        return (self.source,)


def _kernel(
    kernel_call: KernelCall, inputs: ForwardInputs, graphs: KernelGraphs, chosen: Kernel
) -> _Kernel:
    """Describe the forward kernel of a call for `graphs`, which may read numbers from tables."""
    query, key, captured = inputs.query, inputs.key, inputs.captured
    program, target = kernel_call.program, gpu_target(kernel_call.template)
    template, device = forward_template(target), query.device
    head_dims = query.shape[3], inputs.value.shape[-1]
    variant = forward_variant(
        graphs.score,
        graphs.mask,
        graphs.bounds,
        (*query.shape[:3], key.shape[2]),
        (shapes_of(graphs.scores), shapes_of(graphs.masks)),
        graphs.softmax,
        graphs.facts,
        graphs.known,
    )
    variant = variant._replace(
        lists_override_mask=program.lists_override_mask,
        sink=program.sink,
        dropout=program.dropout,
    )
    read = Captured(graphs.scores, graphs.masks)
    arguments = tuple(captured_arguments(variant, captured, read, device))
    masked = variant.mask is not None or variant.lists_override_mask
    chosen = template.fit(chosen, variant.form, masked, variant.dropout)
    if chosen.bias_first and template.copy_bias is not None:
        tensors = [graphs.scores[slot] for slot in variant.slots[0]]
        chosen = template.copy_bias(chosen, head_dims, variant, tensors)
    dtype = str(query.dtype).removeprefix("torch.")
    needed = kernel_call.need_max, kernel_call.need_entropy
    config = template.config(variant.form, chosen, dtype, head_dims, *needed, target.arch)
    parts = (variant.form.factor, variant.form.bias)
    pairs = pair_load([n for n in parts if n is not None])
    if pairs is not None and not chosen.bias_first:
        table = graphs.scores[variant.slots[0][int(str(pairs.attr))]]
        if template.pair_table(config, table.shape):
            config["pair_table"] = True
    if kernel_call.runs is None and template.edge_only(variant.form, config):
        config["edge_only"] = True
    check = None
    if kernel_call.check is not None and template.checks_data:
        check = kernel_call.check.forward
        config["checks_data"] = True
        arguments = (*arguments, check.rows)
    source = forward_source(
        target,
        variant,
        tuple(sorted(config.items())),
        head_dims,
        tensor_kinds(read_captured(arguments, captured, device)),
        inputs.scale > 0,
        graphs.facts is not None,
    )
    return _Kernel(source, chosen, config, arguments, check)


def _log_copies(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Log which tensors each call copies before its kernel, because TMA cannot read them."""
    from attnkit.util.log import once  # which is needed only here

    for name, t in (("query", query), ("key", key), ("value", value)):
        if not have_tma_strides([t]):
            once(
                _log,
                f"each call copies its {name} {list(t.shape)} with strides {list(t.stride())} before "
                "the kernel: TMA needs a last stride of 1 and others of multiples of 16 bytes",
            )


def captured_arguments(
    variant: ForwardVariant,
    captured: Captured,
    read: Captured,
    device: torch.device,
) -> Iterator[CapturedArgument]:
    """Yield the kernel argument for each captured tensor that the kernel of `variant` reads.

    Args:
        variant: the variant that the kernel computes.
        captured: tensors that the score and the mask capture.
        read: tensors that the graphs of the kernel read: the captured ones, tables of the mask's
            intervals, tables of numbers.
        device: device of the kernel.
    """
    own = len(captured.scores) - variant.sink - variant.dropout
    for slot in variant.slots[0]:
        if slot < own:
            yield captured_slot(SCORE, slot, captured, device)
        else:
            yield readable(read.scores[slot], device)
    for slot in variant.slots[1]:
        if slot < len(captured.masks):
            yield captured_slot(MASK, slot, captured, device)
        else:
            yield readable(read.masks[slot], device)
    if variant.dropout:
        yield captured_slot(SCORE, len(captured.scores) - 1 - variant.sink, captured, device)
    if variant.sink:
        yield captured_slot(SCORE, len(captured.scores) - 1, captured, device)


def _launch(
    source: Source, arguments: Sequence[Any], outputs: tuple[int, ...], changing: Sequence[int]
) -> Relaunch:
    code = kernel(source)
    code(*arguments)
    return code.relauncher(arguments, changing)


def _emulate(
    layout: Layout,
    work: WorkList,
    chosen: Kernel,
    check: CheckTable | None,
    source: Source,
    arguments: Sequence[Any],
    outputs: tuple[int, ...],
    changing: Sequence[int],
) -> Relaunch:
    """Execute a kernel in the emulator; return a function that executes it again."""
    from attnkit.jit import emulation
    from attnkit.jit.emulated_kernel import EmulatedKernel

    counts = work.work_tiles[:, [6, 9]].sum()
    cost = emulation.attention_work(int(counts), work.work_tiles.shape[0], block=chosen.block)
    counters = COUNTER if outputs else None  # the combine kernel has neither
    pointers = {}
    if check is not None and outputs:
        pointers = {next(i for i, a in enumerate(arguments) if a is check.rows): check.reached}
    code = EmulatedKernel(source, cost, layout.warps, outputs, counters, pointers)
    code(*arguments)
    return code.relauncher(arguments, changing)

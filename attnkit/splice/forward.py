"""Running a variant with a GPU forward kernel: hooks, work list, compiled kernel, launch.

What differs between templates, such as their settings, is in a module of their own: a `Template` of
`forward_source`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from attnkit.codegen.score_form import score_form
from attnkit.graph.ir import Node
from attnkit.jit import emulation
from attnkit.jit.kernel import Source, kernel
from attnkit.jit.relaunch import Relaunch
from attnkit.schedule.kernel_table import Kernel, kernels
from attnkit.schedule.scheduler import Shape, schedule_forward
from attnkit.schedule.targets import Target, gpu_target
from attnkit.schedule.work_list import WorkList, fitted, full_runs, work_list
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.sparsity.intervals.normal_form import Intervals, find_intervals
from attnkit.splice.call import (
    OWN,
    Call,
    Combining,
    Place,
    is_plain,
    readable,
    steps,
)
from attnkit.splice.forward_source import combine_source, source_of, template_of
from attnkit.splice.kernel_call import Captured, ForwardInputs, KernelCall
from attnkit.splice.layout import Layout
from attnkit.splice.program import Program
from attnkit.splice.spliced import Spliced, spliced
from attnkit.templates.cpu import output_strides
from attnkit.tracing.tracer import Traced
from attnkit.util.tensor_cache import VersionedCache

_SMS_EMULATED = 2  # CTAs in the emulator: few, so that each computes several tiles


def layout_of(
    template: str,
    program: Program,
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    block: tuple[int, int],
) -> Layout:
    """Describe the inside of a GPU template's forward kernel.

    Args:
        template: of a plan.
        program: the graphs.
        dtype: of query, key and value.
        head_dims: of query and key, and of value.
        block: the plan's tile sizes.

    Raises:
        ArgumentError: `template` is no GPU kernel.
    """
    target, score = gpu_target(template), program.score
    settings = template_of(target)
    found = kernels(*head_dims, score is not None, target.template)
    chosen = next(k for k in found if k.block == block)
    form = score_form(score)
    chosen = settings.fitted(chosen, form, masked=False)
    name = str(dtype).removeprefix("torch.")
    config = settings.config_of(form, chosen, name, head_dims, False, target.arch)
    return settings.layout_of(config)


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
        template: of a plan.
        program: the graphs.
        head_dims: of query and key, and of value.
        runs: tiles to visit; None for all.
        q_len: length of the query, None for a long one.

    Raises:
        ArgumentError: `template` is no GPU kernel.
    """
    found, why = kernel_of(head_dims, runs, program, gpu_target(template), q_len)
    return found.block, why


_calls: VersionedCache[Call] = VersionedCache(128)


def prepare(kernel_call: KernelCall, inputs: ForwardInputs) -> Call:
    """Attention with a compiled kernel, for tensors like these.

    All tensors of a call must have the device, dtypes, shapes and strides of these, and the mask's
    must be these with this data. Of the scale only the sign counts.
    """
    qkv, captured = (inputs.query, inputs.key, inputs.value), inputs.captured
    sizes = tuple((t.shape, t.stride()) for t in qkv)
    kinds = tuple((t.dtype, t.device, t.shape, t.stride()) for l in captured for t in l)
    device = inputs.query.device
    workers = emulation.ctas(_SMS_EMULATED) if kernel_call.spec.emulated else _sms(device)
    key = kernel_call, sizes, inputs.query.dtype, device, kinds, inputs.scale > 0, workers
    return _calls.get(key, captured.masks, lambda: _prepare(kernel_call, inputs, workers))


def _prepare(kernel_call: KernelCall, inputs: ForwardInputs, workers: int) -> Call:
    query, key, value, captured = inputs.query, inputs.key, inputs.value, inputs.captured
    program, runs, need_max = kernel_call.program, kernel_call.runs, kernel_call.need_max
    target, emulated = kernel_call.spec.target, kernel_call.spec.emulated
    assert target is not None
    batch, heads, q_len, head_dim = query.shape
    head_dims = head_dim, value.shape[-1]
    strides = output_strides(query, value.shape[-1])
    device, dtype = query.device, str(query.dtype).removeprefix("torch.")
    template = template_of(target)
    chosen, _ = kernel_of(head_dims, _near(runs, query), program, target, q_len)
    workers = max(1, workers // chosen.ctas)
    ends, mask_tensors = _intervals(program, captured[1], query, key)
    variant = spliced(program.score, program.mask, ends, (batch, heads, q_len, key.shape[2]))
    variant = replace(variant, listed=program.listed)
    places = tuple(_places(variant, captured, mask_tensors, device))
    tensors = [
        readable(slot if isinstance(slot, Tensor) else captured[which][slot], device)
        for which, slot, _ in places
    ]
    chosen = template.fitted(chosen, variant.form, variant.mask is not None or variant.listed)
    config = template.config_of(variant.form, chosen, dtype, head_dims, need_max, target.arch)
    work = _work(runs, chosen, query, key, value, workers, split=not need_max)
    tile = template.tile_of(chosen, head_dims)
    combining = None
    if work.slots:
        combining = Combining(
            combine_source(dtype, head_dims[1], tile, target.arch), (work.split, work.split_ptr)
        )
    slots = max(1, work.slots)
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()  # other streams may read the tables next
    size = query.element_size()
    return Call(
        run=functools.partial(_emulate, template.layout_of(config), work, chosen)
        if emulated
        else _launch,
        source=source_of(
            target,
            variant,
            tuple(sorted(config.items())),
            head_dims,
            tuple(
                (str(t.dtype).removeprefix("torch."), t.ndim, _ends_contiguous(t)) for t in tensors
            ),
            inputs.scale > 0,
        ),
        device=device,
        dtype=query.dtype,
        shape=(batch, heads, q_len, head_dims[1]),
        strides=strides,
        direct=steps((batch, heads, q_len, head_dims[1]), strides, size),
        loadable=all(steps(t.shape, t.stride(), size) for t in (query, key, value)),
        tables=(work.pieces, work.partial, work.full),
        parts=((slots, *tile), (slots, tile[0])),
        places=places,
        numbers=(heads // key.shape[1], min(workers, work.pieces.shape[0])),
        combining=combining,
        need_max=need_max,
        emulated=emulated,
    )


def _places(
    variant: Spliced, captured: Captured, mask_tensors: Sequence[Tensor], device: torch.device
) -> Iterator[Place]:
    """Where the captured tensors that the kernel reads are found at each call."""
    for slot in variant.slots[0]:
        yield 0, slot, is_plain(captured[0][slot], device)
    for slot in variant.slots[1]:
        t = mask_tensors[slot]
        own = slot >= len(captured[1])  # a table of intervals
        yield (OWN, readable(t, device), True) if own else (1, slot, is_plain(t, device))


def _ends_contiguous(t: Tensor) -> bool:
    return t.ndim == 0 or t.stride(-1) == 1


def kernel_of(
    head_dims: tuple[int, int],
    runs: BlockRuns | None,
    program: Program,
    target: Target,
    q_len: int | None,
) -> tuple[Kernel, str]:
    """The kernel for these tiles, None for all, and why; a q_len of None is a long one."""
    found = kernels(*head_dims, program.score is not None, target.template, q_len=q_len)
    form = score_form(program.score)
    return template_of(target).chosen(found, head_dims, runs, program.listed, form)


def _intervals(
    program: Program, tensors: Sequence[Tensor], query: Tensor, key: Tensor
) -> tuple[tuple[tuple[Node, Node], ...] | None, Sequence[Tensor]]:
    """The mask's intervals, if it has that form, and the tensors that they or the mask read."""
    if program.mask is None:
        return None, ()
    return bounds_of(program.mask, tensors, query, (query.shape[2], key.shape[2]))


def bounds_of(
    mask: Node, tensors: Sequence[Tensor], query: Tensor, lengths: tuple[int, int]
) -> tuple[tuple[tuple[Node, Node], ...] | None, Sequence[Tensor]]:
    """The intervals of kv that a mask keeps in every row q, if it has that form, and its tensors.

    Args:
        lengths: of the mask's q and of its kv.
    """
    found = find_intervals(
        Traced("mask", mask, tuple(tensors), tuple(f"t{i}" for i in range(len(tensors)))),
        q_len=lengths[0],
        kv_len=lengths[1],
        batch=query.shape[0],
        heads=query.shape[1],
        device=query.device,
    )
    if isinstance(found, Intervals):
        return found.bounds, found.tensors
    return None, tensors


@functools.lru_cache(maxsize=16)
def _sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# Tiles that are ordered on the host: so few operators cost less there than their launches, and at
# the first call much less, as a GPU loads the code of each.
_ON_HOST = 1 << 15

_lists: weakref.WeakKeyDictionary[BlockRuns, dict[Any, WorkList]] = weakref.WeakKeyDictionary()


@overload
def _near(runs: BlockRuns, query: Tensor) -> BlockRuns: ...


@overload
def _near(runs: None, query: Tensor) -> None: ...


def _near(runs: BlockRuns | None, query: Tensor) -> BlockRuns | None:
    """The runs on the host, if they are few."""
    if runs is None or query.shape[0] * query.shape[1] * runs.q_blocks > _ON_HOST:
        return runs
    return runs.to("cpu")


def _work(
    runs: BlockRuns | None,
    chosen: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workers: int,
    split: bool,
) -> WorkList:
    """The work list of runs for these tensors, made once."""
    lengths = (query.shape[2], key.shape[2])
    if runs is None:
        runs = full_runs(*lengths, chosen.block, query.device)
    shape = Shape(
        query.shape[0],
        query.shape[1],
        chosen.block[1] * (key.shape[3] + value.shape[3]) * key.element_size(),
        kv_heads=key.shape[1],
        kv_batch=key.shape[0],
    )
    known = _lists.setdefault(runs, {})
    wanted = (shape, chosen.block, workers, split)
    if wanted not in known:
        fine = fitted(_near(runs, query), chosen.block)
        order = schedule_forward(fine, shape, workers=workers, split=split)
        known[wanted] = work_list(fine, order).to(query.device)
    return known[wanted]


def _launch(
    source: Source, arguments: Sequence[Any], outputs: tuple[int, ...], changing: Sequence[int]
) -> Relaunch:
    found = kernel(source)
    found(*arguments)
    return found.relauncher(arguments, changing)


def _emulate(
    layout: Layout,
    work: WorkList,
    chosen: Kernel,
    source: Source,
    arguments: Sequence[Any],
    outputs: tuple[int, ...],
    changing: Sequence[int],
) -> None:
    """Execute a kernel on the CPU."""
    from attnkit.jit.emulator_runs import Undefined, run_emulated

    counts = work.pieces[:, [6, 9]].sum()
    cost = emulation.attention_work(int(counts), work.pieces.shape[0], block=chosen.block)
    values = [Undefined(a) if i in outputs else a for i, a in enumerate(arguments)]
    run_emulated(kernel(source, lines=True), values, work=cost, roles=layout.warps)

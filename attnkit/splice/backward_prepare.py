"""Prepare a backward: build its tables and describe its kernels, once for tensors of a geometry."""

from __future__ import annotations

import torch

from attnkit.splice import sink_gradient
from attnkit.splice.backward_call import BackwardCall, loaded
from attnkit.splice.backward_kernels import SettingsOf, describe_kernels
from attnkit.splice.kernel_call import BackwardInputs, KernelCall
from attnkit.splice.mask_intervals import column_intervals
from attnkit.splice.run_time_numbers import KernelGraphs, kernels_for
from attnkit.splice.tma import have_tma_strides
from attnkit.splice.workers import worker_count
from attnkit.util import caches
from attnkit.util.tensor_cache import VersionedCache

_calls: VersionedCache[BackwardCall] = VersionedCache(128)
caches.register(_calls.clear)


def prepare(kernel_call: KernelCall, inputs: BackwardInputs, settings: SettingsOf) -> BackwardCall:
    """Return the cached `BackwardCall` for tensors like `inputs`, or build it.

    Args:
        kernel_call: the template, graphs and tiles.
        inputs: example tensors. Later calls may pass other tensors of the same geometry, except for
            the tensors that the mask captures: these must be the same, with the same data.
        settings: see `SettingsOf`.
    """
    sizes = tuple([(t.shape, t.stride()) for t in loaded(inputs)])
    kinds = tuple([(t.dtype, t.device, t.shape, t.stride()) for l in inputs.captured for t in l])
    query = inputs.query
    workers = worker_count(query.device, kernel_call.spec.emulated)
    case = kernel_call.template, kernel_call.program, kernel_call.runs, tuple(inputs.needs_grad)
    sink = inputs.sink is not None, inputs.needs_sink_grad, inputs.dropout is not None
    grads = inputs.grad_lse is None, inputs.grad_entropy is None
    kind = grads, sink, query.dtype, query.device
    key = case, kind, workers, sizes, kinds, kernel_call.check
    build = lambda: _build_call(kernel_call, inputs, settings, workers)
    return _calls.get(key, inputs.captured.masks, build)


def _build_call(
    kernel_call: KernelCall, inputs: BackwardInputs, settings: SettingsOf, workers: int
) -> BackwardCall:
    query, key, value, captured = inputs.query, inputs.key, inputs.value, inputs.captured
    program, device = kernel_call.program, query.device
    bounds, mask_tensors = column_intervals(program.mask, captured.masks, query, key)
    graphs = KernelGraphs(
        program.score,
        program.mask,
        bounds,
        tuple(captured.scores),
        tuple(mask_tensors),
        program.has_softmax,
    )
    build = lambda g: describe_kernels(kernel_call, inputs, g, settings, workers)
    kernels = kernels_for(graphs, build, device)
    final = kernels.settings
    like = [torch.empty_like(t, device="meta") for t in (query, key, value)]
    with_sink = inputs.needs_sink_grad
    return BackwardCall(
        settings=final,
        work=kernels.work,
        device=device,
        dtype=query.dtype,
        preprocess=kernels.preprocess,
        main=kernels.main,
        postprocess=kernels.postprocess,
        shifts=kernels.shifts,
        captured=kernels.arguments,
        needs_grad=kernels.needs_grad,
        table=kernels.table,
        sink=kernels.reads_sink,
        sink_parts=sink_gradient.parts_shape(final, query) if with_sink else None,
        like=tuple((tuple(t.shape), t.stride()) for t in like),
        direct=have_tma_strides(like),
        tma_strides=have_tma_strides(loaded(inputs)),
        group=query.shape[1] // key.shape[1],
        row_words=final.template.row_words(final),
        emulated=kernel_call.spec.emulated,
        check=None if kernel_call.check is None else kernel_call.check.backward,
        stored=kernels.stored,
    )

"""Run a prepared backward: allocate the gradients and launch the kernels.

No function here synchronizes with the GPU. All of them may run during CUDA graph capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attnkit.codegen.load_indices import LoadIndices, data_bound
from attnkit.codegen.nonnegative import wrapping
from attnkit.graph.ir import Node
from attnkit.jit.kernel import Source, kernel
from attnkit.jit.relaunch import Relaunch
from attnkit.splice import entropy_gradient, exact_sums, sink_gradient
from attnkit.splice.backward_rows import cached_learned_loads, row_work
from attnkit.splice.backward_sources import (
    RowWork,
    main_source,
    postprocess_source,
    preprocess_source,
)
from attnkit.splice.backward_template import BackwardSettings
from attnkit.splice.backward_work import UNIT, BackwardWork, backward_work
from attnkit.splice.captured_arguments import (
    MASK,
    SCORE,
    CapturedArgument,
    CapturedSlot,
    captured_slot,
    own_tensors,
    read_captured,
    readable,
    tensor_kinds,
)
from attnkit.splice.copied_bias import backward_bias
from attnkit.splice.counters import zero_counters
from attnkit.splice.data_check import CheckTable
from attnkit.splice.graph_capture import is_capturing, keep_while_replayable
from attnkit.splice.kernel_call import BackwardInputs, Captured, KernelCall
from attnkit.splice.mask_intervals import column_intervals
from attnkit.splice.program import Program
from attnkit.splice.replay import CallTensors, Launch, prepare_replay
from attnkit.splice.run_time_numbers import KernelGraphs, kernels_for
from attnkit.splice.sink_gradient import RepeatedBackward
from attnkit.splice.stored_gradients import (
    CallSizes,
    StoredGradient,
    Unwritten,
    stored_gradients,
    unwritten,
)
from attnkit.splice.tma import have_tma_strides, loadable
from attnkit.splice.workers import worker_count
from attnkit.util import caches
from attnkit.util.tensor_cache import VersionedCache
from attnkit.util.torch_private import device_index, fast_empty_strided, stream_of

if TYPE_CHECKING:
    from attnkit.jit.emulated_kernel import EmulatedKernel


# Function that returns the compile-time settings of kernels: (graphs, whether each tensor that the
# score reads needs a gradient) -> settings.
SettingsOf: TypeAlias = Callable[[Program, tuple[bool, ...]], BackwardSettings]

_CHECKS = 7  # index of the preprocess kernel's argument with the table of checked data


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


@dataclass(frozen=True, eq=False)
class Buffers:
    """Holds the tensors that the kernels of a backward write.

    Attributes:
        grads: gradients of query, key and value, with the strides of `BackwardCall.like`.
        written: the gradients that the kernels write: `grads`, or contiguous copies of them if the
            kernels cannot write these strides.
        sums: float32 [units * UNIT], the accumulators of dQ, and of shared dK and dV; then the
            counters of `backward_leaders`, if there are any.
        rows: float32 words of the LSE, and of the delta, of each row.
        flags: one tensor of flags, set where a first writer has stored its part of dQ; empty if the
            kernel uses no flags.
        totals: for each tensor that the score captures, the sums of its gradient, or None if the
            gradient is not needed.
        sink: one tensor, the parts of the sink's gradient [B, Hq, warps of the preprocess]; empty
            if that gradient is not needed.
    """

    grads: list[Tensor]
    written: list[Tensor]
    sums: Tensor
    rows: list[Tensor]
    flags: list[Tensor]
    totals: list[Tensor | None]
    sink: list[Tensor]

    @property
    def cleared(self) -> Tensor:
        """Return the tensor that the preprocess kernel sets to zero: the flags, or the sums."""
        return self.flags[0] if self.flags else self.sums


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """Callable that runs a prepared backward on tensors of fixed shapes, strides and dtypes.

    Attributes:
        settings: compile-time settings of the kernels.
        work: tables that the kernels read.
        device: device of all tensors.
        dtype: dtype of query, key and value.
        preprocess, main, postprocess: the kernels, in the order of their launches.
        shifts: whether the preprocess reads captured tensors.
        captured: the captured tensors that the main kernel reads.
        needs_grad: for each tensor that the score captures, whether its gradient is needed; then
            False for tables of numbers that the kernels read.
        table: number of the score's tensor of which the main kernel reads a copy with rows of odd
            length, see `odd_rows`; None for none.
        sink: whether the preprocess reads an attention sink.
        sink_parts: shape of the parts of the sink's gradient; None if it is not needed.
        like: shape and strides of the gradients of query, key and value.
        direct: whether the kernels can write gradients with these strides without a copy.
        tma_strides: whether TMA can read the tensors of a call without copies if their addresses
            are multiples of 16 bytes.
        group: query heads per kv head.
        row_words: float32 words of a row's LSE and of its delta, see `BackwardTemplate`.
        emulated: whether the kernels are executed on the CPU.
        check: what the preprocess kernel compares with fingerprints; None for nothing.
        stored: gradients of the score's tensors that the main kernel stores.
        replay: relaunches all kernels of this call; None if they have not run yet, or if a relaunch
            is impossible.
        scale: softmax scale that `replay` uses; None until the call has been analysed.
    """

    settings: BackwardSettings
    work: BackwardWork
    device: torch.device
    dtype: torch.dtype
    preprocess: Source
    main: Source
    postprocess: tuple[Postprocess, ...]
    shifts: bool
    captured: tuple[CapturedArgument, ...]
    needs_grad: tuple[bool, ...]
    table: int | None
    sink: bool
    sink_parts: tuple[int, int, int] | None
    like: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    direct: bool
    tma_strides: bool
    group: int
    row_words: tuple[int, int]
    emulated: bool
    check: CheckTable | None = None
    stored: tuple[StoredGradient, ...] = ()
    _relaunches: dict[tuple[Source, int], Relaunch] = field(default_factory=dict)
    replay: RepeatedBackward | None = field(init=False, default=None)
    scale: float | None = field(init=False, default=None)

    def __call__(
        self, inputs: BackwardInputs
    ) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:
        """Launch the kernels; return (dQ, dK, dV) and the gradients of the score's tensors.

        The latter end with None for the state of dropout and with the gradient of the sink, if there
        are any.
        """
        tensors = query, key, value, out, grad_out = loaded(inputs)
        repeatable = self._is_repeatable(tensors)
        if not repeatable:
            query, key, value, out, grad_out = map(loadable, tensors)
        lse = inputs.lse if inputs.lse.is_contiguous() else inputs.lse.contiguous()
        grad_lse = entropy_gradient.with_lse(inputs)
        grad_lse = lse if grad_lse is None else grad_lse.contiguous()
        capturing = is_capturing(self.device)
        buffers = self._allocate(inputs.captured.scores, repeatable)

        read = read_captured(self.captured, inputs.captured, self.device)
        if capturing:
            memory = [] if self.check is None else self.check.memory()
            own = own_tensors(self.captured, read)
            keep_while_replayable(self.device, (self, own, memory))
        # what a kernel needs of the score's tensors
        learned = (*read[: len(self.needs_grad)], *(t for t in buffers.totals if t is not None))
        checks = () if self.check is None else (self.check.rows,)
        first = (out, grad_out, lse, grad_lse, *buffers.rows, buffers.cleared, *checks)
        first = (*first, *learned) if self.shifts else first
        if self.sink:
            assert inputs.sink is not None
            first = (*first, inputs.sink.contiguous(), *buffers.sink)
        dropout = () if inputs.dropout is None else (inputs.dropout,)
        first = (*first, *dropout)
        if self.shifts and self.settings.with_entropy and any(self.needs_grad):
            first = (*first, entropy_gradient.of_shifts(inputs))
        launches = [self._clear(*gap, buffers, repeatable) for gap in self._gaps()]
        launches.append(self._launch(self.preprocess, first, repeatable))
        if self.table is not None:
            read = [*read[: self.table], odd_rows(read[self.table]), *read[self.table + 1 :]]
        main = self._main_arguments((query, key, value, grad_out), inputs, buffers, read, capturing)
        launches.append(self._launch(self.main, main, repeatable))
        for post in self.postprocess:
            factor = inputs.scale if post.scaled else 1.0
            rows = (query, *learned) if post.factors else ()
            last = (buffers.sums, buffers.written[post.which], *rows, post.first, factor)
            launches.append(self._launch(post.source, last, repeatable, which=post.which))

        scores, masks = inputs.captured
        if not self.direct:
            for t, g in zip(buffers.grads, buffers.written, strict=True):
                t.copy_(g)
        elif repeatable and self.scale is None and self._may_learn(capturing):
            sinks = () if inputs.sink is None else (inputs.sink,)
            extras = (*dropout, *sinks)
            call_inputs = [query, key, value, out, grad_out, lse, *scores, *extras, *masks]
            call_inputs += [] if inputs.grad_lse is None else [inputs.grad_lse]
            self._learn(launches, self._call_tensors(call_inputs, buffers), inputs.scale)
        dq, dk, dv = buffers.grads
        pairs = zip(scores, buffers.totals, strict=True)
        captured = [None if s is None else self._gradient(s, t.shape) for t, s in pairs]
        if inputs.dropout is not None:
            captured.append(None)
        if inputs.sink is not None:
            captured.append(self._sink_gradient(inputs, buffers))
        return (dq, dk, dv), captured

    def _may_learn(self, capturing: bool) -> bool:
        """Return whether a replay of all kernels would be a whole backward."""
        copies = self.settings.with_entropy or self.table is not None
        return not (capturing or self.deterministic or copies)

    def _sink_gradient(self, inputs: BackwardInputs, buffers: Buffers) -> Tensor | None:
        """Return the gradient of the sink from the parts that the preprocess has written."""
        if not buffers.sink:
            return None
        total = sink_gradient.sum_parts(*buffers.sink)
        return total if inputs.grad_entropy is None else total + entropy_gradient.of_sink(inputs)

    def _allocate(self, scores: Sequence[Tensor], repeatable: bool) -> Buffers:
        """Allocate the tensors that the kernels write.

        Args:
            scores: the tensors that the score captures.
            repeatable: see `_launch`.
        """
        fast = repeatable and bool(self._relaunches)
        make = fast_empty_strided(self.device) if fast else self._empty
        work, units = self.work, self.work.units
        grads = [make(*l, self.dtype) for l in self.like]
        sums = make((sum(units) * UNIT + work.leaders,), (1,), torch.float32)
        if sum(units[1:]) + work.leaders:
            sums[units[0] * UNIT :].zero_()
        pairs = zip(scores, self.needs_grad, strict=False)  # tables of numbers have none
        parts = [] if self.sink_parts is None else [self.sink_parts]
        return Buffers(
            grads=grads,
            written=grads if self.direct else [_contiguous(t) for t in grads],
            sums=sums,
            rows=[make((n * work.rows,), (1,), torch.float32) for n in self.row_words],
            flags=[make((n,), (1,), torch.float32) for n in (work.flags,) if n],
            totals=[self._total(i, t.shape) if n else None for i, (t, n) in enumerate(pairs)],
            sink=[self._empty(s, (s[1] * s[2], s[2], 1), torch.float32) for s in parts],
        )

    def _main_arguments(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        inputs: BackwardInputs,
        buffers: Buffers,
        read: Sequence[Tensor],
        capturing: bool,
    ) -> tuple[Any, ...]:
        """Return the arguments of the main kernel.

        Args:
            tensors: query, key, value and the gradient of the output, with strides and addresses
                that TMA can read.
            inputs: tensors of the call.
            buffers: tensors that the kernels write.
            read: captured tensors as the kernel reads them.
            capturing: whether a CUDA graph is being captured.
        """
        work = self.work
        return (
            *tensors,
            *buffers.written[1:],
            *buffers.rows,
            buffers.sums,
            work.work_tiles,
            work.partial,
            work.full,
            zero_counters(self.device, capturing, work.counters),
            *read,
            *([] if inputs.grad_entropy is None else [inputs.grad_entropy.contiguous()]),
            *([] if inputs.dropout is None else [inputs.dropout]),
            *(t for t in buffers.totals if t is not None),
            *work.order_tables(),
            *[t.view(torch.int32) for t in buffers.flags],
            *([] if work.starts is None else [work.starts, buffers.written[0]]),
            *self._leader_counters(buffers),
            inputs.scale,
            self.group,
            work.workers,
        )

    def _leader_counters(self, buffers: Buffers) -> list[Tensor]:
        """Return the counters of stored blocks of dS, int32 [kv blocks, heads * q blocks]."""
        count, block = self.work.leaders, self.settings.block[1]
        if not count:
            return []
        kv_blocks = -(-self.like[1][0][2] // block)
        return [buffers.sums[-count:].view(torch.int32).view(kv_blocks, -1)]

    def _call_tensors(self, inputs: list[Tensor], buffers: Buffers) -> CallTensors:
        """Group the tensors of this call for `prepare_replay`."""
        units = self.work.units
        totals = [t for t in buffers.totals if t is not None]
        scratch = [buffers.sums, *buffers.rows, *buffers.flags]
        zeros = 4 * units[0] * UNIT if sum(units[1:]) + self.work.leaders else None
        outputs = [*buffers.grads, *buffers.sink]
        learned = [i for i, t in enumerate(buffers.totals) if t is not None]
        written = [learned.index(s.slot) for s in self.stored]
        return CallTensors(inputs, outputs, totals, scratch, self._tables(), zeros, written)

    def _is_repeatable(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether kernels on the current device can read these tensors without copies."""
        return (
            self.tma_strides
            and (self.emulated or device_index() == self.device.index)
            and not any(t.data_ptr() & 15 for t in tensors)
        )

    @property
    def deterministic(self) -> bool:
        """Return whether gradients are accumulated in a fixed order."""
        return self.settings.deterministic

    def _learn(self, launches: Sequence[Launch | None], call: CallTensors, scale: float) -> None:
        """Set `replay` and `scale` if all kernels are known and the inputs' addresses differ."""
        known = [launch for launch in launches if launch is not None]
        distinct = len({t.data_ptr() for t in call.inputs}) == len(call.inputs)
        # a replay identifies tensors by their addresses, so these must differ
        if len(known) < len(launches) or not distinct:
            return
        counter = lambda: zero_counters(self.device, False, self.work.counters)
        replay = prepare_replay(known, call, counter, 5, self.device)
        with_sink = self.sink_parts is not None
        object.__setattr__(self, "replay", sink_gradient.summed(replay) if with_sink else replay)
        object.__setattr__(self, "scale", scale)

    def _tables(self) -> list[Tensor]:
        """Return the tables: kernel arguments that are the same tensors in every call."""
        work = self.work
        captured = [a for a in self.captured if not isinstance(a, CapturedSlot)]
        checks = [] if self.check is None else [self.check.rows]
        starts = [] if work.starts is None else [work.starts]
        starts += [t for _, gap in self._gaps() for t in (gap.visited, gap.slices)]
        return [*captured, *checks, work.work_tiles, work.partial, work.full, *work.order, *starts]

    def _gaps(self) -> list[tuple[int, Unwritten]]:
        """Return the stored gradients of which the main kernel leaves elements unwritten.

        Each is (number of its tensor, the elements to clear).
        """
        return [(s.slot, s.unwritten) for s in self.stored if s.unwritten is not None]

    def _clear(
        self, slot: int, gap: Unwritten, buffers: Buffers, repeatable: bool
    ) -> Launch | None:
        """Clear the elements of a stored gradient that the main kernel does not write.

        This is the first kernel of a call, because it does not wait for the kernel before it as
        those of a dependent launch do.
        """
        total = buffers.totals[slot]
        assert total is not None
        return self._launch(gap.source, gap.arguments(total), repeatable, which=slot)

    def _total(self, slot: int, shape: torch.Size) -> Tensor:
        """Return memory for the gradient of captured tensor `slot`; zeros unless it is stored."""
        if self.deterministic:
            return exact_sums.empty_sums(shape, self.device)
        if any(s.slot == slot for s in self.stored):
            return torch.empty(shape, dtype=torch.float32, device=self.device)
        return torch.zeros(shape or (1,), dtype=torch.float32, device=self.device)

    def _gradient(self, total: Tensor, shape: torch.Size) -> Tensor:
        """Convert the sums of a captured tensor to its float32 gradient of this shape."""
        if self.deterministic:
            return exact_sums.round_sums(total, shape)
        return total.view(shape)

    def _empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    def _launch(
        self,
        source: Source,
        arguments: Sequence[Any],
        repeatable: bool,
        which: int = 0,
    ) -> Launch | None:
        """Launch a kernel; take the relaunch path if it has run with tensors of the same strides.

        Args:
            source: the kernel.
            arguments: the kernel's tensors and numbers.
            repeatable: whether the tensors have the strides of all other repeatable calls.
            which: number of the launch among the launches of the same kernel in a call. Their
                tensors differ in shape.

        Returns:
            A description of the launch if this was a relaunch; None if the kernel ran for the
            first time.
        """
        code = self._emulated_kernel(source) if self.emulated else kernel(source)
        relaunch = self._relaunches.get((source, which)) if repeatable else None
        if relaunch is None:
            code(*arguments)
            if repeatable:
                known = code.relauncher(arguments, range(len(arguments)))
                self._relaunches[source, which] = known
            return None
        addresses = [a.data_ptr() for a in arguments if isinstance(a, Tensor)]
        numbers = tuple(a for a in arguments if not isinstance(a, Tensor))
        stream = get_ident() if self.emulated else stream_of(self.device.index)
        relaunch(stream, addresses, numbers)
        return Launch(code.relauncher, arguments)

    def _emulated_kernel(self, source: Source) -> EmulatedKernel:
        """Return the `EmulatedKernel` of a source, which the emulator executes on the CPU."""
        from attnkit.jit.emulated_kernel import EmulatedKernel

        roles = self.settings.template.roles
        if source is not self.main:
            pointers = {}
            if self.check is not None and source is self.preprocess:
                pointers = {_CHECKS: self.check.reached}
            return EmulatedKernel(source, roles=roles, pointers=pointers)
        rows = len(self.row_words)
        outputs = () if self.work.units[1] else (4, 5)  # else the postprocess writes dK and dV
        return EmulatedKernel(source, self.work.cost, roles, outputs, counters=10 + rows)


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


def loaded(inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors that TMA reads: query, key, value, output, gradient of the output."""
    return inputs.query, inputs.key, inputs.value, inputs.out, inputs.grad_out


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
    build = lambda g: _kernels(kernel_call, inputs, g, settings, workers)
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


class _Kernels(NamedTuple):
    """Describes the kernels of a backward, which are not compiled yet.

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


def _kernels(
    kernel_call: KernelCall,
    inputs: BackwardInputs,
    graphs: KernelGraphs,
    settings_of: SettingsOf,
    workers: int,
) -> _Kernels:
    """Describe the kernels of a backward for `graphs`, which may read numbers from tables."""
    query, key, value, captured = inputs.query, inputs.key, inputs.value, inputs.captured
    program = kernel_call.program.without_sink()  # the LSE includes the sink
    program = replace(program, score=graphs.score, mask=graphs.mask)
    emulated, device, own = kernel_call.spec.emulated, query.device, len(captured.scores)
    needs_grad = (*inputs.needs_grad, *(False for _ in graphs.scores[own:]))
    settings = settings_of(program, needs_grad)
    check = None if kernel_call.check is None else kernel_call.check.backward
    checks = () if check is None else tensor_kinds([check.rows])
    arguments = (
        *(captured_slot(SCORE, i, captured, device) for i in range(own)),
        *(readable(t, device) for t in graphs.scores[own:]),
        *(_mask_argument(t, captured, device) for t in graphs.masks),
    )
    kinds = tensor_kinds(read_captured(arguments, captured, device))
    indices = _load_indices(graphs, query, key)
    numbers = exact_sums.BINS if settings.deterministic else 1  # of one sum
    sizes = enumerate(t.numel() * numbers for t in captured.scores)
    large = tuple([i for i, size in sizes if size >= 2**31])
    before, after = row_work(program.score, settings, kinds, needs_grad, indices.clamp)
    runs, learned = kernel_call.runs, any(needs_grad)
    call = CallSizes.of(query, key)
    alone, shared = stored_gradients(program.score, needs_grad, settings, indices, call)
    leads = bool(shared) and (runs is None or runs.batch == 1)
    work = backward_work(runs, settings, query, key, value, workers, emulated, learned, leads)
    rounding = settings  # of the postprocess, which does not depend on who writes dQ first
    tensors = (*captured.scores, *graphs.scores[own:])
    if settings.bias_first and not settings.deterministic:
        bias = backward_bias(program.score, graphs.facts, tensors, indices)
        if bias is not None:
            settings = settings.with_copied_bias(bias.element_size())
    if work.leaders:
        settings = settings.with_leaders()
    else:
        shared = {}
    if work.first_writer:
        settings = settings.with_first_writer()
    elif work.starts is not None:
        settings = settings.with_whole_heads()
    table = None
    if settings.one_hot:
        ((load, _),) = cached_learned_loads(program.score, needs_grad, settings.row_sums).scores
        table = int(str(load.attr))
    stored = []
    for i, index in (alone | shared).items():
        gap = unwritten(index, captured.scores[i].shape, runs, settings, call, device)
        stored.append(StoredGradient(i, i in shared, gap))
    with_lse = inputs.grad_lse is not None or settings.with_entropy
    with_sink = inputs.needs_sink_grad
    # terms that shift a row do not shift its sink: their gradients are less than dLSE by the sink's
    reads_sink = with_sink or (inputs.sink is not None and before is not None)
    return _Kernels(
        settings=settings,
        work=work,
        preprocess=preprocess_source(settings, with_lse, before, checks, reads_sink + with_sink),
        main=main_source(
            program,
            graphs.bounds,
            settings,
            kinds,
            needs_grad,
            large,
            indices,
            graphs.facts,
            tuple(alone),
            tuple(shared),
        ),
        postprocess=_postprocess(rounding, work, after),
        shifts=before is not None,
        arguments=arguments,
        needs_grad=needs_grad,
        table=table,
        reads_sink=reads_sink,
        stored=tuple(stored),
    )


def odd_rows(table: Tensor) -> Tensor:
    """Return a copy of a table of pairs whose rows are an odd number of elements apart.

    A warp reads entries of several rows. In rows of 64 floats, those of a column would be in the
    same bank of the first-level cache.
    """
    *outer, columns = table.shape
    copy = table.new_empty(*outer, columns + 1 - columns % 2)[..., :columns]
    return copy.copy_(table.detach())


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
        if count and not (which == 0 and work.starts is not None):  # else the main kernel writes dQ
            own = rows if which == 0 else None
            head_dim = settings.head_dims[which == 2]
            source = postprocess_source(settings, head_dim, width, block, own)
            kernels.append(Postprocess(source, which, first, which < 2, own is not None))
        first += count
    return tuple(kernels)


def _contiguous(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)

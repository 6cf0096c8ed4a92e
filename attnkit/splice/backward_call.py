"""Run a prepared backward: allocate the gradients and launch the kernels.

No function here synchronizes with the GPU. All of them may run during CUDA graph capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnkit.jit.kernel import Source, kernel
from attnkit.jit.relaunch import Relaunch
from attnkit.splice import entropy_gradient, exact_sums, sink_gradient
from attnkit.splice.backward_kernels import Postprocess
from attnkit.splice.backward_template import BackwardSettings
from attnkit.splice.backward_work import UNIT, BackwardWork
from attnkit.splice.captured_arguments import (
    CapturedArgument,
    CapturedSlot,
    own_tensors,
    read_captured,
)
from attnkit.splice.counters import zero_counters
from attnkit.splice.data_check import CheckTable
from attnkit.splice.graph_capture import is_capturing, keep_while_replayable
from attnkit.splice.kernel_call import BackwardInputs
from attnkit.splice.replay import CallTensors, Launch, prepare_replay
from attnkit.splice.sink_gradient import RepeatedBackward
from attnkit.splice.stored_gradients import (
    StoredGradient,
    Unwritten,
)
from attnkit.splice.tma import loadable
from attnkit.util.torch_private import device_index, fast_empty_strided, stream_of

if TYPE_CHECKING:
    from attnkit.jit.emulated_kernel import EmulatedKernel


_CHECKS = 7  # index of the preprocess kernel's argument with the table of checked data


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
        flags: one tensor of flags, set where a first writer has stored its part of dQ, or of counters
            of these parts; empty if the kernel uses neither.
        semaphores: one tensor, a copy of the semaphores in `BackwardWork.order`, because launches on
            two streams may overlap; empty if there are none.
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
    semaphores: list[Tensor]
    totals: list[Tensor | None]
    sink: list[Tensor]

    @property
    def cleared(self) -> Tensor:
        """Return the tensor that the preprocess kernel sets to zero: the flags or counters, or the sums."""
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
        """Return whether a replay of all kernels would be a whole backward.

        Gradients of captured tensors in a fixed order are rounded after the kernels.
        """
        copies = self.settings.with_entropy or self.table is not None
        rounds = self.deterministic and any(self.needs_grad)
        return not (capturing or copies or rounds)

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
            semaphores=[t.clone() for t in work.order[:1]],
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
            *buffers.semaphores,
            *work.order[1:],
            *[t.view(torch.int32) for t in buffers.flags],
            *[t for t in (work.starts, work.visits) if t is not None],
            *([buffers.written[0]] if work.writes_dq else []),
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
        scratch = [buffers.sums, *buffers.rows, *buffers.flags, *buffers.semaphores]
        copied = [(len(scratch) - 1, t) for t in self.work.order[:1]]
        zeros = 4 * units[0] * UNIT if sum(units[1:]) + self.work.leaders else None
        outputs = [*buffers.grads, *buffers.sink]
        learned = [i for i, t in enumerate(buffers.totals) if t is not None]
        written = [learned.index(s.slot) for s in self.stored]
        return CallTensors(inputs, outputs, totals, scratch, self._tables(), zeros, copied, written)

    def _is_repeatable(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether kernels on the current device can read these tensors without copies."""
        return (
            self.tma_strides
            and (self.emulated or device_index() == self.device.index)
            and not any(t.data_ptr() & 15 for t in tensors)
        )

    @property
    def deterministic(self) -> bool:
        """Return whether CTAs add to gradients in a fixed order, see `BackwardWork.order`."""
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
        starts = [t for t in (work.starts, work.visits) if t is not None]
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


def loaded(inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors that TMA reads: query, key, value, output, gradient of the output."""
    return inputs.query, inputs.key, inputs.value, inputs.out, inputs.grad_out


def odd_rows(table: Tensor) -> Tensor:
    """Return a copy of a table of pairs whose rows are an odd number of elements apart.

    A warp reads entries of several rows. In rows of 64 floats, those of a column would be in the
    same bank of the first-level cache.
    """
    *outer, columns = table.shape
    copy = table.new_empty(*outer, columns + 1 - columns % 2)[..., :columns]
    return copy.copy_(table.detach())


def _contiguous(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)

"""A backward that was prepared: what is left to do at each repetition.

Nothing here waits for the GPU, and all of it may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.ir import Node
from attnkit.jit.kernel import Source, kernel
from attnkit.jit.relaunch import Relaunch
from attnkit.splice import exact_sums
from attnkit.splice.backward_sources import finish_source, main_source, prepare_source
from attnkit.splice.backward_work import UNIT, Work, work_of, workers
from attnkit.splice.call import OWN, Place, _counter, is_plain, loadable, readable, steps
from attnkit.splice.forward import bounds_of
from attnkit.splice.kernel_call import BackwardInputs, Captured, KernelCall
from attnkit.splice.program import Program
from attnkit.splice.replay import Made, Ran, Replay, replay
from attnkit.util.tensor_cache import VersionedCache
from attnkit.util.torch_fast import device_index, is_captured, maker, stream_of

if TYPE_CHECKING:
    from attnkit.splice.backward_settings import Settings

_calls: VersionedCache[BackwardCall] = VersionedCache(128)
_counters: dict[tuple[int, int], Tensor] = {}
# A CUDA graph reads the tables of the calls in it at every replay, and does not say when it is gone.
_in_graphs: dict[tuple[int, ...], Any] = {}


@dataclass(frozen=True)
class Rounding:
    """A kernel that turns sums into a gradient.

    Attributes:
        source: the kernel.
        which: the gradient: of query (0), key (1) or value (2).
        first: its first unit among the sums.
        scaled: whether the sums are multiplied by the softmax scale.
    """

    source: Source
    which: int
    first: int
    scaled: bool


@dataclass(frozen=True, eq=False)
class BackwardCall:
    """A backward for tensors of given shapes, strides and dtypes.

    Attributes:
        settings: what is fixed in the kernels.
        work: their tables.
        device: of all tensors.
        prepare, main: the kernels; those that follow are `roundings`.
        places: the captured tensors that the main kernel reads.
        wanted: for each tensor of the score, whether its gradient is.
        like: shape and strides of the gradients of query, key and value.
        direct: whether the kernels can write all of these.
        same: whether the tensors can be read by TMA as they are, their addresses apart, on a GPU.
        group: query heads per kv head.
        words: of a row's LSE and of its delta, see `Template`.
        emulated: the kernels are executed on the CPU.
        again, scale: how it is made again with the scale of an earlier time; None if not known.
    """

    settings: Settings
    work: Work
    device: torch.device
    dtype: torch.dtype
    prepare: Source
    main: Source
    roundings: tuple[Rounding, ...]
    places: tuple[Place, ...]
    wanted: tuple[bool, ...]
    like: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    direct: bool
    same: bool
    group: int
    words: tuple[int, int]
    emulated: bool
    _again: dict[tuple[Source, int], Relaunch] = field(default_factory=dict)
    again: Replay | None = field(init=False, default=None)
    scale: float | None = field(init=False, default=None)

    def __call__(
        self, inputs: BackwardInputs
    ) -> tuple[tuple[Tensor, Tensor, Tensor], list[Tensor | None]]:
        """The gradients of query, key and value, and of the score's tensors, on the current stream."""
        query, key, value, out, lse = (
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.out,
            inputs.lse,
        )
        grad_out, grad_lse = inputs.grad_out, inputs.grad_lse
        captured, scale = inputs.captured, inputs.scale
        device, work = self.device, self.work
        same = (
            self.same
            and device_index() == device.index
            and not (query.data_ptr() | key.data_ptr() | value.data_ptr()) & 15
            and not (out.data_ptr() | grad_out.data_ptr()) & 15
        )
        if not same:
            query, key, value, out, grad_out = map(loadable, (query, key, value, out, grad_out))
        if not lse.is_contiguous():
            lse = lse.contiguous()
        given = (query, key, value, out, grad_out, lse, *captured[0], *captured[1])
        given = given if grad_lse is None else (*given, grad_lse)
        grad_lse = lse if grad_lse is None else grad_lse.contiguous()
        capturing = device.type == "cuda" and is_captured()
        make = maker(device) if same and self._again else self._empty
        own = [make(*l, self.dtype) for l in self.like]
        dq, dk, dv = own if self.direct else [_fresh(t) for t in own]
        units = work.units
        sums = make((sum(units) * UNIT,), (1,), torch.float32)
        if sum(units[1:]):
            sums[units[0] * UNIT :].zero_()
        rows = [make((n * work.rows,), (1,), torch.float32) for n in self.words]
        marks = [make((n,), (1,), torch.float32) for n in (work.marks,) if n]
        cleared = marks[0] if marks else sums
        written = _undefined if self.emulated else _itself
        ran = [self._run(self.prepare, (out, grad_out, lse, grad_lse, *rows, cleared), same)]
        tensors = self._read(captured, capturing)
        shapes = [t.shape if n else None for t, n in zip(captured[0], self.wanted, strict=True)]
        added = [self._total(shape) for shape in shapes if shape is not None]
        shared = units[1] > 0
        run = self._run(
            self.main,
            (
                *(query, key, value, grad_out),
                *((dk, dv) if shared else (written(dk), written(dv))),
                *(*rows, sums),
                *(work.pieces, work.partial, work.full, _counts(device, capturing, work.counts)),
                *(*tensors, *added, *work.turn_tables(), *[t.view(torch.int32) for t in marks]),
                *(scale, self.group, work.workers),
            ),
            same,
            work.cost,
        )
        ran.append(run)
        for one in self.roundings:
            factor = scale if one.scaled else 1.0
            rounded = (sums, (dq, dk, dv)[one.which], one.first, factor)
            ran.append(self._run(one.source, rounded, same, which=one.which))
        if not self.direct:
            for t, g in zip(own, (dq, dk, dv), strict=True):
                t.copy_(g)
        elif same and self.scale is None and not (capturing or self.deterministic):
            zeros = 4 * units[0] * UNIT if sum(units[1:]) else None
            made = Made(given, own, added, [sums, *rows, *marks], self._kept(), zeros)
            self._learn(ran, made, scale)
        found = iter(added)
        totals = [None if s is None else self._gradient(next(found), s) for s in shapes]
        return (own[0], own[1], own[2]), totals

    @property
    def deterministic(self) -> bool:
        """Whether the sums are formed in a fixed order."""
        return bool(self.settings.values["turns"])

    def _learn(self, ran: Sequence[Ran | None], made: Made, scale: float) -> None:
        """Find how a call is made again, once its kernels are known."""
        known = [one for one in ran if one is not None]
        apart = len({t.data_ptr() for t in made.given}) == len(made.given)
        if len(known) < len(ran) or not apart:  # of one address it is not to be told whose it is
            return
        counter = lambda: _counts(self.device, False, self.work.counts)
        again = replay(known, made, counter, 5, self.device)
        object.__setattr__(self, "again", again)
        object.__setattr__(self, "scale", scale)

    def _kept(self) -> list[Tensor]:
        """The tensors that are the same in every call."""
        found = [slot for which, slot, _ in self.places if which == OWN]
        for value in vars(self.work).values():
            found += value if isinstance(value, tuple) else [value]
        return [t for t in found if isinstance(t, Tensor)]

    def _total(self, shape: torch.Size) -> Tensor:
        """Where the kernel adds up the gradient of a captured tensor."""
        if self.deterministic:
            return exact_sums.empty_sums(shape, self.device)
        return torch.zeros(shape or (1,), dtype=torch.float32, device=self.device)

    def _gradient(self, total: Tensor, shape: torch.Size) -> Tensor:
        """The gradient of a captured tensor, float32, from what was added up."""
        if self.deterministic:
            return exact_sums.rounded(total, shape)
        return total.view(shape)

    def _empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    def _read(self, captured: Captured, capturing: bool) -> list[Any]:
        """The captured tensors that the kernel reads."""
        found: list[Any] = []
        for which, slot, plain in self.places:
            if which == OWN:
                found.append(slot)
            else:
                t = captured[which][slot]  # type: ignore[index]
                found.append(t if plain else readable(t, self.device))
        if capturing:
            moved = [t for t in found if t.numel() == 1]
            _in_graphs[tuple(map(id, (self, *moved)))] = self, moved
        return found

    def _run(
        self,
        source: Source,
        arguments: Sequence[Any],
        same: bool,
        work: float = 0.0,
        which: int = 0,
    ) -> Ran | None:
        """Run a kernel; `same`: with the strides of all other calls where that is so.

        `which` tells apart runs of a kernel for tensors of other shapes in one call.

        Returns:
            The launch, if one like it was made before.
        """
        if self.emulated:
            from attnkit.jit.emulator_runs import run_emulated

            code = kernel(source, lines=True)
            run_emulated(code, arguments, work=work, roles=self.settings.template.ROLES)
            return None
        again = self._again.get((source, which)) if same else None
        if again is None:
            code = kernel(source)
            code(*arguments)
            if same:
                self._again[source, which] = code.relauncher(arguments, range(len(arguments)))
            return None
        addresses = [a.data_ptr() for a in arguments if isinstance(a, Tensor)]
        again(
            stream_of(self.device.index),
            addresses,
            tuple(a for a in arguments if not isinstance(a, Tensor)),
        )
        return Ran(kernel(source).relauncher, arguments)


def prepare(
    kernel_call: KernelCall, inputs: BackwardInputs, settings: Callable[[], Settings]
) -> BackwardCall:
    """The backward for tensors like these.

    Args:
        kernel_call: what is computed.
        inputs: tensors like those of every call; the mask's must be these with this data.
        settings: gives what is fixed in the kernels.
    """
    used = _loaded(inputs)
    sizes = tuple([(t.shape, t.stride()) for t in used])
    kinds = tuple([(t.dtype, t.device, t.shape, t.stride()) for l in inputs.captured for t in l])
    query = inputs.query
    case = kernel_call.template, kernel_call.program, kernel_call.runs, tuple(inputs.needs_grad)
    kind = inputs.grad_lse is None, query.dtype, query.device
    key = case, kind, workers(query.device, kernel_call.spec.emulated), sizes, kinds
    build = lambda: _prepare(kernel_call, inputs, settings())
    return _calls.get(key, inputs.captured.masks, build)


def _loaded(inputs: BackwardInputs) -> tuple[Tensor, ...]:
    """The tensors that are read by TMA."""
    return inputs.query, inputs.key, inputs.value, inputs.out, inputs.grad_out


def _prepare(kernel_call: KernelCall, inputs: BackwardInputs, settings: Settings) -> BackwardCall:
    query, key, value, captured = inputs.query, inputs.key, inputs.value, inputs.captured
    program, emulated, device = kernel_call.program, kernel_call.spec.emulated, query.device
    needs_grad = tuple(inputs.needs_grad)
    runs = kernel_call.runs
    work = work_of(runs, settings, query, key, value, emulated)
    roundings = _roundings(settings, work)
    if work.stored:
        settings = settings.storing()
    ends, mask_tensors = _column_intervals(program, captured[1], query, key)
    places = (
        *((0, i, is_plain(t, device)) for i, t in enumerate(captured[0])),
        *(_place(t, captured[1], device) for t in mask_tensors),
    )
    read = [readable(t, device) for t in (*captured[0], *mask_tensors)]
    kinds = tuple((str(t.dtype).removeprefix("torch."), t.ndim, t.stride(-1) == 1) for t in read)
    like = [torch.empty_like(t, device="meta") for t in (query, key, value)]
    return BackwardCall(
        settings=settings,
        work=work,
        device=device,
        dtype=query.dtype,
        prepare=prepare_source(settings, inputs.grad_lse is not None),
        main=main_source(program, ends, settings, kinds, needs_grad),
        roundings=roundings,
        places=places,
        wanted=needs_grad,
        like=tuple((tuple(t.shape), t.stride()) for t in like),
        direct=_stepped(like),
        same=not emulated and _stepped(_loaded(inputs)),
        group=query.shape[1] // key.shape[1],
        words=settings.template.words(settings),
        emulated=emulated,
    )


def _place(t: Tensor, tensors: Sequence[Tensor], device: torch.device) -> Place:
    """Where a tensor of the mask is found at each call: among these, or it is a table."""
    at = next((i for i, own in enumerate(tensors) if own is t), None)
    return (OWN, readable(t, device), True) if at is None else (1, at, is_plain(t, device))


def _roundings(settings: Settings, work: Work) -> tuple[Rounding, ...]:
    """The kernels after the main one."""
    config = settings.values
    wide, deep, columns = config["width"], config["value_width"], settings.block[1]
    found, first = [], 0
    for which, (count, width, block) in enumerate(
        zip(work.units, (wide, wide, deep), (config["block_q"], columns, columns), strict=False)
    ):
        if count:
            source = finish_source(settings, settings.head_dims[which == 2], width, block)
            found.append(Rounding(source, which, first, which < 2))
        first += count
    return tuple(found)


def _column_intervals(
    program: Program, tensors: Sequence[Tensor], query: Tensor, key: Tensor
) -> tuple[tuple[tuple[Node, Node], ...] | None, Sequence[Tensor]]:
    """The intervals of q that every column keeps, if the mask has that form; and its tensors."""
    if program.mask is None:
        return None, ()
    q, kv = ir.arg("q"), ir.arg("kv")
    turned = ir.substitute(program.mask, {q: kv, kv: q})
    return bounds_of(turned, tensors, query, (key.shape[2], query.shape[2]))


def _counts(device: torch.device, capturing: bool, count: int) -> Tensor:
    """Zeros that a kernel counts up and leaves at zero; others for every stream."""
    if count == 1:
        return _counter(device, capturing)
    if device.index is None or capturing:
        return torch.zeros(count, dtype=torch.int32, device=device)
    at = device.index, stream_of(device.index)
    found = _counters.get(at)
    if found is None or found.numel() < count:
        found = _counters[at] = torch.zeros(count, dtype=torch.int32, device=device)
    return found


def _stepped(tensors: Sequence[Tensor]) -> bool:
    """Whether TMA can read or write tensors like these."""
    return all(steps(t.shape, t.stride(), t.element_size()) for t in tensors)


def _fresh(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _undefined(t: Tensor) -> Any:
    from attnkit.jit.emulator_runs import Undefined

    return Undefined(t)


def _itself(t: Tensor) -> Tensor:
    return t

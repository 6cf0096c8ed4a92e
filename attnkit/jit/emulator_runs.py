"""Run compiled kernels in the emulator; `backend="emulate"` calls this instead of a GPU.

Importing this module loads the emulator, so import it inside of the function that emulates. Rooms
above import the emulator's names from here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from attnkit import emulator
from attnkit.emulator import Timeline, Undefined, picture
from attnkit.emulator.host.host_function import Captured, compiler
from attnkit.emulator.machine.global_memory import GlobalMemory
from attnkit.emulator.timing.cycles import busy, rates_of
from attnkit.jit.arg_specs import Dim, Extent, NumberSpec, StreamSpec, TensorSpec
from attnkit.jit.emulation import Session, current_session, refuse_long
from attnkit.util import caches

if TYPE_CHECKING:
    from attnkit.jit.kernel import CompiledKernel

__all__ = [
    "Emulatable",
    "Timeline",
    "Undefined",
    "busy",
    "compiler",
    "launches",
    "picture",
    "rates_of",
    "run_emulated",
]


class Emulatable(Protocol):
    """Describes a kernel that the emulator can run, for example a `CompiledKernel`."""

    name: str

    def executable(self) -> emulator.Executable:
        """Build the emulator's form of the kernel from its PTX and its host code."""
        ...


_executables: weakref.WeakKeyDictionary[Any, emulator.Executable] = weakref.WeakKeyDictionary()
caches.register(_executables.clear)
# The kernels of a session run one after another, some as programmatic dependents of the last one.
_streams: weakref.WeakKeyDictionary[Session, emulator.Stream] = weakref.WeakKeyDictionary()


def run_emulated(
    kernel: Emulatable,
    arguments: Sequence[Any],
    *,
    work: float = 0.0,
    barriers: Mapping[int, str] | None = None,
    roles: Mapping[str, Iterable[int]] | None = None,
) -> emulator.Report | emulator.CheckReport:
    """Execute a kernel on the CPU, as the current session says.

    Args:
        kernel: for example what `jit.kernel.kernel` returns.
        arguments: as of a call of the kernel: torch CPU tensors and numbers, without the stream;
            `Undefined(t)` for an output that must not be read before it is written.
        work: estimated warp instructions, see `emulation.attention_work`; 0 is never refused.
        barriers: names of mbarriers by offset in shared memory, in bytes, for reports.
        roles: numbers of warps by role, for reports.

    Returns:
        The report; outputs are in the tensors.

    Raises:
        UnsupportedError: no C compiler, an instruction that is not implemented, or too much work.
        KernelFault: the kernel faulted, and there is no session to keep the report.
    """
    current = current_session()
    session = current or Session()
    if not session.execute:
        return emulator.Report((), (), session.mode)
    refuse_long(kernel.name, work, session)
    target = _executable(kernel).describe(names=barriers, roles=roles)
    if session.timeline:
        before = emulator.snapshot(arguments)
        session.timelines.append((kernel.name, emulator.timeline(target, *arguments)))
        emulator.restore(arguments, before)
    stream = _streams.setdefault(session, emulator.Stream())
    report: emulator.Report | emulator.CheckReport
    if session.mode == "check":
        report = emulator.check(
            target,
            *arguments,
            seeds=session.seeds,
            deterministic=session.deterministic,
            stream=stream,
        )
    else:
        seed = session.seeds - 1 if session.mode == "adversarial" else 0
        report = emulator.run(
            target,
            *arguments,
            mode=session.mode,
            seed=seed,
            raises=current is None,
            stream=stream,
        )
    session.reports.append((kernel.name, report))
    return report


def _executable(kernel: Emulatable) -> emulator.Executable:
    """Return the emulator's form of a kernel; build it once, because that links its host code."""
    executable = _executables.get(kernel)
    if executable is None:
        compiler()  # first, because its error says that the C compiler is missing
        executable = _executables[kernel] = kernel.executable()
    return executable


def launches(kernel: CompiledKernel) -> list[Captured]:
    """Capture the kernel launches that a call asks CUDA for, by running its host code on the CPU.

    The call gets the smallest tensors that fit, and 1 for each number. In attnkit's kernels the CTA
    size, the cluster and the shared memory are the same for all tensor sizes.

    Raises:
        UnsupportedError: there is no C compiler.
    """
    arguments: list[Any] = []
    for spec in kernel.signature.specs:
        if isinstance(spec, TensorSpec):
            arguments.append(_smallest(spec))
        elif isinstance(spec, NumberSpec):
            arguments.append(1.0 if spec.kind.startswith("Float") else 1)
        else:
            assert isinstance(spec, StreamSpec)
    return kernel.executable().captured(arguments, GlobalMemory())


def _smallest(spec: TensorSpec) -> torch.Tensor:
    """Build the smallest CPU tensor that fits a spec, all zeros, aligned as the spec says."""
    shape = [_smallest_extent(n) for n in spec.shape]
    stride = [_smallest_extent(n) for n in spec.stride]
    length = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    dtype: torch.dtype = getattr(torch, spec.dtype)
    memory = torch.zeros(length * dtype.itemsize + spec.align, dtype=torch.uint8)
    start = -memory.data_ptr() % spec.align
    whole = memory[start : start + length * dtype.itemsize].view(dtype)
    return whole.as_strided(shape, stride)


def _smallest_extent(extent: Extent) -> int:
    return extent.divisibility if isinstance(extent, Dim) else extent

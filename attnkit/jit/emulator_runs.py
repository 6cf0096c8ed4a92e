"""Run compiled kernels in the emulator instead of on a GPU, for `backend="emulate"`.

Importing this module loads the emulator, so callers import it inside the function that needs it.
Packages above `jit` import the emulator's names from here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from attnkit import emulator
from attnkit.emulator import Pointers, Timeline, Undefined, picture
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
    "Pointers",
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
    """Protocol of a kernel that the emulator can run, for example a `CompiledKernel`."""

    name: str

    def executable(self) -> emulator.Executable:
        """Return the `Executable` of the kernel, built from its PTX and its host code."""
        ...


_executables: weakref.WeakKeyDictionary[Any, emulator.Executable] = weakref.WeakKeyDictionary()
caches.register(_executables.clear)
# The kernels of a session run in stream order, some with programmatic dependent launch.
_streams: weakref.WeakKeyDictionary[Session, emulator.Stream] = weakref.WeakKeyDictionary()


def run_emulated(
    kernel: Emulatable,
    arguments: Sequence[Any],
    *,
    work: float = 0.0,
    barriers: Mapping[int, str] | None = None,
    roles: Mapping[str, Iterable[int]] | None = None,
) -> emulator.Report | emulator.CheckReport:
    """Run a kernel in the emulator with the options of the current session; return the report.

    Args:
        kernel: the kernel, for example a result of `jit.kernel.kernel`.
        arguments: arguments of a call of the kernel: torch CPU tensors and numbers, without the
            stream. `Undefined(t)` marks an output that must not be read before it is written.
        work: estimated warp instructions, see `emulation.attention_work`; 0 is never refused.
        barriers: maps the shared-memory offset of an mbarrier, in bytes, to its name, for reports.
        roles: maps the name of a role to its warp indices, for reports.

    Returns:
        The report. The kernel writes its outputs to the tensors.

    Raises:
        UnsupportedError: there is no C compiler, an instruction is not implemented, or the
            estimated time is above the limit.
        KernelFault: the kernel faulted, and no session collects the report.
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
    """Return the cached `Executable` of a kernel; building it links the kernel's host code."""
    executable = _executables.get(kernel)
    if executable is None:
        compiler()  # first, because its error says that the C compiler is missing
        executable = _executables[kernel] = kernel.executable()
    return executable


def launches(kernel: CompiledKernel) -> list[Captured]:
    """Return the CUDA launches that a call of `kernel` makes, by running its host code on the CPU.

    The host code gets the smallest tensors that match the signature, and 1 for each number. In
    attnkit's kernels the CTA size, the cluster and the shared memory are the same for all sizes.

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
    """Return the smallest CPU tensor of zeros that matches `spec`, including its alignment."""
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

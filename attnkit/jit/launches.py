"""What a compiled kernel's host code asks for at a launch, found by running it without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnkit.jit.arg_specs import Dim, Extent, NumberSpec, StreamSpec, TensorSpec

if TYPE_CHECKING:
    from attnkit.emulator.host.host_function import Captured
    from attnkit.jit.kernel import Kernel


def launches(kernel: Kernel) -> list[Captured]:
    """The launches of a call with the smallest tensors that fit, and ones for numbers.

    In attnkit's kernels block, cluster and shared memory are the same for all sizes.

    Raises:
        UnsupportedError: there is no C compiler.
    """
    from attnkit.emulator.machine.global_memory import GlobalMemory

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
    shape = [_at_least(1, n) for n in spec.shape]
    stride = [_at_least(1, n) for n in spec.stride]
    room = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    dtype: torch.dtype = getattr(torch, spec.dtype)
    memory = torch.zeros(room * dtype.itemsize + spec.align, dtype=torch.uint8)
    start = -memory.data_ptr() % spec.align
    whole = memory[start : start + room * dtype.itemsize].view(dtype)
    return whole.as_strided(shape, stride)


def _at_least(n: int, want: Extent) -> int:
    return want.divisibility * -(-n // want.divisibility) if isinstance(want, Dim) else want

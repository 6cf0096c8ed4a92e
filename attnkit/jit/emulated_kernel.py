"""Run a kernel in the emulator with the call and relaunch interface of `CompiledKernel`.

A repeated call with `backend="emulate"` thus takes the same path as on a GPU: it passes addresses
of new tensors, and counters that the previous launch has used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnkit.jit import emulation
from attnkit.jit.abi import misplaced
from attnkit.jit.artifact import Source
from attnkit.jit.emulator_runs import Pointers, Undefined, run_emulated
from attnkit.jit.kernel import kernel, request
from attnkit.jit.relaunch import Relaunch


@dataclass(frozen=True, eq=False)
class EmulatedKernel:
    """Kernel that runs in the emulator on CPU tensors, with the interface of `CompiledKernel`.

    Attributes:
        source: the kernel.
        work: estimated warp instructions, see `emulation.attention_work`.
        roles: maps the name of a role to its warp indices, for reports.
        outputs: indices of the arguments that must not be read before the kernel has written them.
        counters: index of the argument with the work counters, which are zero before and after a
            launch; None if the kernel has no counters.
        pointers: maps the index of an argument that holds addresses to a function that returns the
            tensors to which they point.
    """

    source: Source
    work: float = 0.0
    roles: Mapping[str, Iterable[int]] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()
    counters: int | None = None
    pointers: Mapping[int, Callable[[], Sequence[Tensor]]] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> None:
        """Run the kernel in the emulator, in the mode of the current emulation session.

        If the session executes no kernels, this one is requested, and not compiled.

        Args:
            arguments: CPU tensors and Python numbers, as for a call of the compiled kernel.

        Raises:
            AssertionError: the counters are not zero before the launch, or are not zero after a
                launch without faults.
            ArgumentError: a tensor has no memory.
            UnsupportedError, KernelFault: see `run_emulated`.
        """
        values = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
        for i, a in enumerate(values):
            if isinstance(a, Tensor) and a.numel() and not a.data_ptr():
                raise misplaced(f"argument {i}", 0, 1)
        counters = None if self.counters is None else values[self.counters]
        self._check(counters, "finds")
        current = emulation.current_session()
        if current is not None and not current.execute:
            request(self.source)
            return
        for i in self.outputs:
            values[i] = Undefined(values[i])
        for i, targets in self.pointers.items():
            values[i] = Pointers(values[i], targets())
        clean = False
        try:
            code = kernel(self.source, lines=emulation.with_lines())
            clean = run_emulated(code, values, work=self.work, roles=self.roles).ok
        finally:
            if not clean and counters is not None:
                counters.zero_()  # a kernel that ended early leaves arbitrary values
        self._check(counters, "leaves")

    def relauncher(self, arguments: Sequence[Any], changing: Sequence[int]) -> Relaunch:
        """Return a function that runs the kernel again with new addresses and numbers.

        Args:
            arguments: all arguments of an earlier call.
            changing: indices of the arguments that change, in increasing order.
        """
        fixed = [None if i in changing else a for i, a in enumerate(arguments)]
        tensors = [(i, _Form.of(arguments[i])) for i in changing if _is_tensor(arguments[i])]
        places = [i for i in changing if not _is_tensor(arguments[i])]

        def relaunch(
            stream: int, addresses: Sequence[int], numbers: Sequence[int | float] = ()
        ) -> None:
            values = list(fixed)
            for (i, form), address in zip(tensors, addresses, strict=True):
                if not address:
                    raise misplaced("a tensor", address, 1)
                values[i] = form.at(address)
            for i, number in zip(places, numbers, strict=True):
                values[i] = number
            self(*values)

        return relaunch

    def _check(self, counters: Tensor | None, verb: str) -> None:
        """Raise AssertionError if a counter is not zero; reset the counters to zero first."""
        if counters is None or not counters.any():
            return
        values = counters.tolist()
        counters.zero_()
        raise AssertionError(f"{self.source.name} {verb} its work counters at {values}, not at 0")


@dataclass(frozen=True)
class _Form:
    """Describes the layout of a tensor without its data.

    Attributes:
        shape, strides, dtype: shape, strides (in elements) and dtype of the tensor.
        size: bytes from the first element to the end of the last element.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    size: int

    @staticmethod
    def of(t: Tensor) -> _Form:
        """Return the layout of a non-empty tensor."""
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        return _Form(tuple(t.shape), t.stride(), t.dtype, (last + 1) * t.element_size())

    def at(self, address: int) -> Tensor:
        """Return a tensor of this layout at `address`; the caller must keep the memory alive."""
        memory = (ctypes.c_ubyte * self.size).from_address(address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.shape, self.strides)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)

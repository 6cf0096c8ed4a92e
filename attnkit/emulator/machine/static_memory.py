"""Assign addresses to the variables of a kernel, in every address space."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.machine.address_spaces import LOCAL_BASE, PARAM_BASE, SHARED_BASE
from attnkit.emulator.ptx.kernel import PtxKernel, Variable


class StaticMemory:
    """Assigns an address to every parameter and variable of a kernel.

    Attributes:
        symbols: name -> (state space, address in the generic space).
        globals: (name, bytes) of `.global` and `.const` variables.
        shared_bytes: size of the static shared memory, rounded up to a multiple of 1024; dynamic
            shared memory begins there.
        local_bytes: size of the local memory of a thread.
    """

    def __init__(self, kernel: PtxKernel) -> None:
        self.symbols = {p.name: ("param", PARAM_BASE + p.offset) for p in kernel.params}
        self.globals: list[tuple[str, np.ndarray[Any, Any]]] = []
        self.shared_bytes = 0
        self.local_bytes = 0
        dynamic = []
        for v in kernel.variables:
            if v.space == "shared" and v.size:
                at = -(-self.shared_bytes // v.align) * v.align
                self.symbols[v.name] = ("shared", SHARED_BASE + at)
                self.shared_bytes = at + v.size
            elif v.space == "shared":
                dynamic.append(v)
            elif v.space == "local":
                at = -(-self.local_bytes // v.align) * v.align
                self.symbols[v.name] = ("local", LOCAL_BASE + at)
                self.local_bytes = at + v.size
            else:
                self.symbols[v.name] = (v.space, self._place_global(v))
        self.shared_bytes = -(-self.shared_bytes // 1024) * 1024
        for v in dynamic:
            self.symbols[v.name] = ("shared", SHARED_BASE + self.shared_bytes)

    def _place_global(self, v: Variable) -> int:
        """Allocate a variable of global or constant memory, and return its address."""
        raw = np.zeros(max(v.size, len(v.data)) + v.align, np.uint8)
        skip = -raw.__array_interface__["data"][0] % v.align
        data = raw[skip:]
        data[: len(v.data)] = np.frombuffer(v.data, np.uint8)
        self.globals.append((v.name, data))
        address: int = data.__array_interface__["data"][0]
        return address

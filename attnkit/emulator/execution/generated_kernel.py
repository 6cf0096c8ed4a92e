"""Translate a kernel into Python functions, one per basic block, for full and for partial masks.

A function is generated when its block first runs. It is bound once for each width of a gang,
because constants are vectors of that width. `emit.blocks` says what a block function returns.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np

from attnkit.emulator.emit.blocks import block_source
from attnkit.emulator.emit.emitter import Emitter
from attnkit.emulator.machine.static_memory import StaticMemory
from attnkit.emulator.numerics.lane_arithmetic import NAMESPACE
from attnkit.emulator.ops.namespace import OPERATIONS
from attnkit.emulator.ptx.control_flow import PostDominators
from attnkit.emulator.ptx.kernel import PtxKernel

BlockFunction = Callable[[Any, list[Any], Any], Any]
Table = tuple[list[BlockFunction | None], list[BlockFunction | None]]
Bind = Callable[[int, bool], BlockFunction]


class GeneratedKernel:
    """Holds the generated code of one kernel, and the layout of its static memory."""

    def __init__(self, kernel: PtxKernel) -> None:
        self.kernel = kernel
        self.static = StaticMemory(kernel)
        self.emitter = Emitter(kernel, self.static.symbols)
        self._texts: dict[int, str] = {}
        self._code: dict[tuple[int, bool], CodeType] = {}
        self._spaces: dict[int, dict[str, Any]] = {}
        self._tables: dict[int, tuple[Table, Bind]] = {}
        self.post_dominators = PostDominators(kernel)

    def functions(self, width: int) -> tuple[Table, Bind]:
        """Return the block functions of gangs of `width` lanes, and a function that binds more.

        Returns:
            The functions by block, for full and for partial masks, None until bound; and a function
            that binds block `index` for full or partial masks.
        """
        if width not in self._tables:
            n = len(self.kernel.blocks)
            table: Table = ([None] * n, [None] * n)

            def bind(index: int, masked: bool) -> BlockFunction:
                f = table[masked][index] = self._bind(index, masked, width)
                return f

            self._tables[width] = (table, bind)
        return self._tables[width]

    def _bind(self, index: int, masked: bool, width: int) -> BlockFunction:
        """Define the function of a block for gangs of `width` lanes; compile it at first use."""
        if (index, masked) not in self._code:
            text = self._texts.pop(index, "") if not masked else ""
            text = text or block_source(self.emitter, index, masked)
            self._code[index, masked] = compile(text, f"<block {index}>", "exec")
        space = self._space(width)
        exec(self._code[index, masked], space)
        f: BlockFunction = space["block"]
        return f

    def _space(self, width: int) -> dict[str, Any]:
        """Return the global namespace of block functions: operations, arithmetic and constants."""
        space = self._spaces.setdefault(width, NAMESPACE | OPERATIONS)
        space.update(self.emitter.objects)
        for name, scalar in self.emitter.constants.items():
            if name not in space:
                value = np.full(width, scalar)
                value.setflags(write=False)
                space[name] = value
        return space

    def initial_registers(self, width: int) -> list[Any]:
        """Return the registers of a new gang, filled with values that are unlikely results."""
        fill = {
            "bool": np.zeros(width, bool),
            "u2": np.full(width, 0xDEAD, np.uint16),
            "u4": np.full(width, 0x7FC0BEEF, np.uint32),
            "u8": np.full(width, 0x7FC0BEEF7FC0BEEF, np.uint64),
            "c16": np.full(width, 0, np.complex128),
        }
        fill["f4"], fill["f8"] = fill["u4"].view(np.float32), fill["u8"].view(np.float64)
        return [fill[self.emitter.store[r]] for r in self.kernel.regs]

    def check(self) -> None:
        """Generate every block, so that an unknown opcode is reported before anything runs."""
        for i in range(len(self.kernel.blocks)):
            self._texts[i] = block_source(self.emitter, i, False)

"""A kernel as Python functions: one per basic block, for full and for partial masks of lanes.

Functions are generated when a block first runs, and bound per width of a gang, because constants
are vectors of that width. A block function returns the index of the next block, -1 at exit, None
when it has to wait, or (predicate, block if true, block if false).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np

from attnkit.emulator.emit_async import ASYNC_OPS
from attnkit.emulator.emit_float import FLOAT_OPS, SPECIAL_OPS, arithmetic, special
from attnkit.emulator.emit_int import INTEGER_OPS, integer
from attnkit.emulator.emit_memory import MEMORY_OPS
from attnkit.emulator.emit_move import MOVE_OPS
from attnkit.emulator.emit_wait import waiting
from attnkit.emulator.emitter import Emitter
from attnkit.emulator.faults import PtxError
from attnkit.emulator.flow import Flow
from attnkit.emulator.lanes import NAMESPACE
from attnkit.emulator.ptx import Instr, Kernel, is_blocking
from attnkit.emulator.spaces import LOCAL_BASE, PARAM_BASE, SHARED_BASE

Emit = Callable[[Emitter, Instr], list[str]]
BlockFunction = Callable[[Any, list[Any], Any], Any]
Table = tuple[list[BlockFunction | None], list[BlockFunction | None]]
Bind = Callable[[int, bool], BlockFunction]

EMIT: dict[str, Emit] = {
    **dict.fromkeys(INTEGER_OPS, integer),
    **dict.fromkeys(FLOAT_OPS, arithmetic),
    **dict.fromkeys(SPECIAL_OPS, special),
    **MOVE_OPS,
    **MEMORY_OPS,
    **ASYNC_OPS,
}
# Without effect on values here.
NOTHING = {"prefetch", "prefetchu", "griddepcontrol", "applypriority", "setmaxnreg"}
NOTHING |= {"discard", "createpolicy", "pmevent", "nop"}


def emit(e: Emitter, c: Instr) -> list[str]:
    """Lines of Python for one instruction that neither branches nor blocks.

    Raises:
        UnknownOpcode: the instruction, or this form of it, is not implemented.
    """
    op = c.parts[0]
    if op in NOTHING:
        return e.put(c.args[0], e.const(0, "u8"), "u8") if op == "createpolicy" else []
    if op in ("fence", "membar"):
        if "proxy" in c.parts:
            return ["W.fence_proxy(m)"] if c.op.startswith("fence.proxy.async") else []
        return ["W.fence()"]
    if c.op.startswith(("bar.warp", "barrier.warp")):
        return []
    if op in ("trap", "brkpt"):
        return ["W.trap()"]
    if op not in EMIT:
        raise e.fail(c)
    try:
        return EMIT[op](e, c)
    except (KeyError, IndexError, ValueError) as error:
        raise e.fail(c, f"{type(error).__name__}: {error}") from error


_CALL = re.compile(r"W\.\w+\(")


class Program:
    """Generated code of one kernel, and the layout of its static memory."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.globals: list[tuple[str, np.ndarray[Any, Any]]] = []
        self.static_shared = 0
        self.local_bytes = 0
        self.emitter = Emitter(kernel, self._symbols())
        self._texts: dict[int, str] = {}
        self._code: dict[tuple[int, bool], CodeType] = {}
        self._spaces: dict[int, dict[str, Any]] = {}
        self._tables: dict[int, tuple[Table, Bind]] = {}
        self.flow = Flow(kernel)

    def _symbols(self) -> dict[str, tuple[str, int]]:
        out = {p.name: ("param", PARAM_BASE + p.offset) for p in self.kernel.params}
        dynamic = []
        for v in self.kernel.variables:
            if v.space == "shared" and v.size:
                off = -(-self.static_shared // v.align) * v.align
                out[v.name] = ("shared", SHARED_BASE + off)
                self.static_shared = off + v.size
            elif v.space == "shared":
                dynamic.append(v)
            elif v.space == "local":
                off = -(-self.local_bytes // v.align) * v.align
                out[v.name] = ("local", LOCAL_BASE + off)
                self.local_bytes = off + v.size
            else:
                raw = np.zeros(max(v.size, len(v.data)) + v.align, np.uint8)
                skip = -raw.__array_interface__["data"][0] % v.align
                data = raw[skip:]
                data[: len(v.data)] = np.frombuffer(v.data, np.uint8)
                self.globals.append((v.name, data))
                out[v.name] = (v.space, data.__array_interface__["data"][0])
        self.static_shared = -(-self.static_shared // 1024) * 1024
        for v in dynamic:
            out[v.name] = ("shared", SHARED_BASE + self.static_shared)
        return out

    # ---- functions
    def functions(self, width: int) -> tuple[Table, Bind]:
        """(functions by block for full and for partial masks, None until bound; what binds one)."""
        if width not in self._tables:
            n = len(self.kernel.blocks)
            table: Table = ([None] * n, [None] * n)

            def bind(index: int, masked: bool) -> BlockFunction:
                f = table[masked][index] = self._bind(index, masked, width)
                return f

            self._tables[width] = (table, bind)
        return self._tables[width]

    def _bind(self, index: int, masked: bool, width: int) -> BlockFunction:
        if (index, masked) not in self._code:
            text = self._texts.pop(index, "") if not masked else ""
            text = text or self.source(index, masked)
            self._code[index, masked] = compile(text, f"<block {index}>", "exec")
        space = self._space(width)
        exec(self._code[index, masked], space)
        f: BlockFunction = space["block"]
        return f

    def _space(self, width: int) -> dict[str, Any]:
        space = self._spaces.setdefault(width, dict(NAMESPACE))
        space.update(self.emitter.objects)
        for name, scalar in self.emitter.constants.items():
            if name not in space:
                value = np.full(width, scalar)
                value.setflags(write=False)
                space[name] = value
        return space

    def source(self, index: int, masked: bool) -> str:
        """The Python text of one block."""
        e, block = self.emitter, self.kernel.blocks[index]
        if is_blocking(block[0]):
            lines = waiting(e, index)
        else:
            lines = self._straight(block, index, masked)
        return "def block(W,R,m):\n" + "\n".join("  " + x for x in lines)

    def _straight(self, block: list[Instr], index: int, masked: bool) -> list[str]:
        e, out = self.emitter, []
        for c in block:
            if c.parts[0] in ("bra", "ret", "exit"):
                out.append(self._jump(c, index))
                return out
            e.masked = masked or c.pred is not None
            lines = emit(e, c)
            if any(_CALL.search(x) for x in lines):
                lines = [f"W.line={c.line}", *lines]
            out += self._guarded(c, lines)
        return [*out, f"return {index + 1}"]

    def _guarded(self, c: Instr, lines: list[str]) -> list[str]:
        if c.pred is None or not lines:
            return lines
        guard = ("~" if c.negated else "") + self.emitter.boolean(c.pred)
        inner = ["  " + x for x in lines]
        return ["m0=m", f"m=W.narrowed(m,{guard})", "if m is not None:", *inner, "m=m0"]

    def _jump(self, c: Instr, index: int) -> str:
        target = -1
        if c.parts[0] == "bra":
            label = c.args[0]
            if label not in self.kernel.labels:
                outer = f"{label.split('@')[0]}@0"
                if outer not in self.kernel.labels:
                    raise PtxError(f"PTX line {c.line}: no label {label!r}")
                label = outer
            target = self.kernel.labels[label]
        if c.pred is None:
            return f"return {target}"
        guard = ("~" if c.negated else "") + self.emitter.boolean(c.pred)
        return f"return ({guard},{target},{index + 1})"

    def initial_registers(self, width: int) -> list[Any]:
        """Registers of a fresh gang: values that are unlikely to pass for results."""
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
        """Generates every block, so that an unknown opcode is found before anything runs."""
        for i in range(len(self.kernel.blocks)):
            self._texts[i] = self.source(i, False)

"""Translate a basic block into a Python function, for a full or for a partial mask of lanes.

A block function executes the block and returns the index of the next block, or -1 at exit. At a
conditional branch it returns (predicate, block if true, block if false); if it must wait, None.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from attnkit.emulator.emit.asynchronous import ASYNC_OPS
from attnkit.emulator.emit.emitter import Emitter
from attnkit.emulator.emit.floats import FLOAT_OPS, SPECIAL_OPS, arithmetic, special
from attnkit.emulator.emit.integers import INTEGER_OPS, integer
from attnkit.emulator.emit.memory import MEMORY_OPS
from attnkit.emulator.emit.moves import MOVE_OPS
from attnkit.emulator.emit.waits import waiting
from attnkit.emulator.faults import PtxError
from attnkit.emulator.machine.knowledge import SCOPES
from attnkit.emulator.ptx.kernel import Instr, is_blocking

Emit = Callable[[Emitter, Instr], list[str]]

EMIT: dict[str, Emit] = {
    **dict.fromkeys(INTEGER_OPS, integer),
    **dict.fromkeys(FLOAT_OPS, arithmetic),
    **dict.fromkeys(SPECIAL_OPS, special),
    **MOVE_OPS,
    **MEMORY_OPS,
    **ASYNC_OPS,
}
# Instructions without an effect here, such as cache hints and setmaxnreg; createpolicy gives 0.
NOTHING = {"prefetch", "prefetchu", "applypriority", "setmaxnreg"}
NOTHING |= {"createpolicy", "pmevent", "nop"}
_OPERATION = re.compile(r"\w\(W[,)]")  # matches the call of an operation, which may fault


def block_source(e: Emitter, index: int, masked: bool) -> str:
    """Return the source text of the Python function of one block.

    Args:
        masked: whether some lanes may be inactive.
    """
    block = e.kernel.blocks[index]
    if is_blocking(block[0]):
        lines = waiting(e, index)
    else:
        lines = _straight(e, block, index, masked)
    return "def block(W,R,m):\n" + "\n".join("  " + x for x in lines)


def emit_instruction(e: Emitter, c: Instr) -> list[str]:
    """Return lines of Python for one instruction that neither branches nor waits.

    Raises:
        UnknownOpcode: the instruction, or this form of it, is not implemented.
    """
    op = c.parts[0]
    if op in NOTHING:
        return e.put(c.args[0], e.const(0, "u8"), "u8") if op == "createpolicy" else []
    if op in ("fence", "membar"):
        return _fence(c)
    if op == "griddepcontrol":
        return ["grid_wait(W)"] if "wait" in c.parts else []
    if op in ("trap", "brkpt"):
        return ["trap(W)"]
    if op not in EMIT:
        raise e.fail(c)
    try:
        return EMIT[op](e, c)
    except (KeyError, IndexError, ValueError) as error:
        raise e.fail(c, f"{type(error).__name__}: {error}") from error


def _fence(c: Instr) -> list[str]:
    """Emit fence or membar; proxy fences other than fence.proxy.async need no code."""
    if c.op.startswith("fence.mbarrier_init"):
        return ["fence_initialisation(W)"]
    if "proxy" not in c.parts:
        scope = c.option(*SCOPES)
        return [f"fence(W,'{scope or 'sys'}',m)"]
    if not c.op.startswith("fence.proxy.async"):
        return []
    spaces = [x.split("::")[0] for x in c.parts[2:]]
    shared, everywhere = "shared" in spaces, "global" in spaces
    both = not (shared or everywhere)
    return [f"fence_proxy(W,{shared or both},{everywhere or both},m)"]


def _straight(e: Emitter, block: list[Instr], index: int, masked: bool) -> list[str]:
    """Return the lines of a block of instructions that do not wait."""
    out: list[str] = []
    for c in block:
        if c.parts[0] in ("bra", "ret", "exit"):
            out.append(_jump(e, c, index))
            return out
        e.masked = masked or c.pred is not None
        lines = emit_instruction(e, c)
        if any(_OPERATION.search(x) for x in lines):
            lines = [f"W.line={c.line}", *lines]
        out += _guarded(e, c, lines)
    return [*out, f"return {index + 1}"]


def _guarded(e: Emitter, c: Instr, lines: list[str]) -> list[str]:
    """Return the lines of an instruction, conditional on its guard predicate if it has one."""
    if c.pred is None or not lines:
        return lines
    guard = ("~" if c.negated else "") + e.boolean(c.pred)
    inner = ["  " + x for x in lines]
    return ["m0=m", f"m=W.narrowed(m,{guard})", "if m is not None:", *inner, "m=m0"]


def _jump(e: Emitter, c: Instr, index: int) -> str:
    """Return the last line of a block that ends with a branch or an exit."""
    target, labels = -1, e.kernel.labels
    if c.parts[0] == "bra":
        label = c.args[0]
        if label not in labels:
            outer = f"{label.split('@')[0]}@0"
            if outer not in labels:
                raise PtxError(f"PTX line {c.line}: no label {label!r}")
            label = outer
        target = labels[label]
    if c.pred is None:
        return f"return {target}"
    guard = ("~" if c.negated else "") + e.boolean(c.pred)
    return f"return ({guard},{target},{index + 1})"

"""Find missing wgmma.fence instructions in PTX; a run in the emulator does not show them.

A warpgroup must execute wgmma.fence before its first wgmma.mma_async, and again before one whose
registers (accumulator or A fragment) were written since. As an exception, wgmma.mma_async of the
same shape may accumulate in the same registers one after another (PTX ISA, wgmma.fence).
"""

from __future__ import annotations

import re

from attnkit.emulator.faults import Finding, Place
from attnkit.emulator.ptx.control_flow import successors
from attnkit.emulator.ptx.kernel import Instr, PtxKernel

# Instructions whose first operand is not a destination.
_NO_DESTINATION: tuple[str, ...] = (
    "st",
    "red",
    "bra",
    "ret",
    "exit",
    "bar",
    "barrier",
    "fence",
    "cp",
    "wgmma",
)
_NO_DESTINATION += ("stmatrix", "prefetch", "setmaxnreg", "membar", "nanosleep", "griddepcontrol")
_REGISTER = re.compile(r"%?[\w$]+(?:@\d+)?")
State = frozenset[str]
FIRST = "(none yet)"  # member of a state: some path from the kernel's entry has had no fence


def missing_fences(kernel: PtxKernel) -> list[Finding]:
    """Report each wgmma.mma_async that uses registers written since the last wgmma.fence.

    This is a data-flow analysis. The state is the set of accumulator and A registers that were
    written since the last fence, on any path of the control flow.
    """
    watched = _watched(kernel)
    if not watched:
        return []
    entry: dict[int, State] = {0: frozenset({FIRST})}
    work, findings = [0], dict[int, Finding]()
    while work:
        b = work.pop()
        state = entry[b]
        for c in kernel.blocks[b]:
            state = _step(c, state, watched, findings)
        for nxt in successors(kernel, b):
            joined = entry.get(nxt, frozenset()) | state
            if nxt not in entry or joined != entry[nxt]:
                entry[nxt] = joined
                work.append(nxt)
    return [findings[line] for line in sorted(findings)]


def _operands(c: Instr) -> tuple[set[str], set[str]]:
    """Return (accumulator registers, A registers) of a wgmma.mma_async."""
    d = set(_REGISTER.findall(c.args[0]))
    a = set(_REGISTER.findall(c.args[1])) if c.args[1].startswith("{") else set()
    return d, a


def _watched(kernel: PtxKernel) -> set[str]:
    """Return the accumulator and A registers of all wgmma.mma_async."""
    out: set[str] = set()
    for c in kernel.instructions():
        if c.op.startswith("wgmma.mma_async"):
            d, a = _operands(c)
            out |= d | a
    return out


def _step(c: Instr, state: State, watched: set[str], findings: dict[int, Finding]) -> State:
    """Return the state after an instruction; add a finding if a fence is missing."""
    if c.op.startswith("wgmma.fence"):
        return frozenset()
    if c.op.startswith("wgmma.mma_async"):
        d, a = _operands(c)
        bad = state & (d | a | {FIRST})
        # A product needs the fence for earlier writes even if it overwrites its accumulator.
        if bad:
            regs = ", ".join(sorted(x for x in bad if x != FIRST)[:4])
            text = (
                f"no wgmma.fence since {regs} was written" if regs else "no wgmma.fence before it"
            )
            place = Place(line=c.line, source=str(c.source or ""))
            findings.setdefault(c.line, Finding("fence", f"wgmma.mma_async: {text}", place))
        return state - d - {FIRST}
    if c.parts[0] in _NO_DESTINATION or not c.args:
        return state
    written = set(_REGISTER.findall(c.args[0])) & watched
    return state | written if written else state

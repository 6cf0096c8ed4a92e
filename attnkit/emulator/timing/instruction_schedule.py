"""Predict the time of straight-line code, for a warp that has its part of the SM to itself.

At each clock, the first instruction in PTX order issues whose operands are ready and whose unit is
free. This approximates the order that a compiler chooses: it moves independent instructions ahead
of those that must wait, and otherwise keeps the order. An SM has four equal parts, and warp w runs
on part w % 4. `cycles` has the rates of the units.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from attnkit.emulator.ptx.kernel import Instr, PtxKernel
from attnkit.emulator.timing.cycles import Rates, unit_of

PARTS = 4  # number of parts of an SM
# Clocks until a dependent instruction can issue (microbenchmarks of Volta to Hopper, rounded):
# arithmetic, special functions, shared memory and shuffles, votes, loads from the L2 cache.
# Tensor memory is assumed to have the latency of shared memory, after the transfer itself.
ALU, SPECIAL, SHARED, VOTE, GLOBAL = 4, 18, 24, 12, 280
_LATENCY = {"special": SPECIAL, "shared": SHARED}
_OF_OPCODE = {"vote": VOTE, "redux": VOTE, "match": VOTE, "mma": 33, "atom": 2 * GLOBAL}

# Instructions without cost here: moves only rename registers, and the replay times events.
_FREE = {"mov", "cvta", "ret", "exit", "mbarrier", "wgmma", "tcgen05", "cp", "bar", "barrier"}
_FREE |= {"fence", "setmaxnreg", "griddepcontrol", "prefetch", "prefetchu", "createpolicy"}
_REGISTER = re.compile(r"%[\w$]+(?:@\d+)?")


@dataclass(frozen=True)
class Pace:
    """Describes how fast a warp issues instructions.

    Attributes:
        step: clocks from one instruction to the next.
        hold: factor on the clocks for which an instruction keeps its unit busy.
    """

    step: float = 1.0
    hold: float = 1.0


@dataclass(frozen=True)
class Segment:
    """Holds the time of straight-line code that has no events inside, in clocks.

    Attributes:
        clocks: time that it takes if the warp is alone on its part of the SM.
        contended: time that it takes while tensor cores are busy.
        units: time for which each unit is busy.
    """

    clocks: float
    contended: float
    units: dict[str, float]


def registers(c: Instr) -> tuple[list[str], list[str]]:
    """Return (registers written, registers read)."""
    stores = c.parts[0] in ("st", "red", "bra", "stmatrix", "nanosleep", "cp", "bar", "barrier")
    stores = stores or c.op.startswith("tcgen05.st")
    operands = [_REGISTER.findall(a) for a in c.args]
    written = [] if stores or not operands else operands[0]
    read = [r for a in operands[0 if stores else 1 :] for r in a]
    return written, read + ([c.pred] if c.pred else [])


@dataclass(frozen=True)
class KernelFacts:
    """Holds facts about a kernel that the schedule of a segment needs.

    Attributes:
        read: number of instructions that read each register.
        varying: registers that may differ between the threads of a warp. Others are uniform
            registers, whose arithmetic costs only the clock in which it issues.
    """

    read: Counter[str]
    varying: frozenset[str]

    @classmethod
    def of(cls, kernel: PtxKernel) -> KernelFacts:
        """Collect the facts about a kernel."""
        code = [(c, *registers(c)) for c in kernel.instructions()]
        read = Counter(r for _, _, used in code for r in set(used))
        readers: dict[str, list[tuple[Instr, list[str]]]] = {}
        for c, written, used in code:
            for r in used:
                readers.setdefault(r, []).append((c, written))
        work = [r for c, written, used in code if _diverges(c, used) for r in written]
        varying: set[str] = set()
        while work:
            r = work.pop()
            if r not in varying:
                varying.add(r)
                work += [w for c, ws in readers.get(r, ()) if not _unites(c) for w in ws]
        return cls(read, frozenset(varying))


def _unites(c: Instr) -> bool:
    """Return whether the result is the same in all threads of a warp, whatever the operands."""
    return c.parts[0] in ("vote", "redux") or c.op.startswith("shfl.sync.idx")


def _diverges(c: Instr, used: list[str]) -> bool:
    """Return whether the result may differ between threads even if the operands do not."""
    loads = c.parts[0] in ("ld", "ldmatrix", "mma", "elect", "atom", "tcgen05", "wgmma")
    if loads and "param" not in c.op:
        return True
    if c.parts[-1] in ("f32", "f32x2", "f16x2", "bf16x2"):  # Hopper has no uniform float arithmetic
        return c.parts[0] not in ("mov", "ld")
    return any(x.startswith(("%tid", "%laneid", "%lanemask", "%clock")) for x in used)


def _contracts(c: Instr, kinds: tuple[str, ...]) -> bool:
    """Return whether ptxas may fuse this product or sum into an FMA."""
    return c.parts[0] in kinds and c.parts[-1] in ("f32", "f64") and "rn" not in c.parts


def fused(code: Sequence[Instr], read: Counter[str]) -> set[int]:
    """Return the indices of the instructions that ptxas merges with the user of their result.

    These are products that a sum uses, and bitwise ands that a comparison uses.
    """
    first: dict[str, int] = {}
    out = set()
    for i, c in enumerate(code):
        written, used = registers(c)
        if _contracts(c, ("add", "sub")) or (c.parts[0] == "setp" and c.parts[-1] == "b32"):
            merged = next((r for r in used if r in first), None)
            if merged is not None:
                out.add(first.pop(merged))
        merges = _contracts(c, ("mul",)) or c.op == "and.b32"
        if merges and written and read[written[0]] == 1:
            first[written[0]] = i
    return out


def occupancy(c: Instr, rates: Rates) -> tuple[str, float]:
    """Return (unit, clocks for which an instruction of a warp keeps that unit of its part busy)."""
    if c.op.startswith("mma.sync"):
        m, n, k = re.search(r"m(\d+)n(\d+)k(\d+)", c.op).groups()  # type: ignore[union-attr]
        return "tensor", 2 * int(m) * int(n) * int(k) * PARTS / rates.tensor
    if c.op.startswith(("tcgen05.ld", "tcgen05.st")):
        wide = re.search(r"\.x(\d+)", c.op)
        return "tensor_memory", 128 * int(
            wide.group(1) if wide else 1
        ) * PARTS / rates.tensor_memory
    unit, lanes = unit_of(c.op)
    return unit, 32 * lanes * PARTS / getattr(rates, unit) if unit else 0.0


def _free(c: Instr) -> bool:
    """Return whether an instruction costs nothing here: it renames registers, or is an event."""
    if c.op.startswith(("tcgen05.ld", "tcgen05.st")) or (c.inline and c.parts[0] == "mov"):
        return False
    return c.parts[0] in _FREE and not c.op.startswith("tcgen05.wait")


def _latency(c: Instr, unit: str) -> int:
    """Return the clocks until a dependent instruction can issue."""
    if c.parts[0] == "ld" and "shared" not in c.op and "param" not in c.op:
        return GLOBAL
    return _OF_OPCODE.get(c.parts[0], _LATENCY.get(unit, ALU))


def segment(code: Sequence[Instr], rates: Rates, facts: KernelFacts, contended: Pace) -> Segment:
    """Return the time of straight-line code.

    Args:
        code: a part of one basic block.
        facts: facts about the kernel that contains the code.
        contended: pace of the warp while tensor cores work.
    """
    dropped = fused(code, facts.read)
    nodes: list[tuple[str, float, int]] = []  # unit, occupancy, latency
    after: list[list[int]] = []
    waits: list[int] = []
    maker: dict[str, int] = {}
    for i, c in enumerate(code):
        written, used = registers(c)
        makers = {maker[r] for r in used if r in maker}
        if c.op.startswith("tcgen05.wait"):  # alone in its block; the transfer is over by now
            nodes.append(("", 0.0, SHARED))
            after.append([])
            waits.append(0)
            makers = {len(nodes) - 1}
        if i in dropped or _free(c):
            for r in written:  # ready with the operand that is computed last in program order
                maker.pop(r, None)
                if makers:
                    maker[r] = max(makers)
            continue
        uniform = not any(r in facts.varying for r in (*written, *used))
        unit, clocks = ("", 0.0) if uniform else occupancy(c, rates)
        node = len(nodes)
        nodes.append((unit, clocks, _latency(c, unit)))
        after.append([])
        waits.append(len(makers))
        for j in makers:
            after[j].append(node)
        maker.update(dict.fromkeys(written, node))
    units: defaultdict[str, float] = defaultdict(float)
    for unit, clocks, _ in nodes:
        units["issue"] += 1
        if unit:
            units[unit] += clocks
    alone, slower = (_makespan(nodes, after, list(waits), x) for x in (Pace(), contended))
    return Segment(alone, slower, dict(units))


def _makespan(
    nodes: list[tuple[str, float, int]], after: list[list[int]], waits: list[int], pace: Pace
) -> float:
    """Return the clocks until the last instruction has left its unit.

    The next instruction to issue is the first in program order whose operands are ready and whose
    unit is free.

    Args:
        nodes: (unit, occupancy, latency) of each instruction.
        after: for each instruction, those that use its result.
        waits: for each instruction, how many results it needs; the list is changed.
    """
    free: dict[str, float] = {}
    ready_at = [0.0] * len(nodes)
    future = [(0.0, i) for i, n in enumerate(waits) if not n]
    heapq.heapify(future)
    ready: list[int] = []
    now, end = 0.0, 0.0
    while future or ready:
        while future and future[0][0] <= now:
            i = heapq.heappop(future)[1]
            heapq.heappush(ready, i)
        held = []
        chosen = -1
        while ready:
            i = heapq.heappop(ready)
            if free.get(nodes[i][0], 0.0) <= now or not nodes[i][0]:
                chosen = i
                break
            held.append(i)
        for i in held:
            heapq.heappush(ready, i)
        if chosen < 0:
            times = [free[nodes[i][0]] for i in held] + ([future[0][0]] if future else [])
            now = max(now + 1, min(times)) if times else now + 1
            continue
        unit, clocks, latency = nodes[chosen]
        if unit:
            free[unit] = now + pace.hold * clocks
        end = max(end, now + max(pace.hold * clocks, 1.0))
        for j in after[chosen]:
            ready_at[j] = max(ready_at[j], now + latency)
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(future, (ready_at[j], j))
        now += pace.step if unit else 1.0
    return end

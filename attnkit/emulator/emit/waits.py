"""Emit Python code for instructions that may wait.

Each of them is a basic block of its own, whose function returns None while it has to wait.
"""

from __future__ import annotations

from attnkit.emulator.emit.emitter import Emitter
from attnkit.emulator.emit.memory import atomic, load
from attnkit.emulator.ptx.kernel import Instr, PtxKernel, is_poll


def is_spin(kernel: PtxKernel, index: int) -> bool:
    """Return whether the wait in block `index` begins a loop that does nothing but wait."""
    blocks, labels = kernel.blocks, kernel.labels
    wait = blocks[index][0]
    nxt = blocks[index + 1][0] if index + 1 < len(blocks) else None
    if nxt is None or nxt.parts[0] != "bra" or nxt.pred != wait.args[0]:
        return False
    if nxt.negated:
        return labels.get(nxt.args[0]) == index
    after = blocks[index + 2][0] if index + 2 < len(blocks) else None
    if after is None or after.parts[0] != "bra" or after.pred:
        return False
    return labels.get(after.args[0]) == index


def waiting(e: Emitter, index: int) -> list[str]:
    """Return the lines of block `index`, which consists of one instruction that may wait."""
    c = e.kernel.blocks[index][0]
    e.masked = True
    out = []
    if c.pred:
        guard = e.boolean(c.pred)
        out = [f"m=W.narrowed(m,{'~' if c.negated else ''}{guard})", "if m is None:"]
        out.append(f"  return {index + 1}")
    out.append(f"W.line={c.line}")
    if c.op.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        out += _try_wait(e, c, index)
    elif is_poll(c):
        out += _poll(e, c, index)
    else:
        out.append(f"if not {_call(e, c, index)}:")
        out.append("  return None")
    return [*out, f"return {index + 1}"]


def _try_wait(e: Emitter, c: Instr, index: int) -> list[str]:
    """Emit mbarrier.try_wait or mbarrier.test_wait."""
    spin = is_spin(e.kernel, index)
    parity = "parity" in c.parts
    phase = e.val(c.args[2], "u4" if parity else "u8")
    flags = f"{spin},{parity},{'relaxed' in c.parts}"
    out = [f"T=mbarrier_test_wait(W,{e.addr(c.args[1])},{phase},m,{flags})", "if T is None:"]
    return [*out, "  return None", *e.put(c.args[0], "T", "bool")]


def _poll(e: Emitter, c: Instr, index: int) -> list[str]:
    """Emit a load or atomic on global memory that a warp may repeat in a spin loop."""
    body = load(e, c) if c.parts[0] == "ld" else atomic(e, c)
    watch = [e.index[r] for r in e.vector(c.args[0]) if r in e.index]
    return [*body, f"note_poll(W,{index},{watch},m)"]


def _call(e: Emitter, c: Instr, index: int) -> str:
    """Return a call of the operation; its result is whether the warps may go on."""
    p, a, op = c.parts, c.args, c.op
    if p[0] in ("bar", "barrier") and "cluster" in p:
        return f"cluster_arrive(W,m,{'relaxed' in p})" if "arrive" in p else "cluster_wait(W,m)"
    if p[0] in ("bar", "barrier") and "warp" in p:
        return f"warp_sync(W,{index},{e.val(a[0], 'u4')},m)"
    if p[0] in ("bar", "barrier"):
        if "red" in p:
            raise e.fail(c)
        n = e.val(a[1], "u4") if len(a) > 1 else "None"
        return f"bar(W,{index},{e.val(a[0], 'u4')},{n},m,{'arrive' in p})"
    if op.startswith("cp.async.bulk.wait_group"):
        return f"bulk_wait(W,{int(a[0], 0)},{'read' in p},m)"
    if op.startswith("cp.async.wait"):
        return f"cp_async_wait(W,{int(a[0], 0) if 'wait_group' in p else -1})"
    if op.startswith("wgmma.wait_group"):
        return f"wgmma_wait(W,{int(a[0], 0)})"
    if op.startswith("tcgen05.wait"):
        return f"tcgen05_wait(W,{'wait::st' in p})"
    if p[0] == "nanosleep":
        return "nanosleep(W)"
    raise e.fail(c)

"""Emit Python code for asynchronous copies, tensor-core instructions and cluster launch control.

The opcodes are cp, mma, wgmma, tcgen05 and clusterlaunchcontrol.
"""

from __future__ import annotations

import re

from attnkit.emulator.emit.emitter import Emitter
from attnkit.emulator.machine.async_groups import WgmmaForm
from attnkit.emulator.ptx.kernel import Instr


def cp(e: Emitter, c: Instr) -> list[str]:
    """Emit cp.async, cp.async.bulk, cp.async.bulk.tensor or cp.reduce.async.bulk.

    This includes commit_group and mbarrier.arrive, but not wait_group, which `waits` emits. A
    prefetch needs no code.
    """
    op, p = c.op, c.parts
    if op.startswith("cp.async.bulk.commit_group"):
        return ["bulk_commit(W,m)"]
    if op.startswith("cp.async.commit_group"):
        return ["cp_async_commit(W)"]
    if op.startswith("cp.async.mbarrier.arrive"):
        return [f"cp_async_arrive(W,{e.addr(c.args[0])},m,{'noinc' in p})"]
    if "prefetch" in p:
        return []
    if "tensor" in p:
        return _tensor(e, c)
    if "bulk" in p:
        return _bulk(e, c)
    if op.startswith(("cp.async.ca", "cp.async.cg")):
        if "ignore-src" in op:
            raise e.fail(c)
        n = int(c.args[2], 0)
        operands = c.args[:-1] if "L2::cache_hint" in p else c.args
        size = operands[3] if len(operands) > 3 else operands[2]
        src = e.val(size, "u4")
        return [f"cp_async(W,{e.addr(c.args[0])},{e.addr(c.args[1])},{n},{src},m)"]
    raise e.fail(c)


def _map_operand(e: Emitter, a: str) -> tuple[str, str]:
    """Return expressions for the tensor map's address and the coordinates in `[map, {x, y}]`."""
    inner = a.strip()[1:-1]
    i = inner.index("{")
    coords = e.values(inner[i:], "i4")
    return e.val(inner[:i].strip().rstrip(","), "u8"), coords


def _tensor(e: Emitter, c: Instr) -> list[str]:
    """Emit a TMA load, store or reduction (cp.async.bulk.tensor)."""
    p, a = c.parts, c.args
    if not c.has("tile") and any(x.startswith("im2col") or "gather" in x for x in p):
        raise e.fail(c)
    to_shared = next(x for x in p if x == "global" or x.startswith("shared")) != "global"
    if to_shared:
        desc, coords = _map_operand(e, a[1])
        multicast = any("multicast" in x for x in p)
        mask = e.val(a[3], "u4") if multicast else "None"
        return [f"tma_load(W,{e.addr(a[0])},{desc},{coords},{e.addr(a[2])},m,{mask})"]
    desc, coords = _map_operand(e, a[0])
    how = c.option("add", "min", "max", "inc", "dec", "and", "or", "xor")
    return [f"tma_store(W,{desc},{coords},{e.addr(a[1])},m,{how!r})"]


def _bulk(e: Emitter, c: Instr) -> list[str]:
    """Emit a bulk copy or reduction without a tensor map."""
    p, a = c.parts, c.args
    spaces = [x.split("::")[0] for x in p if x.split("::")[0] in ("shared", "global")]
    size = e.val(a[2], "u4")
    how = c.option("add", "min", "max", "inc", "dec", "and", "or", "xor")
    kind = p[-1] if p[1] == "async" and p[0] == "cp" and how else ""
    if spaces == ["shared", "global"]:
        mask = e.val(a[4], "u4") if any("multicast" in x for x in p) else "None"
        return [f"bulk_load(W,{e.addr(a[0])},{e.addr(a[1])},{size},{e.addr(a[3])},m,{mask})"]
    if spaces == ["shared", "shared"]:
        kind = p[-1] if how else ""
        bar = e.addr(a[3])
        return [f"bulk_remote(W,{e.addr(a[0])},{e.addr(a[1])},{size},{bar},m,{how!r},{kind!r})"]
    if spaces == ["global", "shared"]:
        kind = p[-1] if how else ""
        return [f"bulk_store(W,{e.addr(a[0])},{e.addr(a[1])},{size},m,{how!r},{kind!r})"]
    raise e.fail(c)


def wgmma(e: Emitter, c: Instr) -> list[str]:
    """Emit wgmma.mma_async, wgmma.fence or wgmma.commit_group."""
    p, a = c.parts, c.args
    if p[1] == "fence":
        return []  # registers are accessed in order here; `ptx.wgmma_fences` finds missing fences
    if p[1] == "commit_group":
        return ["wgmma_commit(W)"]
    shape = next((re.fullmatch(r"m64n(\d+)k(\d+)", x) for x in p if x.startswith("m64")), None)
    if p[1] != "mma_async" or shape is None or "sp" in p:
        raise e.fail(c)
    n, k = int(shape.group(1)), int(shape.group(2))
    dt, at, bt = (x for x in p[-3:])
    if dt not in ("f32", "f16", "s32") or c.has("satfinite"):
        raise e.fail(c)
    d = tuple(e.index[x] for x in e.vector(a[0]))
    in_regs = a[1].startswith("{")
    first = str(tuple(e.index[x] for x in e.vector(a[1]))) if in_regs else e.val(a[1], "u8")
    imm = [int(x, 0) for x in a[4:]]
    scale = (imm[0], imm[1]) if dt != "s32" else (1, 1)
    transposed = imm[2:]
    ta, tb = (
        (0, transposed[0])
        if in_regs and transposed
        else ((transposed[0], transposed[1]) if len(transposed) == 2 else (0, 0))
    )
    form = e.object(WgmmaForm(d, n, k, (dt, at, bt), scale, (ta, tb), in_regs))
    return [f"wgmma(W,{form},{first},{e.val(a[2], 'u8')},{e.boolean(a[3])},m)"]


def mma(e: Emitter, c: Instr) -> list[str]:
    """Emit mma.sync, which computes one small matrix product per warp."""
    p, a = c.parts, c.args
    shapes = [re.fullmatch(r"m(\d+)n(\d+)k(\d+)", x) for x in p]
    shape = next((x for x in shapes if x), None)
    if shape is None or "sp" in p or any("block_scale" in x for x in p) or not c.has("row"):
        raise e.fail(c)
    if c.has("satfinite"):
        raise e.fail(c, "saturation of s32")
    m, n, k = (int(x) for x in shape.groups())
    dt, at, bt = p[-4], p[-3], p[-2]
    if (m, n) != (16, 8) or not c.has("col") or "b1" in p:
        raise e.fail(c)
    args = ",".join(e.values(x, "u4") for x in a[1:4])
    out = [f"T=mma(W,({m},{n},{k}),('{dt}','{at}','{bt}'),{args},m)"]
    for j, r in enumerate(e.vector(a[0])):
        t = "f4" if dt == "f32" else "u4"
        out += e.put(r, f"T[{j}]", t)
    return out


def tcgen05(e: Emitter, c: Instr) -> list[str]:
    """Emit a tcgen05 instruction of Blackwell's tensor cores and tensor memory, except a wait."""
    what, a = c.parts[1], c.args
    group = 2 if "cta_group::2" in c.op else 1
    if what == "alloc":
        return [f"tcgen05_alloc(W,{e.addr(a[0])},{e.val(a[1], 'u4')},{group},m)"]
    if what == "dealloc":
        return [f"tcgen05_dealloc(W,{e.val(a[0], 'u4')},{e.val(a[1], 'u4')},{group},m)"]
    if what == "relinquish_alloc_permit":
        return ["tcgen05_relinquish_alloc_permit(W)"]
    if what == "fence::before_thread_sync" or what == "fence::after_thread_sync":
        return [f"fence_tensor(W,{'after' in what})"]
    if what == "commit":
        mask = e.val(a[1], "u4") if "multicast" in c.op else "None"
        return [f"tcgen05_commit(W,{e.addr(a[0])},m,{mask},{group})"]
    if what == "mma":
        return _tc_mma(e, c, group)
    if what == "cp":
        return [
            f"tcgen05_cp(W,{e.addr(a[0])},{e.val(a[1], 'u8')},'{_tc_cp_shape(e, c)}',{group},m)"
        ]
    if what in ("ld", "st"):
        return _tc_move(e, c)
    raise e.fail(c)


def _tc_cp_shape(e: Emitter, c: Instr) -> str:
    """Return the shape of a tcgen05.cp."""
    shape = c.option("128x256b", "128x128b", "32x128b", "64x128b", "4x256b")
    if shape is None or shape in ("64x128b", "4x256b") or any(x.startswith("b") for x in c.parts):
        raise e.fail(c)
    return shape


def _tc_move(e: Emitter, c: Instr) -> list[str]:
    """Emit tcgen05.ld or tcgen05.st."""
    shape = c.option("32x32b", "16x128b", "16x256b")
    if shape is None or c.has("red", "pack::16b", "unpack::16b", "spill"):
        raise e.fail(c)
    if c.parts[1] == "st":
        return [f"tcgen05_st(W,{e.addr(c.args[0])},'{shape}',{e.values(c.args[1], 'u4')},m)"]
    regs = e.vector(c.args[0])
    out = [f"T=tcgen05_ld(W,{e.addr(c.args[1])},'{shape}',{len(regs)},m)"]
    for j, r in enumerate(regs):
        out += e.put(r, f"T[{j}]", "u4")
    return out


def _tc_mma(e: Emitter, c: Instr, group: int) -> list[str]:
    """Emit tcgen05.mma."""
    kind = next((x for x in c.parts if x.startswith("kind::")), "")
    if kind not in ("kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8"):
        raise e.fail(c)
    if c.has("sp", "ws", "block_scale") or any(x.startswith("scale_vec") for x in c.parts):
        raise e.fail(c)
    a = c.args
    in_tmem = a[1].startswith("[")
    first = e.addr(a[1]) if in_tmem else e.val(a[1], "u8")
    optional = list(a[4:])
    disable = (
        e.values(optional.pop(0), "u4") if optional and optional[0].startswith("{") else "None"
    )
    accumulate = e.boolean(optional.pop(0)) if optional else e.const(True, "bool")
    if optional:
        raise e.fail(c, "scale-input-d")
    return [
        f"tcgen05_mma(W,{e.addr(a[0])},{first},{in_tmem},{e.val(a[2], 'u8')},{e.val(a[3], 'u4')},"
        f"{accumulate},'{kind[6:]}',{group},m,{disable})"
    ]


def clc(e: Emitter, c: Instr) -> list[str]:
    """Emit clusterlaunchcontrol: request the next cluster of the grid, or decode the response."""
    if c.parts[1] == "try_cancel":
        every = any("multicast" in x for x in c.parts)
        return [f"clc_try_cancel(W,{e.addr(c.args[0])},{e.addr(c.args[1])},m,{every})"]
    if c.op.startswith("clusterlaunchcontrol.query_cancel.is_canceled"):
        return e.put(c.args[0], f"clc_is_canceled(W,{e.val(c.args[1], 'c16')},m)", "bool")
    if c.op.startswith("clusterlaunchcontrol.query_cancel.get_first_ctaid"):
        out = [f"T=clc_first_ctaid({e.val(c.args[1], 'c16')})"]
        axis = next((p[-1] for p in c.parts if p.startswith("get_first_ctaid::")), None)
        regs = e.vector(c.args[0])
        for j, r in enumerate(regs):
            out += e.put(r, f"T[{'xyz'.index(axis) if axis else j}]", "u4") if r != "_" else []
        return out
    raise e.fail(c)


ASYNC_OPS = {"cp": cp, "wgmma": wgmma, "mma": mma, "tcgen05": tcgen05, "clusterlaunchcontrol": clc}

"""Emit Python code for moves, selection, comparison, conversion and warp-wide instructions."""

from __future__ import annotations

from attnkit.emulator.emit.emitter import BYTES, NUMPY, Emitter
from attnkit.emulator.ptx.kernel import Instr

_ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_INT_CMP = {**_ORDERED, "ne": "!=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_INVERSE = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
_CMP = {*_INT_CMP, "neu", "equ", "nan", "num", *_INVERSE}


def mov(e: Emitter, c: Instr) -> list[str]:
    """Emit mov, including the forms that pack or unpack a vector of registers."""
    d, s = c.args[0], c.args[1]
    if c.parts[-1] == "pred":
        return e.put(d, e.boolean(s), "bool")
    size = BYTES[NUMPY.get(c.parts[-1], "u4")]
    if d.startswith("{"):
        return _unpack(e, d, s, size)
    if s.startswith("{"):
        return e.put(d, _pack(e, s, size), f"u{size}" if size < 16 else "c16")
    t = e.stored(d, size)
    return e.put(d, e.val(s, t), t)


def _unpack(e: Emitter, d: str, s: str, size: int) -> list[str]:
    """Return code that splits register `s` of `size` bytes into the registers of `d`."""
    regs = e.vector(d)
    if size == 16:
        out = [f"T={e.val(s, 'c16')}.view(u8)"]
        for j, r in enumerate(regs):
            out += e.put(r, f"T[{j}::2]", "u8")
        return out
    t, w = f"u{size}", size // len(regs)
    out = [f"T={e.val(s, t)}"]
    for j, r in enumerate(regs):
        shifted = f"(T>>{e.const(8 * w * j, t)})" if j else "T"
        out += e.put(r, f"{shifted}.astype(u{w})", f"u{w}")
    return out


def _pack(e: Emitter, s: str, size: int) -> str:
    """Return an expression that joins the registers of `s` into a value of `size` bytes."""
    regs = e.vector(s)
    if size == 16:
        return f"quad({e.val(regs[0], 'u8')},{e.val(regs[1], 'u8')})"
    t, w = f"u{size}", size // len(regs)
    if size == 8 and w == 4:
        return f"pack2({e.val(regs[0], 'u4')},{e.val(regs[1], 'u4')})"
    one = [
        f"({e.val(r, f'u{w}')}.astype({t})<<{e.const(8 * w * j, t)})" for j, r in enumerate(regs)
    ]
    return "|".join(one)


def selp(e: Emitter, c: Instr) -> list[str]:
    """Emit selp."""
    a = c.args
    t = e.stored(a[0], BYTES[NUMPY[c.parts[-1]]])
    return e.put(a[0], f"where({e.boolean(a[3])},{e.val(a[1], t)},{e.val(a[2], t)})", t)


def compare(e: Emitter, c: Instr, cmp: str, kind: str) -> str:
    """Return an expression for comparison `cmp` of operands of PTX type `kind`."""
    a, b = c.args[1], c.args[2]
    if kind in ("f16", "bf16"):
        x, y = (f"{kind}_to_f32({e.val(v, 'u2')})" for v in (a, b))
    else:
        t = NUMPY[kind]
        x, y = e.val(a, t), e.val(b, t)
        if t[0] != "f":
            return f"({x}{_INT_CMP[cmp]}{y})"
        if "ftz" in c.parts:
            x, y = f"ftz({x})", f"ftz({y})"
    if cmp in _ORDERED:
        return f"({x}{_ORDERED[cmp]}{y})"
    if cmp in _INVERSE:
        return f"~({x}{_INVERSE[cmp]}{y})"
    table = {
        "ne": f"(({x}<{y})|({x}>{y}))",
        "neu": f"({x}!={y})",
        "equ": f"~(({x}<{y})|({x}>{y}))",
        "nan": f"(np.isnan({x})|np.isnan({y}))",
        "num": f"~(np.isnan({x})|np.isnan({y}))",
    }
    return table[cmp]


def setp(e: Emitter, c: Instr) -> list[str]:
    """Emit setp, with an optional second destination and an optional Boolean operand."""
    cmp, kind = c.option(*_CMP), c.parts[-1]
    if cmp is None or (kind not in NUMPY and kind not in ("f16", "bf16")):
        raise e.fail(c)
    out = compare(e, c, cmp, kind)
    both = c.args[0].split("|")
    op = c.option("and", "or", "xor")
    if op is None and len(both) == 1:
        return e.put(both[0], out, "bool")
    code = [f"T={out}"]
    operand = e.boolean(c.args[3].lstrip("!")) if op else ""
    if op and c.args[3].startswith("!"):
        operand = f"~{operand}"
    sign = {"and": "&", "or": "|", "xor": "^"}.get(op or "", "")
    for d, value in zip(both, ("T", "~T"), strict=False):
        code += e.put(d.strip(), f"({value}){sign}{operand}" if op else value, "bool")
    return code


def cvt(e: Emitter, c: Instr) -> list[str]:
    """Emit cvt."""
    p, a = c.parts, c.args
    dt, st = p[-2], p[-1]
    if dt in ("bf16x2", "f16x2", "e4m3x2", "e5m2x2") or st in ("e4m3x2", "e5m2x2"):
        return _cvt_pair(e, c, dt, st)
    if dt == "tf32":
        if not c.has("rna") or c.has("relu", "satfinite"):
            raise e.fail(c)
        return e.put(a[0], f"f32_to_tf32({e.val(a[1], 'f4')})", "f4")
    src = st if st in ("bf16", "f16") else NUMPY.get(st, "")
    dst = dt if dt in ("bf16", "f16") else NUMPY.get(dt, "")
    if not src or not dst:
        raise e.fail(c)
    t = "f4" if src in ("bf16", "f16") else src
    x = f"{src}_to_f32({e.val(a[1], 'u2')})" if t != src else e.val(a[1], src)
    if dst in ("bf16", "f16"):
        return _cvt_half(e, c, x, t, dst)
    return e.put(a[0], _cvt_scalar(e, c, x, t, dst), dst)


def _cvt_scalar(e: Emitter, c: Instr, x: str, src: str, dst: str) -> str:
    """Return an expression for a conversion between numpy types."""
    p = c.parts
    mode = c.option("rzi", "rni", "rmi", "rpi")
    directed = c.option("rz", "rm", "rp")
    if "ftz" in p and src == "f4":
        x = f"ftz({x})"
    if dst[0] == "f" and src[0] == "f":
        if mode:
            fn = {"rzi": "trunc", "rni": "rint", "rmi": "floor", "rpi": "ceil"}[mode]
            x = f"np.{fn}({x})"
        out = f"directed({x},'{directed}')" if directed and dst < src else f"{x}.astype({dst})"
        if "sat" in p:
            out = f"np.nan_to_num(np.clip({out},{e.const(0, dst)},{e.const(1, dst)}))"
        return f"ftz({out})" if "ftz" in p else out
    if dst[0] == "f":
        if directed and BYTES[src] == 8:
            raise e.fail(c, "directed rounding of 64-bit integers")
        wide = directed and BYTES[src] == 4 and dst == "f4"
        return f"directed({x}.astype(f8),'{directed}')" if wide else f"{x}.astype({dst})"
    if src[0] == "f":
        if mode is None:
            raise e.fail(c)
        return f"float_to_int({x},'{mode}',{dst})"
    return f"int_to_int({x},{dst})" if "sat" in p else f"{x}.astype({dst})"


def _cvt_half(e: Emitter, c: Instr, x: str, src: str, dst: str) -> list[str]:
    """Emit a conversion to f16 or bf16."""
    if c.has("sat", "satfinite", "rs") or (src[0] != "f" and BYTES[src] == 8):
        raise e.fail(c)
    if c.has("rz") and dst == "bf16":
        fn = "f32_to_bf16_rz"
    elif c.has("rn"):
        fn = f"f32_to_{dst}"
    else:
        raise e.fail(c)
    x = x if src == "f4" else f"odd({x}.astype(f8))"
    x = f"np.fmax({x},{e.const(0.0, 'f4')})" if c.has("relu") else x
    return e.put(c.args[0], f"{fn}({x})", "u2")


def _cvt_pair(e: Emitter, c: Instr, dt: str, st: str) -> list[str]:
    """Emit a conversion of two values to a packed pair: the first source is the upper half."""
    a = c.args
    if dt in ("bf16x2", "f16x2") and st == "f32":
        hi, lo = e.val(a[1], "f4"), e.val(a[2], "f4")
        if c.has("relu"):
            hi, lo = (f"np.fmax({v},{e.const(0.0, 'f4')})" for v in (hi, lo))
        fn = f"{dt}_rz" if c.has("rz") else dt
        if fn == "f16x2_rz" or c.has("rs", "satfinite"):
            raise e.fail(c)
        return e.put(a[0], f"{fn}({hi},{lo})", "u4")
    if dt.startswith("e") and st == "f32":
        x = f"fp8x2({e.val(a[1], 'f4')},{e.val(a[2], 'f4')},'{dt[:-2]}')"
        return e.put(a[0], x, "u2")
    if dt.startswith("e") and st == "f16x2":
        return e.put(a[0], f"f16x2_to_fp8x2({e.val(a[1], 'u4')},'{dt[:-2]}')", "u2")
    if dt == "f16x2" and st.startswith("e") and not c.has("relu"):
        return e.put(a[0], f"fp8x2_to_f16x2({e.val(a[1], 'u2')},'{st[:-2]}')", "u4")
    raise e.fail(c)


def cvta(e: Emitter, c: Instr) -> list[str]:
    """Emit cvta as a move, because here an address has the same value in every state space."""
    size = BYTES[NUMPY[c.parts[-1]]]
    return e.put(c.args[0], e.val(c.args[1], f"u{size}"), f"u{size}")


def elect(e: Emitter, c: Instr) -> list[str]:
    """Emit elect.sync."""
    d, p = (x.strip() for x in c.args[0].split("|"))
    out = ["T=elect(W,m)"]
    if d != "_":
        out += e.put(d, "T[1]", "u4")
    return out + e.put(p, "T[0]", "bool")


def shfl(e: Emitter, c: Instr) -> list[str]:
    """Emit shfl.sync."""
    a = c.args
    mode = c.option("idx", "bfly", "up", "down")
    both = [x.strip() for x in a[0].split("|")]
    t = e.stored(both[0], 4)
    args = f"{e.val(a[1], t)},{e.val(a[2], 'u4')},{e.val(a[3], 'u4')},'{mode}'"
    out = [f"T=shfl(W,{args},m)", *e.put(both[0], "T[0]", t)]
    return out + (e.put(both[1], "T[1]", "bool") if len(both) > 1 else [])


def warp_op(e: Emitter, c: Instr) -> list[str]:
    """Emit vote, redux, match or activemask."""
    op, p, a = c.parts[0], c.parts, c.args
    if op == "vote":
        kind = c.option("all", "any", "uni", "ballot") or ""
        x = e.boolean(a[1].lstrip("!"))
        x = f"~{x}" if a[1].startswith("!") else x
        return e.put(a[0], f"vote(W,{x},m,'{kind}')", "u4" if kind == "ballot" else "bool")
    if op == "redux" and p[-1] in ("s32", "u32", "b32", "f32"):
        t = NUMPY[p[-1]]
        how = c.option("add", "min", "max", "and", "or", "xor")
        return e.put(a[0], f"redux(W,{e.val(a[1], t)},m,'{how}',{'NaN' in p})", t)
    if op == "activemask":
        return e.put(a[0], "vote(W,m,m,'ballot')", "u4")
    if op == "match" and "any" in p:
        return e.put(a[0], f"match(W,{e.val(a[1], f'u{BYTES[NUMPY[p[-1]]]}')},m)", "u4")
    raise e.fail(c)


def mapa(e: Emitter, c: Instr) -> list[str]:
    """Emit mapa, which computes the address of a variable in another CTA of the cluster."""
    t = NUMPY[c.parts[-1]]
    x = e.addr(c.args[1]) if c.args[1].startswith("[") else e.val(c.args[1], t)
    low = f"({x}&{e.const(0xFFFFFF, t)})"
    rank = f"{e.val(c.args[2], 'u4')}"
    rank = rank if t == "u4" else f"{rank}.astype(u8)"
    return e.put(c.args[0], f"{low}|({rank}<<{e.const(24, t)})", t)


def getctarank(e: Emitter, c: Instr) -> list[str]:
    """Emit getctarank."""
    t = NUMPY[c.parts[-1]]
    return e.put(c.args[0], f"({e.val(c.args[1], t)}>>{e.const(24, t)}).astype(u4)", "u4")


def isspacep(e: Emitter, c: Instr) -> list[str]:
    """Emit isspacep."""
    space = c.parts[1].split("::")[0]
    if space not in ("shared", "global", "local", "param"):
        raise e.fail(c)
    return e.put(c.args[0], f"is_in_space(W,{e.val(c.args[1], 'u8')},'{space}')", "bool")


MOVE_OPS = {
    "mov": mov,
    "selp": selp,
    "setp": setp,
    "cvt": cvt,
    "cvta": cvta,
    "elect": elect,
    "shfl": shfl,
    "vote": warp_op,
    "redux": warp_op,
    "match": warp_op,
    "activemask": warp_op,
    "mapa": mapa,
    "getctarank": getctarank,
    "isspacep": isspacep,
}

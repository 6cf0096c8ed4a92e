"""Emit Python code for integer, bit and predicate instructions."""

from __future__ import annotations

from attnkit.emulator.emit.emitter import BYTES, NUMPY, Emitter
from attnkit.emulator.ptx.kernel import CARRIED, CARRY, Instr, uses_carry

_INFIX = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
_PACKED = ("s16x2", "u16x2")


def integer(e: Emitter, c: Instr) -> list[str]:
    """Emit an instruction whose type is an integer, bits or pred."""
    op, p, a = c.parts[0], c.parts, c.args
    if p[-1] == "pred":
        return _predicate(e, c)
    if p[-1] not in NUMPY or p[-1][0] == "f":
        raise e.fail(c)
    t = NUMPY[p[-1]]
    if uses_carry(c):
        return _carried(e, c, t)
    un = f"u{BYTES[t]}"
    if op in _INFIX:
        if "sat" in p:
            raise e.fail(c, "saturating integer arithmetic")
        return e.put(a[0], f"{e.val(a[1], un)}{_INFIX[op]}{e.val(a[2], un)}", un)
    if op in ("mul", "mad"):
        return _product(e, c, t)
    if op in ("mul24", "mad24"):
        return _product24(e, c, t)
    if op in ("div", "rem"):
        return e.put(a[0], f"i{op}({e.val(a[1], t)},{e.val(a[2], t)})", t)
    if op in ("max", "min"):
        out = f"np.{op}imum({e.val(a[1], t)},{e.val(a[2], t)})"
        if "relu" in p:
            out = f"np.maximum({out},{e.const(0, t)})"
        return e.put(a[0], out, t)
    if op in ("shl", "shr"):
        return _shift(e, c, t)
    return _one_operand(e, c, t)


def _predicate(e: Emitter, c: Instr) -> list[str]:
    """Emit and, or, xor or not of predicates."""
    a = c.args
    x = [e.boolean(v) for v in a[1:]]
    expr = {"not": "~{0}"}.get(c.parts[0]) or "{0}" + _INFIX[c.parts[0]] + "{1}"
    return e.put(a[0], expr.format(*x), "bool")


def _product(e: Emitter, c: Instr, t: str) -> list[str]:
    """Emit mul or mad."""
    p, a, size = c.parts, c.args, BYTES[t]
    un, half = f"u{size}", p[1]
    if "sat" in p:
        raise e.fail(c, "saturating integer arithmetic")
    add = "+{}" if p[0].startswith("mad") else ""
    if half == "lo":
        third = add.format(e.val(a[3], un)) if add else ""
        return e.put(a[0], f"{e.val(a[1], un)}*{e.val(a[2], un)}{third}", un)
    if size == 8:
        if half != "hi" or t != "u8":
            raise e.fail(c)
        third = add.format(e.val(a[3], un)) if add else ""
        return e.put(a[0], f"mulhi64({e.val(a[1], un)},{e.val(a[2], un)}){third}", un)
    wide = f"{t[0]}{size * 2}"
    prod = f"({e.val(a[1], t)}.astype({wide})*{e.val(a[2], t)})"
    if half == "wide":
        third = add.format(e.val(a[3], wide)) if add else ""
        return e.put(a[0], prod + third, wide)
    if half == "hi":
        third = add.format(e.val(a[3], t)) if add else ""
        return e.put(a[0], f"({prod}>>{e.const(size * 8, wide)}).astype({t}){third}", t)
    raise e.fail(c)


def _product24(e: Emitter, c: Instr, t: str) -> list[str]:
    """Emit mul24 or mad24: products of the low 24 bits, of which .hi takes bits 16 to 47."""
    p, a = c.parts, c.args
    if BYTES[t] != 4 or p[1] not in ("hi", "lo") or "sat" in p:
        raise e.fail(c)
    wide = f"{t[0]}8"
    up = e.const(40, wide)
    x, y = (f"(({e.val(v, t)}.astype({wide})<<{up})>>{up})" for v in a[1:3])
    shift = e.const(16 if p[1] == "hi" else 0, wide)
    add = f"+{e.val(a[3], 'u4')}" if p[0] == "mad24" else ""
    return e.put(a[0], f"(({x}*{y})>>{shift}).astype(u4){add}", "u4")


def _carried(e: Emitter, c: Instr, t: str) -> list[str]:
    """Emit 32-bit add, sub or mad that sets the carry flag, adds it (or subtracts it), or both."""
    p, a = c.parts, c.args
    if BYTES[t] != 4 or (p[0].startswith("mad") and p[1] not in ("lo", "hi")):
        raise e.fail(c, "carry flag of other than 32 bits")
    terms = [f"{e.val(x, 'u4')}.astype(u8)" for x in a[1:]]
    if p[0].startswith("mad"):
        product = f"{e.val(a[1], t)}.astype({t[0]}8)*{e.val(a[2], t)}"
        shift = e.const(32 if p[1] == "hi" else 0, f"{t[0]}8")
        terms[:2] = [f"(({product})>>{shift}).astype(u4).astype(u8)"]
    sign = "-" if p[0].startswith("sub") else "+"
    if p[0] in ("addc", "subc", "madc"):
        terms.append(f"{e.val(CARRY, 'u4')}.astype(u8)")
    # for a difference the flag is the borrow, which is also bit 32
    out = e.put(CARRIED, sign.join(terms), "u8") + e.put(a[0], e.val(CARRIED, "u4"), "u4")
    if "cc" in p:
        bit = f"({e.val(CARRIED, 'u8')}>>{e.const(32, 'u8')}).astype(u4)&{e.const(1, 'u4')}"
        out += e.put(CARRY, bit, "u4")
    return out


def _shift(e: Emitter, c: Instr, t: str) -> list[str]:
    """Emit shl or shr."""
    op, a, size = c.parts[0], c.args, BYTES[t]
    kind = t if op == "shr" and t[0] == "i" else f"u{size}"
    bits = size * 8
    if e.is_reg(a[2]):
        return e.put(a[0], f"{op}({e.val(a[1], kind)},{e.val(a[2], 'u4')},{bits})", kind)
    n = int(a[2], 0)
    if n >= bits and kind[0] == "u":
        return e.put(a[0], e.const(0, kind), kind)
    sign = "<<" if op == "shl" else ">>"
    return e.put(a[0], f"{e.val(a[1], kind)}{sign}{e.const(min(n, bits - 1), kind)}", kind)


def _one_operand(e: Emitter, c: Instr, t: str) -> list[str]:
    """Emit the other instructions: of one operand, bit fields, shf, prmt, lop3 and sad."""
    op, p, a, un = c.parts[0], c.parts, c.args, f"u{BYTES[t]}"
    if op == "not":
        return e.put(a[0], f"~{e.val(a[1], un)}", un)
    if op == "neg":
        return e.put(a[0], f"{e.const(0, un)}-{e.val(a[1], un)}", un)
    if op == "abs":
        return e.put(a[0], f"np.abs({e.val(a[1], t)})", t)
    if op in ("popc", "clz"):
        return e.put(a[0], f"{op}({e.val(a[1], un)})", "u4")
    if op == "bfind":
        return e.put(a[0], f"bfind({e.val(a[1], t)},{'shiftamt' in p})", "u4")
    if op == "brev":
        return e.put(a[0], f"brev({e.val(a[1], un)})", un)
    if op == "bfe":
        args = f"{e.val(a[1], t)},{e.val(a[2], 'u4')},{e.val(a[3], 'u4')}"
        return e.put(a[0], f"bfe({args})", t)
    if op == "bfi":
        args = f"{e.val(a[1], un)},{e.val(a[2], un)},{e.val(a[3], 'u4')},{e.val(a[4], 'u4')}"
        return e.put(a[0], f"bfi({args})", un)
    if op == "shf":
        args = ",".join(e.val(x, "u4") for x in a[1:4])
        return e.put(a[0], f"funnel({args},{p[1] == 'l'},{'clamp' in p})", "u4")
    if op == "prmt" and len(p) == 2:
        return e.put(a[0], f"prmt({','.join(e.val(x, 'u4') for x in a[1:4])})", "u4")
    if op == "lop3":
        args = ",".join(e.val(x, "u4") for x in a[1:4])
        return e.put(a[0], f"lop3({args},{int(a[4], 0)})", "u4")
    if op == "sad":
        x, y = e.val(a[1], t), e.val(a[2], t)
        return e.put(a[0], f"{e.val(a[3], t)}+(np.maximum({x},{y})-np.minimum({x},{y}))", t)
    raise e.fail(c)


INTEGER_OPS = (
    "add sub mul mad div rem max min and or xor not neg abs shl shr shf bfe bfi popc clz brev "
    "bfind prmt lop3 sad mul24 mad24 addc subc madc"
).split()

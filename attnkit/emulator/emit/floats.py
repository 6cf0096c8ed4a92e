"""Emit Python code for floating-point instructions: f16, bf16, f32, f64 and packed pairs."""

from __future__ import annotations

from attnkit.emulator.emit.emitter import Emitter
from attnkit.emulator.emit.integers import integer
from attnkit.emulator.ptx.kernel import Instr

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_LAMBDA = {
    "add": "lambda a,b:a+b",
    "sub": "lambda a,b:a-b",
    "mul": "lambda a,b:a*b",
    "fma": "lambda a,b,c:fma(a,b,c)",
    "neg": "lambda a:-a",
    "abs": "np.abs",
    "ex2": "np.exp2",
    "tanh": "np.tanh",
}
_UNARY = {
    "ex2": "np.exp2({})",
    "lg2": "np.log2({})",
    "tanh": "np.tanh({})",
    "rcp": "{one}/{}",
    "sqrt": "np.sqrt({})",
    "rsqrt": "{one}/np.sqrt({})",
    "sin": "np.sin({})",
    "cos": "np.cos({})",
}
_ROUND = ("rz", "rm", "rp")


def arithmetic(e: Emitter, c: Instr) -> list[str]:
    """Emit add, sub, mul, fma, mad, div, min, max, neg, abs or copysign of any operand type."""
    kind = c.parts[-1]
    if kind in ("bf16", "f16") and "f32" in c.parts:
        return _mixed(e, c)
    if kind in ("bf16", "f16", "bf16x2", "f16x2"):
        return _half(e, c)
    if kind == "f32x2":
        return _pair(e, c)
    if kind in ("f32", "f64"):
        return _scalar(e, c)
    return integer(e, c)


def _flush(e: Emitter, c: Instr, x: str) -> str:
    """Return expression `x`, with subnormals flushed to zero if the instruction has .ftz."""
    return f"ftz({x})" if "ftz" in c.parts else x


def _scalar(e: Emitter, c: Instr) -> list[str]:
    """Emit arithmetic of f32 or f64."""
    op, p, a = c.parts[0], c.parts, c.args
    t = "f4" if p[-1] == "f32" else "f8"
    x = [_flush(e, c, e.val(v, t)) for v in a[1:]]
    mode = c.option(*_ROUND)
    if c.has("relu", "oob") or (mode and op == "div"):
        raise e.fail(c)
    if op in _INFIX or op in ("fma", "mad"):
        if mode and t == "f8":
            raise e.fail(c, "directed rounding of f64")
        if mode:
            out = _directed(op, x, mode)
        elif op in _INFIX:
            out = f"{x[0]}{_INFIX[op]}{x[1]}"
        else:
            out = f"{'fma' if t == 'f4' else 'fma64'}({x[0]},{x[1]},{x[2]})"
    elif op in ("max", "min"):
        out = _extremum(e, c, x, t)
    elif op in ("neg", "abs"):
        out = f"-{x[0]}" if op == "neg" else f"np.abs({x[0]})"
    elif op == "copysign":
        out = f"np.copysign({x[1]},{x[0]})"
    else:
        raise e.fail(c)
    return e.put(a[0], _saturated(e, c, _flush(e, c, f"({out})"), t), t)


def _saturated(e: Emitter, c: Instr, x: str, t: str) -> str:
    """Return expression `x`, clamped to [0, 1] with NaN as 0 if the instruction has .sat."""
    if "sat" not in c.parts:
        return x
    return f"np.nan_to_num(np.clip({x},{e.const(0, t)},{e.const(1, t)}))"


def _directed(op: str, x: list[str], mode: str) -> str:
    """Return an expression for float32 arithmetic with directed rounding.

    A product of float32 values is exact in float64. A sum may not be, so `directed_sum` adds.

    Args:
        mode: "rz", "rm" or "rp".
    """
    product = f"{x[0]}.astype(f8)*{x[1]}"
    if op == "mul":
        return f"directed({product},'{mode}')"
    first = f"{x[0]}.astype(f8)" if op in ("add", "sub") else product
    last = f"{'-' if op == 'sub' else ''}{x[-1]}.astype(f8)"
    return f"directed_sum({first},{last},'{mode}')"


def _extremum(e: Emitter, c: Instr, x: list[str], t: str) -> str:
    """Return an expression for min or max of two or three operands."""
    if c.has("xorsign"):
        raise e.fail(c)
    if c.has("abs"):
        x = [f"np.abs({v})" for v in x]
    nan = c.has("NaN")
    fn = f"np.{c.parts[0]}imum" if nan else f"np.f{c.parts[0]}"
    out = x[0]
    for v in x[1:]:
        out = f"{fn}({out},{v})"
    return out


def _sum_or_product(op: str, x: list[str], mode: str | None) -> str:
    """Return the expression of add, sub, mul or fma, with a directed rounding if `mode` names one."""
    if mode:
        return _directed(op, x, mode)
    return f"fma({x[0]},{x[1]},{x[2]})" if op == "fma" else f"({x[0]}{_INFIX[op]}{x[1]})"


def _pair(e: Emitter, c: Instr) -> list[str]:
    """Emit f32x2 arithmetic, which views a 64-bit register as two floats per lane."""
    op, a = c.parts[0], c.args
    x = [_flush(e, c, f"{e.val(v, 'u8')}.view(f4)") for v in a[1:]]
    mode = c.option(*_ROUND)
    if op not in ("add", "sub", "mul", "fma"):
        raise e.fail(c)
    out = _sum_or_product(op, x, mode)
    return e.put(a[0], f"{_flush(e, c, out)}.view(u8)", "u8")


def _mixed(e: Emitter, c: Instr) -> list[str]:
    """Emit add, sub or fma with an f32 result and 16-bit operands, such as fma.rn.f32.bf16.

    PTX ISA, "Mixed Precision Floating-Point Instructions".
    """
    op, a, kind = c.parts[0], c.args, c.parts[-1]

    def operand(v: str) -> str:
        if e.kernel.regs.get(v) == "h":
            return f"{kind}_to_f32({e.val(v, 'u2')})"
        return e.val(v, "f4")

    x, mode = [operand(v) for v in a[1:]], c.option(*_ROUND)
    if op not in ("fma", "add", "sub") or c.has("ftz", "relu", "oob"):
        raise e.fail(c)
    out = _sum_or_product(op, x, mode)
    return e.put(a[0], _saturated(e, c, out, "f4"), "f4")


def _half(e: Emitter, c: Instr) -> list[str]:
    """Emit arithmetic of f16, bf16 or pairs of them."""
    op, a = c.parts[0], c.args
    two = c.parts[-1].endswith("x2")
    kind = c.parts[-1].removesuffix("x2")
    t = "u4" if two else "u2"
    if op in ("max", "min"):
        fn = f"np.{op}imum" if c.has("NaN") else f"np.f{op}"
    elif op in _LAMBDA:
        fn = _LAMBDA[op]
    else:
        raise e.fail(c)
    if c.has("sat", "relu", "oob"):
        raise e.fail(c)
    args = ",".join(e.val(x, t) for x in a[1:])
    return e.put(a[0], f"{'packed' if two else 'half'}({fn},'{kind}',{args})", t)


def special(e: Emitter, c: Instr) -> list[str]:
    """Emit ex2, lg2, rcp, sqrt, rsqrt, sin, cos or tanh; .approx is as precise as numpy."""
    op, kind = c.parts[0], c.parts[-1]
    if kind in ("f16", "f16x2", "bf16", "bf16x2"):
        return _half(e, c)
    if kind not in ("f32", "f64") or c.has(*_ROUND):
        raise e.fail(c)
    t = "f4" if kind == "f32" else "f8"
    x = e.val(c.args[1], t)
    if op != "ex2":
        x = _flush(e, c, x)
    out = _UNARY[op].format(x, one=e.const(1.0, t))
    return e.put(c.args[0], _flush(e, c, f"({out})"), t)


FLOAT_OPS = "add sub mul fma mad div max min neg abs copysign".split()
SPECIAL_OPS = tuple(_UNARY)

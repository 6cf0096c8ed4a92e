"""Translate operands of PTX instructions into Python expressions.

Generated code sees `W` (the gang of warps), `R` (its registers) and `m` (the mask of active lanes).
Each register is an immutable vector of lanes, stored in one numpy type of its size. A 32-bit
register that is mostly used as a float32 is stored as float32, so that arithmetic needs no
reinterpretation. Names of types are numpy's, such as "u4" for uint32.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np

from attnkit.emulator.faults import UnknownOpcode
from attnkit.emulator.ptx.kernel import Instr, PtxKernel

NUMPY = {
    "b8": "u1",
    "u8": "u1",
    "s8": "i1",
    "b16": "u2",
    "u16": "u2",
    "s16": "i2",
    "b32": "u4",
    "u32": "u4",
    "s32": "i4",
    "f32": "f4",
    "b64": "u8",
    "u64": "u8",
    "s64": "i8",
    "f64": "f8",
    "b128": "c16",
}
BYTES = {
    "u1": 1,
    "i1": 1,
    "u2": 2,
    "i2": 2,
    "u4": 4,
    "i4": 4,
    "f4": 4,
    "u8": 8,
    "i8": 8,
    "f8": 8,
    "c16": 16,
}
CLASS = {"p": "bool", "h": "u2", "w": "u4", "d": "u8", "q": "c16"}

SPECIAL = {
    "%tid.x": "W.tid[0]",
    "%tid.y": "W.tid[1]",
    "%tid.z": "W.tid[2]",
    "%ntid.x": "W.ntid[0]",
    "%ntid.y": "W.ntid[1]",
    "%ntid.z": "W.ntid[2]",
    "%ctaid.x": "W.ctaid[0]",
    "%ctaid.y": "W.ctaid[1]",
    "%ctaid.z": "W.ctaid[2]",
    "%nctaid.x": "W.nctaid[0]",
    "%nctaid.y": "W.nctaid[1]",
    "%nctaid.z": "W.nctaid[2]",
    "%cluster_ctaid.x": "W.cluster_ctaid[0]",
    "%cluster_ctaid.y": "W.cluster_ctaid[1]",
    "%cluster_ctaid.z": "W.cluster_ctaid[2]",
    "%cluster_nctaid.x": "W.cluster_nctaid[0]",
    "%cluster_nctaid.y": "W.cluster_nctaid[1]",
    "%cluster_nctaid.z": "W.cluster_nctaid[2]",
    "%clusterid.x": "W.clusterid[0]",
    "%clusterid.y": "W.clusterid[1]",
    "%clusterid.z": "W.clusterid[2]",
    "%nclusterid.x": "W.nclusterid[0]",
    "%nclusterid.y": "W.nclusterid[1]",
    "%nclusterid.z": "W.nclusterid[2]",
    "%cluster_ctarank": "W.cluster_rank",
    "%cluster_nctarank": "W.cluster_size",
    "%laneid": "W.lane",
    "%warpid": "W.warpid",
    "%nwarpid": "W.nwarpid",
    "%smid": "W.smid",
    "%nsmid": "W.nsmid",
    "%clock": "read_clock(W,4)",
    "%clock64": "read_clock(W,8)",
    "%clock_hi": "read_clock(W,4)*u4(0)",
    "%globaltimer": "read_clock(W,8)",
    "%globaltimer_lo": "read_clock(W,4)",
    "%globaltimer_hi": "read_clock(W,4)*u4(0)",
    "%dynamic_smem_size": "W.dynamic_smem_size",
    "%total_smem_size": "W.total_smem_size",
    "%lanemask_eq": "lanemask(W,'eq')",
    "%lanemask_lt": "lanemask(W,'lt')",
    "%lanemask_le": "lanemask(W,'le')",
    "%lanemask_gt": "lanemask(W,'gt')",
    "%lanemask_ge": "lanemask(W,'ge')",
    "WARP_SZ": "W.warp_size",
}
_INT = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")
_FLOAT = re.compile(r"0[fF][0-9a-fA-F]{8}$|0[dD][0-9a-fA-F]{16}$")
_REG = re.compile(r"[%\w$@]+")
_ADDRESS = re.compile(r"^([^+]+?)\s*(?:\+\s*(-?(?:0x[0-9a-fA-F]+|\d+)))?$")


def storage_types(kernel: PtxKernel) -> dict[str, str]:
    """Return the numpy type that stores each register.

    A register of 32 or 64 bits is stored as a float if most instructions use it as a float, and
    else as an unsigned integer. A predicate is stored as bool.
    """
    votes: Counter[str] = Counter()
    for c in kernel.instructions():
        kinds = [p for p in c.parts[1:] if p in ("f32", "f64", "s32", "u32", "s64", "u64", "b32")]
        if not kinds or (c.parts[0] in ("ld", "st", "mov", "shfl", "selp") and kinds[-1][0] == "b"):
            continue
        if c.parts[0] == "cp":  # its type is that of data in memory, not in registers
            continue
        if c.parts[0] == "wgmma":
            kinds = [p for p in c.parts if p in ("f32", "s32")][:1]
        for i, arg in enumerate(c.args):
            kind = kinds[0] if i == 0 or c.parts[0] != "cvt" else kinds[-1]
            for r in re.findall(r"[%\w$@]+", arg) if i == 0 or arg[0] != "[" else ():
                votes[r] += 1 if kind[0] == "f" else -1
    out = {}
    for reg, cls in kernel.regs.items():
        kind = CLASS[cls]
        if votes[reg] > 0 and cls in ("w", "d"):
            kind = "f4" if cls == "w" else "f8"
        out[reg] = kind
    return out


class Emitter:
    """Translates operands into Python expressions, and collects the constants of a kernel.

    Methods return expressions as text.

    Attributes:
        symbols: (state space, offset or address) of each variable of the kernel, by name.
        index: number of each register.
        store: numpy type that stores each register.
        constants, objects: values that generated code refers to by name.
        masked: whether some lanes may be inactive; destinations keep their old value there.
    """

    def __init__(self, kernel: PtxKernel, symbols: dict[str, tuple[str, int]]) -> None:
        self.kernel = kernel
        self.symbols = symbols
        self.index = {r: i for i, r in enumerate(kernel.regs)}
        self.store = storage_types(kernel)
        self.constants: dict[str, Any] = {}
        self._names: dict[tuple[bytes, str], str] = {}
        self.objects: dict[str, Any] = {}
        self.masked = False
        self._mentions = Counter(
            r
            for c in kernel.instructions()
            for x in (*c.args, c.pred or "")
            for r in _REG.findall(x)
        )

    def is_dead(self, register: str) -> bool:
        """Return whether no instruction reads `register`, given that one instruction writes it."""
        return register == "_" or self._mentions[register] == 1

    def fail(self, c: Instr, why: str = "") -> UnknownOpcode:
        """Return the error to raise for an instruction that is not implemented."""
        text = f"PTX line {c.line}: {c.op} is not implemented by the emulator"
        return UnknownOpcode(text + (f" ({why})" if why else "") + f": {c}"[:200])

    # ---- operands
    def const(self, value: int | float | bool, kind: str) -> str:
        """Return the name of a vector with `value` in all lanes; `kind`: a numpy type or "bool"."""
        if kind == "bool":
            scalar: Any = np.bool_(value)
        elif kind in ("f4", "f8"):
            scalar = np.dtype(kind).type(value)
        else:
            size = BYTES[kind]
            raw = int(value) & ((1 << 8 * size) - 1)
            scalar = np.array(raw, f"u{size}").view(kind)[()]
        return self._constant(scalar, kind)

    def _constant(self, scalar: Any, kind: str) -> str:
        """Return the name of the vector of a scalar; equal scalars of one type share a name."""
        key = (scalar.tobytes(), kind)
        if key not in self._names:
            self._names[key] = f"C{len(self._names)}"
            self.constants[self._names[key]] = scalar
        return self._names[key]

    def object(self, value: Any) -> str:
        """Return the name of a constant object, such as a `WgmmaForm`; equal ones share a name."""
        name = next((n for n, v in self.objects.items() if v == value), f"X{len(self.objects)}")
        self.objects[name] = value
        return name

    def _float_bits(self, text: str, kind: str | None) -> str:
        """Return the name of a floating-point constant in bits, such as 0f3F800000."""
        size = 4 if len(text) == 10 else 8
        scalar: Any = np.array(int(text[2:], 16), f"u{size}")
        kind = kind or f"f{size}"
        if BYTES[kind] != size:
            return self._constant(scalar.view(f"f{size}").astype(kind)[()], kind)
        return self._constant(scalar.view(kind)[()], kind)

    def is_reg(self, a: str) -> bool:
        """Return whether operand `a` is a register."""
        return a in self.index

    def val(self, a: str, kind: str | None = None) -> str:
        """Return an expression for operand `a`, as a vector of type `kind` (None: as stored)."""
        if a in self.index:
            return self._register(a, kind)
        if _FLOAT.match(a):
            return self._float_bits(a, kind)
        if _INT.match(a):
            if kind in ("f4", "f8"):  # PTX: an integer here gives the bits of a float
                bits = self.const(int(a.rstrip("U"), 0), f"u{kind[1]}")
                return f"{bits}.view({kind})"
            return self.const(int(a.rstrip("U"), 0), kind or "u4")
        if a in SPECIAL:
            wide = kind is not None and BYTES.get(kind, 4) != 4
            return f"{SPECIAL[a]}.astype({kind})" if wide else SPECIAL[a]
        if a in self.symbols:
            return self._symbol(a, 0, kind or "u8")
        raise UnknownOpcode(f"operand {a!r} is not a register, number or symbol known here")

    def _register(self, a: str, kind: str | None) -> str:
        """Return an expression for register `a`, as a vector of type `kind` (None: as stored)."""
        have, r = self.store[a], f"R[{self.index[a]}]"
        if kind is None or kind == have or have == "bool":
            return r
        a_size, b_size = BYTES[have], BYTES[kind]
        if a_size == b_size:
            return f"{r}.view({kind})"
        if have[0] == "f":
            r = f"{r}.view(u{a_size})"
        if a_size > b_size:
            return f"{r}.astype(u{b_size}).view({kind})"
        if kind[0] == "i":
            return f"{r}.view(i{a_size}).astype({kind})"
        return f"{r}.astype({kind})"

    def _symbol(self, name: str, offset: int, kind: str) -> str:
        """Return an expression for the address of a variable of the kernel, plus `offset` bytes."""
        space, value = self.symbols[name]
        if space == "shared":
            e = f"(W.rank_bits|{self.const(value + offset, 'u4')})"
            return e if kind == "u4" else f"{e}.astype({kind})"
        return self.const(value + offset, kind)

    def boolean(self, a: str) -> str:
        """Return an expression for operand `a` as a vector of booleans."""
        return (
            self.val(a, "bool") if self.is_reg(a) else self.const(a not in ("0", "false"), "bool")
        )

    def addr(self, a: str) -> str:
        """Return an expression for the addresses `[base+offset]`.

        They are u8 for a 64-bit register, a number or a variable that is not in shared memory, and
        u4 otherwise.
        """
        m = _ADDRESS.match(a.strip()[1:-1].strip())
        if m is None:
            raise UnknownOpcode(f"address {a!r} cannot be read")
        base, off = m.group(1).strip(), int(m.group(2) or "0", 0)
        if base in self.index:
            kind = "u8" if self.kernel.regs[base] == "d" else "u4"
            e = self.val(base, kind)
            return f"({e}+{self.const(off, kind)})" if off else e
        if base in self.symbols:
            kind = "u4" if self.symbols[base][0] == "shared" else "u8"
            return self._symbol(base, off, kind)
        return self.const(int(base, 0) + off, "u8")

    def vector(self, a: str) -> list[str]:
        """Return the elements of a vector operand `{a, b, ...}`, or a list of a scalar operand."""
        a = a.strip()
        return [x.strip() for x in a[1:-1].split(",")] if a.startswith("{") else [a]

    def values(self, a: str, kind: str) -> str:
        """Return an expression for a list of the elements of an operand."""
        return "[" + ",".join(self.val(x, kind) for x in self.vector(a)) + "]"

    # ---- destinations
    def put(self, d: str, e: str, kind: str) -> list[str]:
        """Return code that assigns `e` of type `kind` to the active lanes of register `d`."""
        if d == "_":
            return []
        have, i = self.store[d], self.index[d]
        if have not in ("bool", kind):
            e = self._convert(e, kind, have)
        return [f"R[{i}]=" + (f"where(m,{e},R[{i}])" if self.masked else e)]

    def _convert(self, e: str, kind: str, have: str) -> str:
        """Return an expression that converts `e` from type `kind` to type `have`."""
        a, b = BYTES[kind], BYTES[have]
        if a == b:
            return f"({e}).view({have})"
        mid = f"i{b}" if kind[0] == "i" else f"u{b}"
        return f"({e}).astype({mid}).view({have})"

    def stored(self, a: str, size: int) -> str:
        """Return a type of `size` bytes for register `a`: as stored if possible, else unsigned."""
        have = self.store.get(a, "bool")
        return have if BYTES.get(have) == size else f"u{size}"

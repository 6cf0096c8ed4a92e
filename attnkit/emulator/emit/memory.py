"""Emit Python code for loads, stores, atomics, ldmatrix, stmatrix and mbarrier instructions."""

from __future__ import annotations

from attnkit.emulator.emit.emitter import BYTES, NUMPY, Emitter
from attnkit.emulator.machine.knowledge import SCOPES, Order
from attnkit.emulator.ptx.kernel import Instr

_SPACES = ("global", "shared", "param", "const", "local")


def space_of(c: Instr) -> str:
    """Return the state space among the modifiers, or "generic"."""
    for p in c.parts[1:]:
        name = p.split("::")[0]
        if name in _SPACES:
            return name
    return "generic"


def _element(e: Emitter, c: Instr) -> tuple[str, int]:
    """Return the numpy type of an element, and the number of elements."""
    kind = c.parts[-1]
    if kind not in NUMPY:
        raise e.fail(c)
    n = next((int(p[1:]) for p in c.parts if p in ("v2", "v4", "v8")), 1)
    return NUMPY[kind], n


_SEMANTICS = ("acquire", "release", "acq_rel", "relaxed")


def _order(e: Emitter, c: Instr, default: Order | None) -> str:
    """Return the name of the memory `Order` of an access, or "None" for a weak access.

    Args:
        default: order of an instruction without modifiers; None if it is weak.
    """
    if c.has("volatile", "mmio"):
        return e.object(Order("relaxed", SCOPES["sys"]))
    semantics = c.option(*_SEMANTICS)
    scope = c.option(*SCOPES)
    if semantics is None and default is None:
        return "None"
    base = default or Order("relaxed", SCOPES["gpu"])
    return e.object(Order(semantics or base.semantics, SCOPES[scope] if scope else base.scope))


def load(e: Emitter, c: Instr) -> list[str]:
    """Emit ld or ldu."""
    kind, n = _element(e, c)
    space, regs = space_of(c), e.vector(c.args[0])
    size = BYTES[kind]
    if space == "param":
        return _load_param(e, c, regs, size, kind)
    kinds = {e.stored(r, size) for r in regs if r != "_"}
    t = kinds.pop() if len(kinds) == 1 else f"u{size}"
    wider = any(BYTES[e.store[r]] > size for r in regs if r != "_")
    if kind[0] == "i" and (size < 4 or wider):  # extend the sign
        t = kind
    if space in ("const",):
        space = "global"
    order = f",{_order(e, c, None)}" if space in ("global", "generic") else ""
    if space == "shared" and e.is_dead(regs[-1]):
        # compilers widen loads, and drop the elements that they do not need
        order = f",{max((j for j, r in enumerate(regs) if not e.is_dead(r)), default=-1) + 1}"
    order += ",True" if space == "global" and "nc" in c.parts else ""
    out = [f"T=ld_{space}(W,{e.addr(c.args[1])},m,{t},{n}{order})"]
    for j, r in enumerate(regs):
        out += e.put(r, f"T[{j}]", t)
    return out


def _load_param(e: Emitter, c: Instr, regs: list[str], size: int, kind: str) -> list[str]:
    """Emit ld.param; an address that names no kernel parameter is taken as generic."""
    inner = c.args[1].strip()[1:-1]
    base, _, off = inner.partition("+")
    name = base.strip()
    if name not in e.symbols or e.symbols[name][0] != "param":
        return [
            line
            for j, r in enumerate(regs)
            for line in e.put(
                r, f"ld_generic(W,{e.addr(c.args[1])},m,{kind},{len(regs)})[{j}]", kind
            )
        ]
    start = e.symbols[name][1] + int(off or "0", 0)
    out: list[str] = []
    for j, r in enumerate(regs):
        t = e.stored(r, size) if kind[0] != "i" else kind
        out += e.put(r, f"ld_param(W,{start + j * size},{t})", t)
    return out


def store(e: Emitter, c: Instr) -> list[str]:
    """Emit st or st.async."""
    if c.parts[1] == "async":
        return _store_async(e, c)
    kind, _ = _element(e, c)
    size, space = BYTES[kind], space_of(c)
    values = e.vector(c.args[1])
    kinds = {e.stored(v, size) for v in values}
    t = kinds.pop() if len(kinds) == 1 else f"u{size}"
    order = f",{_order(e, c, None)}" if space in ("global", "generic") else ""
    return [f"st_{space}(W,{e.addr(c.args[0])},m,{t},{e.values(c.args[1], t)}{order})"]


def _store_async(e: Emitter, c: Instr) -> list[str]:
    """Emit st.async to another CTA's shared memory; it completes on that CTA's mbarrier."""
    kind, _ = _element(e, c)
    t = f"u{BYTES[kind]}"
    return [f"st_async(W,{e.addr(c.args[0])},{e.values(c.args[1], t)},{e.addr(c.args[2])},m,{t})"]


_NAN_WORDS = 0x7FC0_7FC0_7FC0_7FC0  # NaN as float64, float32, bfloat16 and float16
_LINE = 128  # bytes


def discard(e: Emitter, c: Instr) -> list[str]:
    """Emit discard: store NaN in the line, and mark it as not written."""
    if c.args[1] != str(_LINE):
        raise e.fail(c)
    # Memory of the host may be aligned less than that of a GPU: 32 bytes at a time.
    values = ",".join([e.const(_NAN_WORDS, "u8")] * 4)
    address = e.addr(c.args[0])
    return [
        f"st_global(W,{address}+{e.const(i, 'u8')},m,u8,[{values}],None,False)"
        for i in range(0, _LINE, 32)
    ]


_ATOMS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


def atomic(e: Emitter, c: Instr) -> list[str]:
    """Emit atom or red."""
    if c.parts[1] == "async":
        raise e.fail(c)
    how, kind = c.option(*_ATOMS), c.parts[-1]
    if how is None:
        raise e.fail(c)
    n = next((int(p[1:]) for p in c.parts if p in ("v2", "v4", "v8")), 1)
    is_half = kind in ("bf16x2", "f16x2", "f16", "bf16")
    t = ("u4" if kind.endswith("x2") else "u2") if is_half else NUMPY.get(kind, "")
    if not t or (c.parts[0] == "atom" and (n > 1 or is_half)):
        raise e.fail(c)
    space = space_of(c)
    at = 1 if c.parts[0] == "atom" else 0
    fmt = f"'{kind}'" if is_half else "None"
    order = f",{_order(e, c, Order('relaxed', SCOPES['gpu']))}" if space != "shared" else ""
    if n > 1:
        args = e.values(c.args[at + 1], t)
        return [f"red_vector(W,{e.addr(c.args[at])},m,{t},'{how}',{args},{fmt}{order})"]
    operands = c.args[at + 1 : at + (3 if how == "cas" else 2)]  # a cache policy may follow
    values = "[" + ",".join(e.val(x, t) for x in operands) + "]"
    call = f"atom_{space}(W,{e.addr(c.args[at])},m,{t},'{how}',{values},{fmt}{order})"
    return e.put(c.args[0], call, t) or [call] if at else [call]


def mbarrier(e: Emitter, c: Instr) -> list[str]:
    """Emit the mbarrier instructions that do not wait."""
    what, a = c.parts[1], c.args
    if what == "init":
        return [f"mbarrier_init(W,{e.addr(a[0])},{e.val(a[1], 'u4')},m)"]
    if what == "inval":
        return [f"mbarrier_inval(W,{e.addr(a[0])},m)"]
    if what == "expect_tx":
        return [f"mbarrier_expect_tx(W,{e.addr(a[0])},{e.val(a[1], 'u4')},m)"]
    if what == "complete_tx":
        return [f"mbarrier_complete_tx(W,{e.addr(a[0])},{e.val(a[1], 'u4')},m)"]
    if what in ("arrive", "arrive_drop"):
        # With a destination the address is the second operand; remote arrivals may have no
        # destination.
        at = 0 if a[0].startswith("[") else 1
        tx = "expect_tx" in c.parts
        extra = e.val(a[at + 1], "u4") if len(a) > at + 1 else e.const(1, "u4")
        n = e.const(1, "u4") if tx else extra
        drop = what == "arrive_drop"
        flags = f"{extra if tx else 'None'},{drop},{'relaxed' in c.parts}"
        call = f"mbarrier_arrive(W,{e.addr(a[at])},{n},m,{flags})"
        return e.put(a[0], call, "u8") or [call] if at else [call]
    raise e.fail(c)


def matrix_move(e: Emitter, c: Instr) -> list[str]:
    """Emit ldmatrix or stmatrix of 8x8 matrices of 16-bit elements."""
    if not c.has("m8n8") or c.parts[-1] != "b16":
        raise e.fail(c)
    trans = "trans" in c.parts
    if c.parts[0] == "stmatrix":
        return [f"stmatrix(W,{e.addr(c.args[0])},{e.values(c.args[1], 'u4')},{trans},m)"]
    regs = e.vector(c.args[0])
    out = [f"T=ldmatrix(W,{e.addr(c.args[1])},{len(regs)},{trans},m)"]
    for j, r in enumerate(regs):
        out += e.put(r, f"T[{j}]", "u4")
    return out


MEMORY_OPS = {
    "ld": load,
    "ldu": load,
    "st": store,
    "discard": discard,
    "atom": atomic,
    "red": atomic,
    "mbarrier": mbarrier,
    "ldmatrix": matrix_move,
    "stmatrix": matrix_move,
}

"""Parse PTX text that NVVM has written, with inline assembly in it (PTX ISA, "Syntax")."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from attnkit.emulator.faults import PtxError
from attnkit.emulator.ptx.kernel import (
    CARRIED,
    CARRY,
    TYPE_BYTES,
    Instr,
    Param,
    PtxKernel,
    Source,
    Variable,
    is_blocking,
    uses_carry,
)

CLASS_OF_SIZE = {1: "h", 2: "h", 4: "w", 8: "d", 16: "q"}

_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|local|global|const)\s+"
    r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[(\d*)\])?\s*(?:=\s*\{?([^};]*)\}?)?",
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?([^;{]*?)\{", re.S)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[\w. ]*?\s)?([\w$]+)(?:\[(\d+)\])?"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<label>[$\w]+)\s*:(?!:)|(?P<open>\{)|(?P<close>\})"
    r"|\.loc\s+(?P<loc>[^\n]*)|(?P<stmt>[^;{}\s](?:[^;{]|\{[^}]*\})*?);)",
    re.S,
)
_GUARD = re.compile(r"@\s*(!?)\s*([%$\w]+)\s+(.*)", re.S)
_NAME = re.compile(r"[%A-Za-z_$][\w$]*(?:\.[xyzw])?")


def parse(text: str) -> dict[str, PtxKernel]:
    """Parse a PTX module; return its kernels by name.

    Raises:
        PtxError: the text has no `.entry`, or one that cannot be parsed.
    """
    text = re.sub(r"//\s*(begin|end) inline asm\b", r".inline \1;", text)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.S)
    target = re.search(r"\.target\s+(\w+)", text)
    files = {m[0]: m[1] for m in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    bodies = [(m, *_body(text, m.end())) for m in _ENTRY.finditer(text)]
    if not bodies:
        raise PtxError("no .entry found in the PTX text")
    outside = _outside(text, [(m.start(), end) for m, _, end in bodies])
    shared_by_all = tuple(_variables(outside))
    kernels = {}
    for m, body, _ in bodies:
        params, size = _params(m.group(2) or "")
        threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", m.group(3))
        n = 1
        for x in threads.groups() if threads else ():
            n *= int(x or 1)
        kernel = PtxKernel(
            m.group(1),
            target.group(1) if target else "",
            params,
            size,
            shared_by_all,
            n if threads else None,
        )
        _Body(kernel, files, text.count("\n", 0, m.end()) + 1).read(body)
        kernels[kernel.name] = kernel
    return kernels


def _body(text: str, start: int) -> tuple[str, int]:
    """Return the text of the function body that begins at `start`, and the index after it."""
    depth, i = 1, start
    while depth:
        nxt = re.compile(r"[{}]").search(text, i)
        if nxt is None:
            raise PtxError("an .entry has no closing brace")
        depth += 1 if nxt.group(0) == "{" else -1
        i = nxt.end()
    return text[start : i - 1], i


def _outside(text: str, spans: list[tuple[int, int]]) -> str:
    """Return the text without the spans, each of which is (start, end)."""
    out, last = [], 0
    for a, b in spans:
        out.append(text[last:a])
        last = b
    return "".join([*out, text[last:]])


def _variables(text: str) -> list[Variable]:
    """Parse the variables that a text declares."""
    return [_variable(m) for m in _VARIABLE.finditer(text)]


def _variable(m: re.Match[str]) -> Variable:
    """Parse the declaration of a variable."""
    space, align, kind, name, count, init = m.groups()
    item = TYPE_BYTES[kind]
    n = 1 if count is None else int(count or 0)
    data = b""
    if init:
        values = [int(x.strip(), 0) for x in init.split(",") if x.strip()]
        data = b"".join((v & ((1 << 8 * item) - 1)).to_bytes(item, "little") for v in values)
    return Variable(name, space, int(align or item), n * item, data)


def _params(text: str) -> tuple[tuple[Param, ...], int]:
    """Parse the parameters of a kernel; return them and their size in bytes."""
    params, offset = [], 0
    for align, kind, name, count in _PARAM.findall(text):
        item = TYPE_BYTES[kind]
        size, a = item * int(count or 1), int(align or item)
        offset = -(-offset // a) * a
        params.append(Param(name, offset, size))
        offset += size
    return tuple(params), offset


def split_operands(text: str) -> tuple[str, ...]:
    """Split the operands of an instruction at commas outside braces, brackets and parentheses."""
    out, depth, current = [], 0, ""
    for ch in text:
        depth += (ch in "{[(") - (ch in "}])")
        if ch == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += ch
    if current.strip():
        out.append(current.strip())
    return tuple(out)


class _Scope(NamedTuple):
    """Holds the names that a `{}` scope declares."""

    number: int
    names: dict[str, str]


class _Body:
    """Parses one function body, and adds its instructions and registers to a kernel.

    Registers and labels of inner `{}` scopes get unique names.
    """

    def __init__(self, kernel: PtxKernel, files: dict[str, str], line: int) -> None:
        self.kernel = kernel
        self.files = files
        self.first_line = line
        self.scopes = [_Scope(0, {})]
        self.count = 0
        self.source: Source | None = None
        self.inline = False
        self.code: list[Instr | str] = []

    def read(self, body: str) -> None:
        """Parse the statements of a function body, and cut them into basic blocks."""
        pos, line, seen = 0, self.first_line, 0
        while m := _TOKEN.match(body, pos):
            start = m.start(m.lastgroup or 0)
            line += body.count("\n", seen, start)
            seen, pos = start, m.end()
            if m.group("open"):
                self.count += 1
                self.scopes.append(_Scope(self.count, {}))
            elif m.group("close"):
                self.scopes.pop()
            elif m.group("label"):
                self.code.append(self._label(m.group("label")))
            elif m.group("loc"):
                self._loc(m.group("loc"))
            else:
                self._statement(m.group("stmt").strip(), line)
        if body[pos:].strip():
            raise PtxError(f"PTX line {line}: cannot read {body[pos:].strip()[:60]!r}")
        if any(isinstance(c, Instr) and uses_carry(c) for c in self.code):
            self.kernel.regs |= {CARRY: "w", CARRIED: "d"}
        _blocks(self.kernel, self.code)

    def _loc(self, text: str) -> None:
        """Store the source line of the next instructions."""
        # In a scope of inline assembly, NVVM counts lines of the assembly text instead.
        if len(self.scopes) == 1:
            f, line = text.split()[:2]
            self.source = Source(self.files.get(f, f"file {f}"), int(line))

    def _label(self, name: str) -> str:
        """Return the unique name of a label."""
        return name if name.startswith("$L_") else f"{name}@{self.scopes[-1].number}"

    def _resolve(self, name: str) -> str:
        """Return the unique name of a register or variable."""
        for scope in reversed(self.scopes):
            if name in scope.names:
                return scope.names[name]
        return name

    def _statement(self, text: str, line: int) -> None:
        """Parse an instruction or a directive that begins at `line` of the PTX text."""
        if text.startswith("."):
            self._directive(text, line)
            return
        pred, negated = None, False
        if m := _GUARD.match(text):
            negated, pred, text = bool(m.group(1)), self._resolve(m.group(2)), m.group(3)
        op, _, rest = text.partition(" ") if " " in text else (text, "", "")
        if "\t" in op or "\n" in op:
            op, rest = text.split(None, 1)
        op, rest = op.strip(), rest.strip()
        if op.startswith(("bra", "brx")):
            args: tuple[str, ...] = (self._label(rest),)
        else:
            swap: Callable[[re.Match[str]], str] = lambda m: self._resolve(m.group(0))
            args = split_operands(_NAME.sub(swap, rest))
        self.code.append(Instr(op, args, pred, negated, line, self.source, self.inline))

    def _directive(self, text: str, line: int) -> None:
        """Parse a directive: the declaration of a register or a variable, or an inline mark."""
        if text.startswith(".inline"):
            self.inline = text.endswith("begin")
        elif text.startswith(".reg"):
            m = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
            if m is None:
                raise PtxError(f"PTX line {line}: cannot read {text!r}")
            kind = "p" if m.group(1) == "pred" else CLASS_OF_SIZE[TYPE_BYTES[m.group(1)]]
            for name in m.group(2).split(","):
                self._declare(name.strip(), kind)
        elif m := _VARIABLE.match(text):
            self.kernel.variables += (_variable(m),)

    def _declare(self, name: str, kind: str) -> None:
        """Declare a register, or several (`%r<8>`), in the current scope.

        `kind` is the size class (`PtxKernel.regs`).
        """
        m = re.match(r"([%$\w]+)<(\d+)>", name)
        names = [f"{m.group(1)}{i}" for i in range(int(m.group(2)))] if m else [name]
        scope = self.scopes[-1]
        for n in names:
            full = n if scope.number == 0 else f"{n}@{scope.number}"
            scope.names[n] = full
            self.kernel.regs[full] = kind


def _blocks(kernel: PtxKernel, code: list[Instr | str]) -> None:
    """Cut the code into basic blocks: at labels, after branches, around instructions that may wait.

    The last block is a `ret`, for code that ends without one.
    """
    blocks: list[list[Instr]] = []
    current: list[Instr] = []

    def flush() -> None:
        nonlocal current
        if current:
            blocks.append(current)
            current = []

    for item in code:
        if isinstance(item, str):
            flush()
            kernel.labels[item] = len(blocks)
        elif is_blocking(item):
            flush()
            blocks.append([item])
        else:
            current.append(item)
            if item.parts[0] in ("bra", "ret", "exit", "brx"):
                flush()
    flush()
    blocks.append([Instr("ret", (), None, False, 0)])
    kernel.blocks = blocks

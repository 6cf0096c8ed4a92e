"""Define the result of the parser: kernels as basic blocks of decoded instructions."""

from __future__ import annotations

from dataclasses import dataclass, field

# Size in bytes of the fundamental types (PTX ISA, "Fundamental Types").
TYPE_BYTES = {
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "f32x2": 8,
    "b128": 16,
}


@dataclass(frozen=True)
class Source:
    """Names a line of the program from which the PTX was compiled (`.loc`)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, eq=False)
class Instr:
    """Holds one instruction.

    Attributes:
        op, parts: opcode and modifiers, as one text and split at the dots.
        args: operands as written, with brackets and braces.
        pred, negated: register of the guard predicate, and whether it is negated.
        line, source: lines in the PTX and in the program.
        inline: whether it is inline assembly, which compilers do not change.
    """

    op: str
    args: tuple[str, ...]
    pred: str | None
    negated: bool
    line: int
    source: Source | None = None
    inline: bool = False
    parts: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.op.split(".")))

    def has(self, *names: str) -> bool:
        """Return whether any of the modifiers `names` follows the opcode."""
        return any(n in self.parts for n in names)

    def option(self, *names: str) -> str | None:
        """Return the first of `names` that is among the modifiers; None if none is."""
        return next((n for n in self.parts if n in names), None)

    def __str__(self) -> str:
        guard = f"@{'!' if self.negated else ''}{self.pred} " if self.pred else ""
        return f"{guard}{self.op} {', '.join(self.args)}"


@dataclass(frozen=True)
class Param:
    """Describes a kernel parameter; offset and size are in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Variable:
    """Describes a .shared, .local, .global or .const variable; size 0 is `extern .shared`."""

    name: str
    space: str
    align: int
    size: int
    data: bytes = b""


@dataclass(eq=False)
class PtxKernel:
    """Holds one `.entry`.

    Attributes:
        threads: threads of a CTA, if the kernel requires a number.
        regs: size class of each register.
        blocks: basic blocks; `blocks[labels[l]]` starts at label l.
    """

    name: str
    arch: str
    params: tuple[Param, ...]
    param_bytes: int
    variables: tuple[Variable, ...]
    threads: int | None
    regs: dict[str, str] = field(default_factory=dict)
    blocks: list[list[Instr]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def instructions(self) -> list[Instr]:
        """Return the instructions of all blocks."""
        return [i for block in self.blocks for i in block]


# Instructions at which a warp may have to wait, or must let others run. Each is a block by itself,
# so that it can be tried again without repeating the instructions before it.
BLOCKING = (
    "mbarrier.try_wait",
    "mbarrier.test_wait",
    "bar.sync",
    "bar.arrive",
    "bar.red",
    "bar.cta.sync",
    "bar.cta.arrive",
    "bar.cta.red",
    "barrier.sync",
    "barrier.arrive",
    "barrier.red",
    "barrier.cta.sync",
    "barrier.cta.arrive",
    "barrier.cta.red",
    "barrier.cluster",
    "bar.warp.sync",
    "barrier.warp.sync",
    "cp.async.bulk.wait_group",
    "cp.async.wait_group",
    "cp.async.wait_all",
    "wgmma.wait_group",
    "tcgen05.wait",
    "nanosleep",
)


# Registers that PTX text does not name: the carry flag, and a sum with its carry.
CARRY, CARRIED = "%carry", "%carried"


def uses_carry(instr: Instr) -> bool:
    """Return whether `instr` sets or reads the carry flag."""
    return "cc" in instr.parts or instr.parts[0] in ("addc", "subc", "madc")


def is_blocking(instr: Instr) -> bool:
    """Return whether `instr` may wait, and so is a block by itself."""
    return instr.op.startswith(BLOCKING) or is_poll(instr)


def is_poll(instr: Instr) -> bool:
    """Return whether `instr` is a read of global memory on which a warp may spin."""
    p = instr.parts
    if p[0] == "ld":
        strong = instr.has("acquire", "relaxed", "volatile", "mmio")
        return strong and "global" in p and not p[1].startswith("param")
    return p[0] == "atom" and "cas" in p and not any(x.startswith("shared") for x in p)

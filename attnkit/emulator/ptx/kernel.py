"""Define the data classes that the parser returns: kernels as basic blocks of instructions."""

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
    """Names a source line of the program from which the PTX was compiled (`.loc`)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, eq=False)
class Instr:
    """Holds one decoded PTX instruction.

    Attributes:
        op, parts: opcode and modifiers, as one string and split at the dots.
        args: operands as written, with brackets and braces.
        pred, negated: register of the guard predicate, and whether it is negated.
        line, source: line in the PTX text, and line in the program if it is known.
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
        """Return whether any of `names` is among the opcode and its modifiers."""
        return any(n in self.parts for n in names)

    def option(self, *names: str) -> str | None:
        """Return the first modifier that is one of `names`; None if there is none."""
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
    """Describes a .shared, .local, .global or .const variable.

    Attributes:
        space: state space, such as "shared".
        align, size: in bytes; size 0 is dynamic shared memory (`extern .shared`).
        data: bytes of the initial value; empty if there is none.
    """

    name: str
    space: str
    align: int
    size: int
    data: bytes = b""


@dataclass(eq=False)
class PtxKernel:
    """Holds one kernel of a PTX module (`.entry`).

    Attributes:
        arch: target of the module, such as "sm_90a".
        param_bytes: size of all parameters.
        variables: variables of the module and of the kernel.
        threads: threads of a CTA, if the kernel requires a number (.reqntid).
        regs: size class of each register: "p" for a predicate, else a value of
            `parser.CLASS_OF_SIZE`.
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


# Instructions at which a warp may have to wait, or must let other warps run. Each is a basic block
# by itself, so that it can be executed again without the instructions before it.
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


# Registers that have no name in PTX text: the carry flag, and a sum with its carry.
CARRY, CARRIED = "%carry", "%carried"


def uses_carry(instr: Instr) -> bool:
    """Return whether `instr` sets or reads the carry flag."""
    return "cc" in instr.parts or instr.parts[0] in ("addc", "subc", "madc")


def is_blocking(instr: Instr) -> bool:
    """Return whether `instr` may wait; such an instruction is a basic block by itself."""
    return instr.op.startswith(BLOCKING) or is_poll(instr)


def is_poll(instr: Instr) -> bool:
    """Return whether `instr` reads global memory in a way on which a warp may spin.

    Such reads are strong loads and atomic cas.
    """
    p = instr.parts
    if p[0] == "ld":
        strong = instr.has("acquire", "relaxed", "volatile", "mmio")
        return strong and "global" in p and not p[1].startswith("param")
    return p[0] == "atom" and "cas" in p and not any(x.startswith("shared") for x in p)

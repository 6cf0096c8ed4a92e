"""What the emulator raises and reports: faults of a kernel, each with the place where it happened."""

from __future__ import annotations

from dataclasses import dataclass

from attnkit.errors import AttnkitError, UnsupportedError


class EmulatorError(AttnkitError, RuntimeError):
    """Base of the errors of this package that are not mistakes in arguments."""


class UnknownOpcode(UnsupportedError):
    """The PTX holds an instruction, or a form of one, that the emulator does not implement."""


class PtxError(EmulatorError):
    """The text is not PTX that the parser can read."""


@dataclass(frozen=True)
class Place:
    """Where in the kernel: CTA, warps, the line in the PTX and in the source of the kernel."""

    cta: tuple[int, int, int] | None = None
    warps: tuple[int, ...] = ()
    role: str = ""
    line: int = 0
    source: str = ""

    def __str__(self) -> str:
        parts = []
        if self.cta is not None:
            parts.append(f"CTA {self.cta}")
        if self.warps:
            parts.append(_warps(self.warps) + (f" ({self.role})" if self.role else ""))
        if self.line:
            parts.append(f"PTX line {self.line}")
        if self.source:
            parts.append(self.source)
        return ", ".join(parts)


def _warps(warps: tuple[int, ...]) -> str:
    if len(warps) == 1:
        return f"warp {warps[0]}"
    if warps == tuple(range(warps[0], warps[-1] + 1)):
        return f"warps {warps[0]}-{warps[-1]}"
    return "warps " + ",".join(str(w) for w in warps)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a kernel.

    `kind` is one of: bounds, alignment, barrier, deadlock, descriptor, race, fence, uninitialised,
    unfinished, exited, tensor-memory, launch-control, encoding, runaway, trap, convergence, difference. `severity` is "error" or
    "warning": a warning is something that the PTX ISA does not allow and that hardware is known to let pass.
    """

    kind: str
    text: str
    place: Place = Place()
    severity: str = "error"
    count: int = 1

    def __str__(self) -> str:
        at = str(self.place)
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.severity}: {self.kind}: {self.text}{times}" + (
            f"\n    at {at}" if at else ""
        )


class KernelFault(EmulatorError):
    """The kernel did something that ends its execution; `.finding` says what and where."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Trap(Exception):
    """Raised by the units, without a place; the machine adds it and raises `KernelFault`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text

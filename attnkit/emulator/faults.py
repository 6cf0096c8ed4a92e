"""Define the errors and findings of the emulator, each with the place where it happened."""

from __future__ import annotations

from dataclasses import dataclass

from attnkit.errors import AttnkitError, UnsupportedError


class EmulatorError(AttnkitError, RuntimeError):
    """Base class of errors of the emulator that are not mistakes in arguments."""


class UnknownOpcode(UnsupportedError):
    """Reports an instruction in the PTX, or a form of one, that is not implemented."""


class PtxError(EmulatorError):
    """Reports text that the PTX parser cannot read."""


@dataclass(frozen=True)
class Place:
    """Names a place in a kernel: CTA, warps and their role, PTX line, line of the source code."""

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
    """Format the numbers of warps as text."""
    if len(warps) == 1:
        return f"warp {warps[0]}"
    if warps == tuple(range(warps[0], warps[-1] + 1)):
        return f"warps {warps[0]}-{warps[-1]}"
    return "warps " + ",".join(str(w) for w in warps)


@dataclass(frozen=True)
class Finding:
    """Describes one thing that is wrong with a kernel.

    Attributes:
        kind: bounds, alignment, barrier, deadlock, descriptor, race, fence, uninitialised,
            unfinished, exited, tensor-memory, launch-control, encoding, runaway, trap, convergence
            or difference.
        text: description of what is wrong.
        severity: "error" or "warning". A warning is something that the PTX ISA forbids but that
            works on known hardware.
        count: how often it was found.
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
    """Reports a fault that ends the execution of a kernel; `.finding` says what and where."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Trap(Exception):
    """Signals a fault in an operation, without its place.

    `ScheduledGang.run` and `Cluster.release_one` catch it, add the place and raise `KernelFault`.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text

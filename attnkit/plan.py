"""How a call will run: the template, its tile sizes, and why.

A plan is frozen and hashable: together with the graphs it is the key of whatever is compiled or
cached. Each legality rule is one predicate with its message.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnkit.errors import OptionError, UnsupportedError

BACKENDS = ("auto", "eager", "cpu", "cute", "emulate")

BLOCK = (128, 128)  # FlexAttention's block; strips of the CPU template join several


@dataclass(frozen=True)
class Plan:
    """How a call runs.

    Attributes:
        template: "cpu" (torch operators on any device, block-sparse) or "eager" (dense oracle).
        block: query and kv tile sizes of the mask's runs.
        reason: why this template.
        notes: options that this template has no use for.
    """

    template: str
    block: tuple[int, int] = BLOCK
    reason: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"template {self.template}: {self.reason}"]
        if self.template != "eager":
            lines.append(f"tiles    {self.block[0]} x {self.block[1]}")
        return "\n".join([*lines, *(f"note     {n}" for n in self.notes)])


def choose(
    backend: str, *, device: str, block: tuple[int, int] = BLOCK, notes: tuple[str, ...] = ()
) -> Plan:
    """Choose the plan of a call.

    Args:
        backend: one of `BACKENDS`.
        device: type of the query's device.
        block: tile sizes of the mask's runs.
        notes: passed on.

    Raises:
        OptionError: unknown backend.
        UnsupportedError: a GPU kernel was asked for and none exists for this machine.
    """
    if backend not in BACKENDS:
        raise OptionError(
            f"backend={backend!r} is not known; expected one of {', '.join(BACKENDS)}"
        )
    if backend in ("cute", "emulate"):
        what = "compiled for a GPU" if backend == "cute" else "executed by the emulator"
        raise UnsupportedError(
            f"backend={backend!r} asks for a kernel {what}, and this version of attnkit has no GPU "
            'template yet; use backend="auto" (torch operators, block-sparse, on any device)'
        )
    if backend == "eager":
        return Plan("eager", block, "asked for; dense, holds every score", notes)
    why = "asked for" if backend == "cpu" else f"no kernel template for {device} in this version"
    return Plan("cpu", block, f"{why}; torch operators over the tiles that the mask keeps", notes)

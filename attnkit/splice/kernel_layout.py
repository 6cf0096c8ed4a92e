"""Describe the warp roles and the memory of a kernel, for `explain`."""

from __future__ import annotations

from dataclasses import dataclass

WORK = {
    "counter": "from a counter in memory",
    "clc": "by cluster launch control, in place of CTAs not yet launched",
}


@dataclass(frozen=True)
class Role:
    """Describes the warps that share one role of a warp-specialized kernel.

    Attributes:
        name: name of the role.
        warps: range of warp numbers.
        registers: registers of each thread, as set by setmaxnreg.
    """

    name: str
    warps: range
    registers: int

    def __str__(self) -> str:
        first, last = self.warps[0], self.warps[-1]
        which = f"warp {first}" if first == last else f"warps {first}-{last}"
        return f"{which:12} {self.name:12} {self.registers} registers a thread"


@dataclass(frozen=True)
class Layout:
    """Describes the warp roles and the memory of a kernel; `str()` formats it for `explain`.

    Attributes:
        roles: roles in order of their warps.
        columns: (name, first column, number of columns) of each region of tensor memory; empty if
            the GPU has no tensor memory.
        shared_bytes: shared memory of a CTA, in bytes.
        stages: number of pipeline stages for blocks of K or V.
        work: how a CTA finds its next work tile, a key of `WORK`.
    """

    roles: tuple[Role, ...]
    columns: tuple[tuple[str, int, int], ...]
    shared_bytes: int
    stages: int
    work: str = "counter"

    @property
    def warps(self) -> dict[str, range]:
        """Return a dictionary from the name of each role to its warps."""
        return {role.name: role.warps for role in self.roles}

    def __str__(self) -> str:
        lines = [str(role) for role in self.roles]
        for name, first, count in self.columns:
            last = first + count - 1
            lines.append(
                f"tensor memory columns {first:3} to {last:3}  {name}, 128 rows of float32"
            )
        kib = self.shared_bytes / 1024
        lines.append(f"shared memory {kib:.0f} KiB, a ring of {self.stages} tiles of K or V")
        lines.append(f"the next work tile {WORK[self.work]}")
        return "\n".join(lines)

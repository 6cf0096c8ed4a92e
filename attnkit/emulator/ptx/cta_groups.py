"""Check that a kernel uses tcgen05 either for single CTAs or for pairs of CTAs.

All tcgen05 instructions of a kernel must have the same .cta_group (PTX ISA, tcgen05.alloc,
tcgen05.mma and others).
"""

from __future__ import annotations

from attnkit.emulator.faults import Finding, Place
from attnkit.emulator.ptx.kernel import PtxKernel


def mixed_cta_groups(kernel: PtxKernel) -> list[Finding]:
    """Report the first tcgen05 instruction whose .cta_group differs from earlier ones, if any."""
    first: tuple[str, int] | None = None
    for c in kernel.instructions():
        group = next((p for p in c.parts if p.startswith("cta_group::")), None)
        if c.parts[0] != "tcgen05" or group is None:
            continue
        if first is None:
            first = group, c.line
        elif group != first[0]:
            text = f"{c.op} in a kernel with {first[0]} (PTX line {first[1]})"
            return [Finding("encoding", text, Place(line=c.line, source=str(c.source or "")))]
    return []

"""Define groups of asynchronous operations, for which a gang or a thread still has to wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnkit.emulator.machine.knowledge import Clock

Work = Callable[[], None]


@dataclass(eq=False)
class CopyGroup:
    """Holds the copies between two commits: pending work, clocks and PTX lines.

    `landings` are the clocks of what bulk stores write to global memory.
    """

    work: list[Work] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    landings: list[Clock] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


@dataclass(eq=False)
class BulkGroups:
    """Holds the bulk async-groups of one thread; `landing`: those whose source has been read."""

    current: CopyGroup = field(default_factory=CopyGroup)
    committed: list[CopyGroup] = field(default_factory=list)
    landing: list[CopyGroup] = field(default_factory=list)


@dataclass(frozen=True)
class WgmmaForm:
    """Describes what wgmma that follow each other must share to be computed as one product.

    Attributes:
        d: accumulator registers, by index.
        n, k: N and K of the shape m64nNkK.
        types: types of D, A and B, as PTX names them.
        scale: signs of A and B, 1 or -1.
        major: layouts of A and B; 1 is MN-major.
        a_in_registers: whether A is a tuple of registers; else it is a matrix descriptor.
    """

    d: tuple[int, ...]
    n: int
    k: int
    types: tuple[str, str, str]
    scale: tuple[int, int]
    major: tuple[int, int]
    a_in_registers: bool


@dataclass(eq=False)
class WgmmaGroup:
    """Holds the products of one wgmma group.

    Attributes:
        items: (form, A, B, accumulate) in order of issue. A is a tuple of registers or a
            descriptor, B a descriptor.
        lines: PTX lines of the products.
        clock: clock of the last product, if races are watched.
    """

    items: list[tuple[WgmmaForm, Any, int, bool]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    clock: Clock | None = None

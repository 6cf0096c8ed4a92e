"""Define commit groups of asynchronous operations: cp.async, bulk stores and wgmma."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnkit.emulator.machine.knowledge import Clock

Work = Callable[[], None]


@dataclass(eq=False)
class CopyGroup:
    """Holds the copies between two commits: a group of cp.async, or a bulk async-group.

    Attributes:
        work: delayed copies that are not executed yet.
        clocks: clock of each copy, if races are watched; for a bulk store that of the source read.
        landings: clock of the write of each bulk store to global memory, if races are watched.
        lines: PTX line of each bulk store.
    """

    work: list[Work] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    landings: list[Clock] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


@dataclass(eq=False)
class BulkGroups:
    """Holds the bulk async-groups of one thread.

    Attributes:
        current: the copies since the last commit.
        committed: groups that no wait_group has completed.
        landing: groups whose reads of the source are complete (wait_group.read), but whose writes
            the thread has not waited for.
    """

    current: CopyGroup = field(default_factory=CopyGroup)
    committed: list[CopyGroup] = field(default_factory=list)
    landing: list[CopyGroup] = field(default_factory=list)


@dataclass(frozen=True)
class WgmmaForm:
    """Describes the form of a wgmma; successive wgmma of equal form are computed as one product.

    Attributes:
        d: indices of the accumulator registers.
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

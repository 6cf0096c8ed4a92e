"""Holds groups of asynchronous operations that a gang or a thread has not waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from attnkit.emulator.machine.race_detector import Clock

Work = Callable[[], None]


@dataclass(eq=False)
class CopyGroup:
    """Holds the copies between two commits: what is still to be done, clocks and PTX lines."""

    work: list[Work] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


@dataclass(eq=False)
class BulkGroups:
    """Holds the bulk async-groups of one thread."""

    current: CopyGroup = field(default_factory=CopyGroup)
    committed: list[CopyGroup] = field(default_factory=list)


@dataclass(frozen=True)
class WgmmaForm:
    """Describes what successive wgmma must share to be computed as one product.

    Attributes:
        d: accumulator registers, by index.
        n, k: of the shape m64nNkK.
        types: of D, A and B, as PTX names them.
        scale: signs of A and B, 1 or -1.
        major: of A and B; 1 is MN-major.
        a_in_registers: A is a tuple of registers, else a matrix descriptor.
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
        items: (form, A, B, accumulate) in order. A is a tuple of registers or a descriptor, B a
            descriptor.
        lines: where the products stand in the PTX.
        clock: of the last product, if races are watched.
    """

    items: list[tuple[WgmmaForm, Any, int, bool]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    clock: Clock | None = None

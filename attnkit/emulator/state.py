"""What the units see of a gang: a set of warps of one CTA that run in lockstep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnkit.emulator.formats import Lanes
from attnkit.emulator.race import Clock, RaceDetector
from attnkit.emulator.recorder import Stream

if TYPE_CHECKING:
    from attnkit.emulator.cta import Cta

Mask = Any  # a bool vector of lanes; `full` itself when all lanes are active


class GangState:
    """Fields that every group of operations uses; `Gang` fills them."""

    cta: Cta
    warps: tuple[int, ...]
    width: int
    full: Lanes
    lane: Lanes
    R: list[Any]
    line: int
    why: str
    yielded: bool
    clock_: Clock | None
    race: RaceDetector | None
    first_lane: Lanes
    events: Stream | None  # where what happens is recorded, if anywhere

    def active(self, m: Mask) -> Lanes:
        """Indices of the active lanes."""
        return np.flatnonzero(m)

    def warps_of(self, m: Mask) -> tuple[int, ...]:
        """Numbers of the warps with an active lane."""
        if m is self.full:
            return self.warps
        some = m.reshape(-1, 32).any(1)
        return tuple(w for w, s in zip(self.warps, some.tolist(), strict=True) if s)

    def uniform(self, x: Lanes, m: Mask) -> int:
        """The value of `x` in the first active lane."""
        return int(x[0]) if m is self.full else int(x[m.argmax()])

    def narrowed(self, m: Mask, p: Lanes) -> Mask | None:
        """`m & p`; None if no lane is left, `full` if all are."""
        n = np.count_nonzero(p)
        if m is self.full and n == self.width:
            return m
        if n == 0:
            return None
        out = m & p
        return out if out.any() else None

    @property
    def agent_name(self) -> str:
        return f"warp {self.cta.rank}.{self.warps[0]}"

    def issue(self, unit: str, *, ordered: bool) -> Clock | None:
        """The clock of an asynchronous operation that this gang starts, if races are watched."""
        if self.race is None or self.clock_ is None:
            return None
        return self.race.issue(self.clock_, unit, self.line, ordered=ordered)

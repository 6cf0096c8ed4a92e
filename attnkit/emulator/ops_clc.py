"""Cluster launch control (PTX ISA, clusterlaunchcontrol): a running cluster takes over one not yet launched."""

from __future__ import annotations

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.formats import Lanes, u1, u4
from attnkit.emulator.ops_bulk import BulkOps, Work
from attnkit.emulator.race import Clock
from attnkit.emulator.spaces import OFFSET_MASK, RANK_SHIFT
from attnkit.emulator.state import Mask


class LaunchControlOps(BulkOps):
    def clc_try(self, a: Lanes, bar: Lanes, m: Mask, every: bool) -> None:
        """Writes a 16-byte response and completes 16 bytes on the mbarrier, of every CTA if asked."""
        if self.cta.refused:
            text = "a CTA that has seen a refusal asks for one more cluster: that is not defined"
            raise Trap("launch-control", text)
        for lane in self.active(m).tolist():
            ctaid = self.cta.launch.cancel(self.cta.cluster.rng)
            data = np.frombuffer(self.cta.clc_words(ctaid), u1)
            ranks = range(len(self.cta.cluster.ctas)) if every else [int(a[lane]) >> RANK_SHIFT]
            for r in ranks:
                d = int(a[lane]) & OFFSET_MASK | r << RANK_SHIFT
                b = int(bar[lane]) & OFFSET_MASK | r << RANK_SHIFT
                clock = self.issue("cluster launch control", ordered=False)
                self.cta.cluster.submit("copy", self._response(d, b, data, clock), self)

    def _response(self, d: int, b: int, data: Lanes, clock: Clock | None) -> Work:
        def work(line: int = self.line) -> None:
            self.cta.cluster.write_shared(d, data, clock, line, generic=False)
            self.cta.cluster.complete_tx(b, 16, clock)

        return work

    def clc_canceled(self, x: Lanes, m: Mask) -> Lanes:
        out: Lanes = x.view(u4).reshape(-1, 4)[:, 3] != 0
        self.cta.refused |= not out[self.active(m)].all()
        return out

    @staticmethod
    def clc_ctaid(x: Lanes) -> list[Lanes]:
        words = x.view(u4).reshape(-1, 4)
        return [
            words[:, 0].copy(),
            words[:, 1].copy(),
            words[:, 2].copy(),
            np.zeros(len(words), u4),
        ]

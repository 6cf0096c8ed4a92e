"""Execute cluster launch control: a running cluster takes the work of one not launched yet.

See PTX ISA, clusterlaunchcontrol.
"""

from __future__ import annotations

import numpy as np

from attnkit.emulator.faults import Trap
from attnkit.emulator.machine.address_spaces import OFFSET_MASK, RANK_SHIFT
from attnkit.emulator.machine.async_groups import Work
from attnkit.emulator.machine.gang import Gang, Mask
from attnkit.emulator.machine.knowledge import Clock
from attnkit.emulator.numerics.formats import Lanes, u1, u4
from attnkit.emulator.ops.barriers import check_barriers


def clc_try_cancel(gang: Gang, a: Lanes, bar: Lanes, m: Mask, every: bool) -> None:
    """Execute clusterlaunchcontrol.try_cancel: request a cluster that was not launched yet.

    Asynchronously, a 16-byte response is written to shared memory at `a`, and 16 bytes complete on
    the mbarrier at `bar`.

    Args:
        every: whether every CTA of the cluster gets the response (.multicast::cluster::all).
    """
    if gang.cta.refused:
        text = "a CTA that has seen a refusal asks for one more cluster: that is not defined"
        raise Trap("launch-control", text)
    for lane in gang.active(m).tolist():
        ctaid = gang.launch.cancel(gang.cluster.rng)
        data = np.frombuffer(gang.cta.clc_words(ctaid), u1)
        ranks = range(len(gang.cluster.ctas)) if every else [int(a[lane]) >> RANK_SHIFT]
        for r in ranks:
            d = int(a[lane]) & OFFSET_MASK | r << RANK_SHIFT
            b = int(bar[lane]) & OFFSET_MASK | r << RANK_SHIFT
            clock = gang.issue("cluster launch control", ordered=False, m=m)
            check_barriers(gang, [b], clock)
            gang.cluster.submit("copy", _response(gang, d, b, data, clock), gang)


def _response(gang: Gang, d: int, b: int, data: Lanes, clock: Clock | None) -> Work:
    """Return the work that writes a response at `d` and completes 16 bytes on the mbarrier `b`."""

    def work(line: int = gang.line) -> None:
        gang.cluster.write_shared(d, data, clock, line, generic=False)
        gang.cluster.complete_tx(b, 16, clock)

    return work


def clc_is_canceled(gang: Gang, x: Lanes, m: Mask) -> Lanes:
    """Execute query_cancel.is_canceled: return whether a response holds a cluster.

    A response without one is a refusal. The CTA remembers it, as further requests are not defined.
    """
    out: Lanes = x.view(u4).reshape(-1, 4)[:, 3] != 0
    gang.cta.refused |= not out[gang.active(m)].all()
    return out


def clc_first_ctaid(x: Lanes) -> list[Lanes]:
    """Execute query_cancel.get_first_ctaid: return x, y, z of the cluster's first CTA, and 0."""
    words = x.view(u4).reshape(-1, 4)
    return [
        words[:, 0].copy(),
        words[:, 1].copy(),
        words[:, 2].copy(),
        np.zeros(len(words), u4),
    ]

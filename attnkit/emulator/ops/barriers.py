"""Execute mbarriers, named barriers, the cluster barrier, fences and polls."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.faults import Finding, Trap
from attnkit.emulator.machine.address_spaces import OFFSET_MASK, RANK_SHIFT, SHARED_BASE
from attnkit.emulator.machine.barriers import MBarrier, NamedBarrier
from attnkit.emulator.machine.gang import Gang, Mask
from attnkit.emulator.machine.knowledge import CLUSTER, CTA, GLOBAL, SCOPES, SHARED, Clock
from attnkit.emulator.numerics.formats import Lanes, u8
from attnkit.emulator.ptx.barrier_names import barrier_name


def lanes_by_address(gang: Gang, a: Lanes, m: Mask) -> list[tuple[int, int]]:
    """Return (address, number of lanes that use it), in order of the lanes."""
    x = a if m is gang.full else a[m]
    first = int(x[0])
    if x.size == 1 or (x == x[0]).all():
        return [(first, x.size)]
    values, where, counts = np.unique(x, return_index=True, return_counts=True)
    order = np.argsort(where)
    return [(int(values[i]), int(counts[i])) for i in order]


def _check_init_visible(gang: Gang, b: MBarrier) -> None:
    """Report a use of a barrier whose initialisation is not visible to the gang, in race mode."""
    if gang.race is not None and gang.clock is not None:
        gang.race.check_initialised(b, gang.clock, gang.line, asynchronous=False)


def check_barriers(gang: Gang, addresses: list[int], clock: Clock | None) -> None:
    """Report mbarriers at which an asynchronous operation arrives before they are initialised."""
    if gang.race is None or clock is None:
        return
    for address in addresses:
        b = gang.cluster.mbarrier(address)
        gang.race.check_initialised(b, clock, gang.line, asynchronous=True)


def _initialiser(gang: Gang) -> str:
    """Return the name of the agent that stands for the mbarrier.init of a warp."""
    return f"{gang.agent_name}, mbarrier.init"


def mbarrier_init(gang: Gang, a: Lanes, count: Lanes, m: Mask) -> None:
    """Execute mbarrier.init."""
    for address, n in lanes_by_address(gang, a, m):
        who = m & (a == a.dtype.type(address))
        if n > 1:
            _shared_init(gang, address, count, who)
        off = address & OFFSET_MASK
        if off % 8 or address >> RANK_SHIFT != gang.cta.rank:
            raise Trap("alignment", f"mbarrier.init at shared address {address:#x}")
        c = int(count[gang.active(who)[0]])
        old = gang.cta.mbarriers.get(off)
        if old is not None and (old.flips or old.pending != old.count or old.tx):
            raise Trap("barrier", f"mbarrier.init of an object in use: {old}")
        name = gang.cta.barrier_name(off - SHARED_BASE, gang.line)
        b = gang.cta.mbarriers[off] = MBarrier(off, c, gang.line, name)
        if gang.race is not None and gang.clock is not None:
            agent = gang.race.agent(_initialiser(gang))
            gang.clock.known[agent] += 1
            b.initialised = (agent, int(gang.clock.known[agent]))


def _shared_init(gang: Gang, address: int, count: Lanes, who: Mask) -> None:
    """Warn if lanes of one warp initialise one mbarrier; fault if warps or counts differ.

    The PTX ISA leaves this undefined (mbarrier.init of a valid object). Still, in published kernels
    all lanes of one warp do it at once.
    """
    n, warps = np.count_nonzero(who), gang.warps_of(who)
    if len(warps) > 1 or np.unique(count[who]).size > 1:
        raise Trap("barrier", f"mbarrier.init of one object by {n} threads of warps {warps}")
    text = f"mbarrier.init of the object at shared {address & OFFSET_MASK:#x} by {n} lanes"
    gang.launch.note(Finding("barrier", text, gang.place(gang.line), "warning"))


def mbarrier_inval(gang: Gang, a: Lanes, m: Mask) -> None:
    """Execute mbarrier.inval."""
    for address, _ in lanes_by_address(gang, a, m):
        gang.cluster.mbarrier(address)
        del gang.cta.mbarriers[address & OFFSET_MASK]


def mbarrier_expect_tx(gang: Gang, a: Lanes, tx: Lanes, m: Mask) -> None:
    """Execute mbarrier.expect_tx."""
    for lane in gang.active(m).tolist():
        b = gang.cluster.mbarrier(int(a[lane]))
        _check_init_visible(gang, b)
        b.expect(int(tx[lane]))
    gang.cluster.events += 1


def mbarrier_complete_tx(gang: Gang, a: Lanes, tx: Lanes, m: Mask) -> None:
    """Execute mbarrier.complete_tx."""
    for lane in gang.active(m).tolist():
        gang.cluster.mbarrier(int(a[lane])).expect(-int(tx[lane]))
    gang.cluster.events += 1


def mbarrier_arrive(
    gang: Gang, a: Lanes, n: Lanes, m: Mask, tx: Lanes | None, drop: bool, relaxed: bool
) -> Lanes:
    """Execute mbarrier.arrive[.expect_tx]; return the phase before the arrival, as state token."""
    state = 0
    for address, lanes in lanes_by_address(gang, a, m):
        b = gang.cluster.mbarrier(address)
        _check_init_visible(gang, b)
        state = b.phase
        who = m & (a == a.dtype.type(address))
        if gang.events is not None:
            gang.events.add("arrive", gang.line, what=b, phase=b.flips)
        remote = address >> RANK_SHIFT != gang.cta.rank
        b.release(gang.handed_on(who, relaxed, CLUSTER if remote else CTA))
        if drop:
            b.count -= lanes
        if tx is not None:
            b.expect(int(tx[who].astype(np.int64).sum()))
        b.arrive(int(n[who].astype(np.int64).sum()))
    gang.cluster.events += 1
    if gang.clock is not None:
        gang.clock.tick()
    return np.full(gang.width, state, u8)


def mbarrier_test_wait(
    gang: Gang, a: Lanes, phase: Lanes, m: Mask, spin: bool, parity: bool, relaxed: bool
) -> Lanes | None:
    """Return the lanes whose phase is complete; None if the gang must wait.

    A new barrier passes a wait for parity 1 (PTX ISA, mbarrier.test_wait: the phase before the
    current one is complete).

    Args:
        spin: whether the kernel only waits here, so that the gang may sleep until the phase
            completes.
    """
    ok = np.zeros(gang.width, bool)
    bits = phase & phase.dtype.type(1)
    waits = ""
    for address, _ in lanes_by_address(gang, a, m):
        b = gang.cluster.mbarrier(address)
        _check_init_visible(gang, b)
        lanes = m & (a == a.dtype.type(address))
        passed = lanes & (bits != b.phase)
        if passed.any():
            ok |= passed
            if gang.events is not None:
                gang.events.add("wait", gang.line, what=b, phase=b.flips - 1)
            if gang.clock is not None and b.done is not None:
                several = len(gang.cluster.ctas) > 1
                gang.clock.learn(b.done, relaxed, CLUSTER if several else CTA)
        else:
            waits = f"waits for parity {gang.uniform(bits, lanes)} of {b}"
    if ok.any():
        gang.why = ""
        return ok
    gang.why = waits
    if spin:
        return None
    gang.yielded = gang.polling = True
    return ok


# ---- named barriers
def bar(
    gang: Gang, block: int, number: Lanes, threads: Lanes | None, m: Mask, arrive: bool
) -> bool:
    """Execute bar.sync or bar.arrive, counted in whole warps; return False while it must wait."""
    if block in gang.bar_waits:
        return _resume_bar(gang, block)
    if _warps_differ(gang, number, m, "number") or (
        threads is not None and _warps_differ(gang, threads, m, "thread count")
    ):
        return False
    i = gang.uniform(number, m)
    if not 0 <= i < 16:
        raise Trap("barrier", f"barrier {i}: there are 16, numbered 0 to 15")
    if i not in gang.cta.named:
        name = barrier_name(gang.launch.source_of(gang.line))
        gang.cta.named[i] = NamedBarrier(i, name=name)
    b = gang.cta.named[i]
    n = gang.uniform(threads, m) if threads is not None else gang.cta.threads_in_warps
    warps = gang.warps_of(m)
    generation = b.generation
    if gang.events is not None:
        gang.events.add("arrive", gang.line, what=b, phase=generation)
    b.release(gang.handed_on(m))
    if gang.clock is not None:
        gang.clock.tick()
    done = b.arrive(32 * len(warps), n, warps)
    gang.cluster.events += 1
    if arrive:
        return True
    if done:
        _learn_named(gang, b, generation)
        return True
    gang.bar_waits[block] = (i, generation)
    gang.why = f"waits at {b}"
    return False


def _warps_differ(gang: Gang, x: Lanes, m: Mask, what: str) -> bool:
    """Return whether the warps of the gang have different values of `x`.

    Warps whose value differs from the first then leave the gang, before any of them continues.
    """
    first = gang.uniform(x, m)
    same = m & (x == x.dtype.type(first))
    if np.count_nonzero(same) == np.count_nonzero(m):
        return False
    others = (m & ~same).reshape(-1, 32).any(1)
    if (others & same.reshape(-1, 32).any(1)).any():
        raise Trap("barrier", f"lanes of one warp give a barrier's {what} differently")
    gang.leaving = np.repeat(others, 32)
    return True


def _resume_bar(gang: Gang, block: int) -> bool:
    """Return whether the barrier at which block `block` waits has completed."""
    i, generation = gang.bar_waits[block]
    b = gang.cta.named[i]
    if b.generation == generation:
        gang.why = f"waits at {b}"
        return False
    del gang.bar_waits[block]
    gang.why = ""
    _learn_named(gang, b, generation)
    return True


def _learn_named(gang: Gang, b: NamedBarrier, generation: int) -> None:
    """End a wait at a named barrier: record the event, and add the knowledge that it hands on."""
    if gang.events is not None:
        gang.events.add("wait", gang.line, what=b, phase=generation)
    if gang.clock is not None:
        gang.clock.join(b.clocks[generation])


# ---- cluster barrier
def cluster_arrive(gang: Gang, m: Mask, relaxed: bool) -> bool:
    """Execute barrier.cluster.arrive."""
    b = gang.cluster.barrier
    if gang.cluster_wait_for >= 0:
        raise Trap("barrier", "barrier.cluster.arrive twice without a wait")
    gang.cluster_wait_for = b.generation
    if gang.events is not None:
        gang.events.add("arrive", gang.line, what=b, phase=b.generation)
    gang.cluster.release_cluster(gang.handed_on(m, relaxed))
    if gang.clock is not None:
        gang.clock.tick()
    b.arrive(len(gang.warps_of(m)))
    gang.cluster.events += 1
    return True


def cluster_wait(gang: Gang, m: Mask) -> bool:
    """Execute barrier.cluster.wait; return False while it must wait."""
    b = gang.cluster.barrier
    if gang.cluster_wait_for < 0:
        raise Trap("barrier", "barrier.cluster.wait without an arrive")
    if b.generation == gang.cluster_wait_for:
        gang.why = f"waits at barrier.cluster ({b.arrived} of {b.warps} warps)"
        return False
    if gang.clock is not None:
        knowledge = b.clocks.get(gang.cluster_wait_for)
        if knowledge is not None:  # None if all arrivals were relaxed and nothing was fenced
            gang.clock.join(knowledge)
    if gang.events is not None:
        gang.events.add("wait", gang.line, what=b, phase=gang.cluster_wait_for)
    gang.cluster_wait_for, gang.why = -1, ""
    return True


# ---- order within a warp
def warp_sync(gang: Gang, block: int, members: Lanes, m: Mask) -> bool:
    """Execute bar.warp.sync; return False while lanes among `members` have not reached one.

    Lanes may meet at different instructions, here blocks, as long as they name the same members.
    """
    if m is not gang.full and not (gang.lanes_released.pop(block, ~m) & m).any():
        first = members[gang.warp_start + m.reshape(-1, 32).argmax(1).repeat(32)]
        wanted = (first >> gang.lane.astype(first.dtype)) & first.dtype.type(1) != 0
        wanted &= gang.alive() & m.reshape(-1, 32).any(1).repeat(32)
        elsewhere = {b: x & wanted for b, x in gang.lane_waits.items() if b != block}
        here = np.logical_or.reduce([m, *elsewhere.values()])
        absent = (wanted & ~here).reshape(-1, 32).any(1).repeat(32)
        if absent.any():
            gang.lane_waits[block] = m
            gang.why = "waits at bar.warp.sync for other lanes of the warp"
            whole = (m == gang.alive()).reshape(-1, 32).all(1).repeat(32)
            gang.leaving = m & whole if (m & whole).any() else None
            return False
        for b, lanes in elsewhere.items():
            if lanes.any():
                gang.lanes_released[b] = lanes
    gang.lane_waits.pop(block, None)
    gang.why = ""
    if gang.clock is not None:
        gang.clock.sync_lanes()
    return True


# ---- others
def fence_proxy(gang: Gang, shared: bool, everywhere: bool, m: Mask) -> None:
    """Execute fence.proxy.async: make known generic writes visible to the async proxy.

    Args:
        shared: whether it covers shared memory.
        everywhere: whether it covers global memory.
        m: mask of active lanes.
    """
    if gang.clock is not None:
        seen = gang.clock.seen_by(gang.single(m))
        for covered, row in ((shared, SHARED), (everywhere, GLOBAL)):
            if covered:
                gang.clock.knows.fence_proxy(seen, row)
        gang.clock.tick()


def fence(gang: Gang, scope: str, m: Mask) -> None:
    """Execute a fence, on which relaxed arrivals and waits depend.

    Later relaxed arrivals hand on what the gang knows now; what it learned by earlier relaxed
    waits counts from now on.
    """
    if gang.clock is not None:
        gang.clock.fence(SCOPES[scope], gang.single(m))


def fence_initialisation(gang: Gang) -> None:
    """Execute fence.mbarrier_init, which publishes the mbarrier.init of the gang's threads."""
    if gang.race is not None and gang.clock is not None:
        gang.clock.fence_initialisation(gang.race.agent(_initialiser(gang)))


def fence_tensor(gang: Gang, after: bool) -> None:
    """Execute tcgen05.fence::after_thread_sync, or ::before_thread_sync."""
    if gang.clock is not None:
        gang.clock.fence_tensor(after)


def grid_wait(gang: Gang) -> None:
    """Execute griddepcontrol.wait: the kernels before this one are complete."""
    if gang.clock is not None:
        gang.clock.knows.grids = True
        gang.launch.races.waited()


def note_poll(gang: Gang, block: int, registers: list[int], m: Mask) -> None:
    """Yield after a strong load of global memory that read the same values as before."""
    values: Any = b"".join(gang.R[i][m].tobytes() for i in registers)
    if gang.last_polls.get(block) == values:
        gang.yielded = gang.polling = True
        gang.why = "polls global memory"
    gang.last_polls[block] = values

"""Execute instructions of mbarriers, named barriers, the cluster barrier and fences (PTX ISA).

Functions that may wait return False, or None, while they wait; the gang then executes them again.
The argument `block` of such a function is the number of the basic block of its instruction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit.emulator.faults import Finding, Trap
from attnkit.emulator.machine.address_spaces import OFFSET_MASK, RANK_SHIFT, SHARED_BASE
from attnkit.emulator.machine.barriers import MBarrier, NamedBarrier, Released
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
    """In race mode, report an mbarrier whose initialisation is not visible to the gang."""
    if gang.race is not None and gang.clock is not None:
        gang.race.check_initialised(b, gang.clock, gang.line, asynchronous=False)


def check_barriers(gang: Gang, addresses: list[int], clock: Clock | None) -> None:
    """In race mode, report mbarriers whose initialisation an asynchronous operation may not see.

    Args:
        clock: clock of the operation, which will arrive at them or complete bytes on them.
    """
    if gang.race is None or clock is None:
        return
    for address in addresses:
        b = gang.cluster.mbarrier(address)
        gang.race.check_initialised(b, clock, gang.line, asynchronous=True)


def _initialiser(gang: Gang) -> str:
    """Return the name of a warp's mbarrier.init in the race detector.

    It counts as an agent of its own, because fence.mbarrier_init orders nothing else.
    """
    return f"{gang.agent_name}, mbarrier.init"


def mbarrier_init(gang: Gang, a: Lanes, count: Lanes, m: Mask) -> None:
    """Execute mbarrier.init: create the mbarrier at `a` with the expected arrivals `count`."""
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
            b.check_seen = gang.race.check_seen


def _shared_init(gang: Gang, address: int, count: Lanes, who: Mask) -> None:
    """Report a warning for several lanes of one warp that initialise one mbarrier.

    Raise `Trap` if the lanes are in different warps or give different counts. The PTX ISA leaves
    all of this undefined (mbarrier.init of a valid object). Still, in published kernels all lanes
    of one warp do it at once.
    """
    n, warps = np.count_nonzero(who), gang.warps_of(who)
    if len(warps) > 1 or np.unique(count[who]).size > 1:
        raise Trap("barrier", f"mbarrier.init of one object by {n} threads of warps {warps}")
    text = f"mbarrier.init of the object at shared {address & OFFSET_MASK:#x} by {n} lanes"
    gang.launch.note(Finding("barrier", text, gang.place(gang.line), "warning"))


def mbarrier_inval(gang: Gang, a: Lanes, m: Mask) -> None:
    """Execute mbarrier.inval: remove the mbarrier, which must be in the gang's own CTA."""
    for address, _ in lanes_by_address(gang, a, m):
        if address >> RANK_SHIFT != gang.cta.rank:
            text = f"mbarrier.inval at shared address {address:#x}: it is of another CTA"
            raise Trap("bounds", text)
        _check_init_visible(gang, gang.cluster.mbarrier(address))
        del gang.cta.mbarriers[address & OFFSET_MASK]


def mbarrier_expect_tx(gang: Gang, a: Lanes, tx: Lanes, m: Mask) -> None:
    """Execute mbarrier.expect_tx: add `tx` bytes to the mbarrier's transaction count."""
    for lane in gang.active(m).tolist():
        b = gang.cluster.mbarrier(int(a[lane]))
        _check_init_visible(gang, b)
        b.expect(int(tx[lane]))
    gang.cluster.events += 1


def mbarrier_complete_tx(gang: Gang, a: Lanes, tx: Lanes, m: Mask) -> None:
    """Execute mbarrier.complete_tx: subtract `tx` bytes from the mbarrier's transaction count."""
    for lane in gang.active(m).tolist():
        b = gang.cluster.mbarrier(int(a[lane]))
        _check_init_visible(gang, b)
        b.expect(-int(tx[lane]))
    gang.cluster.events += 1


def mbarrier_arrive(
    gang: Gang, a: Lanes, n: Lanes, m: Mask, tx: Lanes | None, drop: bool, relaxed: bool
) -> Lanes:
    """Execute mbarrier.arrive or arrive_drop, with .expect_tx or without; return the state token.

    The token of a lane is the phase of its mbarrier before the arrival, 0 or 1.

    Args:
        n: arrivals of each lane.
        tx: bytes that .expect_tx adds before the arrival; None without it.
        drop: whether later phases expect these arrivals no more (arrive_drop).
        relaxed: whether the arrival is relaxed; if not, it is a release.
    """
    state = np.zeros(gang.width, u8)
    for address, _ in lanes_by_address(gang, a, m):
        b = gang.cluster.mbarrier(address)
        _check_init_visible(gang, b)
        who = m & (a == a.dtype.type(address))
        state[who] = b.phase
        arrivals = int(n[who].astype(np.int64).sum())
        if gang.events is not None:
            gang.events.add("arrive", gang.line, what=b, phase=b.flips)
        remote = address >> RANK_SHIFT != gang.cta.rank
        b.release(gang.handed_on(who, relaxed, CLUSTER if remote else CTA))
        if drop:
            b.count -= arrivals
        if tx is not None:
            b.expect(int(tx[who].astype(np.int64).sum()))
        b.arrive(arrivals)
    gang.cluster.events += 1
    if gang.clock is not None:
        gang.clock.tick()
    return state


def mbarrier_test_wait(
    gang: Gang, a: Lanes, phase: Lanes, m: Mask, spin: bool, parity: bool, relaxed: bool
) -> Lanes | None:
    """Execute mbarrier.test_wait or try_wait: return the lanes whose phase is complete.

    Return None if the gang must wait. On a new mbarrier, a wait for parity 1 succeeds at once (PTX
    ISA, mbarrier.test_wait: the phase before the current one is complete).

    Args:
        phase: parity of the phase or state token; both have the parity in bit 0.
        spin: whether the kernel does nothing but repeat this wait until it succeeds. The gang may
            then sleep until the phase completes.
        relaxed: whether the wait is relaxed; if not, it is an acquire.
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
            if gang.clock is not None and b.flips:
                b.seen.append((gang.clock.agent, gang.clock.now, gang.line))
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
    """Execute bar.sync or bar.arrive; return False while the gang must wait.

    Threads are counted in whole warps.

    Args:
        number: number of the barrier, 0 to 15.
        threads: threads that the barrier expects; None for all warps of the CTA.
        arrive: whether it is bar.arrive, which does not wait.
    """
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
    generation, released = b.generation, b.released
    if gang.events is not None:
        gang.events.add("arrive", gang.line, what=b, phase=generation)
    released.add(gang.handed_on(m))
    if gang.clock is not None:
        gang.clock.tick()
    done = b.arrive(32 * len(warps), n, warps)
    gang.cluster.events += 1
    if arrive:
        return True
    if done:
        _learn_named(gang, b, generation, released)
        return True
    gang.bar_waits[block] = (b, generation, released)
    gang.why = f"waits at {b}"
    return False


def _warps_differ(gang: Gang, x: Lanes, m: Mask, what: str) -> bool:
    """Return whether the warps of the gang have different values of `x`, an operand named `what`.

    If so, mark the warps whose value differs from the first: they must leave the gang before any
    warp continues. Raise `Trap` if the value differs within a warp.
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
    """Return whether the named barrier at which basic block `block` waits has completed."""
    b, generation, released = gang.bar_waits[block]
    if b.generation == generation:
        gang.why = f"waits at {b}"
        return False
    del gang.bar_waits[block]
    gang.why = ""
    _learn_named(gang, b, generation, released)
    return True


def _learn_named(gang: Gang, b: NamedBarrier, generation: int, released: Released) -> None:
    """End a wait at a named barrier: record the event, and acquire what its arrivals released."""
    if gang.events is not None:
        gang.events.add("wait", gang.line, what=b, phase=generation)
    if gang.clock is not None and released.knowledge is not None:
        gang.clock.join(released.knowledge)


# ---- cluster barrier
def cluster_arrive(gang: Gang, m: Mask, relaxed: bool) -> bool:
    """Execute barrier.cluster.arrive; return True, because it never waits."""
    b = gang.cluster.barrier
    if gang.cluster_wait_for >= 0:
        raise Trap("barrier", "barrier.cluster.arrive twice without a wait")
    gang.cluster_wait_for = b.generation
    if gang.events is not None:
        gang.events.add("arrive", gang.line, what=b, phase=b.generation)
    b.released.add(gang.handed_on(m, relaxed))
    if gang.clock is not None:
        gang.clock.tick()
    b.arrive(len(gang.warps_of(m)))
    gang.cluster.events += 1
    return True


def cluster_wait(gang: Gang, m: Mask) -> bool:
    """Execute barrier.cluster.wait; return False while the gang must wait."""
    b = gang.cluster.barrier
    if gang.cluster_wait_for < 0:
        raise Trap("barrier", "barrier.cluster.wait without an arrive")
    if b.generation == gang.cluster_wait_for:
        gang.why = f"waits at barrier.cluster ({b.arrived} of {b.warps} warps)"
        return False
    knowledge = b.done.knowledge  # None if all arrivals were relaxed and nothing was fenced
    if gang.clock is not None and knowledge is not None:
        gang.clock.join(knowledge)
    if gang.events is not None:
        gang.events.add("wait", gang.line, what=b, phase=gang.cluster_wait_for)
    gang.cluster_wait_for, gang.why = -1, ""
    return True


# ---- order within a warp
def warp_sync(gang: Gang, block: int, members: Lanes, m: Mask) -> bool:
    """Execute bar.warp.sync; return False until all lanes in `members` have reached one.

    The lanes may wait at different bar.warp.sync instructions, which are different basic blocks, if
    all of these have the same members. Lanes that have exited are not waited for.
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
    """Execute fence.proxy.async: make earlier generic writes visible to the asynchronous proxy.

    These are the writes that are ordered before the fence, by the active lanes or by other threads.

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
    """Execute fence.acq_rel, fence.sc or membar of a scope.

    With it, later relaxed arrivals release the accesses that are ordered before the fence, and
    earlier relaxed waits acquire (PTX ISA, "Release and Acquire Patterns").
    """
    if gang.clock is not None:
        gang.clock.fence(SCOPES[scope], gang.single(m))


def fence_initialisation(gang: Gang) -> None:
    """Execute fence.mbarrier_init: let later relaxed arrivals release the gang's mbarrier.init."""
    if gang.race is not None and gang.clock is not None:
        gang.clock.fence_initialisation(gang.race.agent(_initialiser(gang)))


def fence_tensor(gang: Gang, after: bool) -> None:
    """Execute tcgen05.fence::after_thread_sync if `after` is true, else ::before_thread_sync."""
    if gang.clock is not None:
        gang.clock.fence_tensor(after)


def grid_wait(gang: Gang) -> None:
    """Execute griddepcontrol.wait: order earlier kernels before later accesses of the gang."""
    if gang.clock is not None:
        gang.clock.knows.grids = True
        gang.launch.races.waited()


def note_poll(gang: Gang, block: int, registers: list[int], m: Mask) -> None:
    """Let other warps run if a poll of global memory has read the same values as last time.

    A poll is a strong load or an atomic cas that may be part of a spin loop
    (`ptx.kernel.is_poll`). `registers` are the indices of its destination registers.
    """
    values: Any = b"".join(gang.R[i][m].tobytes() for i in registers)
    if gang.last_polls.get(block) == values:
        gang.yielded = gang.polling = True
        gang.why = "polls global memory"
    gang.last_polls[block] = values

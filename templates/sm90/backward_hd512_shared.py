"""Define what the warp roles of a pair of CTAs share in the Hopper backward above head dim 256."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from cutlass import Boolean, Float32, Int32, cute
from cutlass._mlir.dialects.nvvm import MBarrierWaitKind, MemScopeKind, mbarrier_wait_parity

from attnkit.templates.common import device
from attnkit.templates.common.constants import ONE_ARRIVAL
from attnkit.templates.sm90.backward_epilogue import LANE_STRIDE
from attnkit.templates.sm90.backward_hd512_config import Hd512PartConfig
from attnkit.templates.sm90.backward_shared import (
    CONSUMERS,
    WARP,
    WARPS,
    Hd256Barriers,
    LoadBarriers,
    Partial,
    hd256_barrier_count,
    init_hd256_load_barriers,
    place_hd256_barriers,
)


@dataclass(frozen=True)
class PairLoadBarriers(LoadBarriers):
    """Holds the mbarriers of the producers of both CTAs."""

    item_full: cute.Pointer  # in the second CTA: the index of a work tile has arrived
    item_empty: cute.Pointer  # in the first CTA: the second one has read it


@dataclass(frozen=True)
class Hd512Barriers(Hd256Barriers):
    """Holds all mbarriers of a CTA.

    Attributes:
        partial: S, then dP of the other CTA have arrived; one for each consumer.
    """

    partial: cute.Pointer


def hd512_barrier_count(c: Hd512PartConfig) -> int:
    """Return the number of mbarriers of `place_hd512_barriers`."""
    return hd256_barrier_count(c) + 2 + len(Partial) * CONSUMERS


def place_hd512_barriers(c: Hd512PartConfig, base: cute.Pointer) -> Hd512Barriers:
    """Return the mbarriers, laid out in shared memory from address `base`."""
    common, further = place_hd256_barriers(c, base), base + hd256_barrier_count(c)
    loads: Any = {f.name: getattr(common.load, f.name) for f in fields(LoadBarriers)}
    load = PairLoadBarriers(**loads, item_full=further, item_empty=further + 1)
    return Hd512Barriers(load, common.turns, further + 2)


def init_hd512_barriers(c: Hd512PartConfig, bars: Hd512Barriers) -> None:
    """Initialise the mbarriers with their arrival counts; called by one thread."""
    # The emulator's reports name a barrier by the argument of the call named `mbarrier_init`.
    mbarrier_init = cute.arch.mbarrier_init
    load: Any = bars.load
    init_hd256_load_barriers(c, load)
    mbarrier_init(load.item_full, ONE_ARRIVAL)  # by the second CTA's producer, with expect_tx
    mbarrier_init(load.item_empty, ONE_ARRIVAL)
    for i in range(len(Partial) * CONSUMERS):
        mbarrier_init(bars.partial + i, WARPS)  # each warp expects its own bytes


def other_cta() -> Int32:
    """Return the rank of the other CTA of the pair."""
    return cute.arch.block_idx_in_cluster() ^ 1


def in_other_cta(place: cute.Pointer, count: Int32) -> Int32:
    """Return the address of a place of shared memory in the other CTA.

    It is computed anew for each `count`, because few registers are free in the mainloop.
    """
    address = device.recomputed(place.toint(), count)
    local = cute.make_ptr(Int32, address, cute.AddressSpace.smem)
    return cute.arch.map_dsmem_ptr(local, other_cta()).toint()


@cute.jit
def wait_for_other_cta(barrier: cute.Pointer, phase: Int32):
    """Wait until a phase of an mbarrier is complete, and see what the other CTA wrote before."""
    done = is_complete(barrier, phase)
    while not done:
        done = is_complete(barrier, phase)


def is_complete(barrier: cute.Pointer, phase: Int32) -> Boolean:
    """Wait a little for a phase of an mbarrier, and return whether it is complete.

    If so, this thread sees what other CTAs of the cluster wrote before they arrived.
    """
    return Boolean(
        mbarrier_wait_parity(
            barrier.to_llvm_ptr(),
            Int32(phase).ir_value(),
            MBarrierWaitKind.TRY,
            scope=MemScopeKind.CLUSTER,
        )
    )


@dataclass(frozen=True)
class Exchange:
    """Exchanges S and dP between two CTAs, each of which has summed half of the head dim.

    A thread stores its part of an accumulator to the memory of the same thread in the other CTA,
    whose mbarrier counts the bytes. That memory needs no barrier that it is empty. A thread stores
    S of a block after it has received dP of the block before. The other CTA sends that dP after it
    has read the S before. The same holds for dP, after S of the same block.

    Attributes:
        full: mbarrier of S, followed by that of dP: its bytes have arrived.
        memory: f32, of S; that of dP follows after `stride` floats.
        stride: see `memory`.
    """

    full: cute.Pointer
    memory: cute.Pointer
    stride: int

    @staticmethod
    def of(
        c: Hd512PartConfig, bars: Hd512Barriers, memory: cute.Pointer, wg: Int32, thread: Int32
    ) -> Exchange:
        """Create the exchange for one thread of a consumer.

        Args:
            c: compile-time configuration.
            bars: mbarriers.
            memory: f32 [2, consumers, partial_floats] in shared memory.
            wg, thread: index of the consumer, and of the thread in it.
        """
        own = memory + (wg * c.partial_floats + thread * 4)
        return Exchange(bars.partial + wg, own, CONSUMERS * c.partial_floats)

    def send(self, which: Partial, acc: cute.Tensor, count: Int32) -> None:
        """Send this CTA's terms of S or dP of the `count`-th q block."""
        full = self.full + CONSUMERS * which
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * WARP * cute.size(acc))
        to = in_other_cta(self.memory + which * self.stride, count)
        bar = in_other_cta(full, count)
        for i in range(cute.size(acc) // 4):
            cute.arch.inline_ptx(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                f"[{{$r0}}+{4 * LANE_STRIDE * i}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}}, [{{$r5}}];",
                read_only_args=[to, *(acc[4 * i + k] for k in range(4)), bar],
            )

    def add(self, which: Partial, acc: cute.Tensor, count: Int32) -> None:
        """Add the other CTA's terms of S or dP of the `count`-th q block."""
        wait_for_other_cta(self.full + CONSUMERS * which, count & 1)
        for i in range(cute.size(acc) // 4):
            part = cute.make_rmem_tensor(4, Float32)
            start = (self.memory + (which * self.stride + LANE_STRIDE * i)).align(16)
            cute.autovec_copy(cute.make_tensor(start, cute.make_layout(4)), part)
            for k in range(4):
                acc[4 * i + k] = acc[4 * i + k] + part[k]

"""Compute the backward on Hopper (sm_90a) for head dims above 256, to 512.

dK and dV of 64 keys by 512 columns would fill the registers of an SM. So a cluster of two CTAs
takes a kv block of 64 keys, and each CTA has half of the columns of Q, K, V, dO and of dQ, dK, dV.
It runs the loop of `backward_hd256`, with two additions: S^T = K Q^T and dP^T = V dO^T are sums
over all columns. A thread sends its terms to the same thread of the other CTA through distributed
shared memory and adds those that it receives. Both CTAs then compute the same P and dS.

    tensor cores:  S | dQ, dP of this block | dV         | dQ dK S of the next block
    other:           S to the other, dQ, P    dP to it, dS

The terms of S travel while the second half of dQ is added and dP runs; those of dP while dV runs.

Costs of a q block of 64 rows at head dim 512, in cycles of an SM, by count and not measured: the
five MMAs take 2560 of the tensor cores, at 4096 FLOP per cycle. They read 352 KiB of operands from
shared memory: 96 each for S and dP (m64n32k16), 48 each for dV and dK (m64n128k16), and 64 for dQ
(m64n64k16). At 128 bytes per cycle these are 2800, mostly at the same time. dQ leaves the SM as 64
KiB in float32, S and dP as 32 KiB; at about 26 bytes per cycle, as measured for dQ, these are 3800.
They would be the limit if all overlapped. Q and dO arrive as 64 KiB. Other designs cost more:

- Each CTA computes all of S and dP from all columns, without a cluster: seven half products
  instead of five. It reads twice the operands from global memory, and shared memory has no room
  for 64 rows of Q.
- A CTA with 32 keys and all columns: MMAs with N = 32 take 1.5 times as long, because of shared
  memory, and the bytes of dQ per key double.
- One kernel for dQ and one for dK and dV: seven products instead of five.

The kernel supports what `backward_hd256` does, but no fixed order of sums. Gradients of captured
tensors are the same in both CTAs, and the first one adds them.
"""

from __future__ import annotations

from typing import Any

from cutlass import Boolean, Float32, Int32, cute

from attnkit.templates.common.hooks import BackwardHooks
from attnkit.templates.sm90.backward_captured_grads import CapturedGrads
from attnkit.templates.sm90.backward_hd256 import COLUMNS, BackwardHd256, Hd256Consumer
from attnkit.templates.sm90.backward_hd512_config import CTAS, Hd512Config, Hd512PartConfig
from attnkit.templates.sm90.backward_hd512_producer import FIRST, PairProducer
from attnkit.templates.sm90.backward_hd512_shared import (
    Exchange,
    Hd512Barriers,
    hd512_barrier_count,
    init_hd512_barriers,
    place_hd512_barriers,
)
from attnkit.templates.sm90.backward_shared import CONSUMERS, Partial


class PairCapturedGrads(CapturedGrads):
    """Accumulates the gradients of captured tensors, of which both CTAs have the same terms."""

    @cute.jit
    def add_at(self, condition: Boolean, target: cute.Pointer, value: Float32):
        """Add `value` at `target` in global memory if `condition` holds; only the first CTA does so."""
        first = cute.arch.block_idx_in_cluster() == FIRST
        CapturedGrads.add_at(self, condition & first, target, value)


class BackwardHd512(BackwardHd256):
    """Builds the Hopper backward kernel of one configuration and one variant, head dims above 256.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.

    Raises:
        ValueError: the configuration is not supported; the message says why.
    """

    config: Hd512PartConfig
    ctas_per_tile = CTAS

    def __init__(self, config: Hd512Config, hooks: BackwardHooks) -> None:
        problem = config.problem()
        if problem:
            raise ValueError(problem)
        super().__init__(config.part, hooks)
        self.producer = PairProducer(self.config)
        self.captured_grads = PairCapturedGrads(self.config, self.softmax)
        self.tight = True  # the terms of S travel while dQ is added to memory

    def barrier_count(self) -> int:
        """Return the number of mbarriers."""
        return hd512_barrier_count(self.config)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a CTA's shared memory, in the order of their addresses."""
        floats = len(Partial) * CONSUMERS * self.config.partial_floats
        memory = cute.struct.Align[cute.struct.MemRange[Float32, floats], 128]
        return super().fields() | {"partials": memory}

    def place_barriers(self, base: cute.Pointer) -> Hd512Barriers:
        """Return the mbarriers, laid out in shared memory from address `base`."""
        return place_hd512_barriers(self.config, base)

    def init_barriers(self, bars: Any) -> None:
        """Initialise the mbarriers; called by one thread."""
        init_hd512_barriers(self.config, bars)

    def sync_all(self) -> None:
        """Synchronise both CTAs, so that each may use the mbarriers of the other."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def end(self) -> None:
        """Wait until no other CTA reads or writes the memory of this CTA."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def own_columns(self, tiles: tuple) -> tuple:
        """Return the TMA tensors from the first column of this CTA on."""
        rank, c = cute.arch.block_idx_in_cluster(), self.config
        wide, deep = c.head_dim, c.head_dim_v
        columns = (wide, wide, deep, deep, wide, deep)  # of Q, K, V, dO, dK, dV
        return tuple(
            cute.domain_offset((0, rank * width, 0, 0), t)
            for t, width in zip(tiles, columns, strict=True)
        )

    def exchange_of(self, storage: Any) -> cute.Pointer:
        """Return the memory for S and dP of the other CTA."""
        return storage.partials.data_ptr()

    def exchange(self, w: Hd256Consumer) -> Exchange:
        """Create the exchange for one thread."""
        bars: Any = w.bars
        return Exchange.of(self.config, bars, w.exchange, w.wg, w.thread)

    def send_partial(
        self, w: Hd256Consumer, which: Partial, acc: cute.Tensor, count: Int32
    ) -> None:
        """Send this CTA's terms of S or dP of the `count`-th q block to the other CTA."""
        self.exchange(w).send(which, acc, count)

    def add_partial(
        self, w: Hd256Consumer, which: Partial, acc: cute.Tensor, count: Int32
    ) -> None:  # fmt: skip
        """Add the other CTA's terms of S or dP of the `count`-th q block."""
        self.exchange(w).add(which, acc, count)

    def groups(self, head_dim: int) -> int:
        """Return how many groups of `COLUMNS` columns a row of dQ, dK or dV has in float32 memory.

        `head_dim` is the number of columns of this CTA.
        """
        return CTAS * head_dim // COLUMNS

    def first_group(self, row: Int32, head_dim: int) -> Any:
        """Return the index of this CTA's first group of columns in a row, see `groups`."""
        rank = cute.arch.block_idx_in_cluster()
        return (CTAS * row + rank) * (head_dim // COLUMNS)

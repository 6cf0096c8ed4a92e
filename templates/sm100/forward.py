"""Compute the forward on Blackwell (sm_100a): FlashAttention-4's algorithm with a variant's hooks.

The kernel is persistent, with one CTA per SM. Two query tiles of 128 rows are processed in
ping-pong: while the tensor cores run the MMAs of one, a softmax warpgroup processes the other. S
and O are in tensor memory, and P overwrites S. These are the roles; a thread of the first two has
one row:

    softmax      one warpgroup per query tile: mod, mask, exponentials; P back to tensor memory
    correction   one warpgroup: rescales O if a maximum changed, rounds and writes O at the end
    MMA          one warp: S = Q K^T and O += P V, alternating between the tiles
    load         one warp: work tiles, TMA of Q, K and V
    store        one warp: TMA of O

For each query tile the MMAs are issued in the order P V of a block, then Q K of the next one. S of
the next block overwrites P. P V has read P by then, because MMAs complete in the order of issue: no
other wait is needed (Zadouri et al. 2026, FlashAttention-4).

With q_tiles=1, the two buffers of S serve two blocks of one query tile. Above head dim 256, K is
loaded in parts of its columns, and S is their sum. Values wider than 256 columns are computed in
two parts by two work tiles, which both compute S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.memory
import cutlass.tensor_utils
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import (
    OperandMajorMode,
    cpasync,
    make_tiled_tma_atom_A,
    make_tiled_tma_atom_B,
    tcgen05,
)
from cutlass.utils import blackwell_helpers

from attnkit.templates.common.device import DTYPES
from attnkit.templates.common.forward_work import Scalars
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.tma import ordered
from attnkit.templates.sm100.clc_scheduler import RESPONSE_BYTES, ClcScheduler
from attnkit.templates.sm100.config import ROWS, TMEM_COLUMNS, ForwardConfig
from attnkit.templates.sm100.cta_group import CtaGroup
from attnkit.templates.sm100.forward_barriers import BLOCK_NUMBERS, RECORDS, ForwardBarriers
from attnkit.templates.sm100.forward_epilogue import Correction, StoreWarp
from attnkit.templates.sm100.forward_mma import MmaWarp
from attnkit.templates.sm100.forward_producer import Producer, WorkList
from attnkit.templates.sm100.forward_work import RECORD_WORDS, BlockRing, RowNumbers, WorkRing
from attnkit.templates.sm100.softmax import Softmax
from attnkit.templates.sm100.softmax_warpgroup import RowResults, SoftmaxWarpgroup

ROW = cutlass.tensor_utils.LayoutEnum.ROW_MAJOR
ALIGNMENT = 1024  # alignment of tiles in shared memory: the period of the widest swizzle


@dataclass(frozen=True)
class SharedMemory:
    """Holds the tensor views of a CTA's shared memory.

    Attributes:
        q: 16 bits, (mma, m, k, query tile).
        k: 16 bits, (mma, n, k, stage): this CTA's part of a block.
        v: 16 bits, (mma, n, k, stage), in the same ring.
        o: 16 bits [128, head_dim_v, buffer].
        records: i32 [8 * RECORDS], records of work tiles.
        blocks: i32 [BLOCK_NUMBERS], indices of kv blocks.
        scales: f32 [128 * q_tiles], row scales from the softmax to the correction.
        gaps: f32 [128 * q_tiles], see `RowThread`.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    records: cute.Tensor
    blocks: cute.Tensor
    scales: cute.Tensor
    gaps: cute.Tensor


class Forward:
    """Builds and launches the Blackwell forward kernel of one configuration and one variant.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
    """

    def __init__(self, config: ForwardConfig, hooks: ForwardHooks) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.group = group = CtaGroup(config.two_cta)
        self.producer = Producer(config, hooks, group)
        self.mma_warp = MmaWarp(config, group)
        self.softmax_warpgroup = SoftmaxWarpgroup(config, Softmax(config, hooks, group), group)
        self.correction = Correction(config, group)
        self.store_warp = StoreWarp(config, group)

    # ------------------------------------------------------------------------------------ host

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        key: cute.Tensor,
        value: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        max_scores: cute.Tensor,
        work_tiles: cute.Tensor,
        partial_runs: cute.Tensor,
        full_runs: cute.Tensor,
        counter: cute.Tensor,
        split_out: cute.Tensor,
        split_lse: cute.Tensor,
        captured: list,
        scale: Float32,
        group: Int32,
        ctas: Int32,
        stream: Any,
    ):
        """Launch the kernel; the arguments are those of Hopper's `Forward`.

        Args:
            ctas: number of CTAs, or of CTA pairs, for each value part; unused with work="clc".
        """
        c, dtype = self.config, self.dtype
        query, key, out = (ordered(t, (2, 3, 1, 0)) for t in (query, key, out))
        value = ordered(value, (3, 2, 1, 0))
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        cta_group = tcgen05.CtaGroup.TWO if const_expr(c.two_cta) else tcgen05.CtaGroup.ONE
        # (m, n, k) of a block: in a pair the rows of both CTAs
        shape_qk = c.mma_rows, c.block_kv, c.head_dim
        shape_k = c.mma_rows, c.block_kv, c.k_columns  # of a part of K
        shape_pv = c.mma_rows, c.head_dim_v, c.block_kv
        # N of one MMA instruction; with halves, S has two along n
        qk_columns = c.block_kv // 2 if const_expr(c.halves) else c.block_kv
        mma_qk = blackwell_helpers.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, cta_group, (c.mma_rows, qk_columns)
        )
        p_source = tcgen05.OperandSource.TMEM
        mma_pv = blackwell_helpers.make_trivial_tiled_mma(
            dtype, dtype, k_major, mn_major, Float32, cta_group, shape_pv[:2], p_source
        )
        q_layout = blackwell_helpers.make_smem_layout_a(mma_qk, shape_qk, dtype, c.q_tiles)
        # one stage each: K and V share a ring, see `_ring`
        k_layout = blackwell_helpers.make_smem_layout_b(mma_qk, shape_k, dtype, 1)
        v_layout = blackwell_helpers.make_smem_layout_b(mma_pv, shape_pv, dtype, 1)
        o_layout = blackwell_helpers.make_smem_layout_epi(dtype, ROW, (ROWS, c.head_dim_v), 1)
        load, store = cpasync.CopyBulkTensorTileG2SOp(cta_group), cpasync.CopyBulkTensorTileS2GOp()
        one = (None, None, None, 0)  # one stage of a layout
        cluster = cute.tiled_divide(cute.make_layout((c.ctas, 1, 1)), (mma_qk.thr_id.shape,)).shape
        tma_q, q_tiles = make_tiled_tma_atom_A(
            load, query, cute.slice_(q_layout, one), shape_qk, mma_qk, cluster
        )
        tma_k, k_tiles = make_tiled_tma_atom_B(
            load, key, cute.slice_(k_layout, one), shape_k, mma_qk, cluster
        )
        tma_v, v_tiles = make_tiled_tma_atom_B(
            load, value, cute.slice_(v_layout, one), shape_pv, mma_pv, cluster
        )
        tma_o, o_tiles = cpasync.make_tiled_tma_atom(
            store, out, cute.slice_(o_layout, (None, None, 0)), (ROWS, c.head_dim_v)
        )
        # unused with alias, but a struct field needs a size
        o_size = 8 if const_expr(c.alias) else cute.cosize(o_layout)

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, ForwardBarriers.count(c)]
            response: cute.struct.Align[
                cute.struct.MemRange[Int32, RESPONSE_BYTES // 4], RESPONSE_BYTES
            ]
            tmem: Int32  # the address of tensor memory
            records: cute.struct.MemRange[Int32, RECORD_WORDS * RECORDS]
            blocks: cute.struct.MemRange[Int32, BLOCK_NUMBERS]
            scales: cute.struct.MemRange[Float32, ROWS * c.q_tiles]
            gaps: cute.struct.MemRange[Float32, ROWS * c.q_tiles]
            q: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(q_layout)], ALIGNMENT]
            kv: cute.struct.Align[
                cute.struct.MemRange[dtype, c.stages * c.stage_elements], ALIGNMENT
            ]
            o: cute.struct.Align[cute.struct.MemRange[dtype, o_size], ALIGNMENT]

        self.storage = Storage
        lengths = (query.shape[0], key.shape[0], key.shape[3])
        self.kernel(
            (mma_qk, mma_pv),
            # two copies of each: the first overwrites its accumulator, the second accumulates
            (mma_qk, mma_qk, mma_pv, mma_pv),
            (tma_q, tma_k, tma_v, tma_o),
            (q_tiles, k_tiles, v_tiles, o_tiles),
            (q_layout, k_layout, v_layout, o_layout),
            lse,
            max_scores,
            (work_tiles, partial_runs, full_runs, counter),
            (split_out, split_lse),
            captured,
            (scale, group, *lengths),
        ).launch(
            grid=(
                (work_tiles.shape[0] if const_expr(c.work == "clc") else ctas * c.value_parts)
                * c.ctas,
                1,
                1,
            ),
            block=(c.threads, 1, 1),
            cluster=(2, 1, 1) if const_expr(c.two_cta) else None,
            stream=stream,
            min_blocks_per_mp=1,
        )

    # ---------------------------------------------------------------------------------- device

    @cute.kernel
    def kernel(
        self,
        load_mmas: tuple,
        mmas: tuple,
        atoms: tuple,
        tiles: tuple,
        layouts: tuple,
        lse: cute.Tensor,
        max_scores: cute.Tensor,
        lists: tuple,
        splits: tuple,
        captured: list,
        numbers: tuple,
    ):
        """Set up shared memory, tensor memory and barriers, then branch to the role of the warp."""
        c = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == c.load_warp:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        smem = self._shared_memory(storage, layouts)
        bars = ForwardBarriers.at(storage.barriers.data_ptr(), c)
        if warp == c.load_warp:
            with cute.arch.elect_one():
                bars.init(c, self.group)
        if warp == c.mma_warp:
            # all of tensor memory, so that it begins at column 0
            cute.arch.alloc_tmem(TMEM_COLUMNS, storage.tmem.ptr, is_two_cta=c.two_cta)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=c.two_cta)
        cute.arch.mbarrier_init_fence()
        self.group.sync()

        work_ring = WorkRing(smem.records, bars.work_full, bars.work_empty, c.value_parts > 1)
        block_ring = BlockRing(smem.blocks, bars.block_full)
        row_numbers = RowNumbers(smem.scales, bars.scale_full, bars.scale_empty)
        scalars = Scalars(*numbers)
        split_out, split_lse = splits
        softmax_registers, correction_registers, other_registers = c.registers
        if warp >= c.mma_warp:
            cute.arch.setmaxregister_decrease(other_registers)
            if warp == c.mma_warp and self.group.rank() == 0:
                self.mma_warp.run(mmas, smem, work_ring, bars)
            if warp == c.load_warp:
                response = storage.response.data_ptr()
                clc = ClcScheduler(self.group, bars.clc_full, bars.clc_ready, response)
                self.producer.run(
                    atoms[:3],
                    load_mmas,
                    tiles[:3],
                    smem,
                    bars,
                    work_ring,
                    block_ring,
                    clc,
                    WorkList(*lists),
                    scalars,
                )
            if warp == c.store_warp:
                self.store_warp.run((atoms[3], tiles[3]), smem.o, work_ring, bars)
        elif warp >= c.correction_warp:
            cute.arch.setmaxregister_decrease(correction_registers)
            self.correction.run(smem.o, row_numbers, work_ring, split_out, bars)
        else:
            cute.arch.setmaxregister_increase(softmax_registers)
            self.softmax_warpgroup.run(
                smem.gaps,
                row_numbers,
                work_ring,
                block_ring,
                bars,
                RowResults(lse, max_scores, split_lse),
                captured,
                scalars,
            )
        # joint MMAs read the shared memory of both CTAs: neither CTA exits before both are finished
        self.group.sync()
        if warp == c.mma_warp:
            pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem.ptr)
            cute.arch.dealloc_tmem(pointer, TMEM_COLUMNS, is_two_cta=c.two_cta)

    def _shared_memory(self, storage: Any, layouts: tuple) -> SharedMemory:
        """Return the tensor views of shared memory; `SharedMemory` gives their shapes."""
        c = self.config
        q_layout, k_layout, v_layout, o_layout = layouts
        q = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        k = storage.kv.get_tensor(self._ring(k_layout.outer), swizzle=k_layout.inner)
        v = storage.kv.get_tensor(self._ring(v_layout.outer), swizzle=v_layout.inner)
        if c.alias:
            # each output tile overwrites its own rows of Q, which may be wider
            one = cute.slice_(o_layout.outer, (None, None, 0))
            spread = cute.append(one, cute.make_layout(c.q_tiles, stride=ROWS * c.head_dim))
            o = storage.q.get_tensor(spread, swizzle=o_layout.inner)
        else:
            o = storage.o.get_tensor(o_layout.outer, swizzle=o_layout.inner)
        records = storage.records.get_tensor(cute.make_layout(RECORD_WORDS * RECORDS))
        blocks = storage.blocks.get_tensor(cute.make_layout(BLOCK_NUMBERS))
        scales = storage.scales.get_tensor(cute.make_layout(ROWS * c.q_tiles))
        gaps = storage.gaps.get_tensor(cute.make_layout(ROWS * c.q_tiles))
        return SharedMemory(q, k, v, o, records, blocks, scales, gaps)

    def _ring(self, tile: Any) -> Any:
        """Return the layout of a K or V block in all stages of the ring that they share."""
        one = cute.slice_(tile, (None, None, None, 0))
        stages, stride = self.config.stages, self.config.stage_elements
        return cute.append(one, cute.make_layout(stages, stride=stride))

"""Add a term of each kv column to the scores inside their MMA, in the Hopper forward.

A forgetting gate adds -c[h, kv] to each score. A thread has 32 columns of a block, so that it would
load 32 terms and add one to each score, while the softmax waits. Instead, one warp of the producer
warpgroup loads the terms of each kv block once. The rows of Q and K get 16 more columns whose
products add the terms, with one extra k-step. Here t0 + t1 + t2 is the term of a row of K, in three
bfloat16 numbers:

    K's extra columns of row j:     t0 t1 t2 x x x x x      twice
    Q's extra columns of any row:   1/2 1/2 1/2 0 0 0 0 0   twice

The term is divided by the factor of the scores, which multiplies it again. The terms of a block are
counted from its shift, a number that the consumers add once for a block, because tensor cores round
a sum at the magnitude of its largest term. The shift has the magnitude of the smallest term: it takes
away what large sums of log gates have in common, and it makes no term much larger.

K's extra columns are MN-major core matrices without swizzle: a core matrix has eight rows of K, and
an extra column of these rows occupies 16 bytes. As only three of eight extra columns are needed, the
core matrices overlap. The x above are parts of the next rows' terms, or zeros after the last row:

    core matrix 0     t0 t1 t2 x  x  x  x  x
    core matrix 1              t0 t1 t2 x  x  x  x  x
    core matrix 2                       t0 t1 t2 x ...

Zero times x is zero, as all numbers there are finite. If a term of a block is not finite or very
large, the block's terms are zero there and its shift is NaN. The consumers then add the terms of
the block themselves. Such terms mask keys: a softmax of them alone must still be right.

Each stage of the K ring has terms of its own. They are bfloat16 for every dtype of the tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.utils import hopper_helpers

from attnkit.templates.common import device
from attnkit.templates.common.forward_work import Scalars
from attnkit.templates.common.hooks import ForwardHooks
from attnkit.templates.common.site import Site
from attnkit.templates.sm90.config import (
    CORE_WORDS,
    PARTS,
    TERM_WORDS,
    WARP_THREADS,
    WARPGROUP_ROWS,
    ForwardConfig,
)
from attnkit.templates.sm90.forward_barriers import ForwardBarriers
from attnkit.templates.sm90.forward_producer import (
    FIRST_SHIFT,
    SharedMemory,
    Work,
    WorkTile,
    record_of,
)

COLUMNS_WARP = 3  # the warp that writes the terms
GROUP = 8  # rows of K in a core matrix
GROUP_WORDS = 4  # 32-bit words of one part of the terms of a group
LIMIT = 2.0**16  # bound on the terms that the MMA adds, in log2 units


def columns_mma(block_kv: int) -> cute.TiledMma:
    """Return the MMA of the extra k-step."""
    return hopper_helpers.make_trivial_tiled_mma(
        *(BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.MN, Float32),
        (1, 1, 1),
        (WARPGROUP_ROWS, block_kv),
    )


def largest_term(factor: Float32) -> Float32:
    """Return the bound on the terms that the MMA adds, given the factor of the scores."""
    return Float32(LIMIT) / factor


@cute.jit
def write_constants(words: cute.Pointer, config: cutlass.Constexpr):
    """Write Q's extra columns, and zeros for the terms; all threads of the CTA call it.

    A barrier of the CTA must follow.

    Args:
        words: int32 pointer to shared memory, `ForwardConfig.column_words` words.
        config: compile-time configuration.
    """
    thread, _, _ = cute.arch.thread_idx()
    half = Float32(0.5)
    for first in cutlass.range_constexpr(0, config.column_words, config.threads):
        i = first + thread
        word = Int32(0)
        if i < CORE_WORDS:  # a core matrix with eight equal rows, of four words
            if i % 4 == 0:
                word = device.pack(half, half, BFloat16)
            elif i % 4 == 1:
                word = device.pack(half, Float32(0.0), BFloat16)
        if i < config.column_words:
            (words + i).store(word)
    # the tensor cores read them by the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


@dataclass(frozen=True)
class ColumnOperands:
    """Holds the MMA of the extra k-step and its operands.

    Attributes:
        mma: the MMA, which accumulates.
        q_columns: descriptors of Q's extra columns in shared memory.
        k_columns: descriptors of K's extra columns in shared memory, (mma, n, stage).
    """

    mma: cute.TiledMma
    q_columns: cute.Tensor
    k_columns: cute.Tensor

    @staticmethod
    def create(mma: cute.TiledMma, words: cute.Pointer, config: ForwardConfig) -> ColumnOperands:
        """Create the operands of a consumer warpgroup; `words` is that of `write_constants`."""
        thr = mma.get_slice(0)
        # strides of zero repeat one core matrix for all rows of Q, and the first eight columns
        of_q = cute.make_layout(((8, WARPGROUP_ROWS // 8), (8, 2), 1), stride=((8, 0), (1, 0), 0))
        of_k = cute.make_layout(
            ((GROUP, config.block_kv // GROUP), (8, 2), config.stages),
            stride=((1, 2 * TERM_WORDS), (GROUP, 0), 2 * config.stage_words),
        )
        q_smem, k_smem = (
            cute.make_tensor(cute.recast_ptr(at.align(16), dtype=BFloat16), layout)
            for at, layout in ((words, of_q), (words + CORE_WORDS, of_k))
        )
        a = mma.make_fragment_A(thr.partition_A(q_smem))[None, None, 0, 0]
        b = mma.make_fragment_B(thr.partition_B(k_smem))[None, None, 0, None]
        return ColumnOperands(mma, a, b)

    def issue(self, acc: cute.Tensor, stage: Int32) -> None:
        """Issue the extra k-step asynchronously; it belongs to the next group to be committed."""
        cute.gemm(self.mma, acc, self.q_columns, self.k_columns[None, None, stage], acc)


class ColumnWriter:
    """Runs the warp that writes the terms of the kv blocks, one block after the other.

    It follows the producer warp, which writes the number of a block when its K stage is empty. The
    stage is full when K and the terms have arrived.

    Args:
        config: compile-time configuration.
        hooks: hooks of the variant.
    """

    def __init__(self, config: ForwardConfig, hooks: ForwardHooks) -> None:
        self.config = config
        self.hooks = hooks

    @cute.jit
    def run(
        self,
        words: cute.Pointer,
        smem: SharedMemory,
        bars: ForwardBarriers,
        captured: list,
        scalars: Scalars,
    ):
        """Write the terms of all blocks of the CTA's work tiles.

        Args:
            words: see `write_constants`.
            smem: shared memory.
            bars: mbarriers.
            captured: captured tensors.
            scalars: scalar arguments of the call.
        """
        info = smem.info
        tile_idx, k_pos = Int32(0), Int32(0)
        bars.q.wait_full(tile_idx)
        valid = info[record_of(tile_idx) + WorkTile.VALID]
        while valid != 0:
            record = record_of(tile_idx)
            work = Work.read(info, record)
            blocks = info[record + WorkTile.NUM_MASKED] + info[record + WorkTile.NUM_UNMASKED]
            q_len, kv_len, scale = scalars.q_len, scalars.kv_len, scalars.scale
            site = Site(captured, work.batch, work.head, q_len, kv_len, scale, Int32(0))
            head = self.hooks.head(site)
            for _ in cutlass.range(blocks, unroll=1):
                stage = bars.k.stage(k_pos)
                cute.arch.mbarrier_wait(bars.posted + stage, bars.k.phase(k_pos))
                number = info[stage]
                if const_expr(self.hooks.lists_override_mask):
                    number = cutlass.select_(number < 0, ~number, number)
                shift = self._write_terms(words, stage, number, site, head)
                # the tensor cores read the terms by the async proxy
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    info[FIRST_SHIFT + stage] = device.bits(shift)
                    cute.arch.mbarrier_arrive(bars.k.full + stage)
                k_pos += 1
            tile_idx += 1
            bars.q.wait_full(tile_idx)
            valid = info[record_of(tile_idx) + WorkTile.VALID]

    def _write_terms(
        self, words: cute.Pointer, stage: Int32, block: Int32, site: Site, head: Any
    ) -> Float32:
        """Write the terms of a block, less its shift, to a stage; return the shift.

        If one of the terms is too large, write zeros and return NaN.
        """
        c = self.config
        count = c.block_kv // WARP_THREADS  # neighbouring columns of a lane
        first, last = cute.arch.lane_idx() * count, site.kv_len - 1
        columns = [cutlass.min(block * c.block_kv + first + i, last) for i in range(count)]
        terms = self.hooks.column_terms(site, head, columns)
        shift, odd = _shift(terms, largest_term(self.hooks.factor(site, head)))
        rests = [cutlass.select_(odd, Float32(0.0), t - shift) for t in terms]
        at = words + CORE_WORDS + stage * c.stage_words
        at += first // GROUP * TERM_WORDS + first % GROUP // 2
        for part in range(PARTS):
            for i in range(0, count, 2):
                pair = device.pack(rests[i], rests[i + 1], BFloat16)
                (at + GROUP_WORDS * part + i // 2).store(pair)
                low, high = device.unpack(pair, BFloat16)
                rests[i], rests[i + 1] = rests[i] - low, rests[i + 1] - high
        return cutlass.select_(odd, Float32(math.nan), shift)


def _shift(terms: list[Any], limit: Float32) -> tuple[Float32, Boolean]:
    """Return the shift of a block from a lane's terms, and whether it has a term beyond `limit`.

    The shift is as large as the smallest term, and negative if a term is.
    """
    smallest, negative, odd = None, Boolean(False), Boolean(False)
    for t in terms:
        size = cutlass.max(t, -t)
        odd, negative = odd | ~(size < limit), negative | (t < Float32(0.0))
        bits = device.bits(size)  # floats of 0 and above have the order of their bits as integers
        smallest = bits if smallest is None else cutlass.min(smallest, bits)
    size = device.pinned(cute.arch.warp_redux_sync(smallest, "min"))
    shift = cutlass.select_(cute.arch.vote_any_sync(negative), -size, size)
    return shift, cute.arch.vote_any_sync(odd)

"""What the consumers of the Hopper backward hand on: dQ; at the end of a kv tile dK and dV.

dK and dV are rounded and written in whole rows, through the memory where dQ leaves otherwise: K and V
of the next tile are already in theirs. Where several pieces share a tile, each adds its part to
float32 sums, and the last one to do so rounds and writes these. Another warp writes zeros where a
tile keeps nothing.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from attnkit.templates.common import device
from attnkit.templates.sm90.backward_config import ROWS
from attnkit.templates.sm90.backward_sums import NOTE, SUM_FREE, SUM_FULL

OWN = 5  # named barriers after those of `backward_sums`
VECTOR = 8  # elements of 16 bytes
SQUARE = 64 * 64
COUNTS = 8  # of a split kv tile, one a warp: how many parts have been added


class Stores:
    """The part of a backward kernel that hands on its results."""

    config: Any
    dtype: Any
    record: Any  # of `Loads`

    @cute.jit
    def send_before(
        self, acc: cute.Tensor, note: tuple, bars: tuple, kc: Int32, tc: Int32, leaving: tuple,
        wg: Int32, ct: Int32,
    ):  # fmt: skip
        """Hand over the last dQ of the kv tile before, if there is one, and its place of K."""
        if tc > 0:
            # every lane, as each has read the record
            cute.arch.mbarrier_arrive(bars[2] + ((tc - 1) & 1))
            free = not self.config.accumulate  # as `conclude` has waited
            self.send_block(acc, note, bars, kc - 1, leaving, wg, ct, free)

    def send_block(
        self, acc: Any, note: Any, bars: Any, kc: Any, leaving: Any, wg: Any, ct: Any,
        free: bool = False, then: Any = None,
    ) -> None:  # fmt: skip
        """Hand over a tile's dQ; `then`: the chunk that follows, of the same turn, if it is known."""
        device.arrive(bars[9] + (kc & 1))
        rest = () if then is None else (then,)
        self.send(acc, (*note, Int32(-1), *rest), leaving, wg, ct, free)

    def send(
        self, chunk: Any, note: Any, leaving: Any, wg: Any, ct: Any, free: bool = False
    ) -> None:
        """Hand a chunk to the warp that adds it to the sums.

        Args:
            free: it is known not to read the chunk before any more.
        """
        _, _, outgoing, info, _, _, told = leaving
        count = self.config.chunk // 512
        if not free:
            cute.arch.barrier(barrier_id=SUM_FREE + wg, number_of_threads=160)
        self.note(info, note, wg, ct)
        start = outgoing + (wg * self.config.chunk + ct * 4)
        cute.autovec_copy(
            cute.make_tensor(chunk.iterator, cute.make_layout((4, count))),
            cute.make_tensor(start.align(16), cute.make_layout((4, count), stride=(1, 512))),
        )
        cute.arch.fence_proxy("async.shared", space="cta")
        self.tell(told, wg)

    def tell(self, told: Any, wg: Any) -> None:
        """A chunk is there, or no more comes."""
        if self.config.turns:
            cute.arch.sync_warp()
            device.arrive(told + wg)
        else:
            cute.arch.barrier_arrive(barrier_id=SUM_FULL + wg, number_of_threads=160)

    @cute.jit
    def note(self, info: cute.Tensor, note: tuple, wg: Int32, ct: Int32):
        if ct == 0:
            info[NOTE + 4 * wg] = note[0]
            if const_expr(self.config.turns):
                for i in cutlass.range_constexpr(1, 4):
                    info[NOTE + 4 * wg + i] = note[i] if i < len(note) else Int32(-1)
            if const_expr(self.config.firsts):
                info[NOTE + 4 * wg + 3] = note[3] if len(note) > 3 else Int32(-1)

    @cute.jit
    def conclude(
        self, dk: cute.Tensor, dv: cute.Tensor, leaving: tuple, wg: Int32, ct: Int32, tc: Int32
    ):
        """Write dK and dV of the kv tile before, if there is one."""
        if tc > 0:
            grads, numbers, outgoing, info, *_ = leaving
            record = self.record((tc - 1) & 1)
            place = tuple(info[record + i] for i in range(3))
            if const_expr(self.config.accumulate):
                self.add_shared(dk, dv, place, info, record, numbers, leaving, wg, ct)
            else:
                complete = Int32(1)
                if const_expr(self.config.joins):
                    split, parts = info[record + 5], info[record + 6]
                    if split >= 0:
                        complete = self.join(dk, dv, split, parts, leaving, wg, ct)
                cute.arch.barrier(barrier_id=SUM_FREE + wg, number_of_threads=160)
                if complete != 0:
                    # times 1: addresses known before would keep registers through all blocks
                    lane = cute.arch.lane_idx() * info[record + 4]
                    self.write(dv, grads[1], place, None, outgoing, wg, lane)
                    self.write(dk, grads[0], place, numbers[0], outgoing, wg, lane)
                cute.arch.barrier(barrier_id=OWN + wg, number_of_threads=128)

    @cute.jit
    def join(
        self, dk: cute.Tensor, dv: cute.Tensor, split: Int32, parts: Int32, leaving: tuple,
        wg: Int32, ct: Int32,
    ):  # fmt: skip
        """Add a consumer's dK and dV to the sums of a split kv tile; the last one takes these.

        Its warps do so each for itself: nobody else has their rows.

        Args:
            split: number of the tile among those that are split.
            parts: pieces that it has.

        Returns:
            1 in a warp whose registers hold the sums of all parts now, else 0.
        """
        _, numbers, _, _, sums, counter, _ = leaving
        c = self.config
        _, _, q_len, _, heads, _, batch, _ = numbers
        blocks = (q_len + c.block_q - 1) // c.block_q
        own = ROWS * (c.width + c.value_width)  # floats of a consumer
        at = Int64(batch * heads * blocks) * (c.block_q * c.width) + Int64(2 * split + wg) * own
        start = (sums.iterator + (at + ct * 4)).toint()
        add_all(dk, start)
        add_all(dv, start + cute.size(dk) * 512)
        cute.arch.sync_warp()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        arrived = counter.iterator + (1 + COUNTS * split + 4 * wg + warp)
        before = Int32(0)
        if cute.arch.lane_idx() == 0:
            before = cute.arch.atomic_add(arrived, Int32(1), sem="acq_rel", scope="gpu")
            if before == parts - 1:
                cute.arch.store(arrived, Int32(0), sem="relaxed", scope="gpu")
        before = cute.arch.shuffle_sync(before, 0)
        cute.arch.sync_warp()
        complete = Int32(0)
        if before == parts - 1:
            complete = Int32(1)
            load_all(dk, start)
            load_all(dv, start + cute.size(dk) * 512)
        return complete

    def chunks(self, numbers: Any, place: Any) -> list[tuple[Any, int]]:
        """Of the sums of dK and of dV of a kv tile: the first chunk, and how many 64 rows have.

        Args:
            place: the kv tile, head and batch element.
        """
        c = self.config
        _, group, q_len, kv_len, heads, kv_heads, batch, kv_batch = numbers
        at, h, b = place
        blocks = (q_len + c.block_q - 1) // c.block_q
        kv_blocks = (kv_len + c.block_kv - 1) // c.block_kv
        tile = (cutlass.min(b, kv_batch - 1) * kv_heads + h // group) * kv_blocks + at
        first, found = batch * heads * blocks * 2, []
        for width in (c.width, c.value_width):
            count = ROWS * width // c.chunk
            found.append((first + 2 * count * tile, count))
            first = first + kv_batch * kv_heads * kv_blocks * 2 * count
        return found

    def add_shared(self, dk: Any, dv: Any, place: Any, info: Any, record: Any, numbers: Any,
                   leaving: Any, wg: Any, ct: Any) -> None:  # fmt: skip
        """Add a consumer's dK and dV to sums that several pieces share."""
        turn, last = info[record + 5], info[record + 6]
        following = cutlass.select_(turn + 1 == last, Int32(0), turn + 1)
        for acc, (first, count) in zip((dk, dv), self.chunks(numbers, place), strict=True):
            for i in range(count):
                note = (first + wg * count + i, turn, following)
                self.send(chunk_of(acc, i, self.config.chunk), note, leaving, wg, ct)

    def write(
        self, acc: Any, target: Any, place: Any, factor: Any, outgoing: Any, wg: Any, lane: Any
    ) -> None:
        """Round a consumer's dK or dV and write it, through a warp's own part of shared memory.

        Args:
            target: the gradient, [S, D, H, B].
            place: the kv tile, head and batch element.
            outgoing: where dQ leaves; the warp that adds dQ is not reading there.
            lane: the thread's.
        """
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        tile, h, b = place
        columns, room = cute.size(acc) // 32, self.config.chunk * 4 // (2 * SQUARE)
        start = cute.recast_ptr(outgoing + wg * self.config.chunk, dtype=self.dtype)
        # squares of 64 x 64, their rows of 128 bytes, whose 16 bytes are swapped by row
        mine = (16 * warp + lane % 16) * 64
        first = tile * self.config.block_kv + wg * ROWS + 16 * warp + lane // 8
        column = lane % 8 * VECTOR
        # once: an address from four coordinates takes as many instructions as all that follows
        base = cute.domain_offset((first, column, h, b), target).iterator
        for left in range(0, columns, room):
            some = range(left, min(left + room, columns))
            cute.arch.sync_warp()
            for i in some:
                for g in range(4):
                    words = []
                    for k in range(4):
                        at = 32 * i + 8 * g + 2 * k
                        low, high = acc[at], acc[at + 1]
                        if factor is not None:
                            low, high = low * factor, high * factor
                        words.append(device.pack(low, high, self.dtype))
                    piece = (2 * g + lane // 16) ^ (lane % 8)
                    to = start + ((i - left) * SQUARE + mine + piece * VECTOR)
                    device.store_matrix(to, words)
            cute.arch.sync_warp()
            for i in some:
                for step in range(4):
                    row = lane // 8 + 4 * step
                    at = (i - left) * SQUARE + (16 * warp + row) * 64
                    at = start + (at + (lane % 8 ^ row % 8) * VECTOR)
                    words = cute.make_rmem_tensor(4, Int32)
                    source = cute.recast_ptr(at.align(16), dtype=Int32)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
                    inside = first + 4 * step < target.shape[0]
                    inside = inside & (column + 64 * i < target.shape[1])
                    to = base + (4 * step * target.stride[0] + 64 * i)
                    device.store_where(inside, to, [words[k] for k in range(4)])

    @cute.jit
    def write_vector(self, inside: cutlass.Boolean, vector: cute.Tensor, to: cute.Pointer):
        """16 bytes to memory, if they lie inside."""
        if inside:
            cute.autovec_copy(vector, cute.make_tensor(to.align(16), cute.make_layout(VECTOR)))

    @cute.jit
    def clear(self, pieces: cute.Tensor, grad_key: cute.Tensor, grad_value: cute.Tensor):
        """A warp: the gradients of kv tiles that keep nothing are zero; so are shared sums before."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        # shared ones are formed from sums
        total = 0 if const_expr(self.config.accumulate) else pieces.shape[0]
        for first in cutlass.range(32 * cta, total, 32 * ctas, unroll=1):
            mine = cutlass.min(first + lane, total - 1)
            dead = (pieces[mine, 6] + pieces[mine, 9] == 0) & (first + lane < total)
            found = cute.arch.vote_ballot_sync(dead)
            while found != 0:
                index = first + cute.arch.popc((found & -found) - 1)
                found = found & (found - 1)
                place = pieces[index, 2], pieces[index, 1], pieces[index, 0]
                for target in (grad_key, grad_value):
                    self.zero(target, place)

    @cute.jit
    def zero(self, target: cute.Tensor, place: tuple):
        """Zeros for a kv tile of a gradient."""
        tile, h, b = place
        lane = cute.arch.lane_idx()
        vectors = target.shape[1] // VECTOR
        first = tile * self.config.block_kv
        rows = cutlass.min(Int32(self.config.block_kv), target.shape[0] - first)
        none = cute.make_rmem_tensor(VECTOR, self.dtype)
        none.fill(0.0)
        for i in cutlass.range(lane, rows * vectors, 32, unroll=1):
            at = first + i // vectors, i % vectors * VECTOR, h, b
            self.write_vector(True, none, cute.domain_offset(at, target).iterator)


def add_all(acc: Any, start: Any) -> None:
    """Add an accumulator to sums that lie in its order, 16 bytes of every thread side by side."""
    for i in range(0, cute.size(acc), 4):
        cute.arch.inline_ptx(
            f"red.relaxed.gpu.global.add.v4.f32 [{{$r0}}+{512 * i}], {{{{$r1}}, {{$r2}}, {{$r3}}, "
            "{$r4}};",
            read_only_args=[start, *(acc[i + k] for k in range(4))],
        )


def load_all(acc: Any, start: Any) -> None:
    """Load an accumulator that `add_all` has added; past the first-level cache, where it may be old."""
    for i in range(0, cute.size(acc), 4):
        words = cute.arch.inline_ptx(
            f"ld.relaxed.gpu.global.v4.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{512 * i}];",
            write_only_types=[Float32] * 4,
            read_only_args=[start],
        )
        for k in range(4):
            acc[i + k] = words[k]


def chunk_of(acc: Any, i: int, size: int) -> Any:
    """Some of an accumulator's columns, as an accumulator."""
    return cute.make_tensor(acc.iterator + size // 128 * i, chunk_layout(size))


def chunk_layout(size: int) -> Any:
    """The layout of a chunk in a thread's registers."""
    return cute.make_layout(((2, 2, size // 512), 1, 1), stride=((1, 2, 4), 0, 0))

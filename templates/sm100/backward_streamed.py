"""Compute the Blackwell backward of head dims above 256, whose operands are loaded in chunks.

K, V, Q and dO of a block do not fit shared memory together. S and dP are sums over chunks of 64
columns, which arrive in a ring. As at head dim 256, `column_parts` work tiles share a kv block, and
each computes 128 columns of dQ, dK and dV. It loads these columns of Q and dO for each q block, and
those of K once. The compute and reduce warps run the roles of `Backward`.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64, cute

from attnkit.templates.sm100.backward import LOADS, Backward, Memory, struct_of, tma_copy, view
from attnkit.templates.sm100.backward_barriers import BackwardStreamedBarriers
from attnkit.templates.sm100.backward_config import CHUNK, CHUNK_STAGES, SLICE
from attnkit.templates.sm100.backward_shared import Word
from attnkit.templates.sm100.backward_streamed_mma import MmaStreamed, OperandsStreamed
from attnkit.templates.sm100.backward_streamed_producer import ProducerStreamed, StreamTargets


class BackwardStreamed(Backward):
    """Builds and launches the Blackwell backward kernel of head dims above 256.

    Its arguments are those of `Backward`.
    """

    producer_of = ProducerStreamed
    mma_of = MmaStreamed
    operands_of = OperandsStreamed
    barriers_of = BackwardStreamedBarriers

    def layouts(self) -> tuple:
        """Return the layouts of chunks of Q or dO and of K or V, then of a part of their columns."""
        c = self.config
        blocks = c.grad_dims[0] // CHUNK
        return (
            self.tile(c.block_q, CHUNK, CHUNK_STAGES),
            self.tile(c.rows_kv, CHUNK, CHUNK_STAGES),
            self.tile(c.block_q, CHUNK, blocks),
            self.tile(c.rows_kv, CHUNK, blocks),
        )

    def copies(self, layouts: tuple, tensors: list[Any]) -> list[tuple[Any, Any]]:
        """Return the TMA atom and the coordinate tensor of each load and store of 64 columns."""
        c, (q, kv, _, grad) = self.config, layouts
        bm, bn = c.block_q, c.rows_kv
        boxes = (q, bm), (kv, bn), (kv, bn), (q, bm), (grad, bn), (grad, bn)
        return [
            tma_copy(i < LOADS, tensor, layout, (rows, CHUNK))
            for i, (tensor, (layout, rows)) in enumerate(zip(tensors, boxes, strict=True))
        ]

    def struct(self) -> Any:
        """Return the struct of a CTA's shared memory."""
        c, dtype = self.config, self.dtype
        bm, bn, part = c.block_q, c.rows_kv, c.grad_dims[0]

        return struct_of(
            barriers=cute.struct.MemRange[Int64, BackwardStreamedBarriers.count(c)],
            base=Int32,  # address of tensor memory
            info=cute.struct.MemRange[Int32, Word.COUNT],
            lse=cute.struct.Align[cute.struct.MemRange[Float32, c.smem_row_words[0]], 128],
            delta=cute.struct.Align[cute.struct.MemRange[Float32, c.smem_row_words[1]], 128],
            kv=cute.struct.Align[cute.struct.MemRange[dtype, CHUNK_STAGES * bn * CHUNK], 1024],
            q=cute.struct.Align[cute.struct.MemRange[dtype, CHUNK_STAGES * bm * CHUNK], 1024],
            # these three one after another: dV is stored from the memory of the first two, dK from
            # that of the third
            do_part=cute.struct.Align[cute.struct.MemRange[dtype, bm * part], 1024],
            q_part=cute.struct.Align[cute.struct.MemRange[dtype, bm * part], 1024],
            k_part=cute.struct.Align[cute.struct.MemRange[dtype, bn * part], 1024],
            ds=cute.struct.Align[cute.struct.MemRange[dtype, bn * bm], 1024],
            sums=cute.struct.Align[cute.struct.MemRange[Float32, c.slices * SLICE * bn], 128],
        )

    def memory(self, storage: Any, layouts: tuple) -> Memory:
        """Return the views and addresses of shared memory."""
        q, kv, q_part, k_part = layouts
        targets = StreamTargets(
            view(storage.q, q), view(storage.kv, kv), view(storage.q_part, q_part),
            view(storage.do_part, q_part), view(storage.k_part, k_part),
        )  # fmt: skip
        operands = tuple(
            part.data_ptr().toint()
            for part in (
                storage.kv, storage.q, storage.do_part, storage.q_part, storage.k_part, storage.ds,
            )
        )  # fmt: skip
        grads = view(storage.k_part, k_part), view(storage.do_part, k_part)
        return Memory(targets, operands, grads, operands[2], operands[-1])

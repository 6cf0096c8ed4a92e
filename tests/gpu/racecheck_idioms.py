"""Show which synchronisation racecheck of compute-sanitizer follows, with one kernel per idiom.

PYTHONPATH=. compute-sanitizer --tool racecheck python3 tests/gpu/racecheck_idioms.py bulk

One warp fills words of shared memory and another reads them, six times in the same place. The first
part of a name says who stores: `one` lane, a `warp`, or a `bulk` copy. The part after the dash says
how a warp signals the other one: by default one lane arrives after a warp barrier; with `lanes` all
lanes arrive. With `named`, the warps use a named barrier, on which both wait (`sync`) or one
arrives.
"""

from __future__ import annotations

import sys
from typing import Any

import cutlass
import cutlass.memory
import torch
from cutlass import Float32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

ROUNDS, WORDS = 6, 64
FILLED, FREED = 1, 2  # named barriers
IDIOMS = (
    *("one", "one-lanes", "warp", "warp-lanes", "bulk", "bulk-lanes"),
    *("named-arrive", "named-sync"),
)


class Idiom:
    """Kernel that passes words from one warp to another with one synchronisation idiom.

    Args:
        name: one of `IDIOMS`.
    """

    def __init__(self, name: str) -> None:
        self.store, self.tell = name.split("-") if "-" in name else (name, "one")

    @cute.jit
    def __call__(self, source: cute.Tensor, out: cute.Tensor):
        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2]
            words: cute.struct.Align[cute.struct.MemRange[Float32, WORDS], 128]

        self.storage = Storage
        self.kernel(source, out).launch(grid=(1, 1, 1), block=(64, 1, 1))

    @cute.kernel
    def kernel(self, source: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        words = storage.words.get_tensor(cute.make_layout(WORDS))
        full = storage.barriers.data_ptr()
        free = full + 1
        every = self.tell == "lanes"
        if thread == 0:
            cute.arch.mbarrier_init(full, 32 if const_expr(every and self.store == "warp") else 1)
            cute.arch.mbarrier_init(free, 32 if const_expr(every) else 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            for i in cutlass.range(ROUNDS, unroll=1):
                if const_expr(self.store == "named"):
                    self.fill_named(words, i)
                else:
                    cute.arch.mbarrier_wait(free, (i & 1) ^ 1)
                    self.fill(source, words, full, i)
        else:
            total = Float32(0.0)
            if const_expr(self.store == "named"):
                for _ in cutlass.range(ROUNDS, unroll=1):
                    cute.arch.barrier(barrier_id=FREED, number_of_threads=64)
                    cute.arch.barrier(barrier_id=FILLED, number_of_threads=64)
                    total += words[0]
            else:
                for i in cutlass.range(ROUNDS, unroll=1):
                    cute.arch.mbarrier_wait(full, i & 1)
                    total += words[0 if const_expr(self.store == "one") else cute.arch.lane_idx()]
                    self.told(free)
            out[cute.arch.lane_idx()] = total

    @cute.jit
    def fill_named(self, words: cute.Tensor, i: Any):
        cute.arch.barrier(barrier_id=FREED, number_of_threads=64)
        if cute.arch.lane_idx() == 0:
            words[0] = Float32(i)
        if const_expr(self.tell == "sync"):
            cute.arch.barrier(barrier_id=FILLED, number_of_threads=64)
        else:
            cute.arch.barrier_arrive(barrier_id=FILLED, number_of_threads=64)

    @cute.jit
    def fill(self, source: cute.Tensor, words: cute.Tensor, full: cute.Pointer, i: Any):
        if const_expr(self.store == "warp"):
            words[cute.arch.lane_idx()] = Float32(i)
            self.told(full)
        else:
            with cute.arch.elect_one():
                if const_expr(self.store == "bulk"):
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 4 * WORDS)
                    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
                    cute.copy(bulk, source, words, mbar_ptr=full)
                else:
                    words[0] = Float32(i)
                    cute.arch.mbarrier_arrive(full)

    @cute.jit
    def told(self, barrier: cute.Pointer):
        """Arrive on `barrier` when all lanes are done: each lane, or one for all lanes."""
        if const_expr(self.tell == "lanes"):
            cute.arch.mbarrier_arrive(barrier)
        else:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier)


def main(names: list[str]) -> int:
    source = from_dlpack(torch.arange(WORDS, dtype=torch.float32, device="cuda"), assumed_align=16)
    for name in names or IDIOMS:
        out = torch.zeros(32, device="cuda")
        kernel = Idiom(name)
        cute.compile(kernel, source, from_dlpack(out))(source, from_dlpack(out))
        torch.cuda.synchronize()
        sys.stdout.write(f"{name}: {out[0].item():g}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Show which synchronisation racecheck of compute-sanitizer follows, with one kernel per idiom.

PYTHONPATH=. compute-sanitizer --tool racecheck python3 tests/gpu/racecheck_idioms.py bulk
PYTHONPATH=. compute-sanitizer --tool racecheck python3 tests/gpu/racecheck_idioms.py --rounds 600

One warp fills words of shared memory and another reads them, in the same place each time. The first
part of a name says who stores: `one` lane, a `warp`, or a `bulk` copy. The part after the dash says
how a warp signals the other one: by default one lane arrives after a warp barrier; with `lanes` all
lanes arrive. With `named`, the warps use a named barrier, on which both wait (`sync`) or one
arrives. With `groups`, the barriers are those of the Hopper backward: each of two groups has four
warps, one thread of which stores, and a warp that reads.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import cutlass
import cutlass.memory
import torch
from cutlass import Float32, Int64, const_expr, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

WORDS = 64
FILLED, FREED = 1, 3  # named barriers of the first group; those of the second one follow
GROUPS, GROUP_WARPS = 2, 4
IDIOMS = (
    *("one", "one-lanes", "warp", "warp-lanes", "bulk", "bulk-lanes"),
    *("named-arrive", "named-sync", "groups-arrive", "groups-sync"),
)


class Idiom:
    """Kernel that passes words from one warp to another with one synchronisation idiom.

    Args:
        name: one of `IDIOMS`.
        rounds: how often the words are passed.
    """

    def __init__(self, name: str, rounds: int) -> None:
        self.store, self.tell = name.split("-") if "-" in name else (name, "one")
        self.rounds = rounds
        groups, self.group_warps = (GROUPS, GROUP_WARPS) if self.store == "groups" else (1, 1)
        self.filling_warps = groups * self.group_warps
        self.threads = 32 * (self.filling_warps + groups)

    @cute.jit
    def __call__(self, source: cute.Tensor, out: cute.Tensor):
        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2]
            words: cute.struct.Align[cute.struct.MemRange[Float32, WORDS], 128]

        self.storage = Storage
        self.kernel(source, out).launch(grid=(1, 1, 1), block=(self.threads, 1, 1))

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
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < self.filling_warps:
            for i in cutlass.range(self.rounds, unroll=1):
                if const_expr(self.store in ("named", "groups")):
                    self.fill_named(words, i, warp // self.group_warps)
                else:
                    cute.arch.mbarrier_wait(free, (i & 1) ^ 1)
                    self.fill(source, words, full, i)
        else:
            total = Float32(0.0)
            group = warp - self.filling_warps
            if const_expr(self.store in ("named", "groups")):
                for _ in cutlass.range(self.rounds, unroll=1):
                    self.wait(FREED + group)
                    self.wait(FILLED + group)
                    total += words[group * 4]
            else:
                for i in cutlass.range(self.rounds, unroll=1):
                    cute.arch.mbarrier_wait(full, i & 1)
                    total += words[0 if const_expr(self.store == "one") else cute.arch.lane_idx()]
                    self.told(free)
            if group == 0:
                out[cute.arch.lane_idx()] = total

    def wait(self, barrier: Any) -> None:
        """Wait on a named barrier of a group."""
        cute.arch.barrier(barrier_id=barrier, number_of_threads=32 * (self.group_warps + 1))

    @cute.jit
    def fill_named(self, words: cute.Tensor, i: Any, group: Any):
        self.wait(FREED + group)
        thread, _, _ = cute.arch.thread_idx()
        if thread % (32 * self.group_warps) == 0:
            words[group * 4] = Float32(i)
        if const_expr(self.tell == "sync"):
            self.wait(FILLED + group)
        else:
            cute.arch.barrier_arrive(
                barrier_id=FILLED + group, number_of_threads=32 * (self.group_warps + 1)
            )

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="IDIOM", help="default: all of them")
    parser.add_argument("--rounds", type=int, default=6, help="how often words are passed")
    options = parser.parse_args()
    source = from_dlpack(torch.arange(WORDS, dtype=torch.float32, device="cuda"), assumed_align=16)
    for name in options.names or IDIOMS:
        out = torch.zeros(32, device="cuda")
        kernel = Idiom(name, options.rounds)
        cute.compile(kernel, source, from_dlpack(out))(source, from_dlpack(out))
        torch.cuda.synchronize()
        sys.stdout.write(f"{name}: {out[0].item():g}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

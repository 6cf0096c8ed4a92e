"""Analyse the control flow between the basic blocks of a kernel."""

from __future__ import annotations

from functools import cached_property

from attnkit.emulator.ptx.kernel import PtxKernel, is_blocking


def successors(kernel: PtxKernel, b: int) -> list[int]:
    """Return the basic blocks that may follow block `b`; none after an exit."""
    last = kernel.blocks[b][-1]
    if last.parts[0] in ("ret", "exit"):
        return [b + 1] if last.pred else []
    if last.parts[0] == "bra":
        target = kernel.labels.get(last.args[0], b + 1)
        return [target, b + 1] if last.pred else [target]
    return [b + 1] if b + 1 < len(kernel.blocks) else []


class PostDominators:
    """Computes the post-dominators of each basic block of a kernel.

    Post-dominators of a block are the blocks on every path from it to an exit.
    """

    def __init__(self, kernel: PtxKernel) -> None:
        self.kernel = kernel
        self.after = [successors(kernel, b) for b in range(len(kernel.blocks))]

    @cached_property
    def _dominators(self) -> list[int]:
        """Return the post-dominators of each block, itself included, as a set of bits."""
        n = len(self.after)
        every = (1 << n) - 1
        sets = [every] * n
        changed = True
        while changed:
            changed = False
            for b in range(n - 1, -1, -1):
                common = every if self.after[b] else 0
                for s in self.after[b]:
                    common &= sets[s]
                new = common | 1 << b
                if new != sets[b]:
                    sets[b], changed = new, True
        return sets

    @cached_property
    def _acting(self) -> list[bool]:
        """Return for each block whether it, or a block reachable from it, waits or multiplies.

        To multiply is to execute wgmma or mma; to wait, an instruction of `is_blocking`.
        """
        out = [
            any(is_blocking(c) or c.parts[0] in ("wgmma", "mma") for c in block)
            for block in self.kernel.blocks
        ]
        changed = True
        while changed:
            changed = False
            for b in range(len(out) - 1, -1, -1):
                if not out[b] and any(out[s] for s in self.after[b]):
                    out[b] = changed = True
        return out

    def parts(self, b: int) -> bool:
        """Return whether warps that take different branches of block `b` share no later work.

        That is: no post-dominator of `b`, and no block reachable from one, waits or multiplies.
        """
        meeting = self._dominators[b] & ~(1 << b)
        return not any(meeting >> i & 1 and self._acting[i] for i in range(len(self.after)))

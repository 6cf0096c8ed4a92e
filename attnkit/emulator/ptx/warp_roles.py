"""Derive the role of a warp from the instructions that it executed, for use in reports."""

from __future__ import annotations

from collections.abc import Iterable

from attnkit.emulator.ptx.kernel import PtxKernel

_MARKS = (
    ("TMA load", ("cp.async.bulk.tensor", "cp.async.bulk.shared")),
    ("tcgen05.mma", ("tcgen05.mma",)),
    ("wgmma", ("wgmma.mma_async",)),
    ("mma", ("mma.sync",)),
    ("exponential", ("ex2",)),
    ("tensor-memory reader", ("tcgen05.ld",)),
    ("store", ("st.global",)),
)


def _to_global(op: str) -> bool:
    """Return whether an instruction is a bulk store from shared to global memory."""
    return ".global.shared" in op


def role_of(kernel: PtxKernel, blocks: Iterable[int]) -> str:
    """Return a description of what the executed basic blocks do.

    It names at most three kinds of work, the most characteristic first, such as "TMA load + wgmma".
    """
    ops = {c.op for b in blocks for c in kernel.blocks[b]}
    words = [
        word
        for word, marks in _MARKS
        if any(op.startswith(marks) and not _to_global(op) for op in ops)
    ]
    if any(_to_global(op) for op in ops):
        words.append("bulk store")
    return " + ".join(words[:3])

"""Define a Triton kernel in a file of its own, since Triton reads its source."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one_at(pointer, place) -> None:  # type: ignore[no-untyped-def]
    tl.store(pointer + place, tl.load(pointer + place) + 1)

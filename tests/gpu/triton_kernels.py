"""A kernel in Triton, which needs a module of its own for its source."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one_at(pointer, place) -> None:  # type: ignore[no-untyped-def]
    tl.store(pointer + place, tl.load(pointer + place) + 1)

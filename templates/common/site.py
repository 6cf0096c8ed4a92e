"""Where a tile is, as the kernels tell their hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Site:
    """Where a tile is; see `hooks.Site`."""

    tensors: Any
    b: Any
    h: Any
    q_len: Any
    kv_len: Any
    scale: Any
    origin: Any
    steps: Any = None

"""Define the position of a tile, which kernels pass to their hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Site:
    """Describes the position of a tile; see `hooks.Site` for the fields."""

    tensors: Any
    b: Any
    h: Any
    q_len: Any
    kv_len: Any
    scale: Any
    origin: Any
    steps: Any = None
    column_group: int = 1

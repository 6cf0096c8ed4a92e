"""Replace `torch.nn.attention.flex_attention` by one changed import: its names, run by attnkit.

In: what PyTorch's functions take. Out: what they return; a `BlockMask` is an instance of PyTorch's.
Only users import this room. Names that it does not define are PyTorch's own, private helpers
included. docs/flex.md lists every name and every difference.
"""

from __future__ import annotations

from typing import Any

from torch.nn.attention import flex_attention as _theirs
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, FlexKernelOptions

from attnkit.flex.attention import flex_attention
from attnkit.flex.block_mask import (
    BlockMask,
    _create_empty_block_mask,
    create_block_mask,
    create_mask,
    create_nested_block_mask,
)
from attnkit.tracing.mask import and_masks, noop_mask, or_masks

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "_create_empty_block_mask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "create_nested_block_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]


def __getattr__(name: str) -> Any:
    """Return a name of PyTorch's module that this module does not define."""
    if name.startswith("__") or not hasattr(_theirs, name):
        raise AttributeError(f"module 'attnkit.flex' has no attribute {name!r}")
    return getattr(_theirs, name)

"""attnkit: custom attention from two small Python functions, exact, sparse and differentiable.

>>> import torch, attnkit
>>> from attnkit.masks import causal, sliding_window
>>> q = k = v = torch.randn(1, 2, 256, 16)
>>> out = attnkit.flex_attention(q, k, v, block_mask=causal() & sliding_window(64))
>>> out.shape
torch.Size([1, 2, 256, 16])
"""

from attnkit.block_mask import BlockMask, create_block_mask, create_mask
from attnkit.errors import (
    ArgumentError,
    AttnkitError,
    BoundsError,
    DeviceError,
    DTypeError,
    OptionError,
    ShapeError,
    TraceError,
    UnsupportedError,
)
from attnkit.explanation import Explanation, explain
from attnkit.mask import Mask, and_masks, noop_mask, or_masks, per_batch, per_head
from attnkit.merging import merge
from attnkit.ops import flex_attention
from attnkit.validate import AuxOutput, AuxRequest, FlexKernelOptions
from attnkit.variant import Variant

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "AttnkitError",
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "BoundsError",
    "DTypeError",
    "DeviceError",
    "Explanation",
    "FlexKernelOptions",
    "Mask",
    "OptionError",
    "ShapeError",
    "TraceError",
    "UnsupportedError",
    "Variant",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "explain",
    "flex_attention",
    "merge",
    "noop_mask",
    "or_masks",
    "per_batch",
    "per_head",
]

"""attnkit: custom attention from two small Python functions, exact, sparse and differentiable.

>>> import torch, attnkit
>>> from attnkit.masks import causal, sliding_window
>>> q = k = v = torch.randn(1, 2, 256, 16)
>>> out = attnkit.flex_attention(q, k, v, block_mask=causal() & sliding_window(64))
>>> out.shape
torch.Size([1, 2, 256, 16])
"""

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
from attnkit.inspection.explain import Explanation, explain
from attnkit.runtime.api import flex_attention
from attnkit.runtime.merge_states import merge
from attnkit.runtime.variant import Variant
from attnkit.sparsity.block_mask import BlockMask, create_block_mask, create_mask
from attnkit.tracing.mask import Mask, and_masks, noop_mask, or_masks, per_batch, per_head
from attnkit.util.arguments import AuxOutput, AuxRequest, FlexKernelOptions

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

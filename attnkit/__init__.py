"""attnkit: exact, block-sparse, differentiable attention from a `score_mod` and a `mask_mod`.

>>> import torch, attnkit
>>> from attnkit.masks import causal, sliding_window
>>> q = k = v = torch.randn(1, 2, 256, 16)
>>> out = attnkit.flex_attention(q, k, v, block_mask=causal() & sliding_window(64))
>>> out.shape
torch.Size([1, 2, 256, 16])
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from attnkit.errors import (
    ArgumentError,
    AttnkitError,
    BoundsError,
    DeviceError,
    DTypeError,
    OptionError,
    PicklingError,
    ShapeError,
    StaleDataError,
    TraceError,
    UnsupportedError,
)
from attnkit.runtime.api import flex_attention
from attnkit.runtime.variant import Variant
from attnkit.sparsity.block_mask import BlockMask, create_block_mask, create_mask
from attnkit.tracing.axes import Axes
from attnkit.tracing.mask import Mask, and_masks, noop_mask, or_masks, per_batch, per_head
from attnkit.tracing.pickling import picklable
from attnkit.tracing.score_mod import ScoreMod
from attnkit.util import environment
from attnkit.util.arguments import AuxOutput, AuxRequest, FlexKernelOptions
from attnkit.util.caches import clear_all as clear_caches
from attnkit.util.data_state import invalidate, trust_version_counters

if TYPE_CHECKING:
    from attnkit import flex, masks, mods, testing
    from attnkit.inspection.explain import Explanation, explain
    from attnkit.runtime.merge_states import merge, merge_states
    from attnkit.sparsity.intervals.normal_form import intervals

__version__ = "0.1.0"

# A library leaves it to the program what is logged where; ATTNKIT_LOG shows it without code.
logging.getLogger(__name__).addHandler(logging.NullHandler())
if environment.read("ATTNKIT_LOG"):
    importlib.import_module("attnkit.util.log").to_stderr()

__all__ = [
    "ArgumentError",
    "AttnkitError",
    "AuxOutput",
    "AuxRequest",
    "Axes",
    "BlockMask",
    "BoundsError",
    "DTypeError",
    "DeviceError",
    "Explanation",
    "FlexKernelOptions",
    "Mask",
    "OptionError",
    "PicklingError",
    "ScoreMod",
    "ShapeError",
    "StaleDataError",
    "TraceError",
    "UnsupportedError",
    "Variant",
    "and_masks",
    "clear_caches",
    "create_block_mask",
    "create_mask",
    "explain",
    "flex",
    "flex_attention",
    "intervals",
    "invalidate",
    "masks",
    "merge",
    "merge_states",
    "mods",
    "noop_mask",
    "or_masks",
    "per_batch",
    "per_head",
    "picklable",
    "testing",
    "trust_version_counters",
]

# Imported at first access, because `flex_attention` does not need these modules.
_LAZY = {
    "Explanation": "attnkit.inspection.explain",
    "explain": "attnkit.inspection.explain",
    "flex": "attnkit.flex",
    "intervals": "attnkit.sparsity.intervals.normal_form",
    "masks": "attnkit.masks",
    "merge": "attnkit.runtime.merge_states",
    "merge_states": "attnkit.runtime.merge_states",
    "mods": "attnkit.mods",
    "testing": "attnkit.testing",
}


def __getattr__(name: str) -> Any:
    """Import the attribute `name` of `_LAZY` at its first access and return it."""
    if name not in _LAZY:
        raise AttributeError(f"module 'attnkit' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = module if module.__name__ == f"attnkit.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names defined in the module, including those that are imported lazily."""
    return sorted({*globals(), *_LAZY})

"""Arguments of PyTorch's `varlen_attn` that torch 2.11 does not have."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.attention import varlen

ARGUMENTS = inspect.signature(varlen.varlen_attn).parameters
# torch 2.11 takes fewer heads of keys without being asked.
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in ARGUMENTS else {}

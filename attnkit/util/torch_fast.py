"""What is current in torch, and new tensors there, by the quickest way that torch has.

A call of a small problem costs what the host needs for it. torch's own code generator uses the same
functions; where a version of torch lacks one, its public counterpart takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

# Shape, strides, dtype -> a tensor whose elements are not set.
Maker: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]

_C: Any = torch._C
_GUARDS: Any = getattr(getattr(_C, "_dynamo", None), "guards", None)


def _stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# The handle of the current stream of a CUDA device, without an object around it.
stream_of: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _stream)
# The current CUDA device.
device_index: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
# Whether a CUDA graph is captured on the current stream of the current CUDA device.
is_captured: Callable[[], bool] = getattr(
    _C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def maker(device: torch.device) -> Maker:
    """Makes tensors on a device, which is the current one whenever a CUDA tensor is made."""
    found: Maker | None = getattr(_GUARDS, f"_empty_strided_{device.type}", None)
    if found is not None:
        return found

    def make(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return make

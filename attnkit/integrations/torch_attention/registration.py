"""Put attnkit's kernels in the place of PyTorch's for flash attention, and take them out again."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnkit.integrations.torch_attention.aten_ops import KERNELS


class Handle:
    """Holds the registered kernels; PyTorch removes it to restore its own."""

    def __init__(self, library: torch.library.Library) -> None:
        """Create a handle of the library whose kernels are in effect."""
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        """Restore PyTorch's kernels. Calling it again is harmless."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()


def override(backend: str = "auto", dispatch_key: str = "CUDA") -> Handle:
    """Make PyTorch's flash-attention operators run on attnkit until the handle is removed.

    An operator that this version of PyTorch does not have is left out.

    Args:
        backend: backend of `attnkit.flex_attention`.
        dispatch_key: the kind of tensors, "CUDA"; tests use "CPU".
    """
    library = torch.library.Library("aten", "IMPL", dispatch_key)
    for kernel in KERNELS:
        if hasattr(torch.ops.aten, kernel.__name__):
            run: Any = functools.partial(kernel, backend=backend)
            library.impl(kernel.__name__, run, dispatch_key)
    return Handle(library)

"""Turn the normalization of a call into an attention sink, which every backend has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnkit.errors import ConflictError, OptionError
from attnkit.util import caches
from attnkit.util.arguments import shown
from attnkit.util.torch_private import is_intercepted, is_stream_capturing, stream_of

NORMALIZATIONS = ("softmax", "softmax1")
_PLANNED = ("sigmoid", "none")

# Keys: device, stream (0 for the CPU) and number of heads. A stream may read only what an earlier
# operator of the same stream has written.
_zeros: dict[tuple[torch.device, int, int], Tensor] = {}
caches.register(_zeros.clear)


def sink_of(normalization: Any, sink: Any, query: Any) -> Any:
    """Return the sink [Hq] of a call with this normalization; None for none.

    The denominator of softmax1 is 1 + sum(exp(score)), which is that of a softmax with a sink of 0.

    Args:
        normalization: the argument of `flex_attention`.
        sink: the attention sink that the caller passed, unchecked.
        query: the query, unchecked.

    Raises:
        OptionError: `normalization` is unknown, or does not work yet.
        ConflictError: there is a sink, and the normalization is another one than softmax.
    """
    check_normalization(normalization)
    if normalization == "softmax":
        return sink
    if sink is not None:
        raise ConflictError(
            "sink and normalization='softmax1' were both given, and softmax1 is itself a sink of 0 "
            "in every head; drop one of them. For exp(sink) + 1 in the denominator pass "
            "sink=torch.nn.functional.softplus(sink) alone"
        )
    if not isinstance(query, Tensor) or query.is_nested or query.ndim != 4:
        return None  # the call refuses this query
    return _zero_sink(query)


def check_normalization(normalization: Any) -> None:
    """Check that `normalization` is one of `NORMALIZATIONS`.

    Raises:
        OptionError: it is not.
    """
    if isinstance(normalization, str) and normalization in NORMALIZATIONS:
        return
    known = " or ".join(repr(name) for name in NORMALIZATIONS)
    if isinstance(normalization, str) and normalization in _PLANNED:
        raise OptionError(
            f"normalization={normalization!r} does not work yet; expected {known}. To weigh keys "
            "without a softmax, write the attention with torch operators"
        )
    raise OptionError(f"normalization must be {known}, got {shown(normalization)}")


def _zero_sink(query: Tensor) -> Tensor:
    """Return zeros [Hq], float32, on the device of the query; the caller must not write them."""
    heads, device = query.shape[1], query.device
    if torch.compiler.is_compiling():
        return torch.zeros(heads, dtype=torch.float32, device=device)
    on_gpu = device.type == "cuda"
    # what a mode, a transform or the capture of a CUDA graph creates must not outlive it
    if is_intercepted((query,)) or (on_gpu and is_stream_capturing()):
        return torch.zeros(heads, dtype=torch.float32, device=device)
    key = device, stream_of(device.index) if on_gpu else 0, heads
    known = _zeros.get(key)
    if known is None:
        with torch.inference_mode(False):  # autograd cannot save inference tensors
            known = _zeros[key] = torch.zeros(heads, dtype=torch.float32, device=device)
    return known

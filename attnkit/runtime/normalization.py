"""Check the normalization of a call, and turn softmax1 into a softmax with a sink."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnkit.errors import ConflictError, OptionError
from attnkit.util import caches
from attnkit.util.arguments import shown
from attnkit.util.torch_private import is_intercepted, is_stream_capturing, stream_of

NORMALIZATIONS = ("softmax", "softmax1", "sigmoid", "none")
_STATISTICS = ("lse", "max_scores", "max_logits", "entropy")  # of a softmax: fields of AuxRequest

# Keys: device, stream (0 for the CPU) and number of heads. A stream may read only what an earlier
# operator of the same stream has written.
_zeros: dict[tuple[torch.device, int, int], Tensor] = {}
caches.register(_zeros.clear)


def resolve(
    normalization: Any, sink: Any, query: Any, return_lse: Any = False, return_aux: Any = None
) -> tuple[str, Any]:
    """Check the normalization of a call; return what the backends know: its kind and the sink.

    The denominator of softmax1 is 1 + sum(exp(score)), which is that of a softmax with a sink of 0.

    Args:
        normalization: the argument of `flex_attention`.
        sink: the attention sink that the caller passed, unchecked.
        query: the query, unchecked.
        return_lse, return_aux: arguments of `flex_attention`, unchecked.

    Returns:
        "softmax", "sigmoid" or "none"; and the sink [Hq], None for none.

    Raises:
        OptionError: `normalization` is unknown, or has no such statistic.
        ConflictError: there is a sink, and the normalization is another one than softmax.
    """
    check_normalization(normalization)
    if normalization == "softmax":
        return "softmax", sink
    if normalization == "softmax1":
        return "softmax", _sink_of_softmax1(sink, query)
    if sink is not None:
        raise ConflictError(
            f"sink and normalization={normalization!r} were both given, and a sink is one more term "
            "in the denominator of a softmax: without a softmax there is no denominator; drop one"
        )
    kind = "sigmoid" if normalization == "sigmoid" else "none"
    _refuse_statistics(kind, return_lse, return_aux)
    return kind, None


def _sink_of_softmax1(sink: Any, query: Any) -> Any:
    if sink is not None:
        raise ConflictError(
            "sink and normalization='softmax1' were both given, and softmax1 is itself a sink of 0 "
            "in every head; drop one of them. For exp(sink) + 1 in the denominator pass "
            "sink=torch.nn.functional.softplus(sink) alone"
        )
    if not isinstance(query, Tensor) or query.is_nested or query.ndim != 4:
        return None  # the call refuses this query
    return _zero_sink(query)


def _refuse_statistics(kind: str, return_lse: Any, return_aux: Any) -> None:
    """Raise an OptionError if a call without a softmax asks for a statistic of a softmax.

    Raises:
        OptionError: it does.
    """
    asked = ["return_lse"] if return_lse else []
    asked += [f"return_aux.{n}" for n in _STATISTICS if getattr(return_aux, n, False)]
    if asked:
        raise OptionError(
            f"{asked[0]} asks for a statistic of a softmax, which normalization={kind!r} does not "
            "have; leave it out"
        )


def check_normalization(normalization: Any) -> None:
    """Check that `normalization` is one of `NORMALIZATIONS`.

    Raises:
        OptionError: it is not.
    """
    if not isinstance(normalization, str) or normalization not in NORMALIZATIONS:
        known = ", ".join(repr(name) for name in NORMALIZATIONS)
        raise OptionError(f"normalization must be one of {known}, got {shown(normalization)}")


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

"""Define `AttentionCall`, the arguments of one call of `flex_attention`, and check them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit.sparsity.block_runs import BLOCK
from attnkit.splice import Captured, ForwardInputs
from attnkit.util.arguments import (
    DTYPES,
    AuxOutput,
    AuxRequest,
    check_aux,
    check_flag,
    check_options,
    check_scale,
    check_sink,
    check_tensors,
)


@dataclass(frozen=True)
class CallSettings:
    """Holds the validated options of a call.

    Attributes:
        scale: factor on q k^T.
        aux: which auxiliary outputs to return.
        block: tile sizes that the caller passed; the object `BLOCK` (test with `is`) if none.
        notes: options of FlexAttention that attnkit accepts and ignores.
    """

    scale: float
    aux: AuxRequest
    block: tuple[int, int]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Holds the arguments of one call of `flex_attention`; see there for their meaning.

    `normalization` and `sink` are what `runtime.normalization.resolve` returns: "softmax1" is
    "softmax" with a sink.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Callable[..., Any] | None = None
    block_mask: Any = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: dict[str, Any] | None = None
    return_aux: AuxRequest | None = None
    backend: str = "auto"
    deterministic: bool = False
    sink: Tensor | None = None
    normalization: str = "softmax"
    dropout: Tensor | None = None  # the state of `util.dropout.draw_state`

    def check(self) -> CallSettings:
        """Validate all arguments except the functions, which `bind.trace` validates.

        Raises:
            ArgumentError, ShapeError, DTypeError, DeviceError, OptionError, UnsupportedError:
                see `flex_attention`.
        """
        check_tensors(self.query, self.key, self.value, self.enable_gqa)
        check_sink(self.sink, self.query)
        scale = check_scale(self.scale, self.query.shape[-1])
        aux = check_aux(self.return_lse, self.return_aux)
        check_flag("deterministic", self.deterministic)
        block, notes = check_options(self.kernel_options, BLOCK)
        return CallSettings(scale, aux, block, notes)

    @property
    def is_deterministic(self) -> bool:
        """Return whether the caller or a setting of torch requires a deterministic backward."""
        return self.deterministic or torch.are_deterministic_algorithms_enabled()

    def described(self) -> str:
        """Return what the log calls this call: shapes, dtype, device and functions."""
        shapes = {n: list(getattr(self, n).shape) for n in ("query", "key", "value")}
        if shapes["value"] == shapes["key"]:
            del shapes["value"]
        parts = [f"{name} {shape}" for name, shape in shapes.items()]
        parts.append(f"{str(self.query.dtype).removeprefix('torch.')} on {self.query.device}")
        for name, function in (("score_mod", self.score_mod), ("mask", self.block_mask)):
            if function is not None:
                shown = getattr(function, "label", None) or getattr(function, "__name__", None)
                parts.append(f"{name} {shown or type(function).__name__}")
        return ", ".join(parts)

    def inputs(self, captured: Captured) -> ForwardInputs:
        """Build the `ForwardInputs` of the call from its tensors, its scale and `captured`.

        The state of dropout and the sink, if there are any, are appended to the score's captured
        tensors.

        Raises:
            OptionError: `scale` is not a finite number.
        """
        scale = check_scale(self.scale, self.query.shape[-1])
        if self.dropout is not None:
            captured = Captured((*captured.scores, self.dropout), captured.masks)
        if self.sink is not None:
            captured = Captured((*captured.scores, self.sink), captured.masks)
        return ForwardInputs(self.query, self.key, self.value, captured, scale)

    def results(
        self,
        out: Tensor,
        lse: Tensor,
        max_scores: Tensor | None,
        entropy: Tensor | None,
        column_sums: Tensor | None = None,
    ) -> Any:
        """Return out, (out, LSE) or (out, AuxOutput), as `return_lse` and `return_aux` request.

        Args:
            out: [B, Hq, Sq, Dv].
            lse: [B, Hq, Sq], natural logarithm.
            max_scores: [B, Hq, Sq]; None if the call does not return them.
            entropy: [B, Hq, Sq]; None if the call does not return it.
            column_sums: [B, Hq, Skv]; None if the call does not return them.
        """
        if self.return_aux is None:
            return (out, lse) if self.return_lse else out
        aux = check_aux(self.return_lse, self.return_aux)
        return out, AuxOutput.of(aux, lse, max_scores, entropy, column_sums)


def under_autocast(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Return query, key and value cast to the dtype of `torch.autocast` if it is enabled."""
    kind = query.device.type if isinstance(query, Tensor) else ""
    if not kind or not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    query, key, value = [
        t.to(dtype) if isinstance(t, Tensor) and t.dtype in DTYPES[:3] else t
        for t in (query, key, value)
    ]
    return query, key, value

"""Define `Variant`, a score_mod and a mask combined into one callable object."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from attnkit.runtime.api import flex_attention
from attnkit.runtime.bind import Bound, check_functions, classify, is_flex, prove, trace
from attnkit.tracing.pickling import reduced
from attnkit.tracing.tracer import Traced
from attnkit.util.devices import parse_device

if TYPE_CHECKING:
    from typing import Unpack

    from attnkit.util.arguments import AuxOutput, AuxRequest, VariantOptions


@dataclass(frozen=True, eq=False)
class Variant:
    """Combines a score_mod and a mask into one attention variant, callable on query, key, value.

    Variants compare and hash by the identity of their functions. `str(variant)` shows the traced
    formulas. If the closure, defaults, globals or attributes of a function change, it is traced
    again at the next call.

    Args:
        score_mod: `score_mod(score, b, h, q, kv) -> score`, or None.
        mask: a `Mask`, a `mask_mod(b, h, q, kv) -> bool`, a `BlockMask` (PyTorch's too), or None.

    Raises:
        TraceError: a function cannot be traced.
        ArgumentError: `score_mod` or `mask` has another type.

    >>> from attnkit import Variant
    >>> print(Variant(lambda score, b, h, q, kv: score * 2, lambda b, h, q, kv: q >= kv))
    score(score, b, h, q, kv) = score * 2.0
    mask(b, h, q, kv) = kv <= q
    """

    score_mod: Callable[..., Any] | None = None
    mask: Any = None

    def __post_init__(self) -> None:
        check_functions(self.score_mod, self.mask)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Variant):
            return NotImplemented
        return self.score_mod is other.score_mod and self.mask is other.mask

    def __hash__(self) -> int:
        return hash((id(self.score_mod), id(self.mask)))

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced((Variant, (self.score_mod, self.mask)), self.score_mod, self.mask)

    def __copy__(self) -> Variant:
        return Variant(self.score_mod, self.mask)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variant:
        return Variant(*copy.deepcopy((self.score_mod, self.mask), memo))

    def __repr__(self) -> str:
        # the repr of PyTorch's BlockMask reads its data
        mask = type(self.mask).__name__ if is_flex(self.mask) else repr(self.mask)
        return f"Variant(score_mod={self.score_mod!r}, mask={mask})"

    def __str__(self) -> str:
        parts = self.trace(torch.device("cpu"))
        return "\n".join(str(t) for t in parts if t is not None) or "softmax attention"

    def trace(self, device: torch.device) -> tuple[Traced | None, Traced | None]:
        """Return the (cached) traces of score_mod and mask_mod; None for a missing function."""
        traced = trace(self.score_mod, self.mask, parse_device(device))
        return traced.score, traced.mask

    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        return_lse: Literal[False] = False,
        return_aux: None = None,
        **options: Unpack[VariantOptions],
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        return_lse: Literal[True],
        return_aux: None = None,
        **options: Unpack[VariantOptions],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        return_lse: Literal[False] = False,
        return_aux: AuxRequest,
        **options: Unpack[VariantOptions],
    ) -> tuple[Tensor, AuxOutput]: ...
    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        return_lse: bool = False,
        return_aux: AuxRequest | None = None,
        **options: Unpack[VariantOptions],
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Compute attention with this variant; `options` are passed to `attnkit.flex_attention`."""
        return flex_attention(query, key, value, self.score_mod, self.mask, **options)

    def bind(self, query: Tensor, key: Tensor, block: tuple[int, int]) -> Bound:
        """Trace the functions, check their indices, and classify tiles of size `block`.

        Raises:
            TraceError, BoundsError, ShapeError, DTypeError, DeviceError: see `flex_attention`.
        """
        traced = trace(self.score_mod, self.mask, query.device)
        return classify(traced, prove(traced, query, key), query, key, block)

"""Define `flash_attn_func` and `flash_attn_varlen_func` with the signatures of flash-attn 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from attnkit import OptionError, UnsupportedError
from attnkit.integrations.packed.attention import aligned_attention, packed_attention
from attnkit.integrations.packed.offsets import Names
from attnkit.integrations.packed.options import build_score_mod, read_window
from attnkit.util.arguments import check_flag

if TYPE_CHECKING:
    from typing import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        """Lists the options that change no type."""

        score_mod: Callable[..., Any] | None
        mask: Callable[..., Any] | None
        backend: str


_NAMES = Names("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


# What a call returns, for type checkers: by the literal values of two arguments.
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    return_softmax_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    *,
    return_softmax_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
    return_softmax_lse: bool = False,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor, None]: ...
@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]: ...
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_softmax_lse: bool = False,
    score_mod: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    backend: str = "auto",
) -> Any:
    """Compute attention of a batch as `flash_attn.flash_attn_func` does, forward and backward.

    Causal masks, windows and slopes are aligned at the bottom right: the last query is at the last
    key. So query i has the place i + Skv - Sq among the keys, and `score_mod` and `mask` see this
    place as q. Softcap comes first, then the slopes, then `score_mod`.

    Args:
        q: [B, Sq, Hq, D] float16, bfloat16, float32 or float64, any strides.
        k: [B, Skv, Hkv, D]; Hkv divides Hq.
        v: [B, Skv, Hkv, Dv].
        dropout_p: probability of dropping an element of the softmax, a multiple of 1 / 256 after
            rounding, see `attnkit.flex_attention`.
        softmax_scale: factor on q k^T; None for 1 / sqrt(D).
        causal: whether a query keeps no key after its place.
        window_size: (left, right), keys before and after its place that a query keeps, both
            included; -1 or None for no limit.
        softcap: limit on scores, softcap * tanh(score / softcap); 0 for none.
        alibi_slopes: float [Hq] or [B, Hq]: slope * |place - key| is subtracted from the scores.
            Slopes that require a gradient get it.
        deterministic: whether the same inputs must give the same bits, also in the backward.
        return_attn_probs: whether to return (out, LSE, None), as flash-attn does without dropout;
            not with dropout.
        return_softmax_lse: whether to return (out, LSE).
        score_mod: `score_mod(score, b, h, q, kv) -> score`, or None.
        mask: `mask(b, h, q, kv) -> bool` that a score must satisfy besides, or None.
        backend: backend of `attnkit.flex_attention`.

    Returns:
        out [B, Sq, Hq, Dv]; with LSE [B, Hq, Sq], float32, natural logarithm, differentiable. A row
        without a key has output 0 and LSE -inf.

    Raises:
        OptionError: an option has a value that is not allowed.
        ArgumentError, ShapeError, DTypeError, DeviceError: an argument is not as described.
        TraceError, BoundsError, UnsupportedError, StaleDataError: see `attnkit.flex_attention`.
    """
    _refuse_weights(dropout_p, return_attn_probs)
    window = read_window(window_size, causal)
    out, lse = aligned_attention(
        _NAMES,
        q,
        k,
        v,
        window=window,
        score_mod=build_score_mod(softcap, alibi_slopes, score_mod, window),
        mask=mask,
        scale=softmax_scale,
        deterministic=deterministic,
        backend=backend,
        dropout_p=dropout_p,
    )
    return _results(out, lse, return_attn_probs, return_softmax_lse)


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    block_table: Tensor | None = None,
    *,
    return_softmax_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    block_table: Tensor | None = None,
    *,
    return_softmax_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor, None]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    return_softmax_lse: bool = False,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]: ...
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    return_softmax_lse: bool = False,
    score_mod: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    backend: str = "auto",
) -> Any:
    """Compute attention of packed sequences as `flash_attn.flash_attn_varlen_func` does.

    Each sequence attends to itself alone, forward and backward. Its causal mask, windows and slopes
    are aligned at its bottom right: query i of a sequence with n queries and m keys has the place
    i + m - n among these keys. `score_mod` and `mask` see the number of the sequence as b, this
    place as q (negative where a sequence has more queries than keys), and the position of the key
    in its sequence as kv. A table that they read by position must fit the longest sequence.

    Sequences may be empty. Tokens after the last offset belong to no sequence: their output is 0.
    The offsets are read on the host at the first call after a change of their data, and not again.
    In torch.compile they are not checked.

    Args:
        q: [total_q, Hq, D] float16, bfloat16, float32 or float64, any strides.
        k: [total_k, Hkv, D]; Hkv divides Hq.
        v: [total_k, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1] on the device of q, the start of each sequence in q
            and in k, and the end of the last.
        max_seqlen_q, max_seqlen_k: at least the lengths of the longest sequences.
        dropout_p: see `flash_attn_func`. The random bits belong to the places of tokens in q and k.
        softmax_scale, causal, window_size, softcap: see `flash_attn_func`.
        alibi_slopes: float [Hq] or [N, Hq], see `flash_attn_func`.
        deterministic, return_attn_probs, return_softmax_lse, backend: see `flash_attn_func`.
        block_table: must be None; pages of a cache are not supported.
        score_mod: `score_mod(score, b, h, q, kv) -> score`, or None.
        mask: `mask(b, h, q, kv) -> bool` that a score must satisfy besides, or None.

    Returns:
        out [total_q, Hq, Dv]; with LSE [Hq, total_q], float32, natural logarithm, differentiable. A
        row without a key has output 0 and LSE -inf.

    Raises:
        OptionError: the offsets do not start at 0, decrease, or end after the last token; a
            sequence is longer than its bound; or another value is not allowed.
        UnsupportedError: `block_table` is given.
        ArgumentError, ShapeError, DTypeError, DeviceError: an argument is not as described.
        TraceError, BoundsError, StaleDataError: see `attnkit.flex_attention`.
    """
    _refuse_weights(dropout_p, return_attn_probs)
    if block_table is not None:
        raise UnsupportedError(
            "attnkit has no paged keys in flash_attn_varlen_func, got block_table=; gather the pages "
            "into k and v, or use the mask attnkit.masks.paged with attnkit.flex_attention"
        )
    window = read_window(window_size, causal)
    out, lse = packed_attention(
        _NAMES,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        window=window,
        score_mod=build_score_mod(softcap, alibi_slopes, score_mod, window),
        mask=mask,
        scale=softmax_scale,
        deterministic=deterministic,
        backend=backend,
        dropout_p=dropout_p,
    )
    return _results(out, lse, return_attn_probs, return_softmax_lse)


def _refuse_weights(dropout_p: Any, probabilities: Any) -> None:
    """Raise an OptionError if a call asks for the elements that dropout keeps."""
    if probabilities is True and isinstance(dropout_p, float) and dropout_p > 0:
        raise OptionError(
            f"return_attn_probs=True with dropout_p={dropout_p} asks for the weights, which attnkit "
            "never holds; use return_softmax_lse=True for the LSE. docs/tutorials/dropout.md has "
            "the rule by which elements are dropped"
        )


def _results(out: Tensor, lse: Tensor, probabilities: Any, with_lse: Any) -> Any:
    """Return out, (out, LSE) or (out, LSE, None), as the caller asks for it."""
    if check_flag("return_attn_probs", probabilities):
        return out, lse, None
    return (out, lse) if check_flag("return_softmax_lse", with_lse) else out

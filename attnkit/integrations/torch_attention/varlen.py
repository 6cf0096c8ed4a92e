"""Define `varlen_attn` with the signature of `torch.nn.attention.varlen.varlen_attn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from attnkit import ArgumentError, UnsupportedError
from attnkit.integrations.packed.attention import packed_attention
from attnkit.integrations.packed.offsets import Names
from attnkit.integrations.packed.options import build_score_mod, read_window
from attnkit.util.arguments import check_flag, shown

if TYPE_CHECKING:
    from typing import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        """Lists the options that change no type."""

        scale: float | None
        window_size: tuple[int, int]
        enable_gqa: bool
        seqused_k: Tensor | None
        block_table: Tensor | None
        num_splits: int | None
        score_mod: Callable[..., Any] | None
        mask: Callable[..., Any] | None
        deterministic: bool
        backend: str


NAMES = Names("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")


@overload
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any,
    **options: Unpack[_Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask: Callable[..., Any] | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of packed sequences as PyTorch's `varlen_attn` does, on any device.

    Windows are aligned at the bottom right of each sequence: query i of a sequence with n queries
    and m keys has the place i + m - n among these keys. `score_mod` and `mask` see the number of
    the sequence as b, this place as q (negative where a sequence has more queries than keys), and
    the position of the key in its sequence as kv. Sequences may be empty. Tokens after the last
    offset belong to no sequence: their output is 0.

    Unlike PyTorch's function this one differentiates the LSE too, and takes float32 and float64.

    Args:
        query: [total_q, Hq, D] float16, bfloat16, float32 or float64, any strides.
        key: [total_k, Hkv, D].
        value: [total_k, Hkv, Dv].
        cu_seq_q, cu_seq_k: int32 [N + 1] on the device of the query, the start of each sequence and
            the end of the last.
        max_q, max_k: at least the lengths of the longest sequences.
        return_aux: PyTorch's `AuxRequest`, or None; with `lse` True the LSE is returned too.
        scale: factor on q k^T; None for 1 / sqrt(D).
        window_size: (left, right), keys before and after its place that a query keeps, both
            included; -1 for no limit. (-1, 0) is a causal mask.
        enable_gqa: whether Hkv may be a divisor of Hq.
        seqused_k: int32 [N], how many keys of each sequence are used, from its start; or None.
        block_table: must be None; pages of a cache are not supported.
        num_splits: None, or a number above 1, which changes nothing. 1 is refused: it promises the
            same bits in every batch, which attnkit does not.
        score_mod: `score_mod(score, b, h, q, kv) -> score`, or None.
        mask: `mask(b, h, q, kv) -> bool` that a score must satisfy besides, or None.
        deterministic: whether the same inputs must give the same bits, also in the backward.
        backend: backend of `attnkit.flex_attention`.

    Returns:
        out [total_q, Hq, Dv]; or (out, LSE) with LSE [Hq, total_q], float32, natural logarithm. A
        row without a key has output 0 and LSE -inf.

    Raises:
        UnsupportedError: `block_table` is given, or `num_splits` is 1.
        OptionError: the offsets do not start at 0, decrease, or end after the last token; a sequence
            is longer than its bound, or uses more keys than it has.
        ArgumentError, ShapeError, DTypeError, DeviceError: an argument is not as described.
        TraceError, BoundsError, StaleDataError: see `attnkit.flex_attention`.
    """
    refuse_pages(block_table)
    refuse_one_split(num_splits)
    window = read_window(window_size, False)
    check_flag("enable_gqa", enable_gqa)
    out, lse = packed_attention(
        NAMES,
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        used=seqused_k,
        grouped=enable_gqa,
        window=window,
        score_mod=build_score_mod(None, None, score_mod, window),
        mask=mask,
        scale=scale,
        deterministic=deterministic,
        backend=backend,
    )
    return (out, lse) if _wants_lse(return_aux) else out


def _wants_lse(return_aux: Any) -> bool:
    if return_aux is None:
        return False
    if not hasattr(return_aux, "lse"):
        raise ArgumentError(
            "return_aux must be torch.nn.attention.varlen.AuxRequest or None, got "
            f"{shown(return_aux)}"
        )
    return bool(return_aux.lse)


def refuse_pages(block_table: Any) -> None:
    """Raise an UnsupportedError if a call has pages of keys.

    Raises:
        UnsupportedError: `block_table` is given.
    """
    if block_table is not None:
        raise UnsupportedError(
            "attnkit has no paged keys in varlen_attn, got block_table=; gather the pages into key "
            "and value, or use the mask attnkit.masks.paged with attnkit.flex_attention"
        )


def refuse_one_split(num_splits: Any) -> None:
    """Raise an UnsupportedError if a call forbids to split keys, for the same bits in any batch.

    Raises:
        ArgumentError: `num_splits` is neither an int nor None.
        UnsupportedError: `num_splits` is 1.
    """
    if num_splits is None:
        return
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise ArgumentError(f"num_splits must be an int or None, got {shown(num_splits)}")
    if num_splits == 1:
        raise UnsupportedError(
            "num_splits=1 asks for the same bits of a sequence in every batch, which attnkit does not "
            "promise; leave it out"
        )

"""Define `flex_attention` with PyTorch's arguments and result classes, computed by attnkit's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, FlexKernelOptions
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

import attnkit
from attnkit.errors import FunctionError, OptionError
from attnkit.flex.block_mask import BlockMask
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.dropout import state_of
from attnkit.runtime.normalization import resolve
from attnkit.util.arguments import refuse_script
from attnkit.util.tensor_cache import VersionedCache
from attnkit.util.torch_private import flex_parts

if TYPE_CHECKING:
    from typing import Unpack

    from attnkit.util.arguments import CallOptions

_PARTS = flex_parts()

_whole: VersionedCache[bool] = VersionedCache(8)  # results of `_keeps_its_block`


# What a call returns, for type checkers: by the literal values of return_lse and return_aux.
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: None = None,
    **options: Unpack[CallOptions],
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: FlexKernelOptions | None = None,
    return_aux: None = None,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | Tensor | None,
    enable_gqa: bool,
    return_lse: Literal[True],
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: None = None,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest,
    **options: Unpack[CallOptions],
) -> tuple[Tensor, AuxOutput]: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | attnkit.AuxRequest | None = None,
    **options: Unpack[CallOptions],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput | attnkit.AuxOutput]: ...
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | attnkit.AuxRequest | None = None,
    **options: Any,
) -> Any:
    """Compute attention as PyTorch's function does, without torch.compile, forward and backward.

    `attnkit.flex_attention` describes the arguments. Here `scale` may also be a tensor of one
    number, which gets its gradient; batch, query length and kv length may be 0; and `return_aux`
    and its result are PyTorch's classes. `attnkit.AuxRequest` is accepted too: its result is an
    `attnkit.AuxOutput` if it has an output that PyTorch's class lacks.

    Args:
        query: [B, Hq, Sq, D] float16, bfloat16, float32 or float64.
        key: [B or 1, Hkv, Skv, D], same dtype and device.
        value: [B or 1, Hkv, Skv, Dv], same dtype and device.
        score_mod: `score_mod(score, b, h, q, kv) -> score`, or None.
        block_mask: a `BlockMask`, PyTorch's or attnkit's, a mask_mod, or None.
        scale: factor on q k^T, a number or a tensor of one number; None for 1 / sqrt(D).
        enable_gqa: whether key and value may have fewer heads than query.
        return_lse: whether to also return the LSE, [B, Hq, Sq].
        kernel_options: options of PyTorch's kernels. BLOCK_M and BLOCK_N set the tile sizes for a
            mask given as a function; others are checked and change nothing.
        return_aux: which auxiliary outputs to return.
        options: further arguments of `attnkit.flex_attention`, such as `backend` and `sink`.

    Returns:
        out [B, Hq, Sq, Dv]; or (out, lse); or (out, AuxOutput).

    Raises:
        The errors of `attnkit.flex_attention`. Each is also an instance of the builtin exception
        that PyTorch raises for the same mistake.
    """
    if isinstance(block_mask, TorchBlockMask):
        block_mask = _plain(block_mask)
    if isinstance(scale, Tensor):
        score_mod, scale = _scaled(score_mod, _factor(scale, query)), 1.0
    own: Any = return_aux
    if type(return_aux) is AuxRequest:
        own = attnkit.AuxRequest(return_aux.lse, return_aux.max_scores)
    arguments: Any = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
    if not torch.compiler.is_compiling() and _is_empty(query, key, value):
        result = _of_nothing(query, key, value, *arguments, return_aux=own, **options)
    else:
        result = attnkit.flex_attention(
            query,
            key,
            value,
            *arguments,
            return_aux=own,
            **options,
        )
    if return_aux is not None:
        out, more = result
        if all(t is None for t in more[2:]):  # else it has an output that PyTorch's class lacks
            return out, AuxOutput(*more[:2])
    return result


flex_attention.__prepare_scriptable__ = refuse_script  # type: ignore[attr-defined]


def _plain(mask: Any) -> Any:
    """Return what attnkit's function takes for PyTorch's BlockMask.

    Raises:
        FunctionError: the mask is a selection of another, without a mask_mod of its own.
    """
    if isinstance(mask, BlockMask):
        if torch.compiler.is_compiling():
            # a compiled function cannot see whether the caller has edited lists: it follows them
            formula = mask._formula if mask._callers_lists is None else None
            if formula is None and mask._formula is not None:
                return mask._as_torch()
        else:
            formula = mask._resolve()
        if formula is not None:
            return formula
    if _PARTS.sliced is not None and mask.mask_mod is _PARTS.sliced:
        raise FunctionError(
            "Cannot use mask_mod from a sliced BlockMask: block_mask was selected by an index and "
            "has no mask_mod; assign one that fits the selection, block_mask.mask_mod = "
            "lambda b, h, q, kv: whole.mask_mod(b, h, q + offset, kv)"
        )
    if mask.BLOCK_SIZE == (_PARTS.whole, _PARTS.whole) and _keeps_its_block(mask):
        return mask.mask_mod
    return mask


def _keeps_its_block(mask: Any) -> bool:
    """Return whether a BlockMask keeps its only block, which covers every sequence."""
    if mask.kv_indices.numel() != 1 or mask.full_kv_num_blocks is not None:
        return False
    count = mask.kv_num_blocks
    if torch.compiler.is_compiling():  # nothing can be read; torch makes no other
        return True
    return _whole.get((), [count], lambda: bool(count.item() == 1))


def _factor(scale: Tensor, query: Tensor) -> Tensor:
    """Convert a scale of one element to a 0-d tensor in the dtype of the scores.

    Raises:
        OptionError: the tensor does not hold one real number.
    """
    if scale.numel() != 1 or scale.is_complex():
        raise OptionError(
            f"scale must be a number or a tensor of one number, got {scale.dtype} "
            f"{list(scale.shape)}; a scale per head or row belongs in score_mod"
        )
    double = isinstance(query, Tensor) and query.dtype == torch.float64
    return scale.reshape(()).to(torch.float64 if double else torch.float32)


def _scaled(score_mod: Callable[..., Any] | None, factor: Tensor) -> Callable[..., Any]:
    """Return the score_mod that multiplies the score by `factor` before `score_mod` sees it."""
    if score_mod is None:
        return lambda score, b, h, q, kv: score * factor
    return lambda score, b, h, q, kv: score_mod(score * factor, b, h, q, kv)


def _is_empty(*tensors: Any) -> bool:
    """Return whether the batch, the query length or the kv length of a call is 0."""
    for t in tensors:
        if not isinstance(t, Tensor) or t.is_nested or t.ndim != 4:
            return False  # for attnkit's function to refuse
    return any(t.shape[0] == 0 or t.shape[2] == 0 for t in tensors)


def _of_nothing(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
    """Return the result of a call without a row or without a key.

    Rows without keys have output 0 and LSE -inf; with a sink it is their LSE.

    Raises:
        ShapeError, DTypeError, …: as `attnkit.flex_attention`, about other arguments.
    """
    # The checks refuse sizes of 0, so they see tensors in which those are 1.
    stand_ins = [
        t.detach().new_empty(1).expand([max(n, 1) if axis in (0, 2) else n
                                        for axis, n in enumerate(t.shape)])
        for t in (query, key, value)
    ]  # fmt: skip
    asked = query, arguments[4], options["return_aux"]
    options["normalization"], options["sink"] = resolve(
        options.get("normalization", "softmax"), options.get("sink"), *asked
    )
    options["dropout"] = state_of(options.pop("dropout_p", 0.0), query)
    call = AttentionCall(*stand_ins, *arguments, **options)  # type: ignore[arg-type]
    call.check()
    for name, t in (("key", key), ("value", value)):
        if t.shape[0] not in (1, query.shape[0]):
            raise attnkit.ShapeError(
                f"{name} has batch {t.shape[0]}, query has {query.shape[0]}; expected the same, or "
                "1 to share them"
            )
    none = sum(t[..., :0].sum() for t in (query, key, value))  # 0 with a gradient of zeros
    rows = query.shape[:3]
    out = query.new_zeros(*rows, value.shape[3]) + none
    stats = torch.float64 if query.dtype == torch.float64 else torch.float32
    max_scores = torch.full(rows, -torch.inf, dtype=stats, device=query.device)
    lse = max_scores.clone()
    if (sink := call.sink) is not None:  # a sink of -inf is none: it gets the gradient 0
        lse = torch.where(sink == -torch.inf, -torch.inf, sink)[:, None].to(stats).expand(rows)
    sums = torch.zeros(*query.shape[:2], key.shape[2], dtype=stats, device=query.device) + none
    entropy = torch.zeros_like(max_scores) + none
    return call.results(out, lse.contiguous(), max_scores, entropy, sums)

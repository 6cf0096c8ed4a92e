"""Merge the results of attention over two disjoint sets of keys."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge two partial attention results over disjoint keys into the result over all the keys.

    The merged output is the mean of the two outputs, weighted by exp(LSE). It is exact up to
    rounding, for any order and any tree of merges. A part without keys (output 0, LSE -inf) does
    not change the other part. Two parts without keys give output 0 and LSE -inf, with zero
    gradients. The result is differentiable in all four arguments.

    If the rows have an attention sink, it must be in the LSE of exactly one part: pass `sink` to
    one of the calls, or merge a part with output 0 and the sink as its LSE.

    Args:
        out_a, out_b: outputs [..., Dv], of the same shape and dtype.
        lse_a, lse_b: LSEs [...], natural logarithm, of the same dtype.

    Returns:
        out [..., Dv] in the dtype of the outputs, and lse [...] in the dtype of the LSEs, in which
        the arithmetic is done.

    Raises:
        ArgumentError: an argument is not a tensor.
        ShapeError, DTypeError, DeviceError: shapes, dtypes or devices of the tensors do not match.
        UnsupportedError: a tensor is nested, sparse or quantized.
    """
    _check(out_a, lse_a, out_b, lse_b)
    base = torch.maximum(lse_a, lse_b).detach()  # any common factor cancels, so no gradient
    base = torch.where(base == -torch.inf, torch.zeros_like(base), base)
    weight_a, weight_b = (lse_a - base).exp(), (lse_b - base).exp()
    total = weight_a + weight_b
    has_keys = total != 0
    safe = torch.where(has_keys, total, torch.ones_like(total))
    out = weight_a[..., None] * out_a.to(base.dtype) + weight_b[..., None] * out_b.to(base.dtype)
    lse = torch.where(has_keys, base + safe.log(), -torch.inf)
    return (out / safe[..., None]).to(out_a.dtype), lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Call `merge_states`. This deprecated name will be removed in version 0.2."""
    warnings.warn(
        "attnkit.merge is now attnkit.merge_states; the old name goes with version 0.2",
        DeprecationWarning,
        stacklevel=2,
    )
    return merge_states(out_a, lse_a, out_b, lse_b)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, t in named.items():
        if not isinstance(t, Tensor):
            raise ArgumentError(
                f"{name} must be a torch.Tensor, got {type(t).__name__}; merge_states takes four "
                "tensors, the outputs and LSEs of two calls with return_lse=True"
            )
        if t.is_nested or t.layout != torch.strided or t.is_quantized:
            raise UnsupportedError(f"{name} is not a dense tensor; convert it first")
        if t.device != out_a.device:
            raise DeviceError(f"{name} is on {t.device}, out_a is on {out_a.device}; move one")
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or out_a.dim() == 0:
        raise ShapeError(
            f"out_a and out_b must have one shape [..., Dv], lse_a and lse_b one shape [...]; got "
            f"{tuple(out_a.shape)}, {tuple(out_b.shape)}, {tuple(lse_a.shape)} and "
            f"{tuple(lse_b.shape)}"
        )
    if out_a.shape[:-1] != lse_a.shape:
        raise ShapeError(
            f"the LSE of outputs {tuple(out_a.shape)} must be {tuple(out_a.shape[:-1])}, got "
            f"{tuple(lse_a.shape)}"
        )
    if out_a.dtype != out_b.dtype or lse_a.dtype != lse_b.dtype or not lse_a.is_floating_point():
        raise DTypeError(
            f"out_a and out_b must have one dtype, lse_a and lse_b one floating dtype; got "
            f"{out_a.dtype}, {out_b.dtype}, {lse_a.dtype} and {lse_b.dtype}"
        )

"""The public operator, with the signature and meaning of PyTorch's flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnkit import launch, reference
from attnkit.plan import BLOCK, choose
from attnkit.validate import (
    AuxOutput,
    AuxRequest,
    check_aux,
    check_flag,
    check_options,
    check_scale,
    check_tensors,
)
from attnkit.variant import Bound, Variant


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> Any:
    """Attention with a custom score and mask: softmax(score_mod(q k^T * scale) where kept) v.

    Exact against dense attention to the rounding of the dtype; differentiable in query, key,
    value, the LSE and the float tensors that score_mod captures. Tiles that the mask empties are
    not computed. A row that keeps nothing gives 0, LSE -inf and gradient 0.

    Args:
        query: [B, Hq, Sq, D] float16, bfloat16, float32 or float64, any strides.
        key: [B or 1, Hkv, Skv, D], same dtype and device.
        value: [B or 1, Hkv, Skv, Dv], same dtype and device.
        score_mod: `score_mod(score, b, h, q, kv) -> score`, called once with symbols. The score is
            float32 (float64 for float64 inputs), the indices int32; h is the query head.
        block_mask: a `BlockMask` (PyTorch's too), a `Mask`, a `mask_mod(b, h, q, kv) -> bool`, or
            None to keep everything.
        scale: factor on q k^T, 1 / sqrt(D) if None.
        enable_gqa: allow fewer heads in key and value; query head h reads kv head
            h // (Hq // Hkv).
        return_lse: also return the LSE, [B, Hq, Sq], natural logarithm.
        kernel_options: BLOCK_M and BLOCK_N set the tiles of a mask given as a function; the other
            options of FlexAttention are accepted and change nothing.
        return_aux: which auxiliary outputs to return, instead of return_lse.
        backend: "auto", "cpu" (torch operators over the kept tiles, any device), "eager" (dense
            oracle), "cute" (insists on a GPU kernel), "emulate" (that kernel on the CPU).
        deterministic: same inputs give the same bits. The cpu and eager backends always do on a
            CPU.

    Returns:
        out [B, Hq, Sq, Dv] in the query's dtype and stride order; or (out, lse) with return_lse;
        or (out, AuxOutput) with return_aux. LSE and max scores are float32 (float64 for float64).

    Raises:
        TraceError: score_mod or mask_mod cannot be traced, or returns the wrong kind of value.
        BoundsError: an index leaves its captured tensor, or index arithmetic leaves int32.
        ShapeError, DTypeError, DeviceError, ArgumentError, OptionError: wrong arguments.
        UnsupportedError: the backend asked for cannot run here.
    """
    check_tensors(query, key, value, enable_gqa)
    factor = check_scale(scale, query.shape[-1])
    aux = check_aux(return_lse, return_aux)
    check_flag("deterministic", deterministic)
    block, notes = check_options(kernel_options, BLOCK)
    plan = choose(backend, device=query.device.type, block=block, notes=notes)
    bound = Variant(score_mod, block_mask).bind(query, key, plan.block)
    if plan.template == "eager":
        out, lse, top = _dense(query, key, value, bound, factor)
    else:
        out, lse, top = launch.run(
            query,
            key,
            value,
            bound.score.tensors if bound.score else (),
            bound.mask.tensors if bound.mask else (),
            bound.runs,
            bound.program,
            plan.template,
            factor,
            aux.max_scores,
        )
    if return_aux is not None:
        return out, AuxOutput(lse if aux.lse else None, top if aux.max_scores else None)
    return (out, lse) if aux.lse else out


# What torch.compiler.disable sets; calling that would load torch._dynamo at import. Inside
# torch.compile attention is a graph break, and the mod is traced by attnkit, not by dynamo.
flex_attention._torchdynamo_disable = True  # type: ignore[attr-defined]
flex_attention._torchdynamo_disable_msg = "attnkit traces score_mod and mask_mod itself"  # type: ignore[attr-defined]


def _dense(
    query: Tensor, key: Tensor, value: Tensor, bound: Bound, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle; block lists of PyTorch's BlockMask are expanded to single positions."""
    mask, allowed = bound.mask, None
    if bound.listed and bound.runs is not None:
        states = bound.runs.states()
        for axis, size in ((2, bound.runs.block[0]), (3, bound.runs.block[1])):
            states = states.repeat_interleave(size, dim=axis)
        states = states[:, :, : query.shape[2], : key.shape[2]]
        kept = torch.ones((), dtype=torch.bool, device=query.device)
        if mask is not None:
            kept = reference.kept(mask, query, key)
        allowed, mask = (states == 2) | ((states == 1) & kept), None
    return reference.attention(query, key, value, bound.score, mask, scale=scale, allowed=allowed)

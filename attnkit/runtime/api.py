"""Define the public operator, with the signature and meaning of PyTorch's flex_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnkit.runtime import reuse, torch_ops
from attnkit.runtime.call import AttentionCall, under_autocast
from attnkit.runtime.compile import symbolic
from attnkit.runtime.data_guard import raise_if_stale
from attnkit.runtime.prepare import prepare
from attnkit.util.arguments import AuxRequest
from attnkit.util.torch_private import in_autocast


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
    """Compute attention with a custom score and mask: softmax(score_mod(q k^T * scale)) v.

    The softmax runs over the scores that the mask keeps. The result equals that of dense attention
    to the rounding of the dtype. It is differentiable in query, key, value, the LSE and the float
    tensors that score_mod captures. Empty tiles are not computed. A fully masked row gives output
    0, LSE -inf and zero gradients. Captured tensors may be edited in place by anyone. On a GPU a
    write that torch's version counter does not see (by a kernel, a fused optimizer, a collective)
    needs `attnkit.invalidate(tensor)` after it; if that is missing, a later call raises.

    Under torch.autocast query, key and value are cast to its dtype (float64 is not); operations
    inside are not autocast. In torch.compile a call is one operator, which classifies tiles when it
    runs; there backend="eager" is refused. Tensors without data, on the meta device or in a
    FakeTensorMode, give results without data.

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
        backend: "auto" (the GPU kernel where there is one for this call, else "cpu"), "cpu" (torch
            operators over the tiles that the mask keeps, any device), "eager" (dense oracle),
            "cute" (the GPU kernel or an error: Hopper or Blackwell, float16 or bfloat16), "emulate"
            (the Hopper kernel executed on the CPU, for tiny sizes), "emulate:sm_100a" (the same for
            the Blackwell kernel). Where a kernel has no backward, torch operators compute it.
        deterministic: same inputs give the same bits, in the backward too; so does
            torch.use_deterministic_algorithms. The cpu and eager backends always do on a CPU.

    Returns:
        out [B, Hq, Sq, Dv] in the query's dtype and stride order; or (out, lse) with return_lse;
        or (out, AuxOutput) with return_aux. LSE and max scores are float32 (float64 for float64).

    Raises:
        TraceError: score_mod or mask_mod cannot be traced, or returns the wrong kind of value.
        BoundsError: an index leaves its captured tensor, or index arithmetic leaves int32.
        ShapeError, DTypeError, DeviceError, ArgumentError, OptionError: wrong arguments; DTypeError
            also if a query narrower than float64 reads captured float64 data, and rounding that
            data to float32 would change the result.
        UnsupportedError: the backend asked for cannot run here.
        StaleDataError: an earlier call on a GPU ran with data that was edited behind torch's back.
    """
    compiling = torch.compiler.is_compiling()  # or exporting
    if not compiling and kernel_options is None and return_aux is None:
        relaunched = reuse.try_fast_path(
            query,
            key,
            value,
            score_mod,
            block_mask,
            scale,
            enable_gqa,
            return_lse,
            backend,
            deterministic,
        )
        if relaunched is not None:
            return relaunched
    if not compiling:
        raise_if_stale()
    if compiling or in_autocast():
        query, key, value = under_autocast(query, key, value)
    call = AttentionCall(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux,
        backend,
        deterministic,
    )
    if compiling:
        return symbolic.run_compiled(call)
    if symbolic.has_no_data(query):
        return symbolic.run_without_data(call)
    call_key = reuse.key_of(call)
    prepared = reuse.lookup(call_key)
    if call_key is None or prepared is None:
        return _first_call(call)
    result = torch_ops.run(prepared, call.inputs(call_key.captured))
    if return_aux is None and (scale is None or scale > 0):
        reuse.remember(call, call_key, prepared)
    return call.results(*result)


def _first_call(call: AttentionCall) -> Any:
    """Prepare a call, run it, and cache the prepared call if it has a key (slow path)."""
    preparation = prepare(call)
    prepared, captured = preparation.call, preparation.bound.captured
    result = torch_ops.run(prepared, call.inputs(captured))
    call_key = None if prepared.is_dense else reuse.key_of(call)
    if call_key is not None and call_key.fits(prepared, captured):
        reuse.store(call_key, prepared)
    return call.results(*result)

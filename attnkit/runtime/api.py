"""Define the public function `flex_attention`, compatible with that of PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from attnkit.runtime import reuse, torch_ops
from attnkit.runtime.call import AttentionCall, under_autocast
from attnkit.runtime.compile import symbolic
from attnkit.runtime.data_guard import raise_if_stale
from attnkit.runtime.prepare import prepare
from attnkit.util.arguments import AuxOutput, AuxRequest, check_surroundings, refuse_script
from attnkit.util.torch_private import in_autocast

if TYPE_CHECKING:
    from typing import Unpack

    from attnkit.runtime.prepared_call import PreparedCall
    from attnkit.splice import ForwardInputs, ForwardOutputs
    from attnkit.util.arguments import CallOptions

_log = logging.getLogger("attnkit.runtime")
_SOFTMAX = "softmax"  # the same object as the default below, as Python interns such constants
_NO_DROPOUT = 0  # an int, because Dynamo may take a float for a number that changes


# What a call returns, for type checkers: by the literal values of return_lse and return_aux.
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
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
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = None,
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
    scale: float | None,
    enable_gqa: bool,
    return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = None,
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
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
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
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    **options: Unpack[CallOptions],
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]: ...
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
    sink: Tensor | None = None,
    normalization: str = "softmax",
    dropout_p: float = _NO_DROPOUT,
) -> Any:
    """Compute attention with a custom score and mask: softmax(score_mod(q k^T * scale)) v.

    The softmax runs over the scores that the mask keeps. The result equals that of dense attention
    up to the rounding of the dtype. The output and the LSE are differentiable in query, key, value
    and the float tensors that score_mod captures. Empty tiles are not computed. A fully masked row
    has output 0, LSE -inf and zero gradients. Captured tensors may be edited in place between
    calls. After a write on a GPU that torch's version counter does not record (by a kernel, a fused
    optimizer, a collective), call `attnkit.invalidate(tensor)`; otherwise a later call raises.

    Under torch.autocast, query, key and value are cast to the autocast dtype, except float64; the
    operations inside are not autocast. In torch.compile a call is one operator, which classifies
    tiles when it runs; backend="eager" is rejected there. Tensors without data (on the meta device
    or in a FakeTensorMode) give results without data.

    Args:
        query: [B, Hq, Sq, D] float16, bfloat16, float32 or float64, any strides.
        key: [B or 1, Hkv, Skv, D], same dtype and device.
        value: [B or 1, Hkv, Skv, Dv], same dtype and device.
        score_mod: `score_mod(score, b, h, q, kv) -> score`, traced by one call with symbolic
            values. The score is float32 (float64 for float64 inputs), the indices are int32, and h
            is the query head.
        block_mask: a `BlockMask` (PyTorch's too), a `Mask`, a `mask_mod(b, h, q, kv) -> bool`, or
            None to keep everything.
        scale: factor on q k^T; None for 1 / sqrt(D).
        enable_gqa: whether key and value may have fewer heads than query. Query head h reads kv
            head h // (Hq // Hkv).
        return_lse: whether to also return the LSE, [B, Hq, Sq], natural logarithm.
        kernel_options: BLOCK_M and BLOCK_N set the tile sizes for a mask given as a function. Other
            options of FlexAttention are accepted and ignored.
        return_aux: which auxiliary outputs to return, as an alternative to return_lse. All but
            `column_sums`, which take a second pass over the scores, come from the same pass.
        backend: "auto" (the GPU kernel if one supports this call, else "cpu"), "cpu" (torch
            operators over the tiles that the mask keeps, any device), "eager" (dense reference),
            "cute" (the GPU kernel or an error: Hopper or Blackwell, float16 or bfloat16), "emulate"
            (the Hopper kernel executed on the CPU, for tiny sizes), "emulate:sm_100a" (the same for
            the Blackwell kernel). If a kernel has no backward, torch operators compute it.
        deterministic: whether the same inputs must give the same bits, also in the backward.
            torch.use_deterministic_algorithms has the same effect. The cpu and eager backends are
            always deterministic on a CPU.
        sink: [Hq] float32 (or float64 for float64 inputs), an attention sink: one more logit per
            row in the denominator of the softmax, without a value vector. It is in the units of
            the modified scores, so that `scale` does not apply to it, and is differentiable. The
            LSE includes it, the max scores do not. A fully masked row has output 0 and the sink
            as its LSE. A sink of -inf changes nothing.
        normalization: how the modified scores become the weights of the values. "softmax";
            "softmax1", whose denominator is 1 + sum(exp(score)) ("off by one"): a sink of 0 in
            every head, which excludes `sink`; "sigmoid", a sigmoid of each score (a bias such as
            -log(n) belongs in score_mod); "none", the score itself (linear attention). The last two
            give masked scores the weight 0 and have neither a sink nor an LSE or other statistics.
        dropout_p: probability of dropping a weight (an element of the softmax), in [0, 1), rounded
            to a multiple of 1 / 256. Weights that are kept are divided by the probability of
            keeping one. LSE and statistics do not change. With "sigmoid" and "none" torch operators
            run the call. Random bits come from torch's generator of the
            device; they do not depend on the backend (docs/tutorials/dropout.md).

    Returns:
        out [B, Hq, Sq, Dv] in the query's dtype and stride order; or (out, lse) with return_lse;
        or (out, AuxOutput) with return_aux. LSE and statistics are float32 (float64 for float64).

    Raises:
        TraceError: score_mod or mask_mod cannot be traced, or returns the wrong kind of value.
        BoundsError: an index is out of bounds of its captured tensor, or index arithmetic overflows
            int32.
        ShapeError, DTypeError, DeviceError, ArgumentError, OptionError: an argument is invalid.
            DTypeError also if the query is not float64, and rounding captured float64 data to
            float32 would change the result.
        UnsupportedError: the requested backend cannot run here; a tensor is a DTensor; or the call is
            inside of torch's `context_parallel` or of torch.jit.trace.
        StaleDataError: data of an earlier call on a GPU was edited by a write that torch's version
            counter does not record.
    """
    if normalization is not _SOFTMAX:  # identity, because a comparison costs more
        from attnkit.runtime.normalization import resolve  # which most calls do not need

        normalization, sink = resolve(normalization, sink, query, return_lse, return_aux)
    dropout = None
    if dropout_p is not _NO_DROPOUT:  # identity, as above
        from attnkit.runtime.dropout import state_of  # which most calls do not need

        dropout = state_of(dropout_p, query)
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
            sink,
            normalization,
            dropout,
        )
        if relaunched is not None:
            return relaunched
    if not compiling:
        check_surroundings()
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
        sink,
        normalization,
        dropout,
    )
    if compiling:
        return symbolic.run_compiled(call)
    if symbolic.has_no_data(query):
        return symbolic.run_without_data(call)
    call_key = reuse.key_of(call)
    prepared = reuse.lookup(call_key)
    if call_key is None or prepared is None:
        return _first_call(call)
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("reused the preparation of an earlier call, %s", call.described())
    inputs = call.inputs(call_key.captured)
    result = torch_ops.run(prepared, inputs)
    if return_aux is not None:
        return _with_statistics(call, prepared, inputs, result)
    if scale is None or scale > 0:
        reuse.remember(call, call_key, prepared)
    return call.results(*result)


flex_attention.__prepare_scriptable__ = refuse_script  # type: ignore[attr-defined]


def _first_call(call: AttentionCall) -> Any:
    """Slow path: prepare a call, run it, and cache the prepared call if it has a key."""
    preparation = prepare(call)
    prepared, captured = preparation.call, preparation.bound.captured
    inputs = call.inputs(captured)
    result = torch_ops.run(prepared, inputs)
    call_key = None if prepared.is_dense else reuse.key_of(call)
    if call_key is not None and call_key.fits(prepared, captured):
        reuse.store(call_key, prepared)
    elif not prepared.is_dense and _log.isEnabledFor(logging.INFO):
        from attnkit.util.log import once  # which is needed only here

        why = reuse.reason_without_key(call)
        once(_log, f"a call is prepared again each time, {call.described()}: {why}")
    if call.return_aux is not None:
        return _with_statistics(call, prepared, inputs, result)
    return call.results(*result)


def _with_statistics(
    call: AttentionCall, prepared: PreparedCall, inputs: ForwardInputs, result: ForwardOutputs
) -> Any:
    """Return the output and the statistics that `call.return_aux` asks for."""
    if not getattr(call.return_aux, "column_sums", False):
        return call.results(*result)
    from attnkit.runtime.column_sums import column_sums  # which most calls do not need

    return call.results(*result, column_sums(prepared, inputs, result[1]))

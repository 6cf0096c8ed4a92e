"""The public operator, with the signature and meaning of PyTorch's flex_attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from attnkit.graph import ir
from attnkit.graph.simplify import TRUE
from attnkit.runtime import prepare, reference, torch_ops
from attnkit.runtime.compile import hop
from attnkit.runtime.reuse import fast_path
from attnkit.runtime.reuse.call_cache import Likeness, likeness
from attnkit.runtime.torch_ops import Made
from attnkit.runtime.variant import Bound, Variant
from attnkit.sparsity.block_runs import BLOCK
from attnkit.util.arguments import (
    DTYPES,
    AuxOutput,
    AuxRequest,
    check_aux,
    check_flag,
    check_options,
    check_scale,
    check_tensors,
)


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
    not computed. A row that keeps nothing gives 0, LSE -inf and gradient 0. Captured tensors may be
    edited in place by torch; of edits through `t.data[...]` or a numpy view, tiles know nothing.

    Under torch.autocast query, key and value are cast to its dtype (float64 is not), and nothing
    inside is. In torch.compile a call is one operator, which finds the tiles when it runs; there
    backend="eager" is refused. Tensors without data, on the meta device or in a FakeTensorMode,
    give results without data.

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
            operators over the kept tiles, any device), "eager" (dense oracle), "cute" (insists on
            the GPU kernel: Hopper or Blackwell, float16 or bfloat16), "emulate" (the Hopper kernel
            executed on the CPU, for tiny sizes), "emulate:sm_100a" (the Blackwell kernel so).
            Where a kernel has no backward, that is done by torch operators.
        deterministic: same inputs give the same bits, in the backward too; so does
            torch.use_deterministic_algorithms. The cpu and eager backends always do on a CPU.

    Returns:
        out [B, Hq, Sq, Dv] in the query's dtype and stride order; or (out, lse) with return_lse;
        or (out, AuxOutput) with return_aux. LSE and max scores are float32 (float64 for float64).

    Raises:
        TraceError: score_mod or mask_mod cannot be traced, or returns the wrong kind of value.
        BoundsError: an index leaves its captured tensor, or index arithmetic leaves int32.
        ShapeError, DTypeError, DeviceError, ArgumentError, OptionError: wrong arguments; DTypeError
            also for captured float64 data, below a float64 query, whose rounding would show.
        UnsupportedError: the backend asked for cannot run here.
    """
    if torch.compiler.is_compiling():  # or exporting
        query, key, value = under_autocast(query, key, value)
        return hop.compiled(
            *(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse),
            *(kernel_options, return_aux, backend, deterministic),
        )
    if kernel_options is None and return_aux is None:
        found = fast_path.made(
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
        if found is not None:
            return found
    if torch._C._is_any_autocast_enabled():
        query, key, value = under_autocast(query, key, value)
    if hop.has_no_data(query):
        return hop.shaped(
            *(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse),
            *(kernel_options, return_aux, backend, deterministic),
        )
    options = _options(
        scale, enable_gqa, return_lse, kernel_options, return_aux, backend, deterministic
    )
    like = settled = None
    if options is not None:
        like = likeness(query, key, value, score_mod, block_mask, options)
        settled = None if like is None else like.settled()
    if like is None or settled is None:
        made = _first(
            *(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse),
            *(kernel_options, return_aux, backend, deterministic, options),
        )
        return _results(made, return_lse, return_aux)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    made = torch_ops.run(settled, query, key, value, like.scores, like.masks, factor)
    if return_aux is None and factor > 0:
        fast_path.learn(
            *(query, key, value, score_mod, block_mask, enable_gqa, backend, deterministic),
            *(like, settled),
        )
    return _results(made, return_lse, return_aux)


def _first(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: dict[str, Any] | None,
    return_aux: AuxRequest | None,
    backend: str,
    deterministic: bool,
    options: Hashable | None,
) -> Made:
    """A call unlike those before: its arguments are checked, and it is kept where `options` say."""
    check_tensors(query, key, value, enable_gqa)
    factor = check_scale(scale, query.shape[-1])
    need_max = check_aux(return_lse, return_aux).max_scores
    check_flag("deterministic", deterministic)
    block, notes = check_options(kernel_options, BLOCK)
    plan, bound = prepare.planned(
        Variant(score_mod, block_mask), query, key, value, backend, block, notes
    )
    if plan.template == "eager":
        with torch.autocast(query.device.type, enabled=False):
            return _dense(query, key, value, bound, factor)
    ordered = deterministic or torch.are_deterministic_algorithms_enabled()
    settled = prepare.settled(plan, bound, ordered=ordered, need_max=need_max)
    scores = bound.score.tensors if bound.score else ()
    masks = bound.mask.tensors if bound.mask else ()
    made = torch_ops.run(settled, query, key, value, scores, masks, factor)
    if options is not None:
        like = likeness(query, key, value, score_mod, block_mask, options)
        if like is not None and _same(bound, like):
            like.keep(settled)
    return made


def _results(made: Made, return_lse: bool, return_aux: AuxRequest | None) -> Any:
    """What the caller asked for."""
    out, lse, top = made
    if return_aux is None:
        return (out, lse) if return_lse else out
    return out, AuxOutput(lse if return_aux.lse else None, top if return_aux.max_scores else None)


def under_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value in the dtype of `torch.autocast`, as it casts what goes into a product."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else ""
    if not kind or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.dtype in DTYPES[:3] else t for t in tensors
    )


def _options(
    scale: Any,
    enable_gqa: Any,
    return_lse: Any,
    kernel_options: Any,
    return_aux: Any,
    backend: Any,
    deterministic: Any,
) -> Hashable | None:
    """The options that decide anything, scale by its sign; None for any that must be checked."""
    if scale is None:
        positive = True
    elif scale.__class__ is float and -math.inf < scale < math.inf:
        positive = scale > 0
    else:
        return None
    if (
        enable_gqa.__class__ is not bool
        or return_lse.__class__ is not bool
        or deterministic.__class__ is not bool
        or backend.__class__ is not str
        or kernel_options is not None
    ):
        return None
    need_max = False
    if return_aux is not None:
        if return_aux.__class__ is not AuxRequest or return_lse:
            return None
        need_max = bool(return_aux.max_scores)
    ordered = deterministic or torch.are_deterministic_algorithms_enabled()
    return enable_gqa, backend, ordered, positive, need_max


def _same(bound: Bound, like: Likeness) -> bool:
    """Whether a likeness is that of the functions as they were bound."""
    for own, known, found, nothing in (
        (bound.score, like.score, like.scores, ir.arg("score")),
        (bound.mask, like.mask, like.masks, TRUE),
    ):
        root, tensors = (nothing, ()) if own is None else (own.root, own.tensors)
        if root is not (nothing if known is None else known.root) or len(tensors) != len(found):
            return False
        if any(a is not b for a, b in zip(tensors, found, strict=True)):
            return False
    return True


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

"""Run calls on tensors without data: in torch.compile, on the meta device, in FakeTensorMode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnkit.runtime.bind import check_functions
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.compile.hop import attend, attend_eagerly
from attnkit.schedule.plan import parse_backend
from attnkit.sparsity.block_mask import BlockMask
from attnkit.sparsity.block_runs import BLOCK
from attnkit.tracing.axes import Sizes
from attnkit.tracing.built_for import check_built_for, exact_lengths
from attnkit.util.arguments import AuxOutput, check_aux, check_options
from attnkit.util.torch_private import is_fake, mark_constant


def _known_to_dynamo() -> bool:
    """Register with Dynamo how to trace `attend`; return whether the registration succeeded.

    If it fails, Dynamo breaks the graph at the call.
    """
    try:
        from attnkit.runtime.compile import dynamo  # takes a second to import
    except ImportError:  # this version of torch lacks a private part of Dynamo or has it elsewhere
        return False
    return dynamo.register()


mark_constant(_known_to_dynamo)


def run_compiled(call: AttentionCall) -> Any:
    """Add a call to the graph of torch.compile as one operator; return its symbolic results."""
    _known_to_dynamo()
    return _call_operator(attend, call)


def run_without_data(call: AttentionCall) -> Any:
    """Validate a call on tensors without data; return results without data."""
    call.check()
    parse_backend(call.backend)
    check_functions(call.score_mod, call.block_mask)
    return _call_operator(attend_eagerly, call)


def has_no_data(query: Any) -> bool:
    """Return whether `query` is a meta tensor or a fake tensor, which have no data."""
    return isinstance(query, Tensor) and (query.is_meta or is_fake(query))


def _call_operator(operator: Callable[..., Any], call: AttentionCall) -> Any:
    """Call `operator` with the arguments of `call`; return the results in the requested form."""
    aux = check_aux(call.return_lse, call.return_aux)
    block, _ = check_options(call.kernel_options, BLOCK)
    query, score_mod = call.query, call.score_mod
    mask_mod, kind, lists, sizes = _parts(call.block_mask)
    (batch, heads, q_len), key = query.shape[:3], call.key
    call_sizes = Sizes(batch, heads, q_len, key.shape[2], key.shape[1])
    check_built_for(score_mod, call_sizes)
    check_built_for(mask_mod, call_sizes)
    exact = [*exact_lengths(score_mod), *exact_lengths(mask_mod)]
    score = mask = None
    if score_mod is not None:

        def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return _as_tensor(score_mod(s, b, h, q, kv), s)

    if mask_mod is not None:

        def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return _as_tensor(mask_mod(b, h, q, kv), b)

    inputs = (
        query,
        call.key,
        call.value,
        score,
        mask,
        lists,
        (*sizes, *(length for _, _, length in exact)),
        tuple(t for t in (call.dropout, call.sink) if t is not None),
    )
    options = (
        call.scale,
        kind,
        tuple(f"{side} {name}" for name, side, _ in exact),
        () if block is BLOCK else block,
        call.backend,
        call.enable_gqa,
        call.deterministic,
        aux.needs_row_maxima,
        call.sink is not None,
        aux.entropy,
        call.normalization,
        call.dropout is not None,
    )
    out, lse, top, entropy, _ = operator(*inputs, (), *options)
    sums = operator(*inputs, (lse.detach(),), *options)[0] if aux.column_sums else None
    if call.return_aux is not None:
        return out, AuxOutput.of(aux, lse, top, entropy, sums)
    return (out, lse) if aux.lse else out


def _parts(mask: Any) -> tuple[Any, str, tuple[Tensor, ...], tuple[int, ...]]:
    """Return the mask_mod, kind, block lists and sizes of a mask (see `op.Request.kind`)."""
    if isinstance(mask, BlockMask):
        return mask.mask_mod, "block", (), (*mask.shape, *mask.BLOCK_SIZE)
    if hasattr(mask, "kv_num_blocks"):
        lists: tuple[Tensor, ...] = (mask.kv_num_blocks, mask.kv_indices)
        if mask.full_kv_num_blocks is not None:
            lists = (*lists, mask.full_kv_num_blocks, mask.full_kv_indices)
        return mask.mask_mod, "flex", lists, (*mask.BLOCK_SIZE, *mask.seq_lengths)
    return mask, "plain", (), ()


def _as_tensor(x: Any, like: Tensor) -> Any:
    """Convert a Python bool `x` to a tensor, because FX graphs can return only tensors."""
    return torch.full_like(like, x, dtype=torch.bool) if isinstance(x, bool) else x

"""`flex_attention` as torch.compile reads it: one operator, with functions in it.

Dynamo runs this module's `compiled` where it meets `flex_attention`. What it makes of `attend` is
said in `dynamo`, which it loads itself: it takes a second to import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from attnkit.runtime.compile.op import requested
from attnkit.runtime.variant import Variant
from attnkit.schedule.plan import parsed
from attnkit.sparsity.block_mask import BlockMask
from attnkit.sparsity.block_runs import BLOCK
from attnkit.tracing.guards import trace_cached
from attnkit.tracing.mask import check_built_for
from attnkit.util.arguments import (
    AuxOutput,
    AuxRequest,
    check_aux,
    check_flag,
    check_options,
    check_scale,
    check_tensors,
)


class _Attend(HigherOrderOperator):
    """A call with functions in it. torch.compile takes these apart (`dynamo`)."""

    def __init__(self) -> None:
        super().__init__("attnkit_attention")  # type: ignore[no-untyped-call]

    def __call__(self, *arguments: Any) -> Any:
        """The same outside of a graph, where torch.compile could not make one."""
        return torch.compiler.disable(_attended)(*arguments)


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    lists: Sequence[Tensor],
    sizes: Sequence[int],
    scale: float | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    score = None if score_mod is None else trace_cached(score_mod, "score", query.device)
    mask = None if mask_mod is None else trace_cached(mask_mod, "mask", query.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.attnkit.attention(
        *(query, key, value),
        *([] if t is None else list(t.tensors) for t in (score, mask)),
        *(list(lists), list(sizes), requested(score, mask, *options).text, scale),
    )
    return found


attend = _Attend()


def _known_to_dynamo() -> bool:
    try:
        from attnkit.runtime.compile import dynamo
    except ImportError:  # parts of Dynamo that are not public: then it breaks the graph at `attend`
        return False
    return dynamo.registered()


# What torch.compiler.assume_constant_result sets, without loading torch._dynamo: torch.compile calls
# this while it compiles.
_known_to_dynamo._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compiled(
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
) -> Any:
    """`flex_attention` as torch.compile reads it; arguments as there."""
    _known_to_dynamo()
    return _deferred(
        *(attend, query, key, value, score_mod, block_mask, scale, return_lse),
        *(kernel_options, return_aux, backend, enable_gqa, deterministic),
    )


def shaped(
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
) -> Any:
    """`flex_attention` of tensors without data: results without data; arguments as there."""
    check_tensors(query, key, value, enable_gqa)
    check_scale(scale, query.shape[-1])
    check_flag("deterministic", deterministic)
    parsed(backend)
    Variant(score_mod, block_mask)  # which checks them
    return _deferred(
        *(_attended, query, key, value, score_mod, block_mask, scale, return_lse),
        *(kernel_options, return_aux, backend, enable_gqa, deterministic),
    )


def has_no_data(query: Any) -> bool:
    """Whether a tensor has a shape alone: on the meta device, or in a `FakeTensorMode`."""
    if not isinstance(query, Tensor):
        return False
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return query.is_meta or (module is not None and isinstance(query, module.FakeTensor))


def _deferred(
    attended: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    return_lse: bool,
    kernel_options: dict[str, Any] | None,
    return_aux: AuxRequest | None,
    *options: Any,
) -> Any:
    """A call that `attended` takes; `options`: backend, enable_gqa and deterministic."""
    aux = check_aux(return_lse, return_aux)
    block, _ = check_options(kernel_options, BLOCK)
    mask_mod, kind, lists, sizes = _parts(block_mask)
    check_built_for(mask_mod, query.shape[2], key.shape[2])
    score = mask = None
    if score_mod is not None:

        def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return _tensor(score_mod(s, b, h, q, kv), s)

    if mask_mod is not None:

        def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return _tensor(mask_mod(b, h, q, kv), b)

    out, lse, top = attended(
        *(query, key, value, score, mask, lists, sizes, scale),
        *(kind, () if block is BLOCK else block, *options, aux.max_scores),
    )
    if return_aux is not None:
        return out, AuxOutput(lse if aux.lse else None, top if aux.max_scores else None)
    return (out, lse) if aux.lse else out


def _parts(given: Any) -> tuple[Any, str, tuple[Tensor, ...], tuple[int, ...]]:
    """A mask's function, kind, lists and sizes."""
    if isinstance(given, BlockMask):
        return given.mask_mod, "block", (), (*given.shape, *given.BLOCK_SIZE)
    if hasattr(given, "kv_num_blocks"):
        lists: tuple[Tensor, ...] = (given.kv_num_blocks, given.kv_indices)
        if given.full_kv_num_blocks is not None:
            lists = (*lists, given.full_kv_num_blocks, given.full_kv_indices)
        return given.mask_mod, "flex", lists, (*given.BLOCK_SIZE, *given.seq_lengths)
    return given, "plain", (), ()


def _tensor(x: Any, like: Tensor) -> Any:
    """What a function returned; a number as a tensor, which is all that a graph returns."""
    return torch.full_like(like, x, dtype=torch.bool) if isinstance(x, bool) else x

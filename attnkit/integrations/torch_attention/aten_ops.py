"""Define the kernels of PyTorch's flash-attention operators, on attnkit.

Each function has the arguments and the results of the operator `aten::<its name>`. PyTorch's autograd
is between a forward and its backward, so neither records anything. The functions run on any device;
`registration` puts them in the place of PyTorch's CUDA kernels.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from attnkit import OptionError, UnsupportedError
from attnkit.integrations.packed.attention import (
    aligned_attention,
    aligned_gradients,
    packed_attention,
    packed_gradients,
)
from attnkit.integrations.packed.options import Window, read_window
from attnkit.integrations.torch_attention.varlen import NAMES, refuse_one_split, refuse_pages
from attnkit.runtime.dropout import Drawn, state_of
from attnkit.util.dropout import threshold_of

_Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute attention of packed sequences, or without `cum_seq_q` of a batch.

    Args:
        query, key, value: [total, heads, head dim], or [B, length, heads, head dim].
        cum_seq_q, cum_seq_k: the offsets of the sequences, or None.

    Returns:
        out, LSE [Hq, total_q] or [B, Hq, Sq], the state of dropout, and what stands for PyTorch's
        second part of it and for the debug mask.

    Raises:
        OptionError, UnsupportedError: an argument asks for what attnkit does not compute.
    """
    _refuse(return_debug_mask, alibi_slopes, block_table, num_splits)
    window = read_window((window_size_left, window_size_right), bool(is_causal))
    options: dict[str, Any] = {"score_mod": None, "mask": None, "scale": scale, "backend": backend}
    state = state_of(dropout_p, query)
    if state is not None:
        options["dropout_p"] = Drawn(state)
    if seqused_k is not None:
        if cum_seq_q is None:
            raise UnsupportedError("attnkit takes seqused_k with offsets of sequences only")
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
            raise UnsupportedError("PyTorch's operators have no backward with seqused_k")
    with torch.no_grad():
        if cum_seq_q is None:
            out, lse = aligned_attention(NAMES, query, key, value, window=window, **options)
        else:
            out, lse = packed_attention(
                NAMES,
                query,
                key,
                value,
                cum_seq_q,
                cum_seq_k,
                max_q,
                max_k,
                used=seqused_k,
                window=window,
                **options,
            )
    return out, lse, *_placeholders(query, state)


def _flash_attention_forward_no_dropout_inplace(
    out: Tensor, *arguments: Any, **options: Any
) -> Tensor:
    """Write the result of `_flash_attention_forward` to `out`; return the LSE."""
    found, lse, *_ = _flash_attention_forward(*arguments, **options)
    out.copy_(found)
    return lse


def _flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    backend: str = "auto",
) -> _Gradients:
    """Return the gradients of query, key and value of a `_flash_attention_forward`."""
    state = _saved_state(dropout_p, rng_state)
    window = read_window((window_size_left, window_size_right), bool(is_causal))
    if cum_seq_q is None:
        return _batch_gradients(
            *(grad_out, query, key, value, out, logsumexp, window, scale, backend, state)
        )
    return packed_gradients(
        NAMES,
        query,
        key,
        value,
        out,
        logsumexp,
        grad_out,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        window=window,
        scale=scale,
        backend=backend,
        dropout=state,
    )


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Any, ...]:
    """Compute attention of a batch [B, heads, length, head dim].

    `torch.nn.functional.scaled_dot_product_attention` calls this operator with causal masks only if
    there are as many queries as keys.

    Raises:
        OptionError, UnsupportedError: an argument asks for what attnkit does not compute.
    """
    rows = [t.transpose(1, 2) for t in (query, key, value)]
    out, lse, state, unused, debug_mask = _flash_attention_forward(
        *(rows[0], rows[1], rows[2], None, None, query.shape[2], key.shape[2]),
        *(dropout_p, is_causal, return_debug_mask),
        scale=scale,
        backend=backend,
    )
    lengths = query.shape[2], key.shape[2]
    return out.transpose(1, 2), lse, None, None, *lengths, state, unused, debug_mask


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> _Gradients:
    """Return the gradients of query, key and value of a `_scaled_dot_product_flash_attention`."""
    state = _saved_state(dropout_p, philox_seed)
    window = read_window((None, None), bool(is_causal))
    rows = [t.transpose(1, 2) for t in (grad_out, query, key, value, out)]
    found = _batch_gradients(
        *(rows[0], rows[1], rows[2], rows[3], rows[4]), logsumexp, window, scale, backend, state
    )
    return tuple(t.transpose(1, 2) for t in found)  # type: ignore[return-value]


def _batch_gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    window: Window,
    scale: float | None,
    backend: str,
    state: Tensor | None,
) -> _Gradients:
    return aligned_gradients(
        query, key, value, out, lse, grad_out,
        window=window, scale=scale, backend=backend, dropout=state,
    )  # fmt: skip


def _saved_state(dropout_p: Any, state: Tensor) -> Tensor | None:
    """Return the state that `_placeholders` gave to a forward; None without dropout."""
    return state.view(torch.int64) if threshold_of(dropout_p) else None


def _placeholders(query: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the operators give for the state of dropout and for the debug mask."""
    if state is None:
        state = torch.zeros(2, dtype=torch.int64, device=query.device)
    return (
        state.view(torch.uint64),
        torch.zeros((), dtype=torch.uint64, device=query.device),
        query.new_empty(0),
    )


def _refuse(return_debug_mask: Any, alibi_slopes: Any, block_table: Any, num_splits: Any) -> None:
    """Raise an error if a call asks for what attnkit does not compute."""
    if return_debug_mask:
        raise OptionError("attnkit never holds the attention weights, got return_debug_mask=True")
    if alibi_slopes is not None:
        raise UnsupportedError(
            "PyTorch's operators have no backward with alibi_slopes; use "
            "attnkit.integrations.flash_attn.flash_attn_varlen_func"
        )
    refuse_pages(block_table)
    refuse_one_split(num_splits)


KERNELS = (
    _flash_attention_forward,
    _flash_attention_forward_no_dropout_inplace,
    _flash_attention_backward,
    _scaled_dot_product_flash_attention,
    _scaled_dot_product_flash_attention_backward,
)

"""Connect attnkit to PyTorch's own attention functions.

`varlen_attn` has the signature of `torch.nn.attention.varlen.varlen_attn`, and besides a `score_mod`
and a `mask`. `register` makes attnkit an implementation of flash attention, which
`torch.nn.attention.activate_flash_attention_impl("attnkit")` puts behind
`scaled_dot_product_attention` and PyTorch's own `varlen_attn`.

In: the arguments of these functions and of their operators. Out: calls of `attnkit.flex_attention`.
"""

from __future__ import annotations

import functools

import torch

from attnkit.errors import ArgumentError, UnsupportedError
from attnkit.integrations.torch_attention.registration import override
from attnkit.integrations.torch_attention.varlen import varlen_attn

__all__ = ["register", "varlen_attn"]


def register(name: str = "attnkit", *, backend: str = "auto") -> None:
    """Register attnkit as an implementation of PyTorch's flash attention on CUDA.

    Nothing changes until `torch.nn.attention.activate_flash_attention_impl(name)`. From then on
    attnkit computes each `torch.nn.functional.scaled_dot_product_attention` for which PyTorch
    chooses flash attention (float16 or bfloat16 on a GPU, no `attn_mask`), and
    `torch.nn.attention.varlen.varlen_attn`, forward and backward. Calls with ALiBi slopes or
    pages of keys raise an error. `torch.nn.attention.restore_flash_attention_impl()` ends it.
    Calling `register` again is harmless.

    Args:
        name: name of the implementation.
        backend: backend of `attnkit.flex_attention`.

    Raises:
        ArgumentError: `name` is no string, or is empty.
        UnsupportedError: this version of PyTorch has no registry of implementations.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"name must be a string such as 'attnkit', got {name!r}")
    add = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; "
            "install torch 2.13"
        )
    add(name, register_fn=functools.partial(override, backend=backend))

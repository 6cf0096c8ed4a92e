"""What flash-attn's functions do not take here ends in an error that names the argument."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from attnkit import ArgumentError, DTypeError, OptionError, ShapeError, UnsupportedError, masks
from attnkit.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

Q = torch.randn(8, 4, 8)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dropout_p": 1.0}, OptionError, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"dropout_p": 0.1, "return_attn_probs": True}, OptionError, "asks for the weights"),
        ({"block_table": ends(0)}, UnsupportedError, "block_table=; gather the pages"),
        ({"q": Q[None]}, ShapeError, r"q must have shape \[total, heads, head dim\], got \[1, 8"),
        ({"k": None}, ArgumentError, "k must be a torch.Tensor, got NoneType"),
        ({"k": Q[:, :3], "v": Q[:, :3]}, ShapeError, "q has 4 heads, .* of the 3 heads of k"),
        ({"cu_seqlens_q": [0, 8]}, ArgumentError, "cu_seqlens_q must be an int32 tensor .* list"),
        ({"cu_seqlens_q": CU.float()}, DTypeError, "cu_seqlens_q must be int32, got torch.float32"),
        ({"cu_seqlens_k": CU[None]}, ShapeError, r"cu_seqlens_k must have shape \[sequences \+ 1"),
        ({"cu_seqlens_k": CU[:1]}, ShapeError, r"for at least one sequence, got \[1\]"),
        ({"cu_seqlens_q": ends(0, 8)}, ShapeError, r"one entry for each .*got \[2\] and \[3\]"),
        ({"cu_seqlens_q": ends(1, 3, 8)}, OptionError, "cu_seqlens_q must begin with 0, got 1"),
        ({"cu_seqlens_k": ends(0, 5, 3)}, OptionError, "not decrease.* entry 2 is 3 after 5"),
        (
            {"cu_seqlens_k": ends(0, 5, 9)},
            OptionError,
            "end with .* tokens of k, 8, or less, got 9",
        ),
        ({"max_seqlen_q": 4}, OptionError, "max_seqlen_q must be .* longest sequence, 5, got 4"),
        ({"max_seqlen_k": 5.0}, ArgumentError, "max_seqlen_k must be an int, got 5.0"),
        ({"window_size": 5}, ArgumentError, r"window_size must be \(left, right\), .* got 5"),
        ({"window_size": (5, 1.0)}, ArgumentError, r"window_size must be two ints"),
        ({"window_size": (-2, 0)}, OptionError, "window_size must be -1 .no limit. or more"),
        ({"causal": 1}, ArgumentError, "causal must be True or False, got 1"),
        ({"softcap": -1.0}, OptionError, "softcap must be a finite number, 0 for none, got -1"),
        ({"softcap": "a"}, ArgumentError, "softcap must be a number"),
        ({"alibi_slopes": 0.5}, ArgumentError, r"alibi_slopes must be a tensor \[H\] or"),
        ({"alibi_slopes": torch.rand(3)}, ShapeError, r"alibi_slopes .* 3 query heads, got 4"),
        ({"alibi_slopes": torch.rand(3, 4)}, ShapeError, r"alibi_slopes .* size 3, got 2"),
        (
            {"alibi_slopes": torch.rand(2, 3, 4)},
            ShapeError,
            r"alibi_slopes must .* got \[2, 3, 4\]",
        ),
        ({"alibi_slopes": torch.ones(4).int()}, DTypeError, "alibi_slopes must hold floats"),
        (
            {"q": torch.nested.nested_tensor([Q], layout=torch.jagged)},
            UnsupportedError,
            "q is a ne",
        ),
        ({"score_mod": 5}, ArgumentError, r"score_mod must be a function .* got int"),
        ({"mask": 5}, ArgumentError, r"mask must be a function .* got int"),
        ({"mask": masks.causal("bottom-right", q_len=3, kv_len=3)}, ShapeError, "any length"),
        ({"return_attn_probs": 1}, OptionError, "return_attn_probs must be True or False"),
    ],
)
def test_packed(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"q": Q, "k": Q, "v": Q, "cu_seqlens_q": CU, "cu_seqlens_k": CU}
    given |= {"max_seqlen_q": 5, "max_seqlen_k": 5} | arguments
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**given)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dropout_p": "x"}, ArgumentError, "dropout_p must be a number"),
        ({"dropout_p": 0.1, "return_attn_probs": True}, OptionError, "asks for the weights"),
        ({"q": Q}, ShapeError, r"q must have shape \[batch, length, heads, head dim\], got \[8, 4"),
        ({"mask": 5}, ArgumentError, "mask must be a function"),
        ({"softmax_scale": "a"}, (ArgumentError, OptionError), "scale"),
        ({"backend": "none"}, OptionError, "backend"),
    ],
)
def test_dense(arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_func(**({"q": Q[None], "k": Q[None], "v": Q[None]} | arguments))


def test_the_order_of_arguments_is_flash_attns() -> None:
    """These are the signatures of flash-attn 2.8; arguments of attnkit are keywords."""
    dense = "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
    dense += "return_attn_probs"
    lengths = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    packed = dense.replace("q k v", lengths) + " block_table"
    for function, names in ((flash_attn_func, dense), (flash_attn_varlen_func, packed)):
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == names.split()

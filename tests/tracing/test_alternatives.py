"""Check that errors about unsupported operations and tensors name an alternative."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from attnkit import create_block_mask, flex_attention, masks
from attnkit.errors import ArgumentError, ShapeError, TraceError
from attnkit.tracing.proxy import HANDLERS
from attnkit.tracing.tracer import trace

TABLE = torch.randn(4, 8)


@torch.library.custom_op("attnkit_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# function of (score, q) -> what the message says to do
WAYS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "embedding_bag": (lambda s, q: F.embedding_bag(q, TABLE), "index the table: weight[i]"),
    "padding_idx": (
        lambda s, q: torch.embedding(TABLE, q, 4)[0],
        "padding_idx=4 is not among the 4 rows",
    ),
    "max_norm": (lambda s, q: F.embedding(q, TABLE, max_norm=1.0)[0], "normalize it outside"),
    "sparse": (lambda s, q: F.embedding(q, TABLE, sparse=True)[0], "use sparse=False"),
    "scale_grad_by_freq": (
        lambda s, q: F.embedding(q, TABLE, scale_grad_by_freq=True)[0],
        "use scale_grad_by_freq=False",
    ),
    "embedding of floats": (
        lambda s, q: F.embedding(s, TABLE)[0],
        "expected a tensor of integer indices, got torch.float32",
    ),
    "embedding without rows": (
        lambda s, q: F.embedding(q, TABLE[0]),
        "expected a weight of shape [n, features], got shape (8,)",
    ),
    "gather": (
        lambda s, q: torch.gather(TABLE, 0, q)[0],
        "expected the same number of dimensions",
    ),
    "gather beyond": (
        lambda s, q: torch.gather(TABLE[:2] + s, 0, torch.zeros(1, 9).long())[0],
        "expected no more than its size in every dimension except 0",
    ),
    "take_along_dim": (
        lambda s, q: torch.take_along_dim(TABLE, q, 0)[0],
        "expected the same number of dimensions",
    ),
    "index_select by a matrix": (
        lambda s, q: torch.index_select(TABLE, 0, q.view(1, 1)),
        "expected indices of shape [n], got shape (1, 1)",
    ),
    "linear": (lambda s, q: F.linear(s, TABLE), "torch.stack makes a row of numbers"),
    "linear of ints": (
        lambda s, q: F.linear(torch.stack([q] * 8), TABLE)[0],
        "convert with .float()",
    ),
    "long linear": (
        lambda s, q: F.linear(torch.zeros(4, 999)[q], torch.zeros(3, 999))[0],
        "at most 128 are unrolled. Compute the product outside",
    ),
    "bmm": (lambda s, q: torch.bmm(TABLE, s), "compute the product outside"),
    "matmul of a number": (lambda s, q: TABLE @ s, "compute the product outside"),
    "einsum": (lambda s, q: torch.einsum("i,->i", TABLE[0], s), "compute the product outside"),
    "mm": (lambda s, q: torch.mm(TABLE, s), "compute the product outside"),
    "mm of bools": (lambda s, q: ((TABLE > s) @ (TABLE > 0).T)[0, 0], "convert them with .float()"),
    "cumsum": (lambda s, q: torch.cumsum(s, 0), "sees one number and no row"),
    "aten cumsum": (lambda s, q: torch.ops.aten.cumsum.default(s, 0), "one number and no row"),
    "softmax": (lambda s, q: s.softmax(-1), "sees one number and no row"),
    "layer_norm": (lambda s, q: F.layer_norm(s, (8,)), "sees one number and no row"),
    "topk": (lambda s, q: s.topk(1).values, "sees one number and no row"),
    "dropout": (lambda s, q: F.dropout(s), "draw the numbers outside of the function"),
    "dropout module": (lambda s, q: torch.nn.Dropout()(s), "apply dropout to the output"),
    "rand": (lambda s, q: s + torch.rand(()), "draw the numbers outside of the function"),
    "rand_like": (lambda s, q: torch.rand_like(s), "draw the numbers outside of the function"),
    "cat": (lambda s, q: torch.cat([s, s]), "index captured tensors instead"),
    "custom operator": (
        lambda s, q: scaled(s),
        "register a decomposition, which is a Python kernel for CompositeImplicitAutograd; or write",
    ),
    "operator by name": (
        lambda s, q: torch.ops.attnkit_tests.scaled(s),
        "write it with elementwise torch functions",
    ),
    "unknown function": (lambda s, q: torch.special.i0(s), "write it with elementwise torch"),
    "complex": (lambda s, q: torch.add(s, 1j), "use numbers and torch tensors"),
    "attribute": (lambda s, q: s.T, "it stands for one number"),
    "len": (lambda s, q: s + len(q), "it stands for one number"),
    "iteration": (lambda s, q: s + sum(q), "it stands for one number"),
    "long sum": (lambda s, q: s + torch.zeros(4, 999)[q].sum(), "outside of the function"),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_way_out(name: str) -> None:
    body, way = WAYS[name]
    with pytest.raises(TraceError) as caught:
        trace(lambda score, b, h, q, kv: body(score, q), "score")
    assert way in str(caught.value)


def _functions() -> Iterator[tuple[str, Any]]:
    for space in (torch, torch.Tensor, F, torch.special, torch.linalg):
        for name in dir(space):
            function = getattr(space, name)
            if name.startswith("_") or not callable(function) or isinstance(function, type):
                continue
            if function in torch.overrides.get_testing_overrides() and function not in HANDLERS:
                yield name, function


def test_every_function_without_a_handler_names_a_way_out() -> None:
    """The error for every unsupported torch function names an alternative.

    The test covers the functions that can be called with the score alone.
    """
    refused = 0
    for _, function in _functions():
        try:
            trace(lambda score, b, h, q, kv, f=function: f(score), "score")
        except TraceError as error:
            message = str(error).splitlines()[0]
            if "is not supported" in message or "is not known" in message:
                refused += 1
                assert "; " in message, message
    assert refused > 100


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_a_tensor_as_a_mask(ndim: int) -> None:
    kept = torch.ones((1,) * (ndim - 2) + (16, 16), dtype=torch.bool)
    index = ", ".join(("b", "h", "q", "kv")[-ndim:])
    query = torch.zeros(1, 1, 16, 8)
    with pytest.raises(ArgumentError, match="capture the tensor and index it") as caught:
        flex_attention(query, query, query, None, kept)
    assert f"mask[{index}]" in str(caught.value)
    with pytest.raises(TraceError, match="capture the tensor and index it"):
        create_block_mask(kept, 1, 1, 16, 16)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="capture the tensor and index it"):
        masks.causal() & kept  # type: ignore[operator]


def test_lengths_before_heads() -> None:
    query, key = torch.zeros(1, 16, 4, 8), torch.zeros(1, 32, 4, 8)
    with pytest.raises(ShapeError, match=r"must be transposed: query\.transpose\(1, 2\)"):
        flex_attention(query, key, key)
    with pytest.raises(ShapeError, match=r"must be transposed: query\.transpose\(1, 2\)"):
        flex_attention(query, key, key, enable_gqa=True)
    mask = create_block_mask(masks.causal(), 1, 1, 16, 16)
    with pytest.raises(ShapeError, match=r"seem to be \[batch, length, heads, head dim\]"):
        flex_attention(query, query, query, None, mask)


def test_a_tree_without_its_context() -> None:
    query, key = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 10, 8)
    with pytest.raises(ShapeError, match="context=0") as caught:
        flex_attention(query, key, key, None, masks.tree(torch.tensor([-1, 0, 0, 1])))
    assert "built for kv length 4, got 10" in str(caught.value)


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.zeros(8), 0.1, 0, torch.quint8),
        "dequantize()",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "to_padded_tensor",
    ),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "to_padded_tensor",
    ),
    "sparse": (lambda: torch.zeros(8).to_sparse(), "to_dense()"),
    "complex": (lambda: torch.zeros(8, dtype=torch.complex64), "view_as_real"),
    "float8": (lambda: torch.zeros(8).to(torch.float8_e4m3fn), ".float()"),
}


@pytest.mark.filterwarnings("ignore")  # nested and quantized tensors warn
@pytest.mark.parametrize("name", REFUSED)
def test_captured_tensors_that_cannot_be_read(name: str) -> None:
    make, way = REFUSED[name]
    table = make()
    query = torch.zeros(1, 1, 8, 8)
    for _ in range(2):  # the second call must not find a trace
        with pytest.raises(TraceError, match="must be dense and real") as caught:
            flex_attention(query, query, query, lambda s, b, h, q, kv: s * table[q])
        assert way in str(caught.value)
        with pytest.raises(TraceError, match="must be dense and real"):
            create_block_mask(lambda b, h, q, kv: table[q] > 0, 1, 1, 8, 8)

"""Check that bad input raises one attnkit error with the argument's name, value and requirement."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import attnkit
import attnkit.util.arguments
from attnkit import create_block_mask, flex_attention
from attnkit.errors import (
    ArgumentError,
    AttnkitError,
    BoundsError,
    DeviceError,
    DTypeError,
    OptionError,
    ShapeError,
    TraceError,
    UnsupportedError,
)

SHORT = torch.zeros(8)
IDS = torch.zeros(8, dtype=torch.int64)


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def call(query: Any = None, key: Any = None, value: Any = None, *rest: Any, **options: Any) -> Any:
    query = t(2, 4, 16, 8) if query is None else query
    key = t(2, 4, 16, 8) if key is None else key
    value = t(2, 4, 16, 8) if value is None else value
    return flex_attention(query, key, value, *rest, **options)


def emptied(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def same(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s


META = torch.zeros(8, device="meta")

CASES: dict[str, tuple[Any, type[AttnkitError], str]] = {
    "sink is a number": (
        lambda: call(sink=0.5),
        ArgumentError,
        "sink must be a tensor [4] of one logit per query head or None, got 0.5; for one number in "
        "all heads: torch.full((4,), number)",
    ),
    "sink of a wrong shape": (
        lambda: call(sink=t(3)),
        ShapeError,
        "sink has shape (3,); expected (4,), one logit for each of the 4 query heads. A term that "
        "also depends on the batch element or the row belongs in score_mod",
    ),
    "sink of one number": (
        lambda: call(sink=t(1)),
        ShapeError,
        "sink has shape (1,); expected (4,), one logit for each of the 4 query heads. It is not "
        "broadcast: pass sink.expand(4)",
    ),
    "sink with more axes": (
        lambda: call(sink=t(1, 4, 1, 1)),
        ShapeError,
        "sink has shape (1, 4, 1, 1); expected (4,), one logit for each of the 4 query heads. Pass "
        "sink.flatten()",
    ),
    "sink of a wrong dtype": (
        lambda: call(sink=t(4, dtype=torch.bfloat16)),
        DTypeError,
        "sink has dtype torch.bfloat16; expected float32 with a query of torch.float32: pass "
        "sink.float()",
    ),
    "sink in float64": (
        lambda: call(sink=t(4, dtype=torch.float64)),
        DTypeError,
        "sink has dtype torch.float64; expected float32 with a query of torch.float32: pass "
        "sink.float()",
    ),
    "sink on another device": (
        lambda: call(sink=t(4, device="meta")),
        DeviceError,
        "sink is on meta, query is on cpu; move it with sink.to('cpu')",
    ),
    "sink is sparse": (
        lambda: call(sink=t(4).to_sparse()),
        ArgumentError,
        "sink must be a dense tensor [4], got torch.sparse_coo; pass sink.to_dense()",
    ),
    "sink is nested": (
        lambda: call(sink=torch.nested.nested_tensor([t(2), t(2)])),
        ArgumentError,
        "sink must be a dense tensor [4], got a nested tensor",
    ),
    "sink without a storage": (
        lambda: call(sink=emptied(t(4))),
        ArgumentError,
        "sink has a storage that is smaller than the tensor",
    ),
    "not a tensor": (
        lambda: call([1.0]),
        ArgumentError,
        "query must be a torch.Tensor, got list",
    ),
    "rank": (
        lambda: call(None, t(4, 16, 8)),
        ShapeError,
        "key must have 4 dimensions [batch, heads, length, head dim], got shape (4, 16, 8)",
    ),
    "nested": (
        lambda: call(torch.nested.nested_tensor([t(2, 3), t(4, 3)])),
        UnsupportedError,
        "query is a nested tensor; pack the sequences",
    ),
    "sparse": (
        lambda: call(t(2, 4, 16, 8).to_sparse()),
        UnsupportedError,
        "query has layout torch.sparse_coo; expected a dense tensor: query.to_dense()",
    ),
    "length": (
        lambda: call(t(1, 1, 1, 8).expand(1, 1, 2**31, 8), *(t(1, 1, 16, 8),) * 2),
        ShapeError,
        "query has length 2147483648; positions are int32, expected at most 2147483647",
    ),
    "integer dtype": (
        lambda: call(t(2, 4, 16, 8, dtype=torch.int32)),
        DTypeError,
        "query has dtype torch.int32; expected one of float16, bfloat16, float32, float64",
    ),
    "mixed dtypes": (
        lambda: call(None, None, t(2, 4, 16, 8, dtype=torch.float16)),
        DTypeError,
        "value has dtype torch.float16, query has torch.float32",
    ),
    "device": (
        lambda: call(None, t(2, 4, 16, 8, device="meta")),
        DeviceError,
        "key is on meta, query is on cpu",
    ),
    "empty query": (
        lambda: call(t(2, 4, 0, 8)),
        ShapeError,
        "query has no elements: its length is 0, shape (2, 4, 0, 8)",
    ),
    "empty key": (
        lambda: call(None, t(2, 4, 0, 8), t(2, 4, 0, 8)),
        ShapeError,
        "key has no elements: its length is 0",
    ),
    "empty batch": (lambda: call(t(0, 4, 16, 8)), ShapeError, "its batch is 0"),
    "head dim": (
        lambda: call(None, t(2, 4, 16, 4)),
        ShapeError,
        "key has head dim 4, query has 8; they must be equal",
    ),
    "kv lengths": (
        lambda: call(None, t(2, 4, 12, 8)),
        ShapeError,
        "key has length 12, value has 16",
    ),
    "kv heads": (
        lambda: call(None, t(2, 2, 16, 8)),
        ShapeError,
        "key has heads 2, value has 4",
    ),
    "batches": (
        lambda: call(t(3, 4, 16, 8)),
        ShapeError,
        "key and value have batch 2, query has 3; expected the same, or 1",
    ),
    "heads without gqa": (
        lambda: call(None, t(2, 2, 16, 8), t(2, 2, 16, 8)),
        ShapeError,
        "query has 4 heads, key and value have 2; expected the same. For grouped-query attention "
        "set enable_gqa=True",
    ),
    "heads with gqa": (
        lambda: call(None, t(2, 3, 16, 8), t(2, 3, 16, 8), enable_gqa=True),
        ShapeError,
        "query has 4 heads, which is not a multiple of the 3 heads",
    ),
    "enable_gqa": (lambda: call(enable_gqa=1), OptionError, "enable_gqa must be True or False"),
    "scale inf": (lambda: call(scale=math.inf), OptionError, "scale must be finite, got inf"),
    "scale large": (lambda: call(scale=1e308), OptionError, "finite as a float32, got 1e+308"),
    "scale larger": (lambda: call(scale=10**400), OptionError, "finite as a float32, got 1000"),
    "scale nan": (lambda: call(scale=math.nan), OptionError, "scale must be finite, got nan"),
    "scale tensor": (
        lambda: call(scale=torch.tensor(0.1)),
        OptionError,
        "scale must be a number or None, got Tensor",
    ),
    "return_lse": (lambda: call(return_lse=1), OptionError, "return_lse must be True or False"),
    "both results": (
        lambda: call(return_lse=True, return_aux=attnkit.AuxRequest(lse=True)),
        OptionError,
        "return_lse and return_aux were both given",
    ),
    "return_aux": (
        lambda: call(return_aux=True),
        ArgumentError,
        "return_aux must be an AuxRequest, got bool",
    ),
    "deterministic": (
        lambda: call(deterministic="yes"),
        OptionError,
        "deterministic must be True or False, got 'yes'",
    ),
    "unknown option": (
        lambda: call(kernel_options={"BLOK_M": 64}),
        OptionError,
        "kernel_options has no option 'BLOK_M'; did you mean 'BLOCK_M'?",
    ),
    "option value": (
        lambda: call(kernel_options={"BLOCK_N": 0}),
        OptionError,
        "kernel_options['BLOCK_N'] must be a positive int, got 0",
    ),
    "options": (
        lambda: call(kernel_options=[1]),
        ArgumentError,
        "kernel_options must be a dict, got list",
    ),
    "backend": (
        lambda: call(backend="triton"),
        OptionError,
        "backend='triton' is not known; expected one of auto, eager, cpu, cute, emulate",
    ),
    "no backend": (
        lambda: call(backend=None),
        OptionError,
        "backend=None is not known; expected one of auto, eager, cpu, cute, emulate",
    ),
    "no GPU kernel": (
        lambda: call(backend="cute"),
        UnsupportedError,
        "backend='cute' asks for a kernel compiled for a GPU",
    ),
    "numpy on a score": (
        lambda: call(None, None, None, lambda s, b, h, q, kv: np.exp(s)),
        TraceError,
        "raised TypeError while it was traced: a numpy function takes no traced value; use the torch",
    ),
    "tensor as mask_mod": (
        lambda: create_block_mask(t(16, 16), 1, 1, 16, 16),
        TraceError,
        "mask_mod must be a callable mask_mod(b, h, q, kv), got Tensor",
    ),
    "score_mod": (
        lambda: call(None, None, None, 3),
        ArgumentError,
        "score_mod must be a function score_mod(score, b, h, q, kv) or None, got int",
    ),
    "block_mask": (
        lambda: call(block_mask=torch.ones(16, 16, dtype=torch.bool)),
        ArgumentError,
        "block_mask must be a BlockMask, a Mask, a function mask_mod(b, h, q, kv) or None, got "
        "Tensor",
    ),
    "mask as score_mod": (
        lambda: call(None, None, None, causal),
        TraceError,
        "cannot be called as score_mod(score, b, h, q, kv)",
    ),
    "mask returns ints": (
        lambda: call(block_mask=lambda b, h, q, kv: q - kv),
        DTypeError,
        "returned torch.int32; expected torch.bool",
    ),
    "mod returns bool": (
        lambda: call(None, None, None, lambda s, b, h, q, kv: s > 0),
        DTypeError,
        "returned torch.bool; expected a score (float)",
    ),
    "mask lengths": (
        lambda: call(block_mask=create_block_mask(causal, None, None, 32, 16)),
        ShapeError,
        "block_mask was created for query length 32 and kv length 16, got query length 16 and key "
        "length 16",
    ),
    "their mask's lengths": (
        lambda: call(block_mask=flex.create_block_mask(causal, None, None, 16, 128, device="cpu")),
        ShapeError,
        "block_mask was created for query length 16 and kv length 128",
    ),
    "mask batch": (
        lambda: call(block_mask=create_block_mask(causal, 3, None, 16, 16)),
        ShapeError,
        "block_mask has batch 3, query has batch 2; expected 2, or 1 to share it",
    ),
    "mask heads": (
        lambda: call(block_mask=create_block_mask(causal, None, 2, 16, 16)),
        ShapeError,
        "block_mask has heads 2, query has heads 4",
    ),
    "captured on another device": (
        lambda: call(None, None, None, lambda s, b, h, q, kv: s + META[kv]),
        DeviceError,
        "score_mod reads the tensor 'META' on meta, query is on cpu; move it with META.to('cpu')",
    ),
    "captured by the mask": (
        lambda: call(block_mask=lambda b, h, q, kv: META[kv] > 0),
        DeviceError,
        "mask_mod reads the tensor 'META' on meta",
    ),
    "short table": (
        lambda: call(None, None, None, lambda s, b, h, q, kv: s + SHORT[kv]),
        BoundsError,
        "SHORT",
    ),
    "short table in the mask": (
        lambda: call(block_mask=lambda b, h, q, kv: IDS[q] == IDS[kv]),
        BoundsError,
        "IDS",
    ),
    "relative table": (
        lambda: call(None, None, None, lambda s, b, h, q, kv: s + SHORT[q - kv]),
        BoundsError,
        "SHORT",
    ),
    "mask needs H": (
        lambda: create_block_mask(lambda b, h, q, kv: q >= kv + h, None, None, 16, 16),
        ArgumentError,
        "mask_mod reads h, but H=None; give H its size",
    ),
    "mask length 0": (
        lambda: create_block_mask(causal, None, None, 0, 16),
        OptionError,
        "Q_LEN must be a positive int, got 0",
    ),
    "block size": (
        lambda: create_block_mask(causal, None, None, 16, 16, BLOCK_SIZE=-1),
        OptionError,
        "BLOCK_SIZE must be a positive int, got -1",
    ),
    "block sizes": (
        lambda: create_block_mask(causal, None, None, 16, 16, BLOCK_SIZE=(1, 2, 3)),
        OptionError,
        "BLOCK_SIZE must be an int or a (query, kv) pair",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_message(name: str) -> None:
    run, kind, message = CASES[name]
    with pytest.raises(kind) as caught:
        run()
    assert message in str(caught.value)


def test_overflowing_index_arithmetic_is_refused() -> None:
    mask = lambda b, h, q, kv: SHORT[(q * kv) % 5] > 3
    with pytest.raises(BoundsError, match="int32"):
        attnkit.explain(None, mask, q_len=60_000)
    attnkit.explain(None, mask, q_len=40_000 // 100)


def test_index_that_cannot_be_proven_is_checked_when_it_runs() -> None:
    where = torch.tensor([[0, 1], [2, 11]])
    mod = lambda s, b, h, q, kv: s + SHORT[where[q % 2, kv % 2]]
    with pytest.raises(BoundsError, match="SHORT"):
        call(None, None, None, mod)
    where[1, 1] = 7
    call(None, None, None, mod)


def test_options_of_flex_attention_are_accepted() -> None:
    plain = call(None, None, None, same)
    tuned = call(None, None, None, same, kernel_options={"num_warps": 4, "fwd_BLOCK_M1": 32})
    assert torch.equal(plain, tuned)
    assert "num_warps" in str(attnkit.explain(same, q_len=16, kernel_options={"num_warps": 4}).plan)


def test_zero_dimensional_captured_tensors_may_stay_on_the_cpu() -> None:
    gain = torch.tensor(2.0)
    attnkit.util.arguments.check_captured("score_mod", ["gain"], [gain], torch.device("cuda"))


def _doors() -> dict[str, Any]:
    """Return public functions of query, key and value [2, 2, 16, 8]."""
    from attnkit.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
    from attnkit.integrations.torch_attention import varlen_attn

    offsets = torch.tensor([0, 16, 32], dtype=torch.int32)

    def packed(function: Any) -> Any:
        lengths = (offsets, offsets, 16, 16)
        return lambda *qkv: function(*(x.transpose(1, 2).flatten(0, 1) for x in qkv), *lengths)

    return {
        "flex_attention": flex_attention,
        "eager": lambda *qkv: flex_attention(*qkv, backend="eager"),
        "flex": attnkit.flex.flex_attention,
        "Variant": attnkit.Variant(),
        "flash_attn_func": lambda *qkv: flash_attn_func(*(x.transpose(1, 2) for x in qkv)),
        "flash_attn_varlen_func": packed(flash_attn_varlen_func),
        "varlen_attn": packed(varlen_attn),
        "without data": lambda *qkv: flex_attention(*(x.to("meta") for x in qkv)),
        "compiled": torch.compile(flex_attention, fullgraph=True, backend="eager"),
    }


@pytest.mark.parametrize("door", _doors())
def test_two_dtypes_are_refused_with_the_costs_of_converting(door: str) -> None:
    function, shape = _doors()[door], (2, 2, 16, 8)
    bf16, f16 = torch.bfloat16, torch.float16
    whole = (
        "key has dtype torch.float16, query has torch.bfloat16; .*rounds, and copies at every call"
    )
    costs = r"key.to\(torch.bfloat16\) writes (1024 bytes|a copy)"
    other = (
        r"query.to\(torch.float16\) writes (1024 bytes|a copy), and gives an output of that dtype"
    )
    with pytest.raises(DTypeError, match=f"{whole}.*{costs}.*{other}"):
        function(*(t(*shape, dtype=d) for d in (bf16, f16, f16)))
    with pytest.raises(DTypeError, match=r"value.to\(torch.bfloat16\) writes") as caught:
        function(*(t(*shape, dtype=d) for d in (bf16, bf16, f16)))
    assert "query.to" not in str(caught.value)


def test_the_cost_of_converting_a_cache_is_in_mebibytes() -> None:
    query, cache = t(1, 8, 1, 64, dtype=torch.bfloat16), t(1, 8, 1 << 12, 64, dtype=torch.float16)
    message = (
        r"key.to\(torch.bfloat16\) writes 4.0 MiB.*query.to\(torch.float16\) writes 1024 bytes"
    )
    with pytest.raises(DTypeError, match=message):
        flex_attention(query, cache, cache)


def test_autocast_converts_all_three() -> None:
    tensors = [t(1, 2, 8, 8, dtype=d) for d in (torch.float32, torch.float16, torch.bfloat16)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flex_attention(*tensors).dtype == torch.bfloat16

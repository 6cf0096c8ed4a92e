"""`varlen_attn` has PyTorch's arguments and equals attention of one sequence after the other."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen

from attnkit import ArgumentError, DTypeError, OptionError, ShapeError, UnsupportedError
from attnkit.integrations.torch_attention import varlen_attn
from tests.integrations import packed_reference
from tests.integrations.flash_attn.test_packed import compare, draw_tensors, offsets

LONGEST = 10
LSE = varlen.AuxRequest(lse=True)

lengths = st.integers(0, LONGEST)


@given(
    sizes=st.lists(st.tuples(lengths, lengths, lengths), min_size=1, max_size=4),
    window=st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
    with_used=st.booleans(),
    functions=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_lengths(
    sizes: list[tuple[int, int, int]],
    window: tuple[int, int],
    with_used: bool,
    functions: bool,
    seed: int,
) -> None:
    """A sequence of which only the first keys are used is as one that has no others."""
    q_lengths, k_lengths, used = (list(side) for side in zip(*sizes, strict=True))
    used = [min(n, m) for n, m in zip(used, k_lengths, strict=True)] if with_used else k_lengths
    cu_q, cu_k = offsets(q_lengths), offsets(k_lengths)
    tensors = draw_tensors(seed, int(cu_q[-1]), int(cu_k[-1]))[:3]
    options: dict[str, Any] = {}
    if functions:
        options["score_mod"] = lambda s, b, h, q, kv: s * 0.5 + 0.1 * (q - 2 * kv + b + h)
        options["mask"] = lambda b, h, q, kv: (q + 2 * kv + b + h) % 4 != 1

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(
            *(q, k, v, cu_q, cu_k, LONGEST, LONGEST),
            window_size=window,
            enable_gqa=True,
            return_aux=LSE,
            seqused_k=torch.tensor(used, dtype=torch.int32) if with_used else None,
            **options,
        )

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        starts = cu_k.tolist()
        rows = [s + i for s, n in zip(starts[:-1], used, strict=True) for i in range(n)]
        kept = k[rows], v[rows]
        ends = cu_q.tolist(), offsets(used).tolist()
        return packed_reference.attend(q, *kept, *ends, window=window, **options)

    compare(run, reference, tensors)


def test_it_takes_the_arguments_of_pytorch() -> None:
    """Every argument of the installed version, in its order; those of attnkit are keywords."""
    theirs = inspect.signature(varlen.varlen_attn).parameters
    own = inspect.signature(varlen_attn).parameters
    for name, parameter in theirs.items():
        assert own[name].kind is parameter.kind
        assert own[name].default == parameter.default
    positional = [p.name for p in own.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_without_a_request_only_out_is_returned() -> None:
    cu = offsets([3, 5])
    qkv = draw_tensors(0, 8, 8, kv_heads=4)[:3]
    out = varlen_attn(*qkv, cu, cu, 5, 5)
    assert isinstance(out, Tensor)
    both = varlen_attn(*qkv, cu, cu, 5, 5, return_aux=LSE)
    assert torch.equal(both[0], out)
    assert both[1].shape == (4, 8)
    assert torch.equal(varlen_attn(*qkv, cu, cu, 5, 5, return_aux=varlen.AuxRequest()), out)


def test_new_counts_of_used_keys_are_seen() -> None:
    """One buffer of counts, which grows from call to call."""
    cu_q, cu_k = offsets([1, 1]), offsets([8, 8])
    used = torch.tensor([2, 5], dtype=torch.int32)
    for _ in range(3):
        q, k, v, _ = draw_tensors(int(used[0]), 2, 16, kv_heads=4)
        for _ in range(2):
            out = varlen_attn(q, k, v, cu_q, cu_k, 1, 8, seqused_k=used)
        for n in range(2):
            rows = slice(8 * n, 8 * n + int(used[n]))
            exact, _ = packed_reference.attend(
                q[n : n + 1], k[rows], v[rows], [0, 1], [0, int(used[n])]
            )
            torch.testing.assert_close(out[n : n + 1], exact)
        used += 1


def test_in_torch_compile() -> None:
    used = torch.tensor([2, 4], dtype=torch.int32)
    layer = lambda q, k, v, cu: varlen_attn(
        q * 2, k, v, cu, cu, 8, 8, window_size=(-1, 0), seqused_k=used
    )
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    qkv = draw_tensors(0, 8, 8, kv_heads=4)[:3]
    for middle in (3, 4):
        cu = offsets([middle, 8 - middle])
        torch.testing.assert_close(compiled(*qkv, cu), layer(*qkv, cu))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"block_table": torch.zeros(2, 1)}, UnsupportedError, "block_table=; gather the pages"),
        ({"num_splits": 1}, UnsupportedError, "num_splits=1 asks for the same bits"),
        ({"cu_seq_k": None}, ArgumentError, "cu_seq_k must be an int32 tensor .* NoneType"),
        ({"max_q": 2}, OptionError, "max_q must be at least .* longest sequence, 5, got 2"),
        ({"enable_gqa": 1}, OptionError, "enable_gqa must be True or False"),
        ({"return_aux": True}, ArgumentError, "return_aux must be torch.nn.attention.varlen"),
        ({"seqused_k": [3, 5]}, ArgumentError, "seqused_k must be an int32 tensor"),
        ({"seqused_k": torch.ones(2)}, DTypeError, "seqused_k must be int32, got torch.float32"),
        ({"seqused_k": offsets([3, 5])}, ShapeError, r"each of the 2 sequences, got shape \[3\]"),
        ({"seqused_k": torch.tensor([4, 1])}, OptionError, "got 4 for sequence 0, which has 3"),
        ({"seqused_k": torch.tensor([-1, 1])}, OptionError, "got -1 for sequence 0"),
        ({"key": torch.randn(8, 2, 8)}, ShapeError, "has 4 heads, key has 2; .* enable_gqa=True"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    x, cu = torch.randn(8, 4, 8), offsets([3, 5])
    given: dict[str, Any] = {"query": x, "key": x, "value": x, "cu_seq_q": cu, "cu_seq_k": cu}
    with pytest.raises(error, match=message):
        varlen_attn(**(given | {"max_q": 5, "max_k": 5} | arguments))


def test_a_request_of_another_class_will_do() -> None:
    """PyTorch's class is not needed, so that the interface does not depend on its version."""
    cu = offsets([8])
    x = torch.randn(8, 4, 8)
    found = varlen_attn(x, x, x, cu, cu, 8, 8, return_aux=SimpleNamespace(lse=True))
    assert len(found) == 2

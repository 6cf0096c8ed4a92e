"""`flash_attn_varlen_func` equals attention of one sequence after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnkit.integrations.flash_attn import flash_attn_varlen_func
from attnkit.mods import relative_bias
from tests.integrations import packed_reference
from tests.integrations.packed_reference import check_close

LONGEST = 12


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def draw_tensors(seed: int, q: int, k: int, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    """Return query, key, value and slopes [heads] in float32."""
    random = torch.Generator().manual_seed(seed)
    shapes = (q, heads, 8), (k, kv_heads, 8), (k, kv_heads, 8), (heads,)
    return [torch.randn(s, generator=random) for s in shapes]


Run = Callable[..., tuple[Tensor, Tensor]]


def with_gradients(run: Run, tensors: list[Tensor]) -> list[Tensor]:
    """Return out, LSE and the gradients of a weighted sum of both in the tensors."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out, lse = run(*leaves)
    kept = lse.isfinite()
    loss = (out * _weights(out)).sum()
    loss = loss + torch.where(kept, lse, 0).mul(_weights(lse)).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    none = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)]
    return [out.detach(), lse.detach(), *none]


def _weights(like: Tensor) -> Tensor:
    return torch.linspace(-1, 2, like.numel(), dtype=like.dtype).view(like.shape)


def compare(run: Run, reference: Run, tensors: list[Tensor]) -> None:
    found = with_gradients(run, tensors)
    exact = with_gradients(reference, [t.double() for t in tensors])
    check_close(found, exact, with_gradients(reference, tensors))


lengths = st.integers(0, LONGEST)


@given(
    pairs=st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5),
    spare=st.integers(0, 3),
    window=st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
    causal=st.booleans(),
    softcap=st.sampled_from([0.0, 1.5]),
    with_slopes=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_lengths(
    pairs: list[tuple[int, int]],
    spare: int,
    window: tuple[int, int],
    causal: bool,
    softcap: float,
    with_slopes: bool,
    seed: int,
) -> None:
    """Out, LSE and gradients; sequences may be empty, and tokens after the last are not read."""
    cu_q, cu_k = (offsets(list(side)) for side in zip(*pairs, strict=True))
    tensors = draw_tensors(seed, int(cu_q[-1]) + spare, int(cu_k[-1]) + spare)
    cap: dict[str, Any] = {"softcap": softcap}

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, probabilities = flash_attn_varlen_func(
            *(q, k, v, cu_q, cu_k, LONGEST, LONGEST),
            causal=causal,
            window_size=window,
            alibi_slopes=slopes if with_slopes else None,
            return_attn_probs=True,
            **cap,
        )
        assert probabilities is None
        return out, lse

    def reference(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        return packed_reference.attend(
            *(q, k, v, cu_q.tolist(), cu_k.tolist()),
            window=(window[0], 0 if causal else window[1]),
            slopes=slopes if with_slopes else None,
            **cap,
        )

    compare(run, reference, tensors)


@given(
    pairs=st.lists(st.tuples(lengths, st.integers(1, LONGEST)), min_size=1, max_size=4),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_functions_see_sequences(pairs: list[tuple[int, int]], causal: bool, seed: int) -> None:
    """b is the sequence; q is the place of the query among the keys of its sequence, as kv is."""
    cu_q, cu_k = (offsets(list(side)) for side in zip(*pairs, strict=True))
    tensors = draw_tensors(seed, int(cu_q[-1]), int(cu_k[-1]))[:3]
    per_sequence = torch.randn(len(pairs), 4)
    bias = torch.randn(2 * LONGEST + 1)
    tensors += [per_sequence, bias]

    def functions(per: Tensor, table: Tensor) -> dict[str, Any]:
        return {
            "score_mod": lambda s, b, h, q, kv: s * per[b, h] + table[q - kv + LONGEST],
            "mask": lambda b, h, q, kv: (q + 2 * kv + b + h) % 4 != 1,
        }

    def run(q: Tensor, k: Tensor, v: Tensor, per: Tensor, table: Tensor) -> Any:
        return flash_attn_varlen_func(
            *(q, k, v, cu_q, cu_k, LONGEST, LONGEST),
            causal=causal,
            return_softmax_lse=True,
            **functions(per, table),
        )

    def reference(q: Tensor, k: Tensor, v: Tensor, per: Tensor, table: Tensor) -> Any:
        return packed_reference.attend(
            *(q, k, v, cu_q.tolist(), cu_k.tolist()),
            window=(-1, 0 if causal else -1),
            **functions(per, table),
        )

    compare(run, reference, tensors)


def test_slopes_for_each_sequence() -> None:
    cu_q, cu_k = offsets([3, 0, 7]), offsets([5, 2, 4])
    *tensors, _ = draw_tensors(0, 10, 11)
    slopes = torch.rand(3, 4)

    def run(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Any:
        return flash_attn_varlen_func(
            *(q, k, v, cu_q, cu_k, 7, 5), alibi_slopes=s, return_softmax_lse=True
        )

    def reference(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Any:
        return packed_reference.attend(q, k, v, cu_q.tolist(), cu_k.tolist(), slopes=s)

    compare(run, reference, [*tensors, slopes])


def test_a_mod_of_the_library() -> None:
    """A declared table is checked against heads and the longest sequence, not against the total."""
    cu = offsets([6, 9])
    q, k, v, _ = draw_tensors(1, 15, 15)
    table = torch.randn(4, 2 * 9 - 1)
    mod = relative_bias(table)
    out = flash_attn_varlen_func(q, k, v, cu, cu, 9, 9, score_mod=mod)
    ends = [0, 6, 15]
    exact, _ = packed_reference.attend(
        q.double(), k.double(), v.double(), ends, ends, score_mod=mod
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    cu_q, cu_k = offsets([5, 11, 1], torch.int64), offsets([9, 11, 4], torch.int64)
    tensors = [t.to(dtype) for t in draw_tensors(2, 17, 24)[:3]]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        found = flash_attn_varlen_func(
            *(q, k, v, cu_q, cu_k, 11, 11), causal=True, return_softmax_lse=True
        )
        assert found[0].dtype == q.dtype
        return found

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return packed_reference.attend(q, k, v, cu_q.tolist(), cu_k.tolist(), window=(-1, 0))

    compare(run, reference, tensors)


def test_out_has_the_layout_of_the_query() -> None:
    cu = offsets([4, 4])
    qkv = torch.randn(8, 3, 4, 8).unbind(1)  # views of a packed projection
    out = flash_attn_varlen_func(*qkv, cu, cu, 4, 4)
    assert out.is_contiguous()
    same = flash_attn_varlen_func(*(t.contiguous() for t in qkv), cu, cu, 4, 4)
    torch.testing.assert_close(out, same)


def test_a_scale() -> None:
    cu = offsets([5])
    q, k, v, _ = draw_tensors(3, 5, 5)
    out = flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, softmax_scale=0.125)
    exact, _ = packed_reference.attend(q, k, v, [0, 5], [0, 5], scale=0.125)
    torch.testing.assert_close(out, exact)

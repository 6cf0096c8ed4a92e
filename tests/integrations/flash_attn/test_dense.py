"""`flash_attn_func` equals dense attention that is aligned at the bottom right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

from attnkit.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from tests.integrations import packed_reference
from tests.integrations.flash_attn.test_packed import compare

BATCH = 2


def packed(t: Tensor) -> Tensor:
    return t.flatten(0, 1)


def draw_tensors(seed: int, q_len: int, kv_len: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = (q_len, 4, 8), (kv_len, 2, 8), (kv_len, 2, 8)
    return [torch.randn(BATCH, *s, generator=random) for s in shapes]


def reference(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute a batch as sequences of equal length."""
    cu_q, cu_k = ([n * t.shape[1] for n in range(BATCH + 1)] for t in (q, k))
    out, lse = packed_reference.attend(packed(q), packed(k), packed(v), cu_q, cu_k, **options)
    return out.unflatten(0, (BATCH, -1)), lse.unflatten(1, (BATCH, -1)).transpose(0, 1)


@given(
    q_len=st.integers(1, 12),
    kv_len=st.integers(0, 12),
    window=st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
    causal=st.booleans(),
    softcap=st.sampled_from([0.0, 1.5]),
    slopes=st.sampled_from([None, (4,), (BATCH, 4)]),
    functions=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_calls(
    q_len: int,
    kv_len: int,
    window: tuple[int, int],
    causal: bool,
    softcap: float,
    slopes: tuple[int, ...] | None,
    functions: bool,
    seed: int,
) -> None:
    tensors = draw_tensors(seed, q_len, kv_len)
    given_slopes = None if slopes is None else torch.rand(slopes)
    options: dict[str, Any] = {"softcap": softcap}
    if functions:
        options["score_mod"] = lambda s, b, h, q, kv: s * 0.5 + 0.1 * (q - 2 * kv + b + h)
        options["mask"] = lambda b, h, q, kv: (q + 2 * kv + b + h) % 4 != 1

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = flash_attn_func(
            *(q, k, v),
            causal=causal,
            window_size=window,
            alibi_slopes=given_slopes,
            return_attn_probs=True,
            **options,
        )
        return out, lse

    def dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sides = window[0], 0 if causal else window[1]
        return reference(q, k, v, window=sides, slopes=given_slopes, **options)

    compare(run, dense, tensors)


def test_slopes_get_their_gradient() -> None:
    tensors = [*draw_tensors(0, 5, 9), torch.rand(4)]

    def run(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Any:
        return flash_attn_func(q, k, v, causal=True, alibi_slopes=s, return_softmax_lse=True)

    def dense(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Any:
        return reference(q, k, v, window=(-1, 0), slopes=s)

    compare(run, dense, tensors)


def test_no_limit_has_two_spellings() -> None:
    q, k, v = draw_tensors(1, 6, 6)
    out = flash_attn_func(q, k, v, window_size=(None, 2))
    assert torch.equal(out, flash_attn_func(q, k, v, window_size=(-1, 2)))


def test_compiled() -> None:
    """In torch.compile with fullgraph, few graphs serve all offsets, also of more sequences."""
    bias = torch.randn(40)
    mod = lambda s, b, h, q, kv: s + bias[q - kv + 20]

    def layer(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        k, v = k[:, :2], v[:, :2]
        a = flash_attn_varlen_func(q, k, v, cu, cu, 20, 20, causal=True, score_mod=mod)
        return a.square() + flash_attn_varlen_func(q, k, v, cu, cu, 20, 20, softcap=3.0)

    compiled, graphs = _compiled(layer)
    qkv = [t.requires_grad_() for t in torch.randn(3, 20, 4, 8)]
    for middle in ([7], [13], [0], [3, 5], [2, 9, 9], [1, 2, 3, 4]):
        cu = torch.tensor([0, *middle, 20], dtype=torch.int32)
        found = compiled(*qkv, cu), layer(*qkv, cu)
        torch.testing.assert_close(*found)
        grads = [torch.autograd.grad(out.square().sum(), qkv) for out in found]
        torch.testing.assert_close(*grads)
    assert len(graphs) <= 2


def test_compiled_for_unequal_lengths() -> None:
    def layer(q: Tensor, k: Tensor) -> Tensor:
        slopes = torch.full((4,), 0.5)
        out: Tensor = flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes, softcap=3.0)
        return out

    compiled, graphs = _compiled(layer)
    for q_len, kv_len in ((5, 7), (6, 9), (4, 12), (9, 3), (7, 8)):
        q, k = torch.randn(2, q_len, 4, 8), torch.randn(2, kv_len, 4, 8)
        torch.testing.assert_close(compiled(q, k), layer(q, k))
    assert len(graphs) <= 2


def _compiled(layer: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[Any]]:
    """Return the compiled layer, and a list of the graphs that were compiled for it."""
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return aot_eager(module, inputs)

    return torch.compile(layer, fullgraph=True, backend=backend), graphs

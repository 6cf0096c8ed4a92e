"""PyTorch's flash-attention operators run on attnkit, forward and backward, until they do not.

The kernels are registered for CPU tensors here, for which PyTorch itself has none, and so the calls
take the way of a GPU: through the dispatcher, PyTorch's autograd and its `varlen_attn`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import varlen

import attnkit
from attnkit import ArgumentError, OptionError, UnsupportedError
from attnkit.integrations import torch_attention
from attnkit.integrations.torch_attention import aten_ops
from attnkit.integrations.torch_attention.registration import override
from tests.integrations import packed_reference
from tests.integrations.flash_attn.test_packed import compare, draw_tensors, offsets
from tests.integrations.torch_attention.versions import ARGUMENTS, GROUPED

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"),
    reason="needs a torch with a registry of flash-attention implementations (2.13)",
)

LONGEST = 10
OPERATORS = [k.__name__ for k in aten_ops.KERNELS if hasattr(torch.ops.aten, k.__name__)]

lengths = st.integers(0, LONGEST)


@pytest.fixture
def _on_the_cpu() -> Iterator[None]:
    handle = override(dispatch_key="CPU")
    yield
    handle.remove()


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    attention.restore_flash_attention_impl(_raise_warn=False)


def overridden(key: str = "CUDA") -> list[bool]:
    """Return for each operator whether its kernel is attnkit's."""
    dumps = (torch._C._dispatch_dump(f"aten::{name}") for name in OPERATORS)
    lines = ([x for x in dump.splitlines() if x.startswith(f"{key}: ")] for dump in dumps)
    return [any("torch_attention" in x for x in found) for found in lines]


@pytest.mark.usefixtures("_restored")
def test_register_activate_restore() -> None:
    """Nothing changes before the activation or after it; it may be repeated."""
    assert overridden() == [False] * len(OPERATORS)
    for _ in range(2):
        torch_attention.register()
        assert "attnkit" in attention.list_flash_attention_impls()
        assert overridden() == [False] * len(OPERATORS)
        for _ in range(2):
            attention.activate_flash_attention_impl("attnkit")
            assert attention.current_flash_attention_impl() == "attnkit"
            assert overridden() == [True] * len(OPERATORS)
            assert overridden("CPU") == [False] * len(OPERATORS)
        attention.restore_flash_attention_impl()
        assert attention.current_flash_attention_impl() is None
        assert overridden() == [False] * len(OPERATORS)


@pytest.mark.usefixtures("_restored")
def test_another_name() -> None:
    torch_attention.register("mine", backend="cpu")
    attention.activate_flash_attention_impl("mine")
    assert attention.current_flash_attention_impl() == "mine"
    with pytest.raises(ArgumentError, match="name must be a string"):
        torch_attention.register("")


def test_a_torch_without_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(UnsupportedError, match=r"has no torch.nn.attention.register_.* torch 2.13"):
        torch_attention.register()


@pytest.mark.usefixtures("_on_the_cpu")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pairs=st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4),
    window=st.tuples(st.integers(-1, 6), st.integers(-1, 6)),
    seed=st.integers(0, 99),
)
def test_varlen_attn_of_pytorch(
    pairs: list[tuple[int, int]], window: tuple[int, int], seed: int
) -> None:
    cu_q, cu_k = (offsets(list(side)) for side in zip(*pairs, strict=True))
    tensors = draw_tensors(seed, int(cu_q[-1]), int(cu_k[-1]))[:3]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = varlen.varlen_attn(
            *(q, k, v, cu_q, cu_k, LONGEST, LONGEST),
            window_size=window,
            **GROUPED,
            return_aux=varlen.AuxRequest(lse=True),
        )
        return out, lse.detach()  # PyTorch's operator has no gradient of the LSE

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        ends = cu_q.tolist(), cu_k.tolist()
        out, lse = packed_reference.attend(q, k, v, *ends, window=window)
        return out, lse.detach()

    compare(run, reference, tensors)


@pytest.mark.usefixtures("_on_the_cpu")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    q_len=st.integers(1, 12),
    kv_len=st.integers(1, 12),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.25]),
    seed=st.integers(0, 99),
)
def test_the_operator_of_scaled_dot_product_attention(
    q_len: int, kv_len: int, causal: bool, scale: float | None, seed: int
) -> None:
    kv_len = q_len if causal else kv_len  # PyTorch chooses another operator otherwise
    random = torch.Generator().manual_seed(seed)
    shapes = (2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 8)
    tensors = [torch.randn(s, generator=random) for s in shapes]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=scale
        )
        assert found[4:6] == (q_len, kv_len)
        return found[0], found[1].detach()

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Any:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = q @ k.mT * (8**-0.5 if scale is None else scale)
        if causal:
            scores = scores.masked_fill(~torch.ones(q_len, kv_len).tril().bool(), -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1).detach()

    compare(run, reference, tensors)


@pytest.mark.usefixtures("_on_the_cpu")
@pytest.mark.parametrize("packed", [False, True])
def test_dropout(packed: bool) -> None:
    """The backward of PyTorch's autograd gets the state that the forward has drawn."""
    tensors = draw_tensors(0, 8, 8, kv_heads=4)[:3]
    results = []
    for ours in (True, False):
        qkv = [t.detach().requires_grad_() for t in tensors]
        torch.manual_seed(2)
        if ours and packed:
            cu = offsets([8])
            out = torch.ops.aten._flash_attention_forward(*qkv, cu, cu, 8, 8, 0.3, True, False)[0]
        elif ours:
            batch = [t.transpose(0, 1)[None] for t in qkv]
            found = torch.ops.aten._scaled_dot_product_flash_attention(*batch, 0.3, True)
            out = found[0][0].transpose(0, 1)
        else:
            batch = [t.transpose(0, 1)[None] for t in qkv]
            mask = lambda b, h, q, kv: kv <= q
            out = attnkit.flex_attention(*batch, None, mask, backend="cpu", dropout_p=0.3)
            out = out[0].transpose(0, 1)
        results.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
    for ours, true in zip(*results, strict=True):
        torch.testing.assert_close(ours, true)


@pytest.mark.usefixtures("_on_the_cpu")
def test_layouts_follow_the_query() -> None:
    """Views [B, S, H, D] transposed, as a projection leaves them, and a gradient by expansion."""
    qkv = [torch.randn(2, 7, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    out = torch.ops.aten._scaled_dot_product_flash_attention(*qkv, 0.0, True)[0]
    assert out.stride() == qkv[0].stride()
    plain = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), qkv), torch.autograd.grad(plain.sum(), qkv)
    )


@pytest.mark.usefixtures("_on_the_cpu")
def test_writes_to_a_given_output() -> None:
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this torch has no varlen_attn_out")
    cu = offsets([3, 5])
    qkv = draw_tensors(0, 8, 8, kv_heads=4)[:3]
    out = torch.empty_like(qkv[0])
    found, lse = varlen.varlen_attn_out(
        out, *qkv, cu, cu, 5, 5, return_aux=varlen.AuxRequest(lse=True)
    )
    expected = varlen.varlen_attn(*qkv, cu, cu, 5, 5, return_aux=varlen.AuxRequest(lse=True))
    assert found is out
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.usefixtures("_on_the_cpu")
def test_keys_in_use() -> None:
    """`seqused_k` has no backward in PyTorch: it is refused where a gradient is recorded."""
    if "seqused_k" not in ARGUMENTS:
        pytest.skip("this torch has no seqused_k")
    cu_q, cu_k = offsets([1, 1]), offsets([8, 8])
    qkv = draw_tensors(0, 2, 16, kv_heads=4)[:3]
    used = torch.tensor([3, 8], dtype=torch.int32)
    call = lambda *qkv: varlen.varlen_attn(*qkv, cu_q, cu_k, 1, 8, seqused_k=used)
    own = torch_attention.varlen_attn(*qkv, cu_q, cu_k, 1, 8, seqused_k=used)
    assert torch.equal(call(*qkv), own)
    qkv[0].requires_grad_()
    with pytest.raises(RuntimeError, match="seqused_k is an inference-only parameter"):
        call(*qkv)
    with pytest.raises(UnsupportedError, match="no backward with seqused_k"):
        torch.ops.aten._flash_attention_forward(
            *(*qkv, cu_q, cu_k, 1, 8, 0.0, False, False), seqused_k=used
        )


@pytest.mark.usefixtures("_on_the_cpu")
def test_in_torch_compile() -> None:
    cu = offsets([3, 5])
    layer = lambda q, k, v: varlen.varlen_attn(q * 2, k, v, cu, cu, 5, 5, window_size=(-1, 0))
    qkv = [t.requires_grad_() for t in draw_tensors(0, 8, 8, kv_heads=4)[:3]]
    out, compiled = layer(*qkv), torch.compile(layer, fullgraph=True, backend="aot_eager")(*qkv)
    torch.testing.assert_close(compiled, out)
    grads = [torch.autograd.grad(t.square().sum(), qkv) for t in (compiled, out)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": 1.0}, OptionError, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"return_debug_mask": True}, OptionError, "never holds the attention weights"),
        ({"alibi_slopes": torch.rand(4)}, UnsupportedError, "alibi_slopes; use .*varlen_func"),
        ({"block_table": torch.zeros(2, 1)}, UnsupportedError, "block_table="),
        ({"num_splits": 1}, UnsupportedError, "num_splits=1"),
        ({"seqused_k": torch.ones(1).int()}, UnsupportedError, "with offsets of sequences only"),
        ({"backend": "none"}, OptionError, "backend"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    x = torch.randn(1, 8, 4, 8)
    fixed = {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False}
    with pytest.raises(error, match=message):
        aten_ops._flash_attention_forward(x, x, x, None, None, 8, 8, **(fixed | options))


def test_the_dense_backend_has_no_backward() -> None:
    """Its gradient is autograd's, which the operators cannot use."""
    handle = override(backend="eager", dispatch_key="CPU")
    try:
        x = torch.randn(1, 4, 8, 8, requires_grad=True)
        out = torch.ops.aten._scaled_dot_product_flash_attention(x, x, x)[0]
        with pytest.raises(UnsupportedError, match=r'backend="eager" .* use backend="auto"'):
            out.sum().backward()
    finally:
        handle.remove()

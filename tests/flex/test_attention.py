"""Check that attnkit.flex.flex_attention takes what PyTorch's function takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.experimental import _paged_attention as paged

import attnkit
from attnkit import flex

S = 64


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def inputs(*lengths: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    sizes = lengths or (S, S)
    return [
        torch.randn(2, 2, n, 8, generator=random, dtype=dtype).requires_grad_()
        for n in (sizes[0], sizes[1], sizes[1])
    ]


def bias(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score + 0.1 * (q - kv)


@pytest.mark.parametrize("score_mod", [None, bias])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)])
def test_a_scale_that_is_a_tensor_gets_its_gradient(score_mod: Any, shape: tuple[int, ...]) -> None:
    query, key, value = inputs()
    scale = torch.full(shape, 0.3, requires_grad=True)
    found = flex.flex_attention(query, key, value, score_mod, scale=scale)
    plain = flex.flex_attention(query, key, value, score_mod, scale=float(scale.detach()))
    torch.testing.assert_close(found, plain)
    (gradient,) = torch.autograd.grad((found * value.detach()).sum(), scale)
    exact = scale.detach().double().requires_grad_()
    scores = query @ key.mT * exact.reshape(())
    rows, columns = torch.arange(S)[:, None], torch.arange(S)
    scores = scores if score_mod is None else bias(scores, 0, 0, rows, columns)
    (expected,) = torch.autograd.grad((scores.softmax(-1) @ value * value.detach()).sum(), exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-6, atol=0)
    for bad in (torch.ones(2), torch.ones((), dtype=torch.cfloat)):
        with pytest.raises(attnkit.OptionError, match="tensor of one number"):
            flex.flex_attention(query, key, value, scale=bad)


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 5, 5), (0, 0, 0)])
def test_calls_without_a_row_or_a_key(sizes: tuple[int, int, int]) -> None:
    batch, q_len, kv_len = sizes
    query = torch.randn(batch, 4, q_len, 8, requires_grad=True)
    key = torch.randn(batch, 2, kv_len, 8, requires_grad=True)
    value = torch.randn(batch, 2, kv_len, 16, requires_grad=True)
    out, aux = flex.flex_attention(
        query, key, value, bias, enable_gqa=True, return_aux=flex.AuxRequest(True, True)
    )
    assert out.shape == (batch, 4, q_len, 16)
    assert not out.any()
    assert (aux.lse.shape, aux.max_scores.shape) == (out.shape[:3],) * 2
    assert (aux.lse == -torch.inf).all()
    out.sum().backward()
    assert all(t.grad is not None and not t.grad.any() for t in (query, key, value))
    if batch == 0 and q_len:  # PyTorch agrees; in eager mode it computes no other of these
        inference = [t.detach() for t in (query, key, value)]
        expected = theirs.flex_attention(*inference, bias, enable_gqa=True)
        assert torch.equal(out.detach(), expected)
    with pytest.raises(attnkit.ShapeError, match="query has 4 heads"):
        flex.flex_attention(query, key, value)
    with pytest.raises(attnkit.DTypeError):
        flex.flex_attention(query, key.double(), value, enable_gqa=True)
    with pytest.raises(attnkit.OptionError):
        flex.flex_attention(query, key, value, enable_gqa=True, kernel_options={"BACKEND": "?"})


def test_batches_of_nothing_must_agree() -> None:
    query, key = torch.zeros(2, 1, 5, 8), torch.zeros(0, 1, 5, 8)
    with pytest.raises(attnkit.ShapeError, match="key has batch 0, query has 2"):
        flex.flex_attention(query, key, key)


def test_auxiliary_outputs_are_pytorchs() -> None:
    query, key, value = (t.detach() for t in inputs(dtype=torch.float32))
    assert flex.AuxRequest is theirs.AuxRequest
    assert flex.AuxOutput is theirs.AuxOutput
    out, aux = flex.flex_attention(query, key, value, return_aux=flex.AuxRequest(lse=True))
    assert type(aux) is theirs.AuxOutput
    assert aux.max_scores is None
    plain, lse = flex.flex_attention(query, key, value, return_lse=True)
    assert torch.equal(plain, out)
    assert torch.equal(lse, aux.lse)
    own = flex.flex_attention(query, key, value, return_aux=attnkit.AuxRequest(max_scores=True))
    assert type(own[1]) is theirs.AuxOutput


@pytest.mark.parametrize("ours", [True, False])
def test_the_block_mask_that_keeps_everything(ours: bool) -> None:
    query, key, value = inputs(S, 40)
    mask = (flex if ours else theirs)._create_empty_block_mask(query, key)
    assert isinstance(mask, theirs.BlockMask)
    expected = flex.flex_attention(query, key, value)
    assert torch.equal(flex.flex_attention(query, key, value, block_mask=mask), expected)
    mask.kv_num_blocks.zero_()
    assert not flex.flex_attention(query[:, :, :1], key[:, :, :1], value[:, :, :1],
                                   block_mask=mask).any()  # fmt: skip


def test_paged_attention() -> None:
    """PyTorch's PagedAttention used the pages of batch entry 0 for all entries."""
    batch, page = 3, 16
    pages = paged.PagedAttention(16, page, batch, device="cpu")
    for b in range(batch):
        pages.reserve(torch.tensor(b), torch.tensor(S))
    query, key, value = (torch.randn(batch, 2, S, 16) for _ in range(3))
    pool = [torch.zeros(1, 2, 16 * page, 16) for _ in range(2)]
    pages.assign(torch.arange(batch), torch.arange(S).expand(batch, -1), key, value, *pool)
    mask = flex.create_block_mask(causal, batch, 1, S, S, "cpu", page)
    physical = pages.convert_logical_block_mask(mask)
    found = flex.flex_attention(query, *pool, pages.get_score_mod(bias), physical)
    expected = flex.flex_attention(query, key, value, bias, mask)
    torch.testing.assert_close(found, expected)


def test_pytorchs_function_takes_our_mask() -> None:
    query, key, value = (t.detach() for t in inputs(S, 40))
    mask = flex.create_block_mask(causal, 2, 1, S, 40, "cpu", 16)
    expected = flex.flex_attention(query, key, value, bias, mask)
    found = theirs.flex_attention(query, key, value, bias, mask)
    torch.testing.assert_close(found, expected)
    assert torch.equal(attnkit.flex_attention(query, key, value, bias, mask), expected)


@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 5, 5)])
def test_calls_of_nothing_have_the_sink_in_their_lse(sizes: tuple[int, int, int]) -> None:
    batch, q_len, kv_len = sizes
    query = torch.randn(batch, 2, q_len, 8, requires_grad=True)
    key, value = (torch.randn(batch, 2, kv_len, 8, requires_grad=True) for _ in range(2))
    sink = torch.tensor([0.5, -torch.inf], requires_grad=True)
    out, lse = flex.flex_attention(query, key, value, return_lse=True, sink=sink)
    rows = (batch, 2, q_len)
    assert not out.any()
    assert torch.equal(lse, sink.detach()[:, None].expand(rows))
    (out.sum() + lse.sum()).backward()
    assert sink.grad is not None
    assert sink.grad.tolist() == [batch * q_len, 0]
    with pytest.raises(attnkit.ShapeError, match="sink"):
        flex.flex_attention(query, key, value, sink=sink[:1])
    _, lse = flex.flex_attention(query, key, value, return_lse=True, normalization="softmax1")
    assert torch.equal(lse, torch.zeros(rows))


@pytest.mark.parametrize("read", [False, True])
def test_torch_compile(read: bool) -> None:
    query, key, value = inputs()

    def attend(mask: Any, scale: Tensor) -> Any:
        return flex.flex_attention(
            query, key, value, bias, mask, scale, return_aux=flex.AuxRequest(lse=True)
        )

    mask = flex.create_block_mask(causal, None, None, S, S, "cpu", 16)
    if read:  # the lists are followed then
        mask.kv_num_blocks[..., 1:] = 0
    scale = torch.tensor(0.3)
    out, aux = torch.compile(attend, backend="eager", fullgraph=True)(mask, scale)
    assert type(aux) is theirs.AuxOutput
    expected, stats = attend(mask, scale)
    torch.testing.assert_close((out, aux.lse), (expected, stats.lse))


def test_masks_are_built_in_compiled_functions() -> None:
    query, key, value = inputs()

    def attend(query: Tensor) -> Any:
        mask = flex.create_block_mask(causal, None, None, query.shape[2], S, query.device)
        return flex.flex_attention(query, key, value, block_mask=mask)

    out = torch.compile(attend, backend="eager", fullgraph=True)(query)
    assert torch.equal(out, attend(query))
    mask = torch.compile(flex.create_block_mask, backend="eager")(causal, 1, 1, S, S)
    assert torch.equal(
        mask.kv_indices, theirs.create_block_mask(causal, 1, 1, S, S, "cpu").kv_indices
    )


def test_options_of_attnkit_are_passed_on() -> None:
    query, key, value = inputs()
    out = flex.flex_attention(query, key, value, bias, backend="eager", deterministic=True)
    torch.testing.assert_close(out, flex.flex_attention(query, key, value, bias))
    with pytest.raises(TypeError, match="bakend"):
        flex.flex_attention(query, key, value, bakend="eager")


ORDERS = [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)]


def falling(t: Tensor) -> list[int]:
    return sorted(range(t.ndim), key=t.stride, reverse=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_outputs_have_the_strides_of_pytorch(order: tuple[int, ...], compiled: bool) -> None:
    """The last axis is contiguous, the others have the order of the query."""
    torch._dynamo.reset()
    function: Any = flex.flex_attention
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    inputs = [torch.randn(2, 5, 12, 16).permute(order) for _ in range(3)]
    expected = theirs.flex_attention(*inputs)
    for t in inputs:
        t.requires_grad_()
    out, aux = function(*inputs, return_aux=flex.AuxRequest(lse=True))
    assert out.stride() == expected.stride()
    torch.testing.assert_close(out, expected)
    assert type(aux) is flex.AuxOutput
    out.backward(torch.randn_like(out))
    for t in inputs:
        assert t.grad is not None
        assert falling(t.grad) == falling(t)


def test_errors_begin_as_those_of_pytorch() -> None:
    """Programs look for these words in the messages."""
    mask = flex.create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 256, 256, device="cpu")
    query = torch.randn(1, 1, 128, 16)
    with pytest.raises(ValueError, match=r"^block_mask was created for"):
        flex.flex_attention(query, query, query, block_mask=mask)
    with pytest.raises(RuntimeError, match=r"^Cannot use mask_mod from a sliced BlockMask"):
        flex.flex_attention(query, query, query, block_mask=mask[:, :, 0])

"""Compare the CPU template with a dense float64 reference, for all shapes and dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnkit.sparsity.block_runs import PARTIAL, BlockRuns
from attnkit.templates import cpu
from tests.templates.cpu_kit import (
    DTYPES,
    Case,
    LambdaHooks,
    Mask,
    Score,
    alibi,
    by_batch,
    by_both,
    by_head,
    causal,
    check,
    constant,
    dead_rows,
    dense_attention,
    dilated,
    documents,
    learned_bias,
    minus_infinity,
    nothing,
    random_inputs,
    softcap,
    template_attention,
    two_sided,
    window,
)


def test_both_orders_of_the_reference_agree() -> None:
    inputs = random_inputs(batch=2, heads=4, kv_heads=2, q_len=50, kv_len=70)
    for mask in (None, dead_rows):
        case = Case(**inputs, mask=mask, score=learned_bias, dtype=torch.float64)
        case.captured = (torch.randn(4, 41), torch.rand(4))
        one, other = (dense_attention(case, torch.float64, turned) for turned in (False, True))
        torch.testing.assert_close(one, other)


MASKS = [None, causal, window, two_sided, documents, dead_rows, dilated, nothing]
SCORES = [alibi, softcap, constant, minus_infinity]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_mask_alone(mask: Mask | None, dtype: torch.dtype) -> None:
    check(Case(**random_inputs(q_len=200), mask=mask, block=(32, 32), dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", SCORES)
def test_score_alone(score: Score, dtype: torch.dtype) -> None:
    check(Case(**random_inputs(q_len=150), score=score, dtype=dtype))


@pytest.mark.parametrize("mask", [window, documents, dead_rows])
@pytest.mark.parametrize("score", SCORES)
def test_mask_and_score(mask: Mask, score: Score) -> None:
    check(Case(**random_inputs(q_len=200), mask=mask, score=score, block=(64, 32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_captured_tensors_get_their_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    captured = (torch.randn(2, 41), torch.rand(2) + 0.5)
    case = Case(**random_inputs(q_len=140), mask=causal, score=learned_bias, dtype=dtype)
    case.captured, case.block = captured, (32, 32)
    check(case)


@pytest.mark.parametrize(
    ("mask", "own"),
    [
        (by_head, (False, True)),
        (by_batch, (True, False)),
        (by_both, (True, True)),
        (by_both, (False, False)),  # shared runs: the mask itself tells heads and batches apart
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kv_batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_by_batch_and_head(
    mask: Mask, own: tuple[bool, bool], kv_heads: int, kv_batch: int, dtype: torch.dtype
) -> None:
    inputs = random_inputs(batch=3, heads=4, kv_heads=kv_heads, q_len=90, kv_batch=kv_batch)
    case = Case(**inputs, mask=mask, own=own, block=(32, 32), dtype=dtype)
    if own == (False, False):
        case.runs = BlockRuns.from_states(
            torch.full((1, 1, 3, 3), PARTIAL, dtype=torch.int8), 90, 90, case.block
        )
    check(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads_broadcast_batch_and_other_value_width(dtype: torch.dtype) -> None:
    inputs = random_inputs(
        batch=3, heads=6, kv_heads=2, q_len=70, kv_len=130, width=24, value_width=40, kv_batch=1
    )
    check(Case(**inputs, mask=two_sided, score=softcap, block=(32, 32), dtype=dtype))


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 300), (300, 1), (129, 257), (127, 640), (5, 3)])
def test_ragged_and_unequal_lengths(q_len: int, kv_len: int) -> None:
    for mask in (None, causal, two_sided, dead_rows):
        check(Case(**random_inputs(q_len=q_len, kv_len=kv_len), mask=mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_any_strides(order: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = random_inputs(batch=2, heads=2, q_len=75)
    inverse = [order.index(axis) for axis in range(4)]
    plain = Case(**inputs, mask=causal, score=softcap, block=(32, 32), dtype=dtype)
    turned = Case(**inputs, mask=causal, score=softcap, block=(32, 32), dtype=dtype)
    for name in ("query", "key", "value"):
        t = inputs[name].permute(order).contiguous().permute(inverse)
        setattr(turned, name, t)
    found, want = template_attention(turned), template_attention(plain)
    for name, result in found.items():
        torch.testing.assert_close(result, want[name])
    assert found["dq"].stride() == turned.query.stride()
    assert found["dk"].stride() == turned.key.stride()
    assert found["out"].stride(3) == 1
    outer = [axis for axis in order if axis != 3]
    strides = [found["out"].stride(axis) for axis in outer]
    assert strides == sorted(strides, reverse=True)


def test_strided_views_of_one_tensor() -> None:
    packed = torch.randn(2, 60, 3, 4, 8)
    query, key, value = (packed[:, :, i].transpose(1, 2) for i in range(3))
    check(Case(query.double(), key.double(), value.double(), mask=causal, block=(16, 16)))
    hooks = LambdaHooks()
    out, lse, _, _ = cpu.forward(query, key, value, None, hooks, 0.5)
    dense = [t.contiguous() for t in (query, key, value)]
    want = cpu.forward(*dense, None, hooks, 0.5)
    torch.testing.assert_close((out, lse), want[:2])
    assert out.stride() == torch.empty(2, 60, 4, 8).transpose(1, 2).stride()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape_mask_and_block(data: st.DataObject) -> None:
    size = lambda high, low=1: data.draw(st.integers(low, high))
    heads = size(4)
    group = data.draw(st.sampled_from([n for n in (1, 2, 3, 4) if heads % n == 0]))
    batch = size(3)
    inputs = random_inputs(
        batch=batch,
        heads=heads,
        kv_heads=heads // group,
        q_len=size(160),
        kv_len=size(160),
        width=size(20),
        value_width=size(20),
        kv_batch=data.draw(st.sampled_from([1, batch])),
        seed=size(1000),
    )
    q_len, kv_len = inputs["query"].shape[2], inputs["key"].shape[2]
    own = data.draw(st.tuples(st.booleans(), st.booleans()))
    shape = (batch if own[0] else 1, heads if own[1] else 1, q_len, kv_len)
    cells = tuple(-(-n // data.draw(st.integers(1, 40))) for n in shape[2:])
    torch.manual_seed(size(1000))
    coarse = torch.rand(*shape[:2], *cells) < data.draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    table = torch.nn.functional.interpolate(coarse.double(), size=shape[2:]).bool()

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        b, h = (t if own[i] else torch.zeros_like(t) for i, t in enumerate((b, h)))
        return table[b.long(), h.long(), q.long(), kv.long()]

    check(
        Case(
            **inputs,
            mask=mask,
            score=data.draw(st.sampled_from([None, alibi, softcap, minus_infinity])),
            block=(size(150), size(150)),
            own=own,
            dtype=data.draw(st.sampled_from(DTYPES)),
        )
    )


@pytest.mark.parametrize("score", [None, softcap])
def test_block_size_does_not_matter(score: Score | None) -> None:
    inputs = random_inputs(q_len=300, kv_len=270)
    results = [
        check(Case(**inputs, mask=window, score=score, block=block))
        for block in [(16, 16), (128, 128), (300, 7), (100, 256), (64, 128)]
    ]
    for other in results[1:]:
        for name, result in other.items():
            torch.testing.assert_close(result, results[0][name])

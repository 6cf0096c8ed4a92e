"""Compare the statistics of `AuxRequest` with dense float64 attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attnkit
from attnkit import AuxRequest, flex, flex_attention

F64 = torch.float64
BACKENDS = ("cpu", "eager")


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep no key in the first rows, and none at all in head 2."""
    return (kv <= q - 5) & (h != 2)


def halved(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score / 2 - 0.125 * h


def draw(seed: int = 0, dtype: torch.dtype = F64) -> list[Tensor]:
    """Return query [2, 4, 40, 16], key and value [2, 2, 50, 16]."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, 40, 16), (2, 2, 50, 16), (2, 2, 50, 16)]
    tensors = [torch.randn(s, generator=random, dtype=F64) for s in shapes]
    return [t.to(dtype).requires_grad_() for t in tensors]


def dense_scores(tensors: list[Tensor]) -> Tensor:
    """Return the modified scores, -inf where the mask keeps none."""
    query, key, _ = tensors
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    rows, columns, head = (
        torch.arange(40)[:, None],
        torch.arange(50),
        torch.arange(4)[:, None, None],
    )
    scores = scores / 2 - 0.125 * head
    return scores.masked_fill((columns > rows - 5) | (head == 2), -math.inf)


def attend(tensors: list[Tensor], request: Any, **options: Any) -> Any:
    asked = {"enable_gqa": True, "return_aux": request, "block_mask": late}
    return flex_attention(*tensors, halved, **(asked | options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_max_logits_are_the_largest_scores_of_heads(backend: str) -> None:
    tensors = draw()
    expected = dense_scores(tensors).amax((2, 3))
    assert bool((expected[:, 2] == -math.inf).all())
    for _ in range(3):
        _, aux = attend(tensors, AuxRequest(max_logits=True), backend=backend)
        assert (aux.lse, aux.max_scores) == (None, None)
        assert aux.max_logits.shape == (2, 4)
        assert not aux.max_logits.requires_grad
        torch.testing.assert_close(aux.max_logits, expected.detach(), rtol=1e-13, atol=1e-13)
    _, both = attend(tensors, AuxRequest(True, True, True), backend=backend)
    assert torch.equal(both.max_logits, both.max_scores.amax(-1))
    _, narrow = attend(draw(dtype=torch.bfloat16), AuxRequest(max_logits=True), backend=backend)
    assert narrow.max_logits.dtype == torch.float32


def test_max_logits_do_not_count_a_sink() -> None:
    tensors = draw()
    _, aux = attend(tensors, AuxRequest(max_logits=True), sink=torch.full((4,), 99.0))
    _, plain = attend(tensors, AuxRequest(max_logits=True))
    assert torch.equal(aux.max_logits, plain.max_logits)


def test_max_logits_compile_and_have_a_shape_without_data() -> None:
    torch._dynamo.reset()
    tensors = draw(dtype=torch.float32)
    call = lambda *t: attend(list(t), AuxRequest(max_logits=True))[1].max_logits
    assert torch.equal(
        torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors), call(*tensors)
    )
    assert call(*(t.detach().to("meta") for t in tensors)).shape == (2, 4)


def test_other_requests_are_accepted_as_they_were() -> None:
    tensors = draw(dtype=torch.float32)
    _, aux = attend(tensors, flex.AuxRequest(max_scores=True))
    assert isinstance(aux, attnkit.AuxOutput)
    assert aux.max_logits is None
    query, key, value = (t.detach() for t in tensors)
    options = {"enable_gqa": True, "return_aux": AuxRequest(max_logits=True)}
    _, aux = flex.flex_attention(query, key, value, **options)
    assert isinstance(aux, attnkit.AuxOutput)
    assert aux.max_logits.shape == (2, 4)
    _, none = flex.flex_attention(query[:, :, :0], key, value, **options)
    assert bool((none.max_logits == -math.inf).all())
    assert none.max_logits.shape == (2, 4)

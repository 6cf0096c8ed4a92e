"""Check score_mods that call modules and look tables up, against torch.vmap and autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnkit import flex_attention
from attnkit.errors import BoundsError, TraceError
from tests.runtime.by_vmap import B, D, H, S, assert_same_by_vmap, dense

IDS = torch.tensor([0, 2, 1, 1, 3, 0, 2, 3, 3, 1])

Made = tuple[Callable[..., Any], Sequence[Tensor]]  # a score_mod and its learned tensors


def embedding() -> Made:
    table = nn.Embedding(2 * S, H)
    return lambda s, b, h, q, kv: s + table(q - kv + S - 1)[h], [*table.parameters()]


def embedding_of_clamped_distances() -> Made:
    table = nn.Embedding(7, H)
    return (
        lambda s, b, h, q, kv: s + table((q - kv).clamp(-3, 3) + 3)[h],
        [*table.parameters()],
    )


def embedding_with_padding() -> Made:
    table = nn.Embedding(4, H, padding_idx=-2)
    with torch.no_grad():
        table.weight.normal_()
    return lambda s, b, h, q, kv: s + table(IDS[q])[h] * kv / S, [*table.parameters()]


def embedding_of_ids() -> Made:
    left, right = nn.Embedding(4, 5), nn.Embedding(4, 5)
    return (
        lambda s, b, h, q, kv: s + torch.dot(left(IDS[q]), right(IDS[kv])) / 5,
        [*left.parameters(), *right.parameters()],
    )


def linear_of_a_row() -> Made:
    features, layer = nn.Parameter(torch.randn(H, 6)), nn.Linear(6, S)
    return (
        lambda s, b, h, q, kv: s + torch.tanh(layer(features[h])[kv]),
        [features, *layer.parameters()],
    )


def perceptron_of_positions() -> Made:
    layers = nn.Sequential(nn.Linear(2, 7), nn.GELU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, H))

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + layers(torch.stack([(q - kv) / S, (q + kv) / S]))[h]

    return mod, [*layers.parameters()]


def linear_of_the_score() -> Made:
    layer = nn.Linear(3, 1, bias=False)

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return layer(torch.stack([s, s.abs(), torch.tanh(s)]))[0]

    return mod, [*layer.parameters()]


def products() -> Made:
    left, right = nn.Parameter(torch.randn(H, S, 4)), nn.Parameter(torch.randn(4, S))
    mixed = nn.Parameter(torch.randn(S, 4))

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + (left[h, q] @ right)[kv] / 3 + torch.mv(mixed, left[h, kv])[q] / 3

    return mod, [left, right, mixed]


def lookups() -> Made:
    table, row = nn.Parameter(torch.randn(4, S)), nn.Parameter(torch.randn(S))

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        at = torch.gather(table[h], 0, q.long().view(1))[0] + torch.index_select(row, 0, kv)[0]
        column = torch.take_along_dim(table, (kv % 4).long().view(1, 1), 0)[0, 0]
        return s + at * column + torch.take(table, IDS[q] * S + kv)

    return mod, [table, row]


MODS = {
    made.__name__: made
    for made in (
        embedding,
        embedding_of_clamped_distances,
        embedding_with_padding,
        embedding_of_ids,
        linear_of_a_row,
        perceptron_of_positions,
        linear_of_the_score,
        products,
        lookups,
    )
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of torch.take
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("name", MODS)
def test_value_and_all_gradients_are_those_of_vmap(name: str, backend: Any) -> None:
    assert_same_by_vmap(MODS[name], backend)


def test_a_replaced_weight_a_replaced_layer_and_an_edit_are_seen() -> None:
    layers = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + layers(torch.stack([q / S, kv / S]))[0]

    inputs = [torch.randn(B, H, S, D) for _ in range(3)]

    def same() -> None:
        found = flex_attention(*inputs, mod)
        torch.testing.assert_close(found, dense(mod, *inputs), rtol=1e-4, atol=1e-5)

    with torch.no_grad():
        same()
        layers[2].weight = nn.Parameter(torch.full((1, 4), 5.0))
        same()
        layers[0] = nn.Linear(2, 4)
        same()
        layers[0].bias += 3
        same()


def test_a_negative_index_into_an_embedding_is_refused_as_torch_refuses_it() -> None:
    query = torch.zeros(1, 1, 8, 8)
    table, row = nn.Embedding(8, 1), torch.arange(8.0)
    for function in (
        lambda at: table(at)[0],
        lambda at: torch.index_select(row, 0, at)[0],
        lambda at: torch.gather(row, 0, at.view(1).long())[0],
        lambda at: torch.take_along_dim(row, at.view(1).long(), 0)[0],
        lambda at: torch.take_along_dim(row, at.view(1).long())[0],
    ):
        with pytest.raises(BoundsError, match=r"reaches 8|to 8; expected"):
            flex_attention(query, query, query, lambda s, b, h, q, kv, f=function: s + f(q - kv))
    taken = flex_attention(
        query, query, query, lambda s, b, h, q, kv: s + torch.take(row, (q - kv).long())
    )
    assert taken.shape == query.shape


def test_a_perceptron_that_would_unroll_too_far_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(2, 100), nn.ReLU(), nn.Linear(100, 100), nn.Linear(100, 1))
    query = torch.zeros(1, 1, 8, 8)
    with pytest.raises(TraceError, match="more than 4096 products for each score; compute"):
        flex_attention(
            query,
            query,
            query,
            lambda s, b, h, q, kv: s + layers(torch.stack([q / 8, kv / 8]))[0],
        )

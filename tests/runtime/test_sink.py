"""Compare attention sinks with one more column of a dense float64 softmax."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attnkit
from attnkit import AuxRequest, flex_attention, merge_states
from attnkit.errors import ArgumentError, ShapeError
from attnkit.runtime.reuse import fast_path

F64 = torch.float64
INF, NAN = float("inf"), float("nan")
LENGTHS = 40, 50
BACKENDS = ("cpu", "eager")


def late(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Keep no key in the first rows."""
    return kv <= q - 5


def draw(seed: int = 0, dtype: torch.dtype = F64) -> list[Tensor]:
    """Return query [2, 4, 40, 16], key and value [2, 2, 50, 16], and a sink [4]."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, LENGTHS[0], 16), (2, 2, LENGTHS[1], 16), (2, 2, LENGTHS[1], 16), (4,)]
    tensors = [torch.randn(s, generator=random, dtype=F64) for s in shapes]
    wide = F64 if dtype == F64 else torch.float32
    return [t.to(d).requires_grad_() for t, d in zip(tensors, (dtype,) * 3 + (wide,), strict=True)]


def attend(tensors: list[Tensor], score_mod: Any = None, mask: Any = late, **options: Any) -> Any:
    *qkv, sink = tensors
    options = {"enable_gqa": True, "return_lse": True, "backend": "cpu"} | options
    return flex_attention(*qkv, score_mod, mask, sink=sink, **options)


def dense(tensors: list[Tensor], slopes: Tensor | None = None, masked: bool = True) -> Any:
    """Compute out and LSE by the rule: the sink is a column of scores whose value is 0."""
    query, key, value, sink = tensors
    key, value = (t.repeat_interleave(2, 1) for t in (key, value))
    scores = query @ key.mT / 4
    rows, columns = (torch.arange(n) for n in LENGTHS)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (rows[:, None] - columns)
    if masked:
        scores = scores.masked_fill(columns > rows[:, None] - 5, -INF)
    column = sink[:, None, None].expand(2, 4, LENGTHS[0], 1)
    scores = torch.cat([scores, column], -1)
    value = torch.cat([value, value.new_zeros(2, 4, 1, 16)], 2)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("modded", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_is_one_more_column_without_a_value(backend: str, modded: bool) -> None:
    tensors = draw()
    slopes = torch.rand(4, dtype=F64).requires_grad_() if modded else None
    mod = None if slopes is None else lambda s, b, h, q, kv: s - slopes[h] * (q - kv)
    expected = dense(tensors, slopes)
    weights = [torch.randn_like(t) for t in expected]
    learned = [*tensors, *([] if slopes is None else [slopes])]
    exact = torch.autograd.grad(expected, learned, weights)
    for _ in range(3):  # the slow path, the call cache, the fast path
        found = attend(tensors, mod, backend=backend)
        gradients = torch.autograd.grad(found, learned, weights)
        for ours, true in zip((*found, *gradients), (*expected, *exact), strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(2, 2, 4, 3), (1, 1, 5, 3), (1, 1, 5, 2), (2,)]
    tensors = [torch.randn(s, generator=random, dtype=F64).requires_grad_() for s in shapes]
    call = lambda *t: attend(list(t), mask=lambda b, h, q, kv: kv < q)
    torch.autograd.gradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_keys_has_the_sink_as_lse(backend: str) -> None:
    tensors = draw()
    out, aux = attend(tensors, return_lse=False, return_aux=AuxRequest(True, True), backend=backend)
    assert bool((out[:, :, :5] == 0).all())
    assert bool((aux.lse[:, :, :5] == tensors[3][:, None]).all())
    assert bool((aux.max_scores[:, :, :5] == -INF).all())
    assert bool((aux.max_scores[:, :, 5:] < aux.lse[:, :, 5:]).all())
    weight = torch.zeros_like(aux.lse)
    weight[:, :, :5] = torch.randn(2, 4, 5, dtype=F64)
    gradients = torch.autograd.grad(aux.lse, tensors, weight, allow_unused=True)
    assert all(g is None or bool((g == 0).all()) for g in gradients[:3])
    torch.testing.assert_close(gradients[3], weight.sum((0, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_sinks_do_not_overflow(backend: str) -> None:
    tensors = [t.detach() for t in draw(dtype=torch.float32)]
    tensors[3] = torch.tensor([1e4, -1e4, 3e38, -3e38])
    out, lse = attend(tensors, backend=backend)
    plain, plain_lse = attend([*tensors[:3], torch.full((4,), -INF)], backend=backend)
    assert bool((out[:, ::2] == 0).all())
    assert bool((lse[:, ::2] == tensors[3][::2, None]).all())
    assert torch.equal(out[:, 1::2], plain[:, 1::2])
    assert torch.equal(lse[:, 1::2, 5:], plain_lse[:, 1::2, 5:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_of_minus_infinity_is_none(backend: str) -> None:
    tensors = draw(dtype=torch.float32)
    none = [*tensors[:3], None]
    with torch.no_grad():
        tensors[3].fill_(-INF)
    found, expected = (attend(t, backend=backend) for t in (tensors, none))
    assert all(map(torch.equal, found, expected))
    weights = [torch.randn_like(t) for t in found]
    gradients = torch.autograd.grad(found, tensors, weights)
    without = torch.autograd.grad(expected, tensors[:3], weights)
    for ours, theirs in zip(gradients[:3], without, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert bool((gradients[3] == 0).all())


@pytest.mark.parametrize("number", [INF, NAN])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_that_are_no_numbers_spoil_the_rows_with_keys(backend: str, number: float) -> None:
    tensors = [t.detach() for t in draw()]
    tensors[3][1] = number
    out, lse = attend(tensors, backend=backend)
    true, _ = dense(tensors)
    assert torch.equal(out[:, :, 5:].isnan(), true[:, :, 5:].isnan())
    assert bool(lse[:, 1, 5:].isnan().all())
    assert bool((out[:, :, :5] == 0).all())
    expected = tensors[3][:, None].expand(2, 4, 5)
    torch.testing.assert_close(lse[:, :, :5], expected, equal_nan=True)


def test_rows_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cpu template computes long rows in parts; it adds the sink once."""
    for module in ("forward", "backward"):
        name = f"attnkit.templates.cpu.{module}"
        monkeypatch.setattr(sys.modules[name], "SCORES", 4 * LENGTHS[0] * 16)
    tensors = draw()
    for mask in (late, None):
        expected = dense(tensors, masked=mask is not None)
        weights = [torch.randn_like(t) for t in expected]
        found = attend(tensors, mask=mask)
        pairs = [
            (*results, *torch.autograd.grad(results, tensors, weights))
            for results in (found, expected)
        ]
        for ours, true in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


@given(seed=st.integers(0, 99), cut=st.integers(1, LENGTHS[1] - 1), first=st.booleans())
def test_parts_of_the_keys_merge_if_one_of_them_has_the_sink(
    seed: int, cut: int, first: bool
) -> None:
    query, key, value, sink = (t.detach() for t in draw(seed))
    parts = []
    for keys, with_sink in ((slice(cut), first), (slice(cut, None), not first)):
        own = [query, key[:, :, keys], value[:, :, keys], sink if with_sink else None]
        parts += attend(own, mask=None)
    for found in (
        merge_states(*parts),
        merge_states(  # a sink is itself a result without keys
            *attend([query, key, value, None], mask=None),
            torch.zeros_like(query),
            sink[:, None].expand(query.shape[:3]),
        ),
    ):
        for ours, true in zip(found, dense([query, key, value, sink], masked=False), strict=True):
            torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


def test_repeated_calls_read_the_sink_that_they_are_given() -> None:
    """Calls that differ only in the sink share neither a result nor a prepared call."""
    attnkit.clear_caches()
    query, key, value, sink = (t.detach().float() for t in draw())
    qkv = [query, key, value]
    wide = torch.arange(8.0)
    sinks = [None, sink, sink + 1, None, wide[::2], wide[:4], sink.clone().requires_grad_()]
    for _ in range(3):
        for one in sinks:
            found, _ = attend([*qkv, one])
            column = torch.full((4,), -INF) if one is None else one.detach()
            expected, _ = dense([*(t.double() for t in qkv), column.double()])
            exact = expected.nan_to_num(0.0)  # rows without keys and without a sink
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
            assert found.requires_grad == (one is not None and one.requires_grad)
        for wrong, error in ((0.5, ArgumentError), (sink[:3], ShapeError)):
            with pytest.raises(error, match="sink"):
                attend([*qkv, wrong])
    buckets = [b for b in fast_path._buckets.values() if b.entries.all]
    kinds = {e.kind for b in buckets for e in b.entries.all}
    assert kinds == {"softmax", "softmax with a sink"}


@pytest.mark.parametrize("kind", ["mod", "mod without effect", "no mod"])
def test_compiles_to_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    table = torch.randn(4, requires_grad=True)
    mods: dict[str, Callable[..., Any] | None] = {
        "mod": lambda s, b, h, q, kv: s * table[h],
        "mod without effect": lambda s, b, h, q, kv: torch.where(q >= 0, s, table[h]),
        "no mod": None,
    }
    tensors = draw(dtype=torch.float32)
    call = lambda *t: attend(list(t), mods[kind], mask=lambda b, h, q, kv: kv <= q)
    learned = [*tensors, table]
    found, expected = (
        torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors),
        call(*tensors),
    )
    weights = [torch.randn_like(t) for t in found]
    for ours, theirs in zip(
        (*found, *torch.autograd.grad(found, learned, weights, allow_unused=True)),
        (*expected, *torch.autograd.grad(expected, learned, weights, allow_unused=True)),
        strict=True,
    ):
        if theirs is None:
            assert ours is None or bool((ours == 0).all())
        else:
            assert torch.equal(ours, theirs)


def test_deterministic_gradients_and_results_without_data() -> None:
    tensors = draw(dtype=torch.bfloat16)
    runs = [
        torch.autograd.grad(attend(tensors, deterministic=True)[0].float().sum(), tensors)
        for _ in range(2)
    ]
    assert all(map(torch.equal, *runs))
    out, lse = attend([t.detach().to("meta") for t in tensors])
    assert out.shape == (2, 4, LENGTHS[0], 16)
    assert lse.is_meta

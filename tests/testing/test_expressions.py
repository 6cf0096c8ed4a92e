"""Check that random functions trace, differ from one another, and are defined by their source."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from attnkit import create_mask, testing
from attnkit.errors import BoundsError
from attnkit.graph import ir
from attnkit.runtime.variant import Variant
from attnkit.testing import Case, Limits
from attnkit.testing.examine import bind
from attnkit.testing.reproducer import definition
from attnkit.testing.source import source_of
from attnkit.tracing.mask import Mask
from attnkit.tracing.tracer import Traced, trace

LIMITS = Limits(q_len=(1, 40), kv_len=(1, 30), batch=(1, 2), heads=(1, 4))
LARGEST = Case(40, 30, batch=2, heads=4, kv_heads=4)
MODS = testing.mask_mods(LIMITS).map(lambda f: ("mask", f)) | testing.score_mods(LIMITS).map(
    lambda f: ("score", f)
)

OPERATIONS = (
    "add sub mul div fdiv tdiv mod abs min max neg where load cast and or xor not shr lt le eq "
    "exp exp2 log1p tanh sigmoid sin cos erf erfinv lgamma hypot atan2 with_slope sqrt rsqrt score b h q kv"
)


def same(a: Traced, b: Traced) -> bool:
    return a.root is b.root and all(
        x.dtype == y.dtype and x.requires_grad == y.requires_grad and torch.equal(x, y)
        for x, y in zip(a.tensors, b.tensors, strict=True)
    )


@given(MODS)
def test_source_makes_the_same_function(drawn: tuple[Any, Any]) -> None:
    kind, function = drawn
    source = source_of(function, kind)
    scope: dict[str, Any] = {"__name__": "again"}
    exec(source.text, scope)
    assert same(trace(function, kind), trace(scope[source.name], kind))


@given(testing.variants(LIMITS))
def test_a_drawn_variant_serves_its_largest_sizes(drawn: Variant) -> None:
    bind(drawn, LARGEST, torch.device("cpu"))


@given(testing.masks(LIMITS))
def test_source_of_a_composed_mask_makes_the_same_mask(mask: Mask) -> None:
    scope: dict[str, Any] = {"__name__": "again"}
    exec(f"from attnkit import Variant\n{definition(Variant(None, mask))}", scope)
    again = create_mask(scope["variant"].mask, *LARGEST.dense_shape)
    assert again.equal(create_mask(mask, *LARGEST.dense_shape))


def test_the_grammar_reaches_every_kind_of_operation() -> None:
    seen: Counter[str] = Counter()
    dtypes, gradients = set(), set()

    @settings(
        max_examples=800,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(MODS)
    def collect(drawn: tuple[Any, Any]) -> None:
        kind, function = drawn
        found = trace(function, kind)
        seen.update({n.op for n in ir.topo(found.root)})
        seen.update(ir.reads(found.root))
        dtypes.update(t.dtype for t in found.tensors)
        gradients.update((t.requires_grad, t.is_leaf) for t in found.tensors)

    collect()
    assert set(OPERATIONS.split()) <= set(seen)
    assert {torch.int64, torch.bool, torch.float32, torch.float64, torch.bfloat16} <= dtypes
    assert gradients == {(False, True), (True, True), (True, False)}


@given(st.data())
def test_lengths_stay_inside_and_meet_tile_edges(data: st.DataObject) -> None:
    assert 5 <= data.draw(testing.lengths(5, 40)) <= 40


@pytest.mark.parametrize("what", ["q_len", "kv_len", "batch", "heads"])
def test_limits_find_the_size_of_a_table(what: str) -> None:
    from attnkit.testing.limits import find_limits

    table = torch.randn(6)
    index = {"q_len": "q", "kv_len": "kv", "batch": "b", "heads": "h"}[what]

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + table[{"b": b, "h": h, "q": q, "kv": kv}[index]]

    variant = Variant(mod)
    found = find_limits(variant, torch.device("cpu"))
    most = {"q_len": 200, "kv_len": 200, "batch": 3, "heads": 8}
    for name, default in most.items():
        assert getattr(found, name) == (1, min(6, default) if name == what else default)
    with pytest.raises(BoundsError):
        bind(variant, Case(**{"q_len": 1, "kv_len": 1, what: 7}), torch.device("cpu"))

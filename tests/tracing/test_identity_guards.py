"""Check that a guarded function gives the same trace as a new one, whatever was edited."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex

from attnkit import masks
from attnkit.masks._examples import examples as mask_examples
from attnkit.mods._examples import examples as mod_examples
from attnkit.tracing import guards, identity_guards
from attnkit.tracing.guards import lookup_by_identity, trace_cached
from attnkit.tracing.mask import Mask
from attnkit.tracing.tracer import Kind, trace

CPU = torch.device("cpu")
LAG = 1
TABLE = torch.arange(8)


def check(function: Any, kind: Kind = "mask") -> None:
    """Check that two cached traces of a function equal a new trace."""
    for _ in range(2):
        cached, true = trace_cached(function, kind, CPU), trace(function, kind, CPU)
        assert cached.root is true.root
        assert len(cached.tensors) == len(true.tensors)
        assert all(a is b for a, b in zip(cached.tensors, true.tensors, strict=True))


def guarded(function: Any, kind: Kind = "mask") -> bool:
    return lookup_by_identity(function, kind, CPU) is not None


def inner_of(size: int) -> Any:
    return lambda b, h, q, kv: q - kv <= size


class State:
    """Build a mask_mod, with functions that edit each object that it depends on."""

    def __init__(self) -> None:
        size: Any = 2
        table: Any = torch.arange(8)
        helper: Any = inner_of(3)
        numbers, options = [1, 2], {"lag": 0}
        part = Mask(inner_of(5)) & Mask(inner_of(6))

        def mask(b: Any, h: Any, q: Any, kv: Any, more: int = 1, *, less: int = 0) -> Any:
            near = (q - kv <= size + LAG + more - less) & (table[q] >= table[kv] + TABLE[kv])
            near = near & (q >= kv + options["lag"] + numbers[0])
            return near & helper(b, h, q, kv) & part(b, h, q, kv)

        def set_size(x: Any) -> None:
            nonlocal size
            size = x

        def set_table(x: Any) -> None:
            nonlocal table
            table = x

        def set_helper(x: Any) -> None:
            nonlocal helper
            helper = x

        self.mask, self.helper, self.numbers, self.options, self.part = (
            mask, lambda: helper, numbers, options, part,
        )  # fmt: skip
        self.table = lambda: table
        self.set_size, self.set_table, self.set_helper = set_size, set_table, set_helper


EDITS: dict[str, Callable[[State, int], None]] = {
    "a number in a cell": lambda s, n: s.set_size(n),
    "a tensor in a cell": lambda s, n: s.set_table(torch.arange(8) + n),
    "a tensor of another shape": lambda s, n: s.set_table(torch.arange(8 + n)),
    "a tensor of another dtype": lambda s, n: s.set_table(torch.arange(8, dtype=torch.int32)),
    "a tensor's data": lambda s, n: s.table().fill_(n),
    "a tensor's memory": lambda s, n: setattr(s.table(), "data", torch.arange(8 + n)),
    "a function in a cell": lambda s, n: s.set_helper(inner_of(n)),
    "an inner function's cell": lambda s, n: setattr(s.helper().__closure__[0], "cell_contents", n),
    "an inner function's code": lambda s, n: setattr(
        s.helper(), "__code__", (lambda size: lambda b, h, q, kv: q + kv <= size)(0).__code__
    ),
    "defaults": lambda s, n: setattr(s.mask, "__defaults__", (n,)),
    "keyword defaults": lambda s, n: setattr(s.mask, "__kwdefaults__", {"less": n}),
    "a keyword default": lambda s, n: s.mask.__kwdefaults__.update(less=n),
    "a list's item": lambda s, n: s.numbers.__setitem__(0, n),
    "a list's length": lambda s, n: s.numbers.insert(0, n),
    "a dict's item": lambda s, n: s.options.update(lag=n),
    "a mask's operator": lambda s, n: setattr(s.part, "op", ("and", "or", "xor")[n % 3]),
    "a mask's parts": lambda s, n: setattr(s.part, "parts", (Mask(inner_of(n)), s.part.parts[1])),
    "a part's function": lambda s, n: setattr(s.part.parts[0], "function", inner_of(n)),
    "a global": lambda s, n: globals().update(LAG=n),
    "a global tensor": lambda s, n: globals().update(TABLE=torch.arange(8) + n),
    "nothing": lambda s, n: None,
}


@given(st.lists(st.tuples(st.sampled_from(sorted(EDITS)), st.integers(0, 300)), max_size=6))
def test_edits_are_seen(edits: list[tuple[str, int]]) -> None:
    kept = LAG, TABLE
    try:
        state = State()
        check(state.mask)
        assert guarded(state.mask)
        for name, n in edits:
            EDITS[name](state, n)
            check(state.mask)
    finally:
        globals().update(LAG=kept[0], TABLE=kept[1])


@pytest.mark.parametrize("name", sorted(set(EDITS) - {"nothing"}))
def test_each_edit_is_seen(name: str) -> None:
    kept = LAG, TABLE
    try:
        state = State()
        check(state.mask)
        EDITS[name](state, 7)
        changed = name != "a tensor's data"  # that is no part of a trace
        assert guarded(state.mask) is not changed
        check(state.mask)
    finally:
        globals().update(LAG=kept[0], TABLE=kept[1])


def test_a_tensor_that_is_gone_is_not_none() -> None:
    bias: Any = torch.ones(4)
    mod = lambda s, b, h, q, kv: s + (0 if bias is None else bias[h])
    check(mod, "score")
    bias = None
    gc.collect()
    assert not guarded(mod, "score")
    check(mod, "score")


def test_a_global_that_appears() -> None:
    scope: dict[str, Any] = {"__name__": "user"}
    exec("def mask(b, h, q, kv):\n    return abs(q - kv) <= 2", scope)
    check(scope["mask"])
    assert guarded(scope["mask"])
    scope["abs"] = lambda x: x
    assert not guarded(scope["mask"])
    check(scope["mask"])


def test_gradients_wanted_of_a_captured_tensor() -> None:
    bias = torch.ones(4)
    mod = lambda s, b, h, q, kv: s + bias[h]
    check(mod, "score")
    assert guarded(mod, "score")
    bias.requires_grad_()
    assert not guarded(mod, "score")
    check(mod, "score")


def test_attributes_of_functions_and_classes() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv <= mask.size + Config.size  # type: ignore[attr-defined]

    class Config:
        size = 1

    mask.size = 2  # type: ignore[attr-defined]
    check(mask)
    mask.size = 3  # type: ignore[attr-defined]
    check(mask)
    Config.size = 5
    check(mask)


def test_functions_that_torch_made_of_others() -> None:
    size = 2
    near = lambda b, h, q, kv: q - kv <= size
    mask = flex.and_masks(near, lambda b, h, q, kv: q >= kv)
    check(mask)
    size = 5
    check(mask)


def test_another_function_at_the_same_address() -> None:
    for size in range(50):
        mask = inner_of(size)
        check(mask)
        del mask


def test_another_tensor_at_the_same_address() -> None:
    table = torch.arange(8)
    holder: list[Any] = [table, {"more": (table,)}]

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (table[q] >= kv) & (holder[0][q] >= kv) & (holder[1]["more"][0][q] >= kv)

    for n in range(60):
        check(mask)
        assert guarded(mask)
        holder.clear()
        del table
        table = torch.arange(8 + n % 3)
        holder.append(table if n % 2 else torch.arange(8))
        holder.append({"more": (table if n % 4 else torch.arange(9),)})


def test_something_else_in_the_place_of_a_tensor() -> None:
    holder: list[Any] = [torch.arange(8), torch.arange(8)]

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (holder[0][q] >= kv) & (holder[1][q] >= kv)

    for edit in (
        lambda: holder.reverse(),
        lambda: holder.append(1),
        lambda: holder.__setitem__(0, holder[1]),
    ):
        check(mask)
        assert guarded(mask)
        edit()
        assert not guarded(mask)
    check(mask)


def test_a_watch_keeps_nothing_alive() -> None:
    table, other = torch.arange(8), torch.arange(8)
    holder = [table]

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (table[q] >= kv) & (holder[0][q] >= kv) & (other[q] >= kv)

    check(mask)
    assert guarded(mask)
    alive = weakref.ref(table), weakref.ref(other), weakref.ref(mask)
    table = other = holder[0] = torch.arange(9)
    gc.collect()
    assert alive[0]() is alive[1]() is None
    before = len(guards._guarded)
    del mask
    gc.collect()
    assert alive[2]() is None
    assert len(guards._guarded) == before - 1


def test_partials_and_masks_are_guarded() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any, size: int) -> Any:
        return q - kv <= size

    some = functools.partial(mask, size=2)
    check(some)
    assert guarded(some)
    some.keywords["size"] = 5
    check(some)
    joined = masks.causal() & masks.document(torch.arange(8) // 3)
    check(joined)
    assert guarded(joined)


def test_a_mask_for_other_lengths_is_another() -> None:
    mask = Mask(inner_of(2), lengths=(8, 8))
    check(mask)
    assert guarded(mask)
    mask.lengths = Mask(inner_of(2), lengths=(9, 9)).lengths
    assert not guarded(mask)


def test_the_library_is_guarded() -> None:
    for name, example in mask_examples(64).items():
        check(example.mask)
        assert guarded(example.mask), name
    for name, score in mod_examples(64).items():
        check(score.mod, "score")
        assert guarded(score.mod, "score"), name


def test_what_cannot_be_guarded_is_traced() -> None:
    class Window:
        size = 2

        def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return q - kv <= self.size

    window = Window()
    check(window)
    assert not guarded(window)
    window.size = 4
    check(window)


def test_a_function_is_expected_where_it_was() -> None:
    def first(q: Any) -> Any:
        return q

    def second(q: Any) -> Any:
        return -q

    expected = identity_guards.expect([first])
    assert identity_guards.matches([first], expected)
    assert not identity_guards.matches([second], expected)
    del first
    gc.collect()
    assert not identity_guards.matches([None], expected)

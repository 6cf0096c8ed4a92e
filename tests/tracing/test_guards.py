"""Check that a trace is reused exactly as long as it is valid."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterator
from sys import getrecursionlimit
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attnkit.tracing import guards
from attnkit.tracing.guards import trace_cached
from attnkit.tracing.mask import Mask
from attnkit.util import caches

CPU = torch.device("cpu")
WINDOW = 3


class Counter:
    def __init__(self) -> None:
        self.traces = 0


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    count, original = Counter(), guards.trace

    def counted(*arguments: Any) -> Any:
        count.traces += 1
        return original(*arguments)

    monkeypatch.setattr(guards, "trace", counted)
    caches.clear_all()
    return count  # type: ignore[return-value]


def text(function: Any, kind: Any = "mask") -> str:
    return str(trace_cached(function, kind, CPU)).split(" = ")[1]


def window_of(size: int) -> Any:
    return lambda b, h, q, kv: q - kv <= size


def slopes_of(slopes: torch.Tensor) -> Any:
    return lambda s, b, h, q, kv: s + slopes[h] * (kv - q)


def test_unchanged_function_is_traced_once(counter: Counter) -> None:
    table = torch.arange(8)
    mask = lambda b, h, q, kv: table[q] - table[kv] <= WINDOW
    for _ in range(5):
        trace_cached(mask, "mask", CPU)
    assert counter.traces == 1


def test_cleared_caches_trace_again(counter: Counter) -> None:
    mask = window_of(5)
    root = trace_cached(mask, "mask", CPU).root
    caches.clear_all()
    assert trace_cached(mask, "mask", CPU).root is root
    assert counter.traces == 2


def test_equal_closures_share_a_trace(counter: Counter) -> None:
    assert text(window_of(5)) == text(window_of(5)) == "q - kv <= 5"
    assert counter.traces == 1
    assert text(window_of(6)) == "q - kv <= 6"
    assert counter.traces == 2


def test_another_tensor_of_the_same_shape_is_an_argument(counter: Counter) -> None:
    first, second = torch.ones(4), torch.zeros(4)
    assert trace_cached(slopes_of(first), "score", CPU).tensors[0] is first
    assert trace_cached(slopes_of(second), "score", CPU).tensors[0] is second
    assert counter.traces == 1
    trace_cached(slopes_of(torch.ones(5)), "score", CPU)
    assert counter.traces == 2


def test_swapped_tensors_stay_swapped(counter: Counter) -> None:
    def pair(x: torch.Tensor, y: torch.Tensor) -> Any:
        return lambda s, b, h, q, kv: s * x[h] + y[h]

    one, two = torch.ones(4), torch.zeros(4)
    assert trace_cached(pair(one, two), "score", CPU).tensors == (one, two)
    swapped = trace_cached(pair(two, one), "score", CPU).tensors
    assert swapped[0] is two
    assert swapped[1] is one
    both = trace_cached(pair(one, one), "score", CPU)
    assert len(both.tensors) == 1  # the same tensor twice is one argument: another graph


def test_changed_closure_value(counter: Counter) -> None:
    size = 2

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv <= size

    assert text(mask) == "q - kv <= 2"
    size = 4
    assert text(mask) == "q - kv <= 4"


def test_changed_global(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = lambda b, h, q, kv: q - kv <= WINDOW
    assert text(mask) == "q - kv <= 3"
    monkeypatch.setitem(globals(), "WINDOW", 7)
    assert text(mask) == "q - kv <= 7"


def test_changed_global_that_only_an_inner_function_reads(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = lambda: (lambda: q - kv <= WINDOW)()
        return near()

    assert text(mask) == "q - kv <= 3"
    monkeypatch.setitem(globals(), "WINDOW", 7)
    assert text(mask) == "q - kv <= 7"


def test_gradients_wanted_of_another_tensor(counter: Counter) -> None:
    """A function that reads `requires_grad` is traced again if the captured tensor's differs."""

    def biased(bias: torch.Tensor) -> Any:
        return lambda s, b, h, q, kv: s + bias[h] if bias.requires_grad else s * bias[h]

    plain, learned = torch.ones(4), torch.ones(4, requires_grad=True)
    for _ in range(2):
        assert text(biased(plain), "score") == "score * bias[h]"
        assert text(biased(learned), "score") == "score + bias[h]"
    assert counter.traces == 2


@pytest.mark.parametrize("change", ["append", "insert", "pop", "clear"])
def test_a_captured_list_of_another_length(counter: Counter, change: str) -> None:
    sizes = [2, 3]
    mask = lambda b, h, q, kv: q - kv <= sum(sizes)
    assert text(mask) == "q - kv <= 5"
    {
        "append": lambda: sizes.append(4),
        "insert": lambda: sizes.insert(0, 4),
        "pop": sizes.pop,
        "clear": sizes.clear,
    }[change]()
    assert text(mask) == f"q - kv <= {sum(sizes)}"


def test_a_captured_container_that_grew(counter: Counter) -> None:
    options, nested = {"lag": 1}, [[2], [3]]
    mask = lambda b, h, q, kv: q - kv <= sum(options.values()) + sum(map(sum, nested))
    assert text(mask) == "q - kv <= 6"
    options["more"] = 10
    assert text(mask) == "q - kv <= 16"
    nested[1].append(100)
    assert text(mask) == "q - kv <= 116"
    nested.append([1000])
    assert text(mask) == "q - kv <= 1116"


def test_changed_default(counter: Counter) -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any, size: int = 2, *, lag: int = 0) -> Any:
        return q - kv <= size + lag

    assert text(mask) == "q - kv <= 2"
    mask.__defaults__ = (5,)
    assert text(mask) == "q - kv <= 5"
    mask.__kwdefaults__ = {"lag": 3}
    assert text(mask) == "q - kv <= 8"


def test_changed_attribute(counter: Counter) -> None:
    class Window:
        size = 2

        def __call__(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return q - kv <= self.size

    mask = Window()
    assert text(mask) == "q - kv <= 2"
    mask.size = 9
    assert text(mask) == "q - kv <= 9"


def test_changed_value_inside_a_list_or_dict(counter: Counter) -> None:
    sizes, options = [2], {"lag": 1}
    mask = lambda b, h, q, kv: q - kv <= sizes[0] + options["lag"]
    assert text(mask) == "q - kv <= 3"
    sizes[0] = 5
    assert text(mask) == "q - kv <= 6"
    options["lag"] = 0
    assert text(mask) == "q - kv <= 5"
    assert counter.traces == 3


def test_changed_function_that_is_called(counter: Counter) -> None:
    inner = window_of(1)
    mask = lambda b, h, q, kv: inner(b, h, q, kv) & (q >= kv)
    assert "q - kv <= 1" in text(mask)
    assert "q - kv <= 1" in text(mask)
    assert counter.traces == 1
    inner = window_of(2)
    assert "q - kv <= 2" in text(mask)


def test_partial_and_mask_objects(counter: Counter) -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any, size: int) -> Any:
        return q - kv <= size

    for size in (1, 1, 2):
        assert text(functools.partial(mask, size=size)) == f"q - kv <= {size}"
    assert counter.traces == 2
    for _ in range(3):
        joined = Mask(window_of(4)) & Mask(lambda b, h, q, kv: q >= kv)
        assert text(joined) == "(q - kv <= 4) & (kv <= q)"
    assert counter.traces == 3


def isin(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.isin(kv, torch.tensor([0, 3])) | (q >= kv)  # reads a name that is its own


def halves(b: Any, h: Any, q: Any, kv: Any, depth: int = 2) -> Any:
    return q >= kv if depth == 0 else halves(b, h, q // 2, kv // 2, depth - 1)


def test_functions_that_name_themselves(counter: Counter) -> None:
    for _ in range(2):
        assert text(isin) == "(kv == t0[0]) | (kv == t0[1]) | (kv <= q)"
        assert text(halves) == "kv // 2 // 2 <= q // 2 // 2"
    assert counter.traces == 3  # a tensor made inside of a function is another one at each call


def test_one_tensor_read_by_two_names(counter: Counter) -> None:
    one, other = torch.arange(8), torch.arange(8)

    def pair(first: torch.Tensor, second: torch.Tensor) -> Any:
        return lambda b, h, q, kv: first[q] >= second[kv]

    for a, b in ((one, one), (other, other), (one, other)):
        found = trace_cached(pair(a, b), "mask", CPU).tensors
        assert {id(t) for t in found} == {id(a), id(b)}
    assert counter.traces == 2


def test_true_is_not_one(counter: Counter) -> None:
    def scaled(factor: Any) -> Any:
        return lambda s, b, h, q, kv: s * factor

    assert text(scaled(True), "score") == text(scaled(1), "score") == "score"
    assert text(scaled(2), "score") == "score * 2.0"
    assert text(scaled(-0.0), "score") == "score * -0.0"
    assert text(scaled(0.0), "score") == "score * 0.0"
    assert counter.traces == 5


def test_value_read_from_a_tensor_is_read_again(counter: Counter) -> None:
    size = torch.tensor(2)
    mask = lambda b, h, q, kv: q - kv <= size.item()
    assert text(mask) == "q - kv <= 2"
    size.fill_(6)
    assert text(mask) == "q - kv <= 6"


def _imported(b: Any, h: Any, q: Any, kv: Any) -> Any:
    from guards_settings import size  # type: ignore[import-not-found]

    return q - kv <= size


_aliased = torch.get_num_threads
UNSEEN: dict[str, Any] = {
    "globals": lambda b, h, q, kv: q - kv <= globals()["WINDOW"],
    "eval": lambda b, h, q, kv: q - kv <= eval("WINDOW"),
    "an import": _imported,
    "a setting of torch": lambda b, h, q, kv: q - kv <= torch.get_num_threads(),
    "a setting by another name": lambda b, h, q, kv: q - kv <= _aliased(),
    "another module's function in C": lambda b, h, q, kv: q - kv <= getrecursionlimit(),
    "in an inner function": lambda b, h, q, kv: (lambda: q - kv <= eval("WINDOW"))(),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_functions_that_read_unguarded_state_are_traced_again(
    name: str, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = types.ModuleType("guards_settings")
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    threads, limit = torch.get_num_threads(), sys.getrecursionlimit()
    try:
        for size in (11, 12):
            torch.set_num_threads(size)
            sys.setrecursionlimit(limit + size)
            settings.size = size  # type: ignore[attr-defined]
            monkeypatch.setitem(globals(), "WINDOW", size)
            assert text(UNSEEN[name]) == f"q - kv <= {size + limit * (name.endswith('in C'))}"
    finally:
        torch.set_num_threads(threads)
        sys.setrecursionlimit(limit)


_draw, _generator, _numbers = np.random.randint, np.random.default_rng(0), np.random
RANDOM: dict[str, Any] = {
    "numpy.random": lambda b, h, q, kv: q - kv <= np.random.randint(1 << 20),
    "a name of numpy.random": lambda b, h, q, kv: q - kv <= _numbers.randint(1 << 20),
    "a function of numpy.random": lambda b, h, q, kv: q - kv <= _draw(1 << 20),
    "a generator": lambda b, h, q, kv: q - kv <= _generator.integers(1 << 20),
    "random": lambda b, h, q, kv: q - kv <= random.randrange(1 << 20),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_drawn_at_every_call(name: str, counter: Counter) -> None:
    random.seed(1)
    np.random.seed(1)
    assert len({text(RANDOM[name]) for _ in range(4)}) > 1
    assert counter.traces == 4


def test_attributes_of_a_class_without_a_module_are_read_again(counter: Counter) -> None:
    scope: dict[str, Any] = {}  # without __name__, as of code that a tool executes
    exec(
        "class Options:\n    window = 1\nmask = lambda b, h, q, kv: q - kv <= Options.window", scope
    )
    assert scope["Options"].__module__ == "builtins"
    assert text(scope["mask"]) == "q - kv <= 1"
    scope["Options"].window = 2
    assert text(scope["mask"]) == "q - kv <= 2"


def test_a_function_that_wraps_one_of_torch_is_walked_over(counter: Counter) -> None:
    scope: dict[str, Any] = {"__name__": "user", "wraps": functools.wraps, "relu": F.relu}
    exec("size = 1\n@wraps(relu)\ndef limit():\n    return size", scope)
    limit = scope["limit"]
    assert limit.__module__ == "torch.nn.functional"
    mask = lambda b, h, q, kv: q - kv <= limit()
    assert text(mask) == "q - kv <= 1"
    scope["size"] = 2
    assert text(mask) == "q - kv <= 2"


def test_a_function_without_a_module_can_be_called(counter: Counter) -> None:
    scope: dict[str, Any] = {}
    exec("def twice(x):\n    return 2 * x", scope)
    twice = scope["twice"]
    assert twice.__module__ is None
    assert text(lambda s, b, h, q, kv: twice(s), "score") == "score * 2.0"


def test_imports_that_do_not_change_are_known(counter: Counter) -> None:
    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        import math

        import torch.nn.functional as functional

        return functional.softplus(s) * math.sqrt(4)

    for _ in range(3):
        trace_cached(score, "score", CPU)
    assert counter.traces == 1


def test_classes_of_torch_do_not_change(counter: Counter) -> None:
    kind = torch.Tensor

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & isinstance(q, kind)

    for _ in range(3):
        trace_cached(mask, "mask", CPU)
    assert counter.traces == 1


def test_edited_tensor_needs_no_second_trace(counter: Counter) -> None:
    table = torch.arange(8)
    mask = lambda b, h, q, kv: table[q] >= kv
    first = trace_cached(mask, "mask", CPU)
    table.add_(1)
    assert trace_cached(mask, "mask", CPU).tensors[0] is table
    assert trace_cached(mask, "mask", CPU).root is first.root
    assert counter.traces == 1


def test_no_tensor_is_kept_alive() -> None:
    import weakref

    table = torch.arange(8)
    alive = weakref.ref(table)
    trace_cached((lambda t: lambda b, h, q, kv: t[q] >= kv)(table), "mask", CPU)
    del table
    assert alive() is None

"""Check that numbers of Python that change between calls are inputs of a compiled graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import attnkit
from attnkit import flex_attention, masks, mods

STEPS = 12  # more than the number of graphs after which Dynamo gives up
LENGTH = 40
temperature, window = 1.0, 1
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(length: int = LENGTH) -> list[Tensor]:
    return [torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3)]


def check(
    call: Call, change: Callable[[int], object], backend: str = "aot_eager", graphs: int = 2
) -> None:
    """Check results and gradients after each change, and how many graphs were compiled.

    Dynamo takes a number for a constant at first, and for an input when it has changed.
    """
    counter = CompileCounterWithBackend(backend)
    compiled, made = torch.compile(call, fullgraph=True, backend=counter), inputs()
    for step in range(STEPS):
        change(step)
        results = [f(*made) for f in (compiled, call)]
        grads = [torch.autograd.grad(out.sin().sum(), made) for out in results]
        for ours, expected in zip([results[0], *grads[0]], [results[1], *grads[1]], strict=True):
            assert torch.equal(ours, expected), step
    assert counter.frame_count <= graphs


def scaled(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * temperature


def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q - kv < window) & (kv <= q)


def change_globals(step: int) -> None:
    global temperature, window
    temperature, window = 1 + step * 0.17, 1 + 3 * step


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_globals(backend: str) -> None:
    check(lambda q, k, v: flex_attention(q, k, v, scaled, near), change_globals, backend)


def test_cells_of_a_closure() -> None:
    heat, size = 1.0, 1

    def change(step: int) -> None:
        nonlocal heat, size
        heat, size = 1 - step * 0.03, 2 + step

    mod = lambda s, b, h, i, j: s * heat + heat
    mask = lambda b, h, i, j: (i - j).abs() < size
    check(lambda q, k, v: flex_attention(q, k, v, mod, mask), change)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heat, self.size = 1.0, 1

    def mod(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score / self.heat

    def mask(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv < self.size

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = flex_attention(query, key, value, self.mod, self.mask)
        return out


@pytest.mark.parametrize("owner", [Layer(), SimpleNamespace(heat=1.0, size=1)])
def test_attributes(owner: Any) -> None:
    def change(step: int) -> None:
        owner.heat, owner.size = 1 + step * 0.1, 1 + step

    mod = lambda s, b, h, i, j: s / owner.heat
    mask = lambda b, h, i, j: i - j < owner.size
    check(lambda q, k, v: flex_attention(q, k, v, mod, mask), change)
    if isinstance(owner, Layer):
        torch._dynamo.reset()
        check(owner, change)


def test_arguments_of_partial_and_defaults() -> None:
    parts: list[Any] = []

    def change(step: int) -> None:
        parts[:] = [
            functools.partial(lambda s, b, h, i, j, heat: s * heat, heat=1 + step * 0.1),
            functools.partial(lambda size, b, h, i, j: i - j < size, 1 + step),
        ]

    check(lambda q, k, v: flex_attention(q, k, v, *parts), change)
    torch._dynamo.reset()
    now = [0]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heat, size = 1 + now[0] * 0.1, 1 + now[0]
        mod = lambda s, b, h, i, j, heat=heat: s * heat
        mask = lambda b, h, i, j, size=size: i - j < size
        out: Tensor = flex_attention(query, key, value, mod, mask)
        return out

    check(call, lambda step: now.__setitem__(0, step))


def test_arithmetic_on_numbers() -> None:
    own: list[Any] = [1.0, 1]

    def change(step: int) -> None:
        own[:] = [2 + step * 0.3, 2 + step]

    mod = lambda s, b, h, i, j: s * (own[0] * own[1] + 1) / own[1] - s**2 * own[0]
    mask = lambda b, h, i, j: (i // own[1] == j // own[1]) | (j < own[1] * 2 - 1)
    check(lambda q, k, v: flex_attention(q, k, v, mod, mask), change)


def test_powers_keep_the_forms_of_their_exponents() -> None:
    exponents = [0.5, 2.0, 1.0, -0.5, 3.0, -1.0, 0.7, 2.5, 0.0, 4.0, 1.5, 0.25]
    own = [0.0]
    mod = lambda s, b, h, i, j: (s.abs() + 1) ** own[0]
    check(
        lambda q, k, v: flex_attention(q, k, v, mod),
        lambda step: own.__setitem__(0, exponents[step]),
    )


def test_the_scale() -> None:
    own = [0.1]
    check(
        lambda q, k, v: flex_attention(q, k, v, scaled, scale=own[0]),
        lambda step: own.__setitem__(0, 0.1 + step * 0.02),
    )


MADE_INSIDE: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "softcap": lambda i: (mods.softcap(2 + i * 0.5), None),
    "log_sigmoid": lambda i: (mods.log_sigmoid(1 + i * 0.5), None),
    "log_relu": lambda i: (mods.log_relu(1 + i * 0.5), None),
    "sliding_window": lambda i: (None, masks.sliding_window(2 + i) & masks.prefix_lm(1 + i)),
    "size": lambda i: (None, masks.sliding_window(size=2 + i)),
    "streaming_llm": lambda i: (None, masks.streaming_llm(2 + i, 1 + i)),
    "longformer": lambda i: (None, masks.longformer(2 + i, 3)),
    "dilated": lambda i: (None, masks.dilated(2 + i, 2)),
    "chunked": lambda i: (None, masks.chunked(2 + i, start=1 + i)),
    "strided": lambda i: (None, masks.strided(2 + i)),
    "block_diagonal": lambda i: (None, masks.block_diagonal(2 + i)),
    "shift": lambda i: (None, masks.causal().shift(q=1 + i)),
}


@pytest.mark.parametrize("name", MADE_INSIDE)
def test_arguments_of_the_library(name: str) -> None:
    own = [0]
    build = MADE_INSIDE[name]
    check(
        lambda q, k, v: flex_attention(q, k, v, *build(own[0])),
        lambda step: own.__setitem__(0, step),
    )


def test_masks_aligned_at_the_end_of_any_lengths() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lengths = {"q_len": query.shape[2], "kv_len": key.shape[2]}
        mask = masks.sliding_window(9, align="bottom-right", **lengths)  # type: ignore[arg-type]
        out: Tensor = flex_attention(query, key, value, None, mask)
        return out

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for length in (20, 33, 50):
        made = [inputs(length)[0], *inputs(60)[1:]]
        assert torch.equal(compiled(*made), call(*made))
    assert counter.frame_count == 1


def test_a_number_whose_value_the_graph_depends_on() -> None:
    """A shift has another form for each distance, so each value is a graph of its own."""
    own = [0]
    check(
        lambda q, k, v: flex_attention(q, k, v, None, lambda b, h, i, j: (i >> own[0]) == j),
        lambda step: own.__setitem__(0, step % 3),
        graphs=4,
    )


def test_a_tensor_that_some_numbers_leave_unread() -> None:
    """`ids[i] * 0` is 0, so that the graph of that call reads fewer tensors than the operator has."""
    ids, other = torch.arange(LENGTH) % 5, torch.randn(LENGTH, requires_grad=True)
    table = torch.randn(LENGTH, requires_grad=True)
    own = [0]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mod = lambda s, b, h, i, j: s + table[ids[i] * own[0]] + other[j]
        mask = lambda b, h, i, j: ids[i] * own[0] <= j
        out: Tensor = flex_attention(query, key, value, mod, mask)
        return out

    compiled, made = torch.compile(call, fullgraph=True, backend="aot_eager"), inputs()
    for own[0] in (3, 2, 0, 5, 0):
        found = [
            torch.autograd.grad(f(*made).sum(), (*made, table, other)) for f in (compiled, call)
        ]
        for ours, expected in zip(*found, strict=True):
            assert torch.equal(ours, expected)


def test_lengths_that_functions_read_are_inputs() -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        mod = lambda s, b, h, i, j: s * ((i + 1.0) / length)
        out: Tensor = flex_attention(query, key, value, mod, lambda b, h, i, j: j < length - i)
        return out

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for length in (64, 100, 77, 33):
        made = inputs(length)
        assert torch.equal(compiled(*made), call(*made))
    assert counter.frame_count == 1


def test_a_number_computed_from_a_tensor() -> None:
    """A number that a tensor holds is an input too, without a guard on the data."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(query: Tensor, key: Tensor, value: Tensor, size: Tensor) -> Tensor:
        limit = size.item()
        out: Tensor = flex_attention(query, key, value, None, lambda b, h, i, j: i - j < limit)
        return out

    made = inputs()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for size in (3, 9, 30):
            expected = flex_attention(*made, None, lambda b, h, i, j, n=size: i - j < n)
            assert torch.equal(call(*made, torch.tensor(size)), expected)


def test_an_int_of_more_than_32_bits_is_refused() -> None:
    own = [5]
    call = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, None, lambda b, h, i, j: i - j < own[0]),
        fullgraph=True,
        backend="aot_eager",
    )
    made = inputs()
    for own[0] in (5, 7):
        call(*made)
    own[0] = 2**40
    with pytest.raises(attnkit.BoundsError, match=r"1099511627776 .* does not fit into 32 bits"):
        call(*made)

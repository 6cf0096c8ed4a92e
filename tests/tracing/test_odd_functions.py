"""Check unusual Python functions as mods: recursive, without a module, from exec, wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnkit import Mask, create_mask, flex_attention
from attnkit.errors import AttnkitError, TraceError

QUERY = torch.randn(1, 2, 8, 8)


def even(x: Any, depth: int = 4) -> Any:
    return x if depth == 0 else odd(x, depth - 1)


def odd(x: Any, depth: int) -> Any:
    return even(x, depth - 1)


def endless(x: Any) -> Any:
    return again(x)


def again(x: Any) -> Any:
    return endless(x)


def without_module(f: Callable[..., Any]) -> Callable[..., Any]:
    f.__module__ = None  # type: ignore[assignment]
    return f


def executed(source: str) -> Any:
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope["f"]


def wrapper_loop() -> Callable[..., Any]:
    f = lambda s, b, h, q, kv: s * 2
    f.__wrapped__ = f  # type: ignore[attr-defined]
    return f


helper = without_module(lambda x: x * 2)
nested: list[Any] = [2.0]
for _ in range(3000):
    nested = [nested]

# score_mods that double the score
MODS: dict[str, Callable[..., Any]] = {
    "mutually recursive helpers": lambda s, b, h, q, kv: even(s) * 2,
    "no module": without_module(lambda s, b, h, q, kv: s * 2),
    "helper without a module": lambda s, b, h, q, kv: helper(s),
    "executed": executed("f = lambda s, b, h, q, kv: s * 2"),
    "helper of an executed function": executed(
        "def g(x): return x * 2\ndef f(s, b, h, q, kv): return g(s)"
    ),
    "decorated": functools.wraps(max)(lambda s, b, h, q, kv: s * 2),
    "partial of a partial": functools.partial(
        functools.partial(lambda k, n, s, b, h, q, kv: s * k * n, 1), 2
    ),
    "wrapper loop": wrapper_loop(),
    "lists within lists": lambda s, b, h, q, kv: s * 2 if nested else s,
}


@pytest.mark.parametrize("name", MODS)
def test_runs(name: str) -> None:
    for backend in ("cpu", "eager", "cpu"):  # the third call may reuse the trace
        out = flex_attention(QUERY, QUERY, QUERY, MODS[name], backend=backend)
        expected = flex_attention(QUERY, QUERY, QUERY, lambda s, b, h, q, kv: s + s)
        torch.testing.assert_close(out, expected)


async def coroutine(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return s


def generator(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    yield s


def bad_signature() -> Callable[..., Any]:
    f = lambda s, b, h, q, kv: s
    f.__signature__ = "none"  # type: ignore[attr-defined]
    return f


REFUSED: dict[str, Callable[..., Any]] = {
    "endless helpers": lambda s, b, h, q, kv: endless(s),
    "coroutine": coroutine,
    "generator": generator,
    "builtin": max,
    "class": dict,
    "unbound method": torch.Tensor.add,
    "module": torch.nn.Linear(2, 2),
    "missing global": executed("def f(s, b, h, q, kv): return nothing + s"),
}


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    for _ in range(2):
        with pytest.raises(TraceError):
            flex_attention(QUERY, QUERY, QUERY, REFUSED[name])


def test_a_signature_that_is_none() -> None:
    """A function whose signature `inspect` cannot read is called as usual."""
    out = flex_attention(QUERY, QUERY, QUERY, bad_signature())
    torch.testing.assert_close(out, flex_attention(QUERY, QUERY, QUERY))


def test_masks_of_such_functions() -> None:
    mask = Mask(without_module(lambda b, h, q, kv: even(q) >= kv)) & executed(
        "f = lambda b, h, q, kv: q - kv < 3"
    )
    expected = create_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 3), 1, 1, 8, 8)
    assert torch.equal(create_mask(mask, 1, 1, 8, 8), expected)
    with pytest.raises(AttnkitError):
        create_mask(Mask(endless), 1, 1, 8, 8)

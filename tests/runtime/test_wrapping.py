"""Check that int32 arithmetic wraps as in PyTorch, so that hash masks are equal on all backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnkit import create_block_mask, create_mask, flex_attention
from attnkit.errors import BoundsError, TraceError
from attnkit.graph import ir
from attnkit.sparsity.block_runs import EMPTY, FULL, PARTIAL
from attnkit.tracing.tracer import trace

S = 192
SEEDS = torch.tensor([0x12345678, -0x7FFFFFFF, 2**31 - 1, -(2**31)], dtype=torch.int32)
TABLE = torch.arange(S, dtype=torch.int32) * 40503
WIDE = torch.arange(S) * 40503


def xorshift(x: Any) -> Any:
    x = x ^ (x << 13)
    x = x ^ (x >> 17)
    return x ^ (x << 5)


def murmur(x: Any) -> Any:
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


HASHES: dict[str, Callable[..., Any]] = {
    "linear congruential": lambda b, h, q, kv: (q * 1103515245 + kv * 12345) % 7 == 0,
    "Knuth's product": lambda b, h, q, kv: (q * 2654435761 ^ kv * 40503 * 65537) % 100 < 30,
    "murmur": lambda b, h, q, kv: murmur(q * S + kv) & 255 < 64,
    "xorshift": lambda b, h, q, kv: xorshift(q * 73856093 + kv * 19349663 + h) % 10 < 3,
    "shifts": lambda b, h, q, kv: (q << 28) < (kv << 27),
    "absolute": lambda b, h, q, kv: (q * 0x7FEDCBA9 - kv * 0x6ABCDEF1).abs() % 5 == 0,
    "negated": lambda b, h, q, kv: -(kv * 0x7FFFFFF1) > q * 0x7FFFFFF1,
    "a seed per head": lambda b, h, q, kv: ((SEEDS[h] ^ q * 65599 * 65599) * 31 + kv) % 3 == 0,
    "a table": lambda b, h, q, kv: TABLE[q] * 65599 - TABLE[kv] * 65599 < 0,
    "a square": lambda b, h, q, kv: (q * 70000) ** 2 > (kv * 70000) ** 2,
    "one side": lambda b, h, q, kv: ((kv * 1566083941) >> 20) & 1 == 0,
    "beside a causal mask": lambda b, h, q, kv: (q >= kv) & (murmur(q - kv) % 4 != 0),
    "terms that cancel": lambda b, h, q, kv: q * 1566083941 < (kv + 2000000000) - kv,
    "terms that cancel beside another": lambda b, h, q, kv: (
        kv - q + (q * 1566083941) < (kv + 100) + kv * 0 - q + 5 * (h + 1)
    ),
    "a block of columns": lambda b, h, q, kv: (kv // 64 * 2246822519) % 2 == 0,
}


def of_vmap(function: Callable[..., Any], heads: int = 1, length: int = S) -> Tensor:
    for axis in (3, 2, 1, 0):
        dims: list[int | None] = [None] * 4
        dims[axis] = 0
        function = torch.vmap(function, in_dims=tuple(dims))
    sizes = (1, heads, length, length)
    result = function(*(torch.arange(n, dtype=torch.int32) for n in sizes))
    assert isinstance(result, Tensor)
    return result


@pytest.mark.parametrize("name", HASHES)
def test_hashes_wrap_everywhere(name: str) -> None:
    mask = HASHES[name]
    expected = of_vmap(mask, heads=4)
    assert expected.any()
    assert not expected.all()
    assert torch.equal(create_mask(mask, 1, 4, S, S), expected)
    block_mask = create_block_mask(mask, 1, 4, S, S, BLOCK_SIZE=32)
    states = block_mask.runs.states()
    tiles = expected.unflatten(3, (-1, 32)).unflatten(2, (-1, 32)).float().mean((3, 5))
    exact = torch.where(tiles == 0, EMPTY, torch.where(tiles == 1, FULL, PARTIAL))
    assert torch.equal(states.expand(exact.shape).long(), exact.long())
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, S, 16, generator=generator) for _ in range(3))
    scores = torch.where(expected, query @ key.mT / 4, -torch.inf)
    dense = scores.softmax(-1).nan_to_num(0.0) @ value
    for backend in ("cpu", "eager"):
        out = flex_attention(query, key, value, block_mask=mask, backend=backend)
        torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-5)


def test_a_score_mod_may_hash_too() -> None:
    def dropped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.where(murmur(q * S + kv) & 255 < 64, -torch.inf, score * 1.5)

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, S, 16, generator=generator) for _ in range(3))
    keep = ~of_vmap(HASHES["murmur"])
    scores = torch.where(keep, query @ key.mT / 4 * 1.5, -torch.inf)
    out = flex_attention(query, key, value, score_mod=dropped, backend="cpu")
    torch.testing.assert_close(out, scores.softmax(-1) @ value, rtol=1e-5, atol=1e-5)


def test_kernels_wrap_too() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        congruential = (q * 1103515245 - kv * 0x6ABCDEF1).abs() % 5 == 0
        return (murmur(q * S + kv) % 3 == 0) | congruential | (-(kv * 0x7FFFFFF1) > (q << 28))

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 48, 64, generator=generator).half() for _ in range(3))
    out = flex_attention(query, key, value, block_mask=mask, backend="emulate")
    wide = (t.float() for t in (query, key, value))
    exact = flex_attention(*wide, block_mask=mask, backend="eager")
    torch.testing.assert_close(out.float(), exact, rtol=2e-3, atol=2e-3)


REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "an index": (
        lambda b, h, q, kv: TABLE[(q * 1103515245 + kv) % S] > 0,
        BoundsError,
        "does not stay in int32",
    ),
    "an index of an index": (
        lambda b, h, q, kv: TABLE[TABLE[q * 1103515245 % S] % S] > 0,
        BoundsError,
        "does not stay in int32",
    ),
    "int64 tables": (
        lambda b, h, q, kv: (WIDE[q] * WIDE[kv] * 40503) % 7 == 0,
        BoundsError,
        "int32",
    ),
    "int64 positions": (
        lambda b, h, q, kv: (q.long() * 1103515245) % 7 == 0,
        BoundsError,
        "does not stay in int32",
    ),
    "a comparison with a larger number": (
        lambda b, h, q, kv: q < 2**31,
        TraceError,
        "positions are int32",
    ),
    "a bit mask of 32 bits": (
        lambda b, h, q, kv: (q * 2654435761) & 0xFFFFFFFF > kv,
        TraceError,
        "-1 for its last 32 bits",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_wrap_in_int32_is_refused(name: str) -> None:
    mask, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        create_block_mask(mask, None, None, S, S).runs  # noqa: B018


def test_a_value_that_indexes_and_counts_wraps_in_one_place_only() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        place = (q + kv * 4097) % S
        return (TABLE[place] >= 0) & (place * 1103515245 % 3 == 0)

    loads = [n for n in ir.topo(trace(mask, "mask").root) if n.op == "load"]
    inside = {n.op for load in loads for n in ir.topo(*load.args)}
    assert not any(op.startswith("wrap_") for op in inside)
    assert torch.equal(create_mask(mask, 1, 1, S, S), of_vmap(mask))


def test_sums_of_usual_size_are_not_marked() -> None:
    mask = lambda b, h, q, kv: (q * 128 + 5 - kv * 128 >= 0) & (q // 64 * 64 <= kv) & (q + kv > 3)
    assert not any(n.op.startswith("wrap_") for n in ir.topo(trace(mask, "mask").root))


# --- random expressions ------------------------------------------------------------------------
STEPS: list[Callable[[Any, Any, int], Any]] = [
    lambda x, y, n: x + y,
    lambda x, y, n: x - y,
    lambda x, y, n: x * y,
    lambda x, y, n: x + n,
    lambda x, y, n: x * n,
    lambda x, y, n: n - x,
    lambda x, y, n: x ^ y,
    lambda x, y, n: x ^ n,
    lambda x, y, n: x & (n & 0xFFFF),
    lambda x, y, n: x << (n & 31),
    lambda x, y, n: x >> (n & 31),
    lambda x, y, n: -x,
    lambda x, y, n: x.abs(),
    lambda x, y, n: ~x,
    lambda x, y, n: x // ((n & 15) + 1),
    lambda x, y, n: x % ((n & 1023) + 1),
    lambda x, y, n: torch.minimum(x, y),
    lambda x, y, n: torch.where(x < y, x, y * 3),
    lambda x, y, n: x**2,
    lambda x, y, n: (x % 50000).to(torch.int16) * 3 + y,
]


@st.composite
def hashes(draw: st.DrawFn) -> Callable[..., Any]:
    """Draw a mask_mod that compares random hashes of positions."""
    number = st.integers(-(2**31), 2**32 - 1)
    place = st.integers(0, 50)
    steps = draw(
        st.lists(st.tuples(st.sampled_from(STEPS), place, place, number), min_size=1, max_size=6)
    )
    limit = draw(st.integers(-(2**31), 2**31 - 1))
    against = draw(st.booleans())

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        stack = [q, kv, q - kv, TABLE[kv], SEEDS[h]]
        for function, x, y, n in steps:
            stack.append(function(stack[-1 - x % len(stack)], stack[-1 - y % len(stack)], n))
        return stack[-1] < (stack[-2] if against else limit)

    return mask


@given(hashes())
@settings(deadline=None)
def test_random_hashes_are_torchs_and_their_tiles_exact(mask: Callable[..., Any]) -> None:
    length, block = 40, 8
    expected = of_vmap(mask, heads=4, length=length)
    block_mask = create_block_mask(mask, 1, 4, length, length, BLOCK_SIZE=block)
    try:
        states = block_mask.runs.states()
    except BoundsError:
        return  # the sum of two numbers that one table holds
    assert torch.equal(create_mask(mask, 1, 4, length, length), expected)
    tiles = expected.unflatten(3, (-1, block)).unflatten(2, (-1, block)).float().mean((3, 5))
    exact = torch.where(tiles == 0, EMPTY, torch.where(tiles == 1, FULL, PARTIAL))
    assert torch.equal(states.expand(exact.shape).long(), exact.long())

"""Check which expressions of a score_mod become tables by distance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import mods
from attnkit.codegen.distance_tables import distance_tables
from attnkit.graph import ir
from attnkit.tracing.tracer import trace

HEADS = torch.rand(4)
TABLE = torch.randn(4, 64)
BATCHES = torch.randn(2, 64)
GAIN = torch.tensor(0.5)


def found(mod: Any) -> tuple[str, tuple[int, ...], str] | None:
    """Return the formula of the score_mod, the slots that it keeps, and its tables."""
    tables = distance_tables(trace(mod, "score").root)
    return tables and (ir.formula(tables.score), tables.kept, tables.describe())


@pytest.mark.parametrize(
    "mod",
    [
        mods.t5_bias(TABLE),
        mods.relative_bias(torch.randn(4, 33)),
        mods.kerple(HEADS, HEADS),
        mods.sandwich(4, 64),
        lambda s, b, h, q, kv: s - TABLE[h, (q - kv).clamp(0, 63)],
        lambda s, b, h, q, kv: s + HEADS[h] * torch.log1p((q - kv).abs()),
    ],
    ids=["t5", "relative_bias", "kerple", "sandwich", "minus", "log1p"],
)
def test_a_bias_by_distance_is_one_table(mod: Any) -> None:
    """Kernels of all biases by distance are the same kernel."""
    result = found(mod)
    assert result is not None
    assert result[:2] == ("score + t0[h, q - kv + kv_last]", ())


@pytest.mark.parametrize(
    "mod",
    [
        mods.alibi(HEADS),  # kernels have a special form
        lambda s, b, h, q, kv: s + TABLE[h, q - kv + 32],  # is such a table
        lambda s, b, h, q, kv: s + HEADS[h] * (q - kv).abs(),  # costs less than a load
        lambda s, b, h, q, kv: s + torch.log1p(HEADS[h]) * (q - kv),  # once per head
        lambda s, b, h, q, kv: s + TABLE[h, q].sin(),
        lambda s, b, h, q, kv: s + torch.log1p((q + kv).float()),
        lambda s, b, h, q, kv: torch.tanh(s),
    ],
    ids=["alibi", "table", "abs", "head", "row", "sum", "score"],
)
def test_other_terms_stay(mod: Any) -> None:
    assert found(mod) is None


def test_terms_that_load_by_distance_are_one_table() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = TABLE[h, (q - kv).clamp(0, 63)]
        return s - HEADS[h] * (q - kv) + near + BATCHES[b, q - kv + 32]

    assert found(mod) == (
        "score + -(t0[h] * f32(q - kv)) + t1[b, h, q - kv + kv_last]",
        (0,),
        "table[b, h, q - kv] = t1[h, min(max(q - kv, 0), 63)] + t2[b, q - kv + 32]",
    )


def test_parts_of_other_expressions_are_tables() -> None:
    """A factor of the score becomes a table, and a term inside of a function of the score."""

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        decay = torch.log1p((q - kv).abs() * GAIN)
        return torch.tanh(s * decay + TABLE[h, (q - kv).abs()]) + decay * HEADS[q]

    assert found(mod) == (
        "tanh(score * t1[q - kv + kv_last] + t2[h, q - kv + kv_last])"
        " + t1[q - kv + kv_last] * t0[q]",
        (2,),
        "table[q - kv] = log1p(f32(abs(q - kv)) * t0)\ntable[h, q - kv] = t1[h, abs(q - kv)]",
    )


def test_a_part_of_a_table_is_a_table_if_it_is_used_elsewhere() -> None:

    def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = TABLE[h, (q - kv).clamp(0, 63)]
        return s * near + near.sin()

    result = found(mod)
    assert result is not None
    assert result[1] == ()
    assert result[2].splitlines() == [
        "table[h, q - kv] = sin(t0[h, min(max(q - kv, 0), 63)])",
        "table[h, q - kv] = t0[h, min(max(q - kv, 0), 63)]",
    ]

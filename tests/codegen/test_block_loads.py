"""Check which loads read one element for several rows or columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.codegen.block_loads import column_group, reads_by_group, reads_by_row_and_column
from attnkit.graph import ir
from attnkit.tracing.guards import trace_cached

IDS = torch.zeros(64, dtype=torch.int32)
PAIRS = torch.zeros(64, 64, dtype=torch.int32)
TABLE = torch.zeros(64, 64)


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (lambda s, b, h, q, kv: s + TABLE[h, q // 8 - kv // 8 + 8], [True]),
        (lambda s, b, h, q, kv: s + TABLE[h, q // 8 - kv + 64], [True]),
        (lambda s, b, h, q, kv: s * TABLE[IDS[q], IDS[kv]], [False, False, True]),
        (lambda s, b, h, q, kv: s + TABLE[h, PAIRS[IDS[q], IDS[kv]]], [False, False, True, True]),
        (lambda s, b, h, q, kv: s + TABLE[q, kv], [False]),
        (lambda s, b, h, q, kv: s + TABLE[h, (q - kv).clamp(0, 8)], [False]),
        (lambda s, b, h, q, kv: s + TABLE[q // 8, (q - kv).clamp(0, 8)], [False]),
        (lambda s, b, h, q, kv: s + TABLE[h, q // 8], [False]),
        (lambda s, b, h, q, kv: s + TABLE[q // 8, (kv + s).to(torch.int32).clamp(0, 8)], [False]),
    ],
)
def test_loads_by_row_and_column(mod: Any, expected: list[bool]) -> None:
    loads = [
        n for n in ir.topo(trace_cached(mod, "score", torch.device("cpu")).root) if n.op == "load"
    ]
    assert sorted(map(reads_by_row_and_column, loads)) == expected


@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (lambda s, b, h, q, kv: s + TABLE[h, q // 8 - kv // 64 + 8], 64),
        (lambda s, b, h, q, kv: s + TABLE[q, kv // 48], 16),
        (lambda s, b, h, q, kv: s + TABLE[IDS[q], IDS[kv // 256]], 64),
        (lambda s, b, h, q, kv: s + TABLE[q, (kv // 64 % 4) * 8 + kv // 8 % 2], 8),
        (lambda s, b, h, q, kv: s + TABLE[q, kv // 4], None),
        (lambda s, b, h, q, kv: s + TABLE[q, kv // 7], None),
        (lambda s, b, h, q, kv: s + TABLE[q, (kv + 1) // 8], None),
        (lambda s, b, h, q, kv: s + TABLE[q // 64, IDS[kv]], None),
        (lambda s, b, h, q, kv: s + TABLE[q, 8 // (kv + 1)], None),
    ],
)
def test_loads_by_group(mod: Any, expected: int | None) -> None:
    *_, load = [
        n for n in ir.topo(trace_cached(mod, "score", torch.device("cpu")).root) if n.op == "load"
    ]
    assert reads_by_group(load) == (expected is not None)
    if expected is not None:
        assert column_group(load) == expected


@given(st.integers(1, 200), st.integers(1, 9), st.booleans())
def test_columns_of_a_group_read_one_element(divisor: int, modulus: int, nested: bool) -> None:
    """In aligned groups of `column_group` columns, an index has one value."""
    mod = lambda s, b, h, q, kv: s + TABLE[q, (kv // divisor) // (3 if nested else 1) % modulus]
    root = trace_cached(mod, "score", torch.device("cpu")).root
    *_, load = [n for n in ir.topo(root) if n.op == "load"]
    group, kv = column_group(load), torch.arange(1024)
    index = (kv // divisor) // (3 if nested else 1) % modulus
    assert (index.view(-1, group) == index.view(-1, group)[:, :1]).all()

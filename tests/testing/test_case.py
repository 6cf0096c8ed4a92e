"""Check `Case`: the sizes it refuses, the tensors it makes, and the source it prints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from attnkit import testing
from attnkit.errors import OptionError, ShapeError
from attnkit.testing import LAYOUTS, Case


@given(testing.cases())
def test_inputs_have_the_shapes_dtype_and_values_of_the_case(case: Case) -> None:
    inputs = case.inputs()
    assert tuple(tuple(t.shape) for t in inputs) == case.shapes
    assert all(t.dtype == case.dtype and t.requires_grad and t.is_leaf for t in inputs)
    for a, b in zip(inputs, case.inputs(), strict=True):
        assert a.stride() == b.stride()
        assert torch.equal(a, b)
    out, lse = case.cotangents()
    assert out.shape == (case.batch, case.heads, case.q_len, case.value_dim)
    assert lse.shape == out.shape[:3]


@given(testing.cases())
def test_code_makes_the_same_case(case: Case) -> None:
    assert eval(case.code(), {"Case": Case, "torch": torch}) == case


def test_layouts_differ_in_memory_only() -> None:
    strides = set()
    for layout in LAYOUTS:
        query, _, _ = Case(6, 6, heads=3, kv_heads=3, layouts=(layout,) * 3).inputs()
        assert query.shape == (1, 3, 6, 8)
        strides.add((query.stride(), query.storage_offset()))
    assert len(strides) == len(LAYOUTS)
    expanded, _, _ = Case(6, 6, heads=3, layouts=("expanded",) * 3).inputs()
    assert expanded.stride(1) == 0
    assert torch.equal(expanded[:, 0], expanded[:, 2])


def test_default_case_leaves_defaults_out() -> None:
    assert Case(3, 4).code() == "Case(q_len=3, kv_len=4)"
    assert str(Case(3, 4, scale=0.5)) == (
        "float32 q[1, 1, 3, 8] k[1, 1, 4, 8] v[1, 1, 4, 8] block 16x16 scale 0.5 spread 1 seed 0"
    )


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"q_len": 0, "kv_len": 1}, ShapeError, "q_len must be at least 1, got 0"),
        ({"q_len": 1, "kv_len": 1, "heads": 3, "kv_heads": 2}, ShapeError, "heads=3 is not a mult"),
        ({"q_len": 1, "kv_len": 1, "batch": 3, "kv_batch": 2}, ShapeError, "1 or batch=3, got 2"),
        ({"q_len": 1, "kv_len": 1, "layouts": ("odd",) * 3}, OptionError, "must be three of conti"),
    ],
)
def test_refuses(sizes: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Case(**sizes)

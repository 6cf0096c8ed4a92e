"""A repeated call passes the values that a call in full would pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.compiled_repeat import Repeat
from attnkit.compiled_signature import Signature
from attnkit.compiled_specs import Dim, NumberSpec, Spec, StreamSpec, TensorSpec
from attnkit.errors import ArgumentError, ShapeError

_EXTENTS = st.sampled_from([4, Dim(), Dim(64)])
_TENSORS = st.tuples(
    st.sampled_from(["float32", "int32", "bfloat16"]), st.lists(_EXTENTS, max_size=4)
).map(lambda t: TensorSpec(t[0], tuple(t[1]), (Dim(64),) * len(t[1]), 2))
_SPECS = st.lists(
    st.one_of(_TENSORS, st.sampled_from([NumberSpec("Int32"), NumberSpec("Float32")])), max_size=6
)


def arguments(specs: list[Spec]) -> list[Any]:
    made: list[Any] = []
    for n, spec in enumerate(specs):
        if isinstance(spec, TensorSpec):
            shape = [x if isinstance(x, int) else 3 + n for x in spec.shape]
            made.append(torch.zeros(shape, dtype=getattr(torch, spec.dtype)))
        elif isinstance(spec, NumberSpec):
            made.append(int(torch.randint(99, ())))
    return made


@given(_SPECS, st.integers(0, 6))
def test_the_same_values(specs: list[Spec], stream: int) -> None:
    specs.insert(min(stream, len(specs)), StreamSpec())
    signature = Signature(specs)
    repeat = Repeat(signature, arguments(specs))
    for handle in (5, 6):
        other = arguments(specs)
        found = repeat.gather(other, lambda device, handle=handle: handle)  # type: ignore[misc]
        full = signature.gather(other, lambda device, handle=handle: handle)  # type: ignore[misc]
        assert list(found[0]) == list(full[0])
        assert found[1] == full[1]


def test_the_first_arguments_are_checked() -> None:
    signature = Signature([TensorSpec("float32", (4,), (1,), 4)])
    with pytest.raises(ShapeError):
        Repeat(signature, [torch.zeros(5)])


def test_addresses_are_checked() -> None:
    signature = Signature([TensorSpec("float32", (4,), (1,), 16)])
    repeat = Repeat(signature, [torch.zeros(4)])
    with pytest.raises(ArgumentError, match="address"):
        repeat.gather([torch.zeros(5)[1:]], lambda device: 0)

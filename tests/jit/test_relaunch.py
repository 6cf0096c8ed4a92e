"""Check that a relaunch passes the same values as a full call."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.errors import ArgumentError, LaunchError, ShapeError
from attnkit.jit.abi import Signature
from attnkit.jit.arg_specs import Dim, NumberSpec, Spec, StreamSpec, TensorSpec
from attnkit.jit.loader import Frame
from attnkit.jit.relaunch import Relaunch, relauncher

_EXTENTS = st.sampled_from([4, Dim(), Dim(64), Dim(divisibility=2)])
_TENSORS = st.tuples(
    st.sampled_from(["float32", "int32", "bfloat16"]), st.lists(_EXTENTS, max_size=4)
).map(lambda t: TensorSpec(t[0], tuple(t[1]), (Dim(64),) * len(t[1]), 2))
_NUMBERS = st.sampled_from(["Int32", "Float32", "Int8", "Float64"]).map(NumberSpec)
_SPECS = st.lists(st.one_of(_TENSORS, _NUMBERS), max_size=6)


class Entry:
    """Stub of a loaded kernel that records the bytes of its launches."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.seen: list[bytes] = []

    def launch(self, frame: Frame) -> None:
        self.seen.append(bytes(frame.values))
        if self.fails:
            raise LaunchError("no GPU")


def repeat(signature: Signature, arguments: Any, changing: Any, entry: Any = None) -> Relaunch:
    return relauncher(entry or Entry(), signature, arguments, changing)


def arguments(specs: list[Spec]) -> list[Any]:
    values: list[Any] = []
    for n, spec in enumerate(specs):
        if isinstance(spec, TensorSpec):
            shape = [x if isinstance(x, int) else 4 + 2 * n for x in spec.shape]
            values.append(torch.zeros(shape, dtype=getattr(torch, spec.dtype)))
        elif isinstance(spec, NumberSpec):
            number = int(torch.randint(-9, 9, ()))
            values.append(number / 2 if spec.kind.startswith("Float") else number)
    return values


def packed(signature: Signature, given: Any, stream: int) -> bytes:
    """Return the argument bytes that a full call passes."""
    values, _ = signature.gather(given, lambda device: stream)
    packing, offsets = signature.layout
    return packing.pack(*values).ljust(offsets[-1] + 8, b"\0")


@given(_SPECS, st.integers(0, 6), st.data())
def test_the_same_values(specs: list[Spec], stream: int, data: st.DataObject) -> None:
    passed = [s for s in specs if not isinstance(s, StreamSpec)]
    changing = sorted(data.draw(st.sets(st.sampled_from(range(len(passed))))) if passed else [])
    specs.insert(min(stream, len(specs)), StreamSpec())
    signature, entry = Signature(specs), Entry()
    first = arguments(specs)
    again = repeat(signature, first, changing, entry)
    for handle in (5, 6, 6):
        other = [x if i in changing else first[i] for i, x in enumerate(arguments(specs))]
        given = [other[i] for i in changing]
        again(
            handle,
            [x.data_ptr() for x in given if isinstance(x, torch.Tensor)],
            [x for x in given if not isinstance(x, torch.Tensor)],
        )
        assert entry.seen[-1] == packed(signature, other, handle)


def test_zeros_of_either_sign() -> None:
    signature, entry = Signature([NumberSpec("Float32")]), Entry()
    again = repeat(signature, [1.0], [0], entry)
    for number in (0.0, -0.0, 0.0, 2.0, 2.0, -0.0):
        again(0, (), (number,))
        assert entry.seen[-1][:4] == struct.pack("<f", number)


def test_a_launch_within_a_launch() -> None:
    """A launch that begins before another returns does not change the other's values."""
    signature = Signature([NumberSpec("Int32")])

    class Nested(Entry):
        def launch(self, frame: Frame) -> None:
            if len(self.seen) < 2:
                self.seen.append(b"")
                again(0, (), (len(self.seen) + 10,))
            self.seen.append(bytes(frame.values)[:4])

    entry = Nested()
    again = repeat(signature, [1], [0], entry)
    again(0, (), (10,))
    assert entry.seen[2:] == [struct.pack("<i", n) for n in (12, 11, 10)]


def test_a_tensor_without_memory_is_refused() -> None:
    signature = Signature([TensorSpec("float32", (Dim(),), (1,), 4)])
    entry, freed = Entry(), torch.zeros(4)
    again = repeat(signature, [torch.zeros(4)], [0], entry)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="no memory"):
        again(0, [freed.data_ptr()])
    assert not entry.seen
    again = repeat(signature, [torch.zeros(0)], [0], entry)
    again(0, [torch.zeros(0).data_ptr()])  # an empty tensor needs none
    assert len(entry.seen) == 1


def test_a_refused_number_does_not_reach_a_later_launch() -> None:
    """The second number is refused after the first was written to the buffer."""
    signature, entry = Signature([NumberSpec("Int32"), NumberSpec("Int8")]), Entry()
    again = repeat(signature, [1, 1], [0, 1], entry)
    again(0, (), (1, 2))
    with pytest.raises(ArgumentError, match="does not fit"):
        again(0, (), (7, 300))
    again(0, (), (1, 2))
    assert entry.seen == [packed(signature, [1, 2], 0)] * 2


def test_failed_launches_return_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that fail one after another need one argument buffer."""
    made: list[Frame] = []

    class Counted(Frame):
        def __init__(self, signature: Signature) -> None:
            super().__init__(signature)
            made.append(self)

    monkeypatch.setattr("attnkit.jit.relaunch.Frame", Counted)
    failing = Entry(fails=True)
    again = repeat(Signature([NumberSpec("Int8")]), [1], [0], failing)
    for number in (1, 300, 1, 300):
        with pytest.raises(ArgumentError if number == 300 else LaunchError):
            again(0, (), (number,))
    assert len(made) == 1


def test_the_first_arguments_are_checked() -> None:
    signature = Signature([TensorSpec("float32", (4,), (1,), 4)])
    with pytest.raises(ShapeError):
        repeat(signature, [torch.zeros(5)], [0])


def test_addresses_and_numbers_that_do_not_fit_are_refused() -> None:
    signature = Signature([TensorSpec("float32", (4,), (1,), 16), NumberSpec("Int8")])
    entry = Entry()
    again = repeat(signature, [torch.zeros(4), 1], [0, 1], entry)
    with pytest.raises(ArgumentError, match="address"):
        again(0, [torch.zeros(5)[1:].data_ptr()], [1])
    for wrong in (300, 1.5):
        with pytest.raises(ArgumentError, match="does not fit"):
            again(0, [torch.zeros(4).data_ptr()], [wrong])
    assert not entry.seen
    failing = Entry(fails=True)
    again = repeat(signature, [torch.zeros(4), 1], [0, 1], failing)
    for _ in range(2):
        with pytest.raises(LaunchError):
            again(0, [torch.zeros(4).data_ptr()], [1])

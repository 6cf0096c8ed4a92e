"""Check replays of calls, with stub kernels that compute on memory at the given addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit.splice import replay as module
from attnkit.splice.replay import CallTensors, Launch, Replay, prepare_replay

N = 12
CPU = torch.device("cpu", 0)  # with an index, as a GPU


def at(address: int, count: int) -> Tensor:
    """Return `count` float32 numbers at `address` as a tensor that shares their memory."""
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


class Kernel:
    """Stub of a kernel that computes on addresses and counts its launches."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.streams: list[int] = []

    def __call__(self, *arguments: Any) -> Launch:
        self.function(*[a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])
        return Launch(self.relauncher, arguments)

    def relauncher(self, arguments: Sequence[Any], changing: Sequence[int]) -> Any:
        first = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]

        def again(stream: int, addresses: Sequence[int], numbers: Sequence[float] = ()) -> None:
            assert not numbers
            assert len(addresses) == len(changing)
            values = list(first)
            for i, address in zip(changing, addresses, strict=True):
                values[i] = address
            self.streams.append(stream)
            self.function(*values)

        return again


def combine(a: int, b: int, to: int, table: int, factor: float) -> None:
    at(to, N)[:] = at(a, N) * at(table, N) + factor * at(b, N)


def finish(half: int, to: int, total: int) -> None:
    at(to, N)[:] = 1.0
    at(to, N // 2)[:] = at(half, N // 2)
    at(total, 1)[:] += at(half, N // 2).sum()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_index", lambda: 0)
    monkeypatch.setattr(module, "is_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "stream_of", lambda index: 7)


class Case:
    """Stub of a call with two kernels, a captured table and a counter.

    The call computes out = [second half of (a * table + 3 b), ones], and total = the sum of that
    half.
    """

    def __init__(self) -> None:
        self.table, self.counter = torch.rand(N), torch.zeros(1)
        self.kernels = Kernel(combine), Kernel(finish)

    def call(self, a: Tensor, b: Tensor) -> tuple[list[Launch], CallTensors]:
        out, total, working = torch.empty(N), torch.zeros(1), torch.empty(N)
        first, second = self.kernels
        ran = [first(a, b, working, self.table, 3.0), second(working[N // 2 :], out, total)]
        return ran, CallTensors([a, b], [out], [total], [working], [self.table])

    def expected(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        half = (a * self.table + 3 * b)[N // 2 :]
        return torch.cat([half, torch.ones(N - N // 2)]), half.sum()[None]

    def learned(self) -> Replay:
        made = self.call(torch.rand(N), torch.rand(N))
        found = prepare_replay(*made, lambda: self.counter, 2, CPU)
        assert found is not None
        return found


def test_a_replay_computes_with_new_tensors() -> None:
    case = Case()
    again = case.learned()
    seen = []
    for _ in range(3):
        a, b = torch.rand(N), torch.rand(N)
        found = again([a, b])
        assert found is not None
        for x, y in zip(found, case.expected(a, b), strict=True):
            torch.testing.assert_close(x, y)
        seen.append(found)
    assert len({t.data_ptr() for found in seen for t in found}) == 6  # each call has its own
    assert case.kernels[0].streams == [7] * 3


def test_memory_that_a_kernel_adds_to() -> None:
    add = Kernel(
        lambda a, sums, to: (at(sums, N)[4:].add_(at(a, N)[4:]), at(to, N).copy_(at(sums, N)))
    )
    a, sums, out = torch.rand(N), torch.zeros(N), torch.empty(N)
    made = CallTensors([a], [out], [], [sums], [], cleared=16)
    again = prepare_replay([add(a, sums, out)], made, lambda: torch.zeros(1), 1, CPU)
    assert again is not None
    for _ in range(5):
        a = torch.rand(N)
        found = again([a])
        assert found is not None
        assert torch.equal(found[0][4:], a[4:])


def test_memory_that_a_table_initialises() -> None:
    """A part of the workspace equals its table before each call, although kernels write to it."""
    count = lambda a, sums, turns, to: (
        at(to, N).copy_(at(a, N) + at(turns, N)), at(turns, N).add_(1), at(sums, N).fill_(1)
    )  # fmt: skip
    add, table = Kernel(count), torch.rand(N)
    a, sums, turns, out = torch.rand(N), torch.empty(N), table.clone(), torch.empty(N)
    made = CallTensors([a], [out], [], [sums, turns], [], copied=[(1, table)])
    again = prepare_replay([add(a, sums, turns, out)], made, lambda: torch.zeros(1), 1, CPU)
    assert again is not None
    before = table.clone()
    for _ in range(3):
        a = torch.rand(N)
        found = again([a])
        assert found is not None
        assert torch.equal(found[0], a + before)
    assert torch.equal(table, before)


def test_equal_tensors_are_told_apart_by_their_place() -> None:
    case = Case()
    again, a = case.learned(), torch.rand(N)
    found = again([a, a])
    assert found is not None
    torch.testing.assert_close(found[0], case.expected(a, a)[0])


def test_an_address_of_no_known_tensor() -> None:
    case = Case()
    a, b, strange = torch.rand(N), torch.rand(N), torch.rand(N)
    ran, made = case.call(a, b)
    ran.append(case.kernels[0](a, b, strange, case.table, 1.0))
    assert prepare_replay(ran, made, lambda: case.counter, 2, CPU) is None


def test_a_kernel_that_cannot_be_launched_again() -> None:
    case = Case()
    ran, made = case.call(torch.rand(N), torch.rand(N))
    ran[1] = Launch(lambda arguments, changing: None, ran[1].arguments)
    assert prepare_replay(ran, made, lambda: case.counter, 2, CPU) is None


@pytest.mark.parametrize("what", ["device_index", "is_stream_capturing"])
def test_nothing_is_done_where_the_call_is_another(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    case = Case()
    again = case.learned()
    monkeypatch.setattr(module, what, lambda: 1)
    assert again([torch.rand(N), torch.rand(N)]) is None
    assert not case.kernels[0].streams


@pytest.mark.parametrize("numbers", [1, 2, 3])  # 4, 8 and 12 bytes after a multiple of 16
@pytest.mark.parametrize("moved", [0, 1])
def test_an_address_that_is_not_aligned(moved: int, numbers: int) -> None:
    case = Case()
    again = case.learned()
    inputs = [torch.rand(N), torch.rand(N)]
    inputs[moved] = torch.rand(N + numbers)[numbers:]
    assert inputs[moved].data_ptr() % 16 == 4 * numbers
    assert again(inputs) is None
    assert not case.kernels[0].streams


def test_tables_live_as_long_as_the_replay() -> None:
    case = Case()
    again = case.learned()
    assert any(t is case.table for t in again.tables)


def test_workspaces_do_not_overlap() -> None:
    sizes = [3, 64, 65]
    starts, size = module._starts([torch.empty(n) for n in sizes])
    ends = [s + 4 * n for s, n in zip(starts, sizes, strict=True)]
    assert starts == [0, 256, 512]
    assert ends[-1] <= size
    assert size % 256 == 0
    apart = torch.empty(4, 6).t()[:, ::2]  # bytes to the last element, with what lies between
    assert module._bytes(apart) == 4 * ((6 - 1) * 1 + (2 - 1) * 12 + 1)

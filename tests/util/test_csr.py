"""Check the helpers for rows of different lengths against the torch operators they replace."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attnkit import create_block_mask, masks
from attnkit.schedule.first_writer import choose_first_writers
from attnkit.schedule.scheduler import Shape, schedule_backward, schedule_forward
from attnkit.schedule.work_list import retile, work_list
from attnkit.util.csr import row_indices, searchsorted_right

KINDS = st.sampled_from([torch.int32, torch.int64])


@given(counts=st.lists(st.integers(0, 5), max_size=12), kind=KINDS)
def test_row_indices(counts: list[int], kind: torch.dtype) -> None:
    own = torch.tensor(counts, dtype=kind)
    expected = torch.arange(len(counts)).repeat_interleave(own)
    torch.testing.assert_close(row_indices(own), expected, rtol=0, atol=0)


@given(
    ends=st.lists(st.integers(-3, 9), max_size=12),
    at=st.lists(st.integers(-9, 12), max_size=12),
    kinds=st.tuples(KINDS, KINDS),
)
def test_searchsorted_right(
    ends: list[int], at: list[int], kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    first, second = torch.tensor(sorted(ends), dtype=kinds[0]), torch.tensor(at, dtype=kinds[1])
    expected = torch.searchsorted(first.to(torch.int64), second.to(torch.int64), right=True)
    torch.testing.assert_close(searchsorted_right(first, second), expected, rtol=0, atol=0)


class Names(TorchDispatchMode):
    """Dispatch mode that records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_work_lists_use_no_multithreaded_operator() -> None:
    """Scheduling calls neither `searchsorted` nor `repeat_interleave`.

    Both wake all threads of the thread pool, even for a few numbers.
    """
    length, shape = 2048, Shape(2, 8, 65536)
    runs = create_block_mask(masks.causal(), None, None, length, length, device="cpu").runs
    with Names() as names:
        torch.searchsorted(torch.arange(3), torch.arange(3))
        torch.arange(3).repeat_interleave(torch.arange(3))
    waking, names.called = names.called & {"searchsorted", "repeat_interleave"}, set()
    assert len(waking) == 2
    with names:
        fine = retile(runs, (64, 128))
        work_list(fine, schedule_forward(fine, shape, workers=132))
        backward = schedule_backward(fine, shape, workers=132)
        backward.table()
        choose_first_writers(fine, backward, 2 * 8 * length * 128)
    assert names.called
    assert not names.called & waking

"""Check the model of the shared memory port: bookings get the first free clocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attnkit.emulator.timing.shared_memory_port import SharedMemoryPort

BOOKINGS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=30
)


@given(BOOKINGS, st.booleans())
def test_clocks_are_those_of_a_list_of_free_ones(
    bookings: list[tuple[int, int, int]], gaps: bool
) -> None:
    """Bookings end as in a model that keeps a set of taken clocks.

    `now` advances by the first number of each booking.
    """
    port, taken, now = SharedMemoryPort(gaps), set[int](), 0
    for passed, later, clocks in bookings:
        now += passed
        at = now + later
        first = at if gaps else max([at, *(t + 1 for t in taken)])
        own = [t for t in range(first, first + 2000) if t not in taken][:clocks]
        taken |= set(own)
        end = port.book(now, at, clocks)
        if own:
            assert end == own[-1] + 1


def test_early_requests_are_served_before_later_bookings() -> None:
    late = SharedMemoryPort(gaps=True)
    assert late.book(0, 100, 50) == 150
    assert late.book(0, 0, 120) == 170  # 100 before, 20 after
    in_order = SharedMemoryPort(gaps=False)
    assert in_order.book(0, 100, 50) == 150
    assert in_order.book(0, 0, 120) == 270

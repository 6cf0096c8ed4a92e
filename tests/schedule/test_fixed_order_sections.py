"""Check how many heads a section of a deterministic backward takes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit.schedule.l2_sections import apart, units_in_order
from attnkit.schedule.scheduler import Shape, schedule_backward
from attnkit.sparsity.block_runs import FULL, BlockRuns

WORKERS, TILE = 132, 1 << 16


def heads_together(states: torch.Tensor, heads: int, l2_bytes: int = 32 << 20) -> int:
    """Return how many heads the first section of a list in descending order has."""
    runs = BlockRuns.from_states(states[None, None], *states.shape, (1, 1))
    schedule = schedule_backward(
        runs, Shape(1, heads, TILE), workers=WORKERS, order="descending", l2_bytes=l2_bytes,
        split=False,
    )  # fmt: skip
    begins = (schedule.tile.diff() > 0).nonzero()
    end = int(begins[0]) + 1 if begins.numel() else schedule.work_tile_count
    return len(set(schedule.h[:end].tolist()))


def full(rows: int, columns: int) -> torch.Tensor:
    return torch.full((rows, columns), FULL, dtype=torch.int8)


def causal(rows: int, columns: int) -> torch.Tensor:
    """Return a causal mask whose kv tiles each begin `rows / columns` q tiles after the one before."""
    return torch.tril(full(columns, columns)).repeat_interleave(rows // columns, 0)


def test_shorter_rows_let_more_heads_run_together() -> None:
    """A head of shorter kv tiles needs more other heads between two reads of a q tile."""
    assert heads_together(causal(128, 64), 64) == 4
    assert heads_together(causal(64, 64), 64) == 11  # tiles begin one q tile apart, not two
    assert heads_together(causal(32, 16), 64) > heads_together(causal(128, 64), 64)
    assert heads_together(full(128, 64), 64) == 8


@given(rows=st.integers(1, 40), columns=st.integers(1, 40), heads=st.integers(1, 40))
def test_a_section_keeps_all_workers_busy(rows: int, columns: int, heads: int) -> None:
    for l2_bytes in (TILE, 64 * TILE, 1 << 40):
        together = heads_together(full(rows, columns), heads, l2_bytes)
        assert together * columns >= min(WORKERS, heads * columns) / 2
    assert together == heads


@given(columns=st.integers(2, 30), small=st.integers(1, 600), large=st.integers(1, 600))
def test_more_memory_lets_more_heads_run_together(columns: int, small: int, large: int) -> None:
    states = causal(2 * columns, columns)
    runs = BlockRuns.from_states(states[None, None], *states.shape, (1, 1))
    kinds = runs.full_t, runs.partial_t
    fewer, more = (units_in_order(kinds, columns, n, WORKERS) for n in sorted((small, large)))
    assert fewer <= more


@given(
    batch=st.integers(1, 4), kv_heads=st.integers(1, 4), group=st.integers(1, 6), one=st.booleans()
)  # fmt: skip
def test_heads_that_share_keys_are_far_apart(
    batch: int, kv_heads: int, group: int, one: bool
) -> None:
    """Between two query heads of a kv head come heads of all others."""
    heads, owners = kv_heads * group, 1 if one else batch
    numbers = apart(batch, heads, (owners, kv_heads), torch.device("cpu"))
    assert numbers.sort().values.tolist() == list(range(batch * heads))
    listed = torch.argsort(numbers)
    owner = listed // heads * (owners > 1) * kv_heads + listed % heads // group
    for own in owner.unique():
        places = (owner == own).nonzero().flatten()
        assert (places.diff() == owners * kv_heads).all()
    if group == 1 and owners == batch:
        assert numbers.tolist() == list(range(batch * heads))


def test_heads_that_share_keys_are_in_different_sections() -> None:
    states = causal(128, 64)
    runs = BlockRuns.from_states(states[None, None], *states.shape, (1, 1))
    schedule = schedule_backward(
        runs, Shape(1, 16, TILE, kv_heads=4), workers=WORKERS, order="descending", split=False
    )
    section = torch.cat([torch.zeros(1), (schedule.tile.diff() > 0).cumsum(0)])
    for n in range(int(section[-1]) + 1):
        heads = schedule.h[section == n].unique()
        assert (heads // 4).unique().numel() == heads.numel()

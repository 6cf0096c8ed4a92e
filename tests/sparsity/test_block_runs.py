"""Check round trips of block runs through the dense grid and FlexAttention's BlockMask."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from attnkit.errors import ArgumentError, DTypeError, OptionError, ShapeError
from attnkit.sparsity.block_runs import EMPTY, FULL, PARTIAL, BlockRuns, Runs, from_flex


@st.composite
def grids(draw: st.DrawFn) -> BlockRuns:
    """Draw the runs of a random grid; lengths need not be multiples of the block."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    block = draw(st.integers(1, 128)), draw(st.integers(1, 128))
    q_len = (rows - 1) * block[0] + draw(st.integers(1, block[0]))
    kv_len = (columns - 1) * block[1] + draw(st.integers(1, block[1]))
    size = batch * heads * rows * columns
    # repeats make runs longer than one block
    cells = draw(st.lists(st.sampled_from([EMPTY, PARTIAL, FULL]), min_size=1, max_size=12))
    times = draw(st.integers(1, 5))
    states = torch.tensor(cells, dtype=torch.int8).repeat_interleave(times).repeat(size)[:size]
    return BlockRuns.from_states(states.view(batch, heads, rows, columns), q_len, kv_len, block)


def listed(runs: Runs) -> list[list[tuple[int, int]]]:
    """Return the runs of each row as a list of (start, length)."""
    pointers = runs.row_ptr.tolist()
    pairs = list(zip(runs.start.tolist(), runs.length.tolist(), strict=True))
    return [pairs[a:b] for a, b in itertools.pairwise(pointers)]


def runs_by_hand(row: list[int], kind: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for i, state in enumerate(row):
        if state == kind and i and row[i - 1] == kind:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        elif state == kind:
            found.append((i, 1))
    return found


@given(runs=grids())
def test_rows_hold_the_maximal_runs_of_the_grid(runs: BlockRuns) -> None:
    states = runs.states()
    for kind, forward, backward in ((FULL, runs.full, runs.full_t),
                                    (PARTIAL, runs.partial, runs.partial_t)):  # fmt: skip
        rows = states.flatten(0, 2).tolist()
        assert listed(forward) == [runs_by_hand(row, kind) for row in rows]
        columns = states.transpose(2, 3).flatten(0, 2).tolist()
        assert listed(backward) == [runs_by_hand(column, kind) for column in columns]


@given(runs=grids())
def test_dense_round_trip(runs: BlockRuns) -> None:
    again = BlockRuns.from_states(runs.states(), runs.q_len, runs.kv_len, runs.block)
    assert torch.equal(again.states(), runs.states())
    states = runs.states()
    assert runs.counts() == tuple(int((states == kind).sum()) for kind in (EMPTY, PARTIAL, FULL))
    assert runs.density() == pytest.approx(float((states != EMPTY).double().mean()))
    for part in (runs.full, runs.partial, runs.full_t, runs.partial_t):
        assert {t.dtype for t in (part.row_ptr, part.start, part.length)} == {torch.int32}
        assert int(part.row_ptr[-1]) == part.start.numel() == part.length.numel()
    assert runs.full.rows == runs.batch * runs.heads * runs.q_blocks
    assert runs.full_t.rows == runs.batch * runs.heads * runs.kv_blocks


@given(runs=grids())
def test_stacking_pairs_of_batch_and_head(runs: BlockRuns) -> None:
    states = runs.states().flatten(0, 1)
    parts = [
        BlockRuns.from_states(s[None, None], runs.q_len, runs.kv_len, runs.block) for s in states
    ]
    again = BlockRuns.stack(parts, runs.batch, runs.heads)
    assert torch.equal(again.states(), runs.states())
    assert listed(again.partial_t) == listed(runs.partial_t)
    assert listed(again.full) == listed(runs.full)


def test_a_run_may_fill_its_row() -> None:
    runs = BlockRuns.from_states(
        torch.full((1, 1, 3, 4), 2, dtype=torch.int8), 300, 400, (100, 100)
    )
    assert listed(runs.full) == [[(0, 4)]] * 3
    assert listed(runs.full_t) == [[(0, 3)]] * 4
    assert listed(runs.partial) == [[]] * 3
    assert runs.counts() == (0, 0, 12)


def test_long_rows_do_not_overflow_their_dense_form() -> None:
    states = torch.full((1, 1, 1, 1000), FULL, dtype=torch.int8)
    states[..., ::3] = PARTIAL
    runs = BlockRuns.from_states(states, 1, 1000, (1, 1))
    assert torch.equal(runs.states(), states)


# --- PyTorch's BlockMask


def entries(block_mask: flex.BlockMask) -> list[list[list[int]]]:
    """Return the indices in each of the four block lists of a BlockMask, up to their counts."""
    found = []
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(block_mask, f"{name}_num_blocks").flatten().tolist()
        indices = getattr(block_mask, f"{name}_indices").flatten(0, -2).tolist()
        found.append([row[:n] for row, n in zip(indices, counts, strict=True)])
    return found


@given(runs=grids())
def test_flex_round_trip_from_runs(runs: BlockRuns) -> None:
    block_mask = runs.to_flex()
    again = from_flex(block_mask)
    assert torch.equal(again.states(), runs.states())
    assert (again.q_len, again.kv_len, again.block) == (runs.q_len, runs.kv_len, runs.block)
    assert block_mask.shape == (runs.batch, runs.heads, runs.q_len, runs.kv_len)
    assert tuple(block_mask.BLOCK_SIZE) == runs.block


def band(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (q - kv < 150 + 100 * h) & (kv >= 40 * b)


SHAPES = [(256, 256, 128), (300, 420, 128), (97, 64, 16), (100, 260, (64, 32)), (50, 50, 128)]


@pytest.mark.parametrize(("q_len", "kv_len", "block"), SHAPES)
@pytest.mark.parametrize("heads", [None, 3])
def test_flex_round_trip_from_torch(
    q_len: int, kv_len: int, block: int | tuple[int, int], heads: int | None
) -> None:
    given_mask = flex.create_block_mask(
        band, 2, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=block
    ) if heads else flex.create_block_mask(
        lambda b, h, q, kv: band(b, h * 0, q, kv), None, None, q_len, kv_len,
        device="cpu", BLOCK_SIZE=block,
    )  # fmt: skip
    runs = from_flex(given_mask)
    again = runs.to_flex(given_mask.mask_mod)
    assert entries(again) == entries(given_mask)
    assert again.seq_lengths == given_mask.seq_lengths
    assert again.BLOCK_SIZE == given_mask.BLOCK_SIZE
    assert again.mask_mod is given_mask.mask_mod
    assert torch.equal(again.to_dense(), given_mask.to_dense())
    assert again.sparsity() == pytest.approx(given_mask.sparsity())


def test_without_full_lists_every_listed_block_is_partial() -> None:
    block_mask = flex.create_block_mask(
        lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu", BLOCK_SIZE=16,
        separate_full_blocks=False,
    )  # fmt: skip
    assert block_mask.full_kv_indices is None
    assert from_flex(block_mask).counts() == (6, 10, 0)


def test_entries_beyond_the_counts_are_ignored() -> None:
    counts = torch.tensor([[[1, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, -7], [99, 1]]]], dtype=torch.int32)
    block_mask = flex.BlockMask((32, 32), counts, indices, None, None, None, None, None, None,
                                BLOCK_SIZE=(16, 16))  # fmt: skip
    assert from_flex(block_mask).states().tolist() == [[[[0, 1], [0, 0]]]]


def test_lists_may_be_narrower_than_the_row_and_in_any_order() -> None:
    counts = torch.tensor([[[2, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[3, 1], [0, 0]]]], dtype=torch.int32)
    block_mask = flex.BlockMask((32, 64), counts, indices, None, None, None, None, None, None,
                                BLOCK_SIZE=(16, 16))  # fmt: skip
    assert from_flex(block_mask).states().tolist() == [[[[0, 1, 0, 1], [1, 0, 0, 0]]]]


def test_a_block_larger_than_the_lengths() -> None:
    """The BlockMask that FlexAttention builds without a mask converts to a single tile."""
    ones, zeros = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    block_mask = flex.BlockMask.from_kv_blocks(ones, zeros, BLOCK_SIZE=1 << 30, seq_lengths=(1, 1))
    runs = from_flex(block_mask)
    assert (runs.q_blocks, runs.kv_blocks, runs.counts()) == (1, 1, (0, 1, 0))


def test_cropped_block_masks_are_understood() -> None:
    whole = flex.create_block_mask(
        lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu", BLOCK_SIZE=16
    )
    assert from_flex(whole._adjust(32, 48)).states().tolist() == [[[[1, 0, 0], [2, 1, 0]]]]


def broken(counts: list[int], indices: list[list[int]], full: list[int] | None = None) -> str:
    def tensors(rows: list[int]) -> tuple[Tensor, Tensor]:
        return (torch.tensor([[rows]], dtype=torch.int32),
                torch.tensor([[indices]], dtype=torch.int32))  # fmt: skip

    block_mask = flex.BlockMask((32, 32), *tensors(counts), *(tensors(full) if full else (None, None)),
                                None, None, None, None, BLOCK_SIZE=(16, 16))  # fmt: skip
    with pytest.raises(ShapeError) as caught:
        from_flex(block_mask)
    return str(caught.value)


def test_a_block_outside_is_refused() -> None:
    assert "block_mask.kv_indices names block 2, but its lengths have 2 kv blocks" in broken(
        [1, 1], [[2, 0], [0, 0]]
    )


def test_a_block_named_twice_is_refused() -> None:
    assert "names a block twice" in broken([2, 1], [[1, 1], [0, 0]])


def test_a_block_both_partial_and_full_is_refused() -> None:
    assert "both as partial and as full" in broken([1, 1], [[0, 1], [1, 0]], full=[1, 0])


def test_lists_of_the_wrong_length_are_refused() -> None:
    assert "lists 3 rows of blocks, but 32 queries in blocks of 16 are 2 rows" in broken(
        [1, 1, 1], [[0, 1], [0, 1], [0, 1]]
    )


def test_only_block_masks_are_taken() -> None:
    with pytest.raises(ArgumentError, match="got Tensor"):
        from_flex(torch.zeros(1))  # type: ignore[arg-type]


# --- construction


def test_wrong_grids_are_refused() -> None:
    good = torch.zeros(1, 1, 2, 2, dtype=torch.int8)
    with pytest.raises(DTypeError, match=r"states must be int8, got torch\.bool"):
        BlockRuns.from_states(good.bool(), 20, 20, (10, 10))
    with pytest.raises(ShapeError, match=r"must be \[batch, heads, 3, 2\], got \(1, 1, 2, 2\)"):
        BlockRuns.from_states(good, 21, 20, (10, 10))
    with pytest.raises(OptionError, match=r"block must be two positive sizes .* got \(0, 10\)"):
        BlockRuns.from_states(good, 20, 20, (0, 10))
    with pytest.raises(ShapeError, match="q_len and kv_len must be at least 1, got 0 and 20"):
        BlockRuns.from_states(good, 0, 20, (10, 10))


def test_text_shows_counts_and_a_picture() -> None:
    states = torch.zeros(1, 1, 3, 3, dtype=torch.int8)
    states[0, 0, 1, 1], states[0, 0, 2] = PARTIAL, FULL
    text = str(BlockRuns.from_states(states, 47, 48, (16, 16)))
    assert "47 x 48 positions in tiles of 16 x 16" in text
    assert "3 full, 1 partial, 5 empty tiles (44.4% kept) in 2 runs" in text
    assert text.splitlines()[1:] == ["|   |", "| + |", "|###|"]


def test_a_large_picture_is_reduced() -> None:
    states = torch.full((1, 1, 100, 70), FULL, dtype=torch.int8).tril()
    runs = BlockRuns.from_states(states, 100, 70, (1, 1))
    lines = runs.picture(10).splitlines()
    assert len(lines) == 10
    assert {len(line) for line in lines} == {12}
    assert lines[0] == "|++        |"
    assert lines[-1] == "|##########|"


def test_moving_keeps_everything() -> None:
    states = torch.full((1, 2, 3, 4), PARTIAL, dtype=torch.int8)
    runs = BlockRuns.from_states(states, 3, 4, (1, 1)).to("cpu")
    assert runs.device == torch.device("cpu")
    assert torch.equal(runs.states(), states)

"""Check that tile counts of a mask agree with the dense mask and FlexAttention's tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex

from attnkit import create_block_mask, create_mask, masks, noop_mask, or_masks, per_head
from attnkit.inspection import summary
from attnkit.inspection.summary import bytes_shown, stored_bytes, summarize

EXAMPLES = masks.examples(64)


@settings(max_examples=60)
@given(st.sampled_from(sorted(EXAMPLES)), st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_counts_are_those_of_the_dense_mask(name: str, block: tuple[int, int]) -> None:
    mask, q_len, kv_len, batch, heads = EXAMPLES[name]
    blocks = create_block_mask(mask, batch, heads, q_len, kv_len, BLOCK_SIZE=block)
    dense = create_mask(mask, batch, heads, q_len, kv_len)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "_AT_ONCE", 700)  # several steps
        found = summarize(blocks)
    assert found.kept_positions == int(dense.sum())
    assert found.dense == dense.numel()
    assert found.tiles == blocks.runs.counts()
    assert found.shape == tuple(dense.shape)


@pytest.mark.parametrize(("q_len", "kv_len", "heads"), [(128, 128, 1), (100, 260, 3)])
def test_sizes_are_those_of_the_tensors(q_len: int, kv_len: int, heads: int) -> None:
    mask = per_head([masks.causal(), masks.prefix(3), masks.sliding_window(9)][:heads])
    sizes = (1, heads, q_len, kv_len)
    blocks = create_block_mask(mask, *sizes, BLOCK_SIZE=(16, 32))
    theirs = flex.create_block_mask(mask, *sizes, device="cpu", BLOCK_SIZE=(16, 32))
    tensors = [t for t in theirs.as_tuple(flatten=True) if isinstance(t, torch.Tensor)]
    found = summarize(blocks)
    assert found.flex == sum(t.nbytes for t in tensors)
    runs = blocks.runs
    kinds = (runs.full, runs.partial, runs.full_t, runs.partial_t)
    assert found.stored == stored_bytes(runs)
    assert found.stored == sum(t.nbytes for k in kinds for t in (k.row_ptr, k.start, k.length))


def test_report() -> None:
    assert str(summarize(create_block_mask(masks.natten((64,), 5), None, None, 64, 64))) == (
        "density: 100% of tiles computed, 7.81% of 4096 positions kept\n"
        "stored: 48 bytes as runs; 32 bytes as FlexAttention's BlockMask, 4 KiB dense\n"
        "built for: query length 64, kv length 64\n"
        "intervals: 1 interval a row\n"
        "  min(max(q - 2, 0), 59) <= kv < min(max(q - 2, 0), 59) + 5"
    )
    dilated = create_block_mask(masks.dilated(64, 2), None, None, 64, 64)
    found = str(summarize(dilated, most_positions=100))
    assert "100% of tiles computed, positions not counted" in found
    assert "built for: any lengths" in found
    assert "intervals: `(q - kv <= 64)" in found


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1500, "1.46 KiB"), (1 << 34, "16 GiB")],
)  # fmt: skip
def test_bytes_to_read(count: int, shown: str) -> None:
    assert bytes_shown(count) == shown


def test_nothing_and_everything() -> None:
    nothing = summarize(create_block_mask(or_masks(), None, None, 100, 70))
    assert (nothing.kept_positions, nothing.tiles) == (0, (1, 0, 0))
    everything = summarize(create_block_mask(noop_mask, None, None, 100, 70))
    assert (everything.kept_positions, everything.tiles) == (7000, (0, 0, 1))

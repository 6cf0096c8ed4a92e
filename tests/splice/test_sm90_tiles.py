"""Check which Hopper forward kernel is chosen for the tiles of a mask at head dims to 64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnkit import create_block_mask, masks
from attnkit.codegen.score_form import score_form
from attnkit.schedule.kernel_table import TALL_TILE_LIMIT, Kernel, kernels, mask_tiles
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.sm90 import choose_kernel, visited_scores

CAUSAL = masks.causal()


def tiles(mask: Any, length: int, block: tuple[int, int]) -> BlockRuns:
    return create_block_mask(mask, None, None, length, length, BLOCK_SIZE=block).runs


def choice(mask: Any, length: int) -> tuple[Kernel, str]:
    candidates = kernels(64, 64, q_len=length)
    runs = None if mask is None else tiles(mask, length, mask_tiles(candidates))
    return choose_kernel(candidates, (64, 64), runs, False, score_form(None))


@pytest.mark.parametrize(
    ("mask", "length", "rows"),
    [
        (None, 640, 128),
        (None, 768, 192),
        (None, 8192, 192),
        (CAUSAL, 512, 128),
        (CAUSAL, 1024, 128),
        (CAUSAL, 1536, 192),
        (CAUSAL, 8192, 192),
        (CAUSAL & masks.sliding_window(256), 4096, 128),
        (CAUSAL & masks.document(torch.arange(4096) // 512), 4096, 128),
    ],
    ids=str,
)
def test_tall_tiles_unless_they_visit_too_much(mask: Any, length: int, rows: int) -> None:
    kernel, why = choice(mask, length)
    assert kernel.block == (rows, 128)
    assert why


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (
            CAUSAL & masks.sliding_window(256),
            "tiles of 192 rows would visit 35% more scores",
        ),
        (CAUSAL, "tiles of 128 rows are slower; these visit 9% more scores"),
        (
            lambda b, h, q, kv: kv > 4096,
            "tiles of 128 rows are slower; these visit nothing either",
        ),
    ],
)
def test_the_reason_says_how_much_more_is_visited(mask: Any, reason: str) -> None:
    assert choice(mask, 4096)[1] == reason


def test_block_lists_take_a_kernel_that_divides_their_tiles() -> None:
    candidates = kernels(64, 64, q_len=8192)
    for block, expected in (((384, 128), 192), ((256, 128), 128), ((128, 128), 128)):
        runs = tiles(CAUSAL, 8192, block)
        kernel, _ = choose_kernel(candidates, (64, 64), runs, True, score_form(None))
        assert kernel.block == (expected, 128)


@given(length=st.integers(129, 1200), window=st.integers(1, 600))
def test_the_choice_visits_few_scores(length: int, window: int) -> None:
    """192 rows visit at most 12 % more scores; 128 rows are taken only if 192 would exceed that."""
    mask = CAUSAL & masks.sliding_window(window)
    kernel, _ = choice(mask, length)
    tall, low = (
        visited_scores(tiles(mask, length, (rows, 128)), (rows, 128)) for rows in (192, 128)
    )
    if kernel.block[0] == 192:
        assert tall <= TALL_TILE_LIMIT * low
    else:
        beyond = -(-length // 192) * 192 > TALL_TILE_LIMIT * -(-length // 128) * 128
        assert beyond or tall > TALL_TILE_LIMIT * low

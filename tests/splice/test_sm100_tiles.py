"""Check which Blackwell forward kernel is chosen for the tiles of a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit import create_block_mask, explain, masks, mods
from attnkit.codegen.score_form import ScoreForm, score_form
from attnkit.schedule.kernel_table import Kernel, kernels
from attnkit.schedule.work_list import full_runs
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice.sm100_tiles import INSTRUCTION, choose_kernel, clocks_of, total
from attnkit.tracing.guards import trace_cached

CPU = torch.device("cpu")
PLAIN = score_form(None)
CAUSAL = masks.causal()
WINDOW = CAUSAL & masks.sliding_window(1024)


SOFTCAP = 6  # instructions of a score


def form_of(mod: Any) -> ScoreForm:
    return score_form(trace_cached(mod, "score", CPU).root)


def tiles(mask: Any, length: int, block: tuple[int, int] = (128, 128)) -> BlockRuns:
    return create_block_mask(mask, None, None, length, length, BLOCK_SIZE=block).runs


def choice(
    runs: BlockRuns,
    dims: tuple[int, int] = (128, 128),
    lists_override_mask: bool = False,
    form: ScoreForm = PLAIN,
) -> tuple[Kernel, str]:
    return choose_kernel(kernels(*dims, template="sm100"), dims, runs, lists_override_mask, form)


@pytest.mark.parametrize(
    ("mask", "block"),
    [(CAUSAL, (512, 128)), (WINDOW, (256, 128)), (masks.prefix(8000), (512, 128))],
    ids=["causal", "window", "prefix"],
)
def test_long_rows_take_pairs_and_narrow_bands_do_not(mask: Any, block: tuple[int, int]) -> None:
    kernel, why = choice(tiles(mask, 8192))
    assert kernel.block == block
    name, other = ("a pair of CTAs", "256") if kernel.ctas == 2 else ("one CTA", "512")
    assert why.startswith(f"{name}: predicted 0.")
    assert f"of the clocks of {other} x 128" in why


def test_other_head_dims() -> None:
    runs = tiles(CAUSAL, 8192, (128, 64))
    assert choice(runs, (192, 128))[0].ctas == 2
    for dims in ((64, 64), (72, 96), (192, 192), (256, 256)):  # pairs gain nothing
        block = kernels(*dims, template="sm100")[0].block
        assert choice(tiles(CAUSAL, 2048, block), dims)[0].block == block


def test_block_lists_are_cut_and_never_joined() -> None:
    for block, expected in (((512, 128), 512), ((256, 256), 256), ((128, 128), 128)):
        kernel, why = choice(tiles(CAUSAL, 8192, block), lists_override_mask=True)
        assert kernel.block == (expected, 128)
    assert "block lists with tiles of (128, 128) fit no other" in why


def test_tall_tiles_ask_for_their_kernel() -> None:
    for block in ((512, 128), (256, 128)):
        for mask in (CAUSAL, WINDOW):
            kernel, why = choice(tiles(mask, 4096, block))
            assert (kernel.block, why) == (block, "its tiles were asked for")


@given(
    st.integers(129, 3000),
    st.integers(1, 3000),
    st.integers(0, 2**32 - 1),
    st.sampled_from([PLAIN, form_of(mods.softcap(20.0))]),
)
def test_the_choice_is_the_least_sum_of_clocks(
    q_len: int, kv_len: int, seed: int, form: ScoreForm
) -> None:
    """The chosen kernel has the least sum of clocks, with tiles counted in a dense grid."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = -(-q_len // 128), -(-kv_len // 128)
    states = torch.randint(0, 3, (1, 1, rows, columns), generator=generator).to(torch.int8)
    runs = BlockRuns.from_states(states, q_len, kv_len, (128, 128))
    kernel, _ = choice(runs, form=form)
    costs = {}
    for other in kernels(128, 128, template="sm100"):
        known = clocks_of((128, 128)).get(other.block)
        if known is None:
            continue
        high = other.block[0] // 128
        groups = [states[0, 0, i : i + high] for i in range(0, rows, high)]
        full = sum(int((g == 2).all(0).sum()) for g in groups)
        kept = sum(int((g > 0).any(0).sum()) for g in groups)
        clocks = [known.full, known.partial] if form.plain else list(known.modded)
        extra = 0 if form.plain else SOFTCAP * INSTRUCTION * other.block[0] // other.ctas // 128
        cost = full * (clocks[0] + extra) + (kept - full) * (clocks[1] + extra)
        costs[other] = other.ctas * (cost + len(groups) * known.tile)
        assert total(other, known, runs, form) == costs[other]
    assert costs[kernel] == min(costs.values())


def test_a_mask_comes_in_tiles_that_can_be_joined() -> None:
    def plan(**call: Any) -> tuple[int, int]:
        return explain(None, CAUSAL, arch="sm_100a", **call).plan.block

    assert plan(q_len=2048, head_dim=128) == (128, 128)
    assert plan(q_len=256, head_dim=128) == (256, 128)
    assert plan(q_len=2048, head_dim=64) == (256, 128)
    fixed = {"BLOCK_M": 256, "BLOCK_N": 128}
    assert plan(q_len=2048, head_dim=128, kernel_options=fixed) == (256, 128)
    lists = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 1024, 1024, "cpu")
    found = explain(None, lists, q_len=1024, head_dim=128, arch="sm_100a")
    assert found.layout.roles  # a kernel of one query tile
    assert full_runs(1024, 1024, found.plan.block, CPU).block == (128, 128)

"""Check the predicted clocks per block, of each unit and of the whole block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from attnkit import Variant, explain, masks, mods
from attnkit.cli import main
from attnkit.codegen.score_form import score_form
from attnkit.emulator.timing.cycles import Product, tile
from attnkit.emulator.timing.timeline import Timeline
from attnkit.errors import ArgumentError, OptionError, UnsupportedError
from attnkit.inspection import throughput
from attnkit.inspection.forecast import GPUS, forecast_forward
from attnkit.inspection.throughput import BlockClocks, backward_block_clocks, forward_block_clocks
from attnkit.schedule.kernel_table import kernels
from attnkit.schedule.targets import SM90, SM100
from attnkit.schedule.work_list import full_runs
from attnkit.sparsity.block_runs import FULL, BlockRuns
from attnkit.splice.sm100_tiles import clocks_of, total
from attnkit.tracing.guards import trace_cached

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _each_timeline_once() -> Iterator[None]:
    """Emulate each kernel at each size once: most tests look at those of the same few variants."""
    known: dict[Any, Timeline] = {}
    whole = throughput._Run.timeline

    def timeline(run: throughput._Run, variant: Variant, *sizes: int, **more: int) -> Timeline:
        key = (type(run), run, str(variant), sizes, *more.items())
        if key not in known:
            known[key] = whole(run, variant, *sizes, **more)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput._Run, "timeline", timeline)
        yield


@pytest.fixture(scope="module")
def blackwell() -> BlockClocks:
    causal = Variant(None, masks.causal())
    return forward_block_clocks(causal, SM100, head_dim=128, block=(256, 128))


def test_the_clocks_of_units_are_those_of_the_paper(blackwell: BlockClocks) -> None:
    """A 128 x 128 block takes the clocks that the FlashAttention-4 paper states for each unit.

    The paper states 1024 clocks of products and 1024 of exponentials.
    """
    products = [Product(128, 128, 128), Product(128, 128, 128, a_shared=False)]
    expected = tile(products, 128 * 128)
    assert blackwell.block == (256, 128)
    assert blackwell.units["tensor"] == 2 * expected.tensor == 2048
    # of a row's 64 pairs of exponentials every third is computed elsewhere; one more says what its
    # sums are worth, and one how its largest weight is rounded
    taken = (2 * (64 - 64 // 3) + 2) / 128
    assert blackwell.units["special"] == taken * 2 * expected.exponential
    assert blackwell.limit == "tensor"


def test_no_prediction_beats_the_units(blackwell: BlockClocks) -> None:
    assert blackwell.full >= 0.99 * blackwell.roofline
    assert blackwell.partial >= blackwell.full  # the mask is not free
    assert blackwell.tile > 0
    assert blackwell.cost.full == round(blackwell.full)


def test_the_backward_has_five_products_and_two_steps() -> None:
    found = backward_block_clocks(Variant(), SM100, head_dim=128)
    assert (found.block, found.sms) == ((128, 256), 2)  # a pair of CTAs
    # and one more step of 16 for the statistics in S and dP
    assert found.units["tensor"] == (5 * 2 * 128**3 + 2 * 2 * 128 * 128 * 16) / 8192 == 2688
    assert "128 x 256 scores, D = 128, on 2 SMs:" in str(found)
    assert 0.99 * found.roofline <= found.full <= 1.1 * found.roofline
    with pytest.raises(UnsupportedError, match="with values up to 512, got 576 and 576"):
        backward_block_clocks(Variant(), SM100, head_dim=576)


def test_the_backward_of_wide_heads_computes_scores_for_each_part() -> None:
    """At head dim 256 each of two CTAs computes all of S and dP, and half of the other products."""
    found = backward_block_clocks(Variant(), SM100, head_dim=256)
    assert (found.block, found.sms) == ((64, 128), 2)
    assert found.units["tensor"] == (2 * 2 + 3) * 2 * 64 * 128 * 128 / 8192


@pytest.mark.exhaustive
def test_pairs_of_ctas_reach_the_limit_of_the_tensor_cores() -> None:
    """A full block of a CTA pair takes at most 1.1 x its tensor core clocks at head dim 128."""
    found = forward_block_clocks(Variant(), SM100, head_dim=128)
    assert (found.block, found.sms) == ((512, 128), 2)
    assert found.units["tensor"] == 2048
    assert found.limit == "tensor"
    assert found.full <= 1.1 * found.roofline


SCORES = {"none": None, "softcap": mods.softcap(20.0)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCORES)
def test_pairs_need_fewer_clocks_a_block(name: str) -> None:
    """The clocks that select the kernel are within a quarter of the predicted ones."""
    score: Any = SCORES[name]
    form = score_form(None if score is None else trace_cached(score, "score", CPU).root)
    rows, found = {}, {}
    for block in ((256, 128), (512, 128)):
        made = forward_block_clocks(
            Variant(score, masks.causal()), SM100, head_dim=128, block=block
        )
        assert made.block == block
        states = torch.full((1, 1, 4096 // block[0], 32), FULL, dtype=torch.int8)
        runs = BlockRuns.from_states(states, 4096, 4096, block)
        kernel = next(k for k in kernels(128, 128, template="sm100") if k.block == block)
        tiles = 4096 // block[0] * kernel.ctas
        rows[block] = total(kernel, clocks_of((128, 128))[block], runs, form) / tiles
        found[block] = 32 * made.full + made.tile
        assert rows[block] == pytest.approx(found[block], rel=0.25)
    for each in (rows, found):
        assert 0.87 < each[512, 128] / each[256, 128] < 0.99


def test_the_report(blackwell: BlockClocks) -> None:
    lines = str(blackwell).splitlines()
    assert lines[0] == "a full block of 256 x 128 scores, D = 128:"
    assert lines[1].endswith("the limit")
    assert lines[1].split()[0] == blackwell.limit
    assert f"{blackwell.full:.0f} clocks" in str(blackwell)


def test_a_mask_with_lengths_of_its_own_is_noted() -> None:
    found = forward_block_clocks(Variant(None, masks.natten((20, 20), 5)), SM90, head_dim=64)
    assert found.partial == found.full
    assert "masked blocks are taken to cost what full ones do" in str(found)


def test_the_speed_of_a_gpu_is_that_of_the_schedule(blackwell: BlockClocks) -> None:
    gpu = GPUS["sm_100a"]
    runs = full_runs(8192, 8192, blackwell.block, torch.device("cpu"))
    found = forecast_forward(
        runs, batch=2, heads=16, head_dim=128, sms=gpu.sms, cost=blackwell.cost
    )
    seconds = found.timeline.makespan / (gpu.clock * 1e9)
    rate = 4 * 128 * 2 * 16 * 8192**2 / seconds / 1e12
    assert 0.5 * gpu.peak < rate < gpu.peak


def test_explain_shows_the_kernel() -> None:
    found = explain(None, masks.causal(), q_len=512, head_dim=128, arch="sm_100a")
    assert found.sms == GPUS["sm_100a"].sms
    assert found.plan.template == "emulate:sm100"
    text = str(found)
    assert "kernel for sm_100a (predicted, not measured)" in text
    for part in ("tensor memory columns", "softmax 0", "registers a thread", "the limit"):
        assert part in text
    assert "TFLOP/s of the unmasked scores (2250 peak)" in text
    assert found.block_clocks.full < found.block_clocks.partial
    assert "blocks of 256 x 128: one CTA: predicted" in text  # 512 rows are one tile of a pair


@pytest.mark.exhaustive
def test_blocks_of_128_have_backwards_of_one_cta() -> None:
    blocks = masks.block_diagonal(128)
    found = explain(None, blocks, q_len=2048, head_dim=128, arch="sm_100a").backward_block_clocks
    assert (found.block, found.sms) == ((128, 128), 1)
    assert found.tile > 0
    found = explain(None, masks.causal(), q_len=8192, head_dim=128, arch="sm_100a")
    assert found.backward_block_clocks.block == (128, 256)


@pytest.mark.exhaustive
def test_explain_says_where_a_pair_takes_a_mask() -> None:
    found = explain(None, masks.causal(), q_len=8192, head_dim=128, arch="sm_100a")
    assert found.block_clocks.sms == 2
    assert "blocks of 512 x 128: a pair of CTAs: predicted 0.9" in found.kernel


def test_what_cannot_be_explained() -> None:
    with pytest.raises(UnsupportedError, match="sm_120a has neither tensor memory nor tcgen05"):
        explain(q_len=64, arch="sm_120a")
    with pytest.raises(OptionError, match="arch='sm_100a' with backend='cpu': give one of them"):
        explain(q_len=64, arch="sm_100a", backend="cpu")
    with pytest.raises(ArgumentError, match="no architecture was named"):
        _ = explain(q_len=64).block_clocks
    assert main(["explain", "masks:causal", "--q-len", "64", "--arch", "sm_80"]) == 2

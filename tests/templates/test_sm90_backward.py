"""Compare the Hopper backward kernels, executed on the CPU, with autograd of the float64 oracle.

Gradients may have twice the error of the dense oracle in the same dtype. Results hold NaN before a
kernel runs, and reading them is a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import attnkit
from attnkit import BlockMask, create_block_mask, flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from cutlass import Int32, cute

from attnkit.schedule.scheduler import Schedule
from attnkit.sparsity.block_runs import BlockRuns
from attnkit.splice import BackwardInputs, KernelCall, backward_work
from attnkit.splice import backward as splice_backward
from attnkit.templates.common import device
from attnkit.templates.common.semaphore import OrderRow, OrderTable
from tests.sampling import diagonal, first_of, sampled
from tests.templates.backward_kit import (
    BF16,
    CAUSAL,
    FP16,
    MODS,
    check,
    draw,
    every_other,
    forget,
    gradients,
    observed,
    ordered,
    poisoned,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned")


MASKS = [None, CAUSAL, CAUSAL & masks.sliding_window(90)]


@pytest.mark.parametrize(("mask", "dims"), diagonal(MASKS, [(64, 64), (128, 128)]), ids=str)
def test_masks_in_all_orders(mask: Any, dims: tuple[int, int]) -> None:
    check(draw(330, dims=dims, heads=(1, 1)), mask=mask, mode="check")


FORMS: dict[str, Callable[[], Any]] = {
    "documents": lambda: masks.document(torch.arange(330) // 70) & CAUSAL,
    "two intervals of rows": lambda: masks.streaming_llm(60, 20),
    "no intervals": lambda: create_block_mask(
        lambda b, h, q, kv: ((q ^ kv) & 5) != 0, None, None, 330, 330, device="cpu"
    ),
}


@pytest.mark.parametrize("name", sampled([(name,) for name in FORMS], 2))
def test_masks_by_column(name: str) -> None:
    """Gradients are exact for each form in which a kernel gets the rows that a column keeps.

    The rows come from tables, as several intervals, or from the mask itself.
    """
    check(draw(330, heads=(1, 1)), mask=FORMS[name]())


WEIGHTS = torch.linspace(-1.0, 1.0, 330)


def long_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return torch.nn.functional.logsigmoid(s) + WEIGHTS[kv]


LONG_MOD_MASKS = [None, FORMS["documents"](), FORMS["no intervals"]()]


@pytest.mark.parametrize(
    ("mask", "dims"), diagonal(LONG_MOD_MASKS, [(64, 64), (128, 128), (192, 192), (256, 256)])
)
def test_a_mod_of_many_instructions(mask: Any, dims: tuple[int, int]) -> None:
    """Blocks with and without a mask share the code of the mod, and P is masked afterwards."""
    check(draw(330, dims=dims, heads=(1, 1)), lambda: long_mod, mask)


DIMS = [(64, 128), (128, 64), (96, 96), (40, 72)]


@pytest.mark.parametrize(("dims", "dtype"), sampled(list(product(DIMS, [BF16, FP16])), 5))
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(150, dims=dims, heads=(1, 1), dtype=dtype), mask=CAUSAL)


@pytest.mark.parametrize(
    "lengths", sampled([((1, 1),), ((17, 200),), ((200, 17),), ((257, 129),)], 3)
)
def test_ragged_lengths(lengths: tuple[int, int]) -> None:
    check(draw(*lengths))


def test_shared_heads_and_batches() -> None:
    check(draw(200, heads=(4, 2), batch=(2, 2)), mask=CAUSAL)
    check(draw(200, heads=(2, 1), batch=(2, 1)))


@pytest.mark.parametrize("full", [True, False])
def test_blocks_of_lists(full: bool) -> None:
    """The mask applies to PARTIAL blocks of a list, and not to FULL ones."""
    counts = torch.ones(1, 1, 3, dtype=torch.int32)
    own = torch.arange(3, dtype=torch.int32).view(1, 1, 3, 1).expand(-1, -1, -1, 3).contiguous()
    others = ((own + 1) % 3).contiguous()
    mask = BlockMask.from_kv_blocks(
        counts,
        own,
        counts if full else None,
        others if full else None,
        (128, 128),
        CAUSAL,
        (330, 330),
    )
    check(draw(330, heads=(1, 1)), mask=mask)


def test_dead_rows_have_no_gradient() -> None:
    keep = lambda b, h, q, kv: (q >= 70) & (kv <= q)
    mask = create_block_mask(keep, None, None, 200, 200, device="cpu")
    inputs, weights = draw(200)
    check((inputs, weights), mask=mask)
    found = gradients("emulate", inputs, weights, (), None, mask, None)
    assert not found[0][:, :, :70].any()


@pytest.mark.parametrize("heads", sampled([((2, 1),), ((1, 1),)], 2))
def test_tiles_that_keep_nothing(heads: tuple[int, int]) -> None:
    mask = every_other(200, 500)
    check(draw(200, 500, heads=heads), mask=mask, mode="check")
    nothing = create_block_mask(
        lambda b, h, q, kv: q < kv - 1000, None, None, 150, 300, device="cpu"
    )
    check(draw(150, 300, heads=heads), mask=nothing)


def test_scores_far_below_zero() -> None:
    inputs, weights = draw(150, 140)
    inputs[0], inputs[1] = inputs[0].abs() * 8, -inputs[1].abs() * 8
    check((inputs, weights))


@pytest.mark.parametrize("name", first_of([(n,) for n in MODS]))
def test_gradients_of_captured_tensors(name: str) -> None:
    mod, captured = MODS[name]
    check(draw(200), mod, CAUSAL, captured())


@pytest.mark.parametrize("name", ["every position", "one by one"])
def test_learned_biases(name: str) -> None:
    """Masked scores add nothing to the gradients of a bias, which are sums of dS."""
    mod, captured = MODS["bias"]
    keep = {"every position": None, "one by one": lambda b, h, q, kv: ((q ^ kv) & 5) != 0}[name]
    check(draw(200), mod, keep, captured())


def test_the_option_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    plain = splice_backward.prepare

    def recorded(call: KernelCall, inputs: BackwardInputs) -> Any:
        seen.append(call.spec.deterministic)
        return plain(call, inputs)

    monkeypatch.setattr(splice_backward, "prepare", recorded)
    for setting in (False, True):
        q, k, v = (torch.randn(1, 1, 140, 64, dtype=BF16, requires_grad=True) for _ in range(3))
        flex_attention(q, k, v, backend="emulate", deterministic=setting).sum().backward()
    assert list(dict.fromkeys(seen)) == [False, True]  # a call may be prepared again


def test_deterministic_bits_do_not_depend_on_workers_or_order() -> None:
    first = ordered("emulate", "eager", 2)
    second = ordered("emulate", "adversarial", 3)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    "name", first_of([(name,) for name in ("row", "column", "head", "relative", "two")])
)
def test_deterministic_bits_of_captured_gradients(name: str) -> None:
    first = ordered("emulate", "eager", 2, name=name)
    second = ordered("emulate", "adversarial", 3, name=name)
    assert all(map(torch.equal, first, second))


def test_turns_of_chunks_that_are_ready_early(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sums have the same bits if each chunk is ready before the one before it is reported.

    Emulated warps run until they wait, so that no chunk would be.
    """
    plain = ordered("emulate", "eager", 2)

    def once_ready(barrier: Any, parity: Any) -> Any:
        cute.arch.mbarrier_wait(barrier, parity)
        return Int32(1) != 0

    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(device, "test_wait", once_ready)
    attnkit.clear_caches()
    try:
        assert all(map(torch.equal, ordered("emulate", "adversarial", 3), plain))
    finally:
        attnkit.clear_caches()


def late_kv_tiles(runs: BlockRuns, schedule: Schedule) -> Schedule:
    """Move the last two kv tiles of head 0 to the end, as `with_short_tail` does in long lists."""
    late = (schedule.h == 0) & (schedule.tile >= schedule.blocks - 2)
    place = torch.where(late, schedule.blocks - schedule.tile, 0)
    return schedule.reordered(torch.argsort(place, stable=True))


@pytest.mark.parametrize(
    ("dim", "heads"),
    [(64, (2, 1)), (128, (2, 2)), pytest.param(256, (2, 2), marks=pytest.mark.exhaustive)],
)
def test_turns_of_kv_tiles_at_the_end_of_the_list(
    dim: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = dim, dim
    plain = ordered("emulate", "eager", 2, dims, heads=heads)
    monkeypatch.setattr(backward_work, "with_short_tail", late_kv_tiles)
    works = observed(monkeypatch, 2)
    first = ordered("emulate", "check", 2, dims, heads=heads)
    rows = works[-1].order[OrderTable.ROW]
    assert bool((rows[:, OrderRow.LAST_TURN] > rows[:, OrderRow.FIRST_TURN]).any())
    forget(monkeypatch)
    second = ordered("emulate", "adversarial", 3, dims, heads=heads)
    assert all(map(torch.equal, first, second))
    for ours, other in zip(first, plain, strict=True):
        torch.testing.assert_close(ours, other, rtol=0.02, atol=0.02)
    assert torch.equal(first[0][:, 1], plain[0][:, 1])  # the other head has the same order


def test_turns_pass_tiles_that_keep_nothing() -> None:
    mask = every_other(400, 400)
    first = ordered("emulate", "eager", 1, mask=mask)
    for a, b in zip(first, ordered("emulate", "adversarial", 3, mask=mask), strict=True):
        assert torch.equal(a, b)


def test_turns_of_rows_that_end_at_a_lower_tile_than_rows_before() -> None:
    ending = lambda b, h, q, kv: q + kv >= 400
    first = ordered("emulate", "eager", 1, mask=ending)
    for a, b in zip(first, ordered("emulate", "adversarial", 3, mask=ending), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("block", [(128, 128), (192, 112), (128, 64), (80, 48)])
def test_tiles_are_fitted(block: tuple[int, int]) -> None:
    lengths = (410, 333)
    size = (-(-lengths[0] // block[0]), -(-lengths[1] // block[1]))
    states = torch.randint(0, 3, (1, 2, *size), dtype=torch.int8)
    runs = BlockRuns.from_states(states, *lengths, block)
    found = backward_work.retile(runs, (64, 128)).states()
    dense = states.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)
    dense = dense[:, :, : lengths[0], : lengths[1]]
    for i in range(found.shape[2]):
        for j in range(found.shape[3]):
            part = dense[:, :, 64 * i : 64 * i + 64, 128 * j : 128 * j + 128].flatten(2)
            whole, none = (part == 2).all(2), (part == 0).all(2)
            assert torch.equal(found[:, :, i, j] == 2, whole)
            assert torch.equal(found[:, :, i, j] == 0, none)

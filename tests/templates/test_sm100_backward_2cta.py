"""Compare the Blackwell backward with CTA pairs, in the emulator, with the float64 oracle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from attnkit import create_block_mask, masks, mods
from tests.sampling import sampled

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation
from attnkit.jit import kernel as compiled
from attnkit.schedule.work_list import full_runs
from attnkit.sparsity.block_runs import FULL, BlockRuns
from attnkit.splice import sm100_pairs
from attnkit.splice.backward_template import BackwardCase
from attnkit.splice.sm100_pairs import RULES, fewer_clocks, kind_of, refusal
from attnkit.templates.sm100.backward_2cta import Backward2Cta
from attnkit.templates.sm100.backward_config import BackwardConfig
from tests.templates.backward_kit import (
    CAUSAL,
    MODS,
    check,
    draw,
    gradients,
    ordered,
    poisoned,  # noqa: F401
)

BACKEND = "emulate:sm_100a"
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("poisoned")


def kernels(*arguments: Any) -> list[Any]:
    """Compile and return the main kernels of a backward."""
    with emulation.session(execute=False), compiled.requested_sources() as sources:
        gradients(BACKEND, *arguments)
    return [compiled.kernel(s) for s in sources if s.name.startswith("backward")]


def in_pairs(*arguments: Any) -> bool:
    """Return whether the operator chooses CTA pairs for a backward."""
    (found,) = kernels(*arguments)
    return "tcgen05.mma.cta_group::2" in found.ptx


@pytest.mark.parametrize(
    "mask", sampled([(CAUSAL & masks.sliding_window(400),), (None,)], 2), ids=str
)
def test_masks_in_all_orders(mask: Any) -> None:
    drawn = draw(420, 500, dims=(128, 128), heads=(1, 1))
    assert in_pairs(*drawn, (), None, mask, None)
    check(drawn, mask=mask, mode="check", backend=BACKEND)


@pytest.mark.parametrize("lengths", sampled([((1, 129),), ((257, 250),), ((17, 700),)], 2))
def test_ragged_lengths(lengths: tuple[int, int]) -> None:
    drawn = draw(*lengths, dims=(128, 128))
    assert in_pairs(*drawn, (), None, None, None)
    check(drawn, mode="check", backend=BACKEND)


def test_shared_heads() -> None:
    drawn = draw(300, 500, dims=(104, 128), heads=(4, 2), batch=(2, 1))
    assert in_pairs(*drawn, (), None, None, None)
    check(drawn, backend=BACKEND)


def test_mods_and_float16() -> None:
    drawn = draw(300, 512, dims=(128, 128), dtype=torch.float16)
    mod = lambda: mods.compose(mods.softcap(5.0), mods.alibi(2))
    assert in_pairs(*drawn, (), mod, masks.padding(torch.tensor([450])), None)
    check(drawn, mod, masks.padding(torch.tensor([450])), backend=BACKEND)


def test_fully_masked_rows_and_columns() -> None:
    """Gradients are exact with fully masked blocks and fully masked rows."""
    mask = masks.prefix(200) & ~CAUSAL
    drawn = draw(400, 700, dims=(128, 128))
    check(drawn, mask=mask, mode="check", backend=BACKEND)


def test_block_lists() -> None:
    keep = lambda b, h, q, kv: (q // 128 + kv // 256) % 2 == 0
    lists = create_block_mask(keep, None, None, 512, 768, BLOCK_SIZE=(128, 256))
    drawn = draw(512, 768, dims=(128, 128))
    assert in_pairs(*drawn, (), None, lists, None)
    check(drawn, mask=lists, backend=BACKEND)


@pytest.mark.assembled
def test_no_spilled_registers() -> None:
    (found,) = kernels(*draw(512, dims=(128, 128)), (), None, None, None)
    assert "tcgen05.mma.cta_group::2" in found.ptx
    assert [s.stack for s in found.stats] == [0]


@pytest.mark.parametrize(
    "name",
    [
        *sampled([("head",), ("column",), ("row",), ("relative",), ("two",)], 4),
        pytest.param("number", marks=pytest.mark.exhaustive),  # summed as those of a head are
    ],
)
def test_gradients_of_captured_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm100_pairs, "fewer_clocks", lambda *_: True)
    mod, captured = MODS[name]
    drawn = draw(200, dims=(128, 128))
    (found,) = kernels(*drawn, captured(), mod, CAUSAL, None)
    assert "tcgen05.mma.cta_group::2" in found.ptx
    assert [s.stack for s in found.stats] == [0]
    mode = "check" if name == "two" else "eager"
    check(drawn, mod, CAUSAL, captured(), mode, backend=BACKEND)


@pytest.mark.parametrize("mask", sampled([(CAUSAL,), (None,)], 2), ids=str)
def test_the_same_bits_in_a_fixed_order(mask: Any) -> None:
    """Deterministic gradients do not depend on the order of execution or the number of pairs.

    The query heads share a kv head.
    """
    found = []
    for mode, ctas in (("eager", 2), ("check" if mask is None else "adversarial", 6)):
        with compiled.requested_sources() as sources:
            found.append(ordered(BACKEND, mode, ctas, (128, 128), mask))
    (source,) = (s for s in sources if s.name.startswith("backward"))
    kernel = compiled.kernel(source)
    assert "tcgen05.mma.cta_group::2" in kernel.ptx
    assert [s.stack for s in kernel.stats] == [0]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_captured_tensors_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm100_pairs, "fewer_clocks", lambda *_: True)
    first, *others = (
        ordered(BACKEND, mode, ctas, (128, 128), CAUSAL, "two")
        for mode, ctas in (("eager", 2), ("adversarial", 6))
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def case(**changes: Any) -> BackwardCase:
    runs = full_runs(512, 512, (128, 128), CPU)
    return BackwardCase(
        **{
            "widths": (128, 128),
            "learned": frozenset(),
            "lists_override_mask": False,
            "runs": runs,
            "additive": True,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"widths": (64, 128)}, "head dims of 65 to 128, these are computed as (64, 128)"),
        ({"lists_override_mask": True}, "block lists have tiles of 128 columns, pairs need 256"),
        ({"runs": full_runs(512, 128, (128, 128), CPU)}, "joined to 256 columns"),
    ],
)
def test_each_rule_has_its_message(changes: dict[str, Any], said: str) -> None:
    assert refusal(case()) == ""
    assert said in refusal(case(**changes))
    assert sum(not rule.holds(case(**changes)) for rule in RULES) == 1


def test_tiles_are_joined_only_where_that_is_faster() -> None:
    """CTA pairs are chosen only if they need fewer clocks.

    They do for two columns of blocks, and do not for a diagonal of blocks of any length.
    """
    for blocks, wide in itertools.product((4, 9), (1, 2)):
        states = torch.zeros(1, 1, blocks, 2 * blocks, dtype=torch.int8)
        for i in range(blocks):
            states[0, 0, i, 2 * i : 2 * i + wide] = FULL
        runs = BlockRuns.from_states(states, 128 * blocks, 256 * blocks, (128, 128))
        assert (refusal(case(runs=runs)) == "") == (wide == 2)


def test_gradients_that_are_added_for_every_score_leave_little_to_gain() -> None:
    """With gradients that are added for every score, pairs are not chosen for a causal mask.

    There, a joined block that is partly empty costs more than a pair saves.
    """
    assert kind_of(frozenset()) == "nothing"
    assert kind_of(frozenset({"head", "column"})) == "summed"
    assert kind_of(frozenset({"head", "row"})) == "spread"
    whole = full_runs(2048, 2048, (128, 128), CPU)
    lower = create_block_mask(CAUSAL, None, None, 2048, 2048, BLOCK_SIZE=128).runs
    for kind, expected in (("nothing", True), ("summed", True), ("spread", False)):
        assert fewer_clocks(whole, kind)
        assert fewer_clocks(lower, kind) == expected


def test_what_is_not_supported_says_so() -> None:
    with pytest.raises(ValueError, match="head dims of 64 and 128: expected 128 and 128"):
        Backward2Cta(BackwardConfig(two_cta=True, head_dim=64), None)

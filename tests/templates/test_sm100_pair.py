"""The Blackwell backward with pairs of CTAs, executed on the CPU, against the float64 oracle.

No operator chooses it yet: no GPU has measured whether it pays. The tests put it in the place of the
backward with single CTAs.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnkit import masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit import compiled, emulation
from attnkit.splice import backward as splice_backward
from attnkit.splice import sm100_backward
from attnkit.templates.sm100.backward_config import BackwardConfig
from attnkit.templates.sm100.backward_edges import Finish, Prepare
from attnkit.templates.sm100.backward_pair import PairBackward
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


def config(settings: Any) -> BackwardConfig:
    """The settings, for pairs."""
    return BackwardConfig(**settings.values, pair=True, dynamic=False)


PAIRS = SimpleNamespace(
    **{
        **vars(sm100_backward),
        "ROLES": {name: warps for name, (warps, _) in BackwardConfig().roles.items()},
        "SEMAPHORES": (2, 2),
        "block_kv": lambda widths: 256,
        "config": config,
        "prepare": lambda settings, with_lse: Prepare(config(settings), with_lse),
        "finish": lambda settings, width, block: Finish(config(settings), width, block),
        "main": lambda settings, hooks: PairBackward(config(settings), hooks),
    }
)


@pytest.fixture(autouse=True)
def _pairs(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:  # noqa: F811
    """Backward kernels are of pairs; their settings do not equal those of others."""
    plain = splice_backward._settings

    def renamed(target: Any, *rest: Any) -> Any:
        return dataclasses.replace(
            plain(target, *rest), target=dataclasses.replace(target, template="sm100 pairs")
        )

    monkeypatch.setattr(splice_backward, "template_of", lambda target: PAIRS)
    monkeypatch.setattr(splice_backward, "_settings", renamed)


@pytest.mark.parametrize("mask", [None, CAUSAL & masks.sliding_window(200)], ids=str)
def test_masks_in_all_orders(mask: Any) -> None:
    drawn = draw(420, 300, dims=(128, 128), heads=(1, 1))
    check(drawn, mask=mask, mode="check", backend=BACKEND, seeds=3)


@pytest.mark.parametrize("lengths", [(1, 1), (17, 600), (257, 129)])
def test_ragged_lengths(lengths: tuple[int, int]) -> None:
    check(draw(*lengths, dims=(128, 128)), backend=BACKEND)


def test_shared_heads() -> None:
    drawn = draw(300, 400, dims=(104, 128), heads=(4, 2), batch=(2, 1))
    check(drawn, mask=CAUSAL, backend=BACKEND)


def test_gradients_of_captured_tensors() -> None:
    mod, captured = MODS["two"]
    check(draw(200, dims=(128, 128)), mod, CAUSAL, captured(), backend=BACKEND)


def test_deterministic_bits_do_not_depend_on_order() -> None:
    first = ordered(BACKEND, "eager", 2, (128, 128))
    for a, b in zip(first, ordered(BACKEND, "adversarial", 3, (128, 128)), strict=True):
        assert torch.equal(a, b)


def test_no_spilled_registers() -> None:
    with emulation.session(execute=False), compiled.asked() as sources:
        gradients(BACKEND, *draw(200, dims=(128, 128)), (), None, CAUSAL, None)
    (source,) = (s for s in sources if s.name.startswith("backward"))
    found = compiled.kernel(source)
    assert "tcgen05.mma.cta_group::2" in found.ptx
    assert [s.stack for s in found.stats] == [0]


def test_pairs_need_wide_heads() -> None:
    with pytest.raises(ValueError, match="expected 128, 128 and dynamic=False"):
        PairBackward(BackwardConfig(width=64, pair=True, dynamic=False), None)

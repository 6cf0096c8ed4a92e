"""Check that the mbarriers of the Blackwell backward do not overlap in shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.templates.sm100.backward_barriers import (
    OPERANDS,
    Backward2CtaBarriers,
    BackwardBarriers,
    BackwardStreamedBarriers,
    CommonBarriers,
)
from attnkit.templates.sm100.backward_config import BackwardConfig


@pytest.mark.parametrize(
    ("barriers", "settings"),
    [
        (BackwardBarriers, {}),
        (BackwardBarriers, {"head_dim": 64, "head_dim_v": 64}),
        (BackwardBarriers, {"head_dim": 192, "block_q": 64}),
        (Backward2CtaBarriers, {"two_cta": True}),
        (BackwardStreamedBarriers, {"head_dim": 384, "head_dim_v": 384, "block_q": 64}),
    ],
)
def test_words(barriers: type[CommonBarriers], settings: dict[str, Any]) -> None:
    config = BackwardConfig(**settings)
    placed: Any = barriers.at(0, config)
    sizes = barriers.sizes(config)
    assert list(sizes) == [field.name for field in dataclasses.fields(placed)]
    words: list[int] = []
    for name, size in sizes.items():
        first = getattr(placed, name)
        words += [first.full, first.empty] if name in OPERANDS else range(first, first + size)
    assert words == list(range(barriers.count(config)))


@pytest.mark.parametrize("rank", [0, 1])
def test_every_barrier_of_a_pair_is_initialised_once(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "cutlass.cute.arch.mbarrier_init", lambda barrier, count: counts.append((barrier, count))
    )
    config = BackwardConfig(two_cta=True)
    barriers: Any = Backward2CtaBarriers.at(0, config)
    barriers.init(config, rank)
    assert sorted(word for word, _ in counts) == list(range(barriers.count(config)))
    # barriers of the first CTA count the loads of both
    assert dict(counts)[barriers.v_full] == 2 - rank


@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_every_barrier_of_a_cta_is_initialised_once(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[int] = []
    monkeypatch.setattr(
        "cutlass.cute.arch.mbarrier_init", lambda barrier, count: words.append(barrier)
    )
    config = BackwardConfig(head_dim=width, head_dim_v=width)
    kind = BackwardStreamedBarriers if config.streamed else BackwardBarriers
    barriers: Any = kind.at(0, config)
    barriers.init(config)
    assert sorted(words) == list(range(barriers.count(config)))

"""Check that the mbarriers of the forward kernels do not overlap in shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.templates.sm90 import config as sm90_config
from attnkit.templates.sm90 import forward_barriers as sm90
from attnkit.templates.sm100 import config as sm100_config
from attnkit.templates.sm100 import forward_barriers as sm100


@pytest.mark.parametrize("store_from_registers", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("switches", [{}, {"columns_in_mma": True}, {"bias_stages": 2}], ids=str)
def test_hopper(store_from_registers: bool, stages: int, switches: dict[str, Any]) -> None:
    config = sm90_config.ForwardConfig(
        stages=stages, store_from_registers=store_from_registers, **switches
    )
    barriers: Any = sm90.ForwardBarriers.at(0, config)
    *rings, biases, posted = [
        getattr(barriers, field.name) for field in dataclasses.fields(barriers)
    ]
    words = [
        first + stage
        for ring in (*rings, *biases)
        for first in (ring.full, ring.empty)
        for stage in range(ring.stages)
    ]
    if config.columns_in_mma:
        words += range(posted, posted + stages)
    assert words == list(range(sm90.ForwardBarriers.count(config)))


@pytest.mark.parametrize(
    "settings",
    [{}, {"alias": True}, {"q_tiles": 1, "block_kv": 64}, {"two_cta": True, "work": "clc"}],
    ids=str,
)
def test_blackwell(settings: dict[str, Any]) -> None:
    config = sm100_config.ForwardConfig(**settings)
    barriers: Any = sm100.ForwardBarriers.at(0, config)
    sizes = sm100.ForwardBarriers.sizes(config)
    assert list(sizes) == [field.name for field in dataclasses.fields(barriers)]
    words = []
    for name, size in sizes.items():
        first = getattr(barriers, name)
        if name == "p_full":
            words += [part + stage for part in first for stage in range(sm100_config.S_STAGES)]
        elif name == "out_empty" and config.alias:
            assert first == barriers.q_empty
            words += range(words[-1] + 1, words[-1] + 1 + size)
        else:
            words += range(first, first + size)
    assert words == list(range(sm100.ForwardBarriers.count(config)))

"""Check that a sample of Blackwell kernels has no stack frame (all: `benchmarks/frames.py`).

Each kernel of the sample once had a stack frame, with one of the assemblers that ship with the DSL.
The tests also check that skipping compiler passes does not change the kernels.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

import cutlass

from attnkit.jit import build, kernel
from tests.sampling import first_of, sampled

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("frames")


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("direction", "ctas", "variant"),
    first_of(
        [
            ("forward", "one", "masks:strided"),
            ("forward", "one", "masks:natten/3d-tiled"),
            ("forward", "one", "mods:log_relu + causal"),
            ("forward", "pair", "masks:fixed"),
            ("forward", "pair", "masks:paged"),
            ("forward", "pair", "masks:natten/3d-tiled"),
            ("forward", "pair", "mods:full_bias + causal"),
            ("forward", "pair", "mods:head_scale"),
            ("backward", "one", "masks:natten/2d-tiled"),
            ("backward", "one", "mods:log_relu"),
            ("backward", "pair", "masks:causal/bottom-right"),
        ]
    ),
)
def test_no_stack_frame(frames: Any, direction: str, ctas: str, variant: str) -> None:
    block = {"one": (256, 128), "pair": (512, 128)}[ctas] if direction == "forward" else None
    job = frames.Job(variant, (128, 128), "bfloat16", "sm_100a", ctas, direction, False, block)
    (row,) = frames.run(job)
    assert row["pair"] == (ctas == "pair")
    assert row["stack"] == 0


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("head_dims", "dtype", "ctas", "direction", "variant"),
    sampled(
        [
            ((192, 128), "float16", "pair", "forward", "mods:head_scale"),
            ((128, 128), "float16", "pair", "forward", "mods:scalable_softmax/batch"),
            ((64, 64), "bfloat16", "one", "backward", "mods:distance_decay/power"),
            ((64, 64), "float16", "one", "backward", "mods:distance_decay/power"),
        ],
        4,
    ),
)
def test_no_stack_frame_at_other_head_dims(
    frames: Any, head_dims: tuple[int, int], dtype: str, ctas: str, direction: str, variant: str
) -> None:
    block = (512, 128) if direction == "forward" else None
    job = frames.Job(variant, head_dims, dtype, "sm_100a", ctas, direction, False, block)
    assert [(r["pair"], r["stack"]) for r in frames.run(job)] == [(ctas == "pair", 0)]


@pytest.mark.exhaustive
@pytest.mark.assembled
def test_no_stack_frame_in_a_fixed_order(frames: Any) -> None:
    job = frames.Job(
        "mods:scalable_softmax", (128, 128), "bfloat16", "sm_100a", "pair", "backward", True, None
    )
    assert [(row["pair"], row["stack"]) for row in frames.run(job)] == [(True, 0)]


@pytest.mark.parametrize(
    ("block", "q_tiles", "ctas"),
    [((512, 128), 2, "pair"), ((128, 128), 1, "one"), ((128, 64), 1, "one")],
)
def test_a_job_compiles_the_tiles_that_it_names(
    frames: Any, block: tuple[int, int], q_tiles: int, ctas: str
) -> None:
    job = frames.Job(
        "masks:causal", (128, 128), "bfloat16", "sm_100a", ctas, "forward", False, block
    )
    (source,) = frames.sources(job)
    for setting in (("q_tiles", q_tiles), ("block_kv", block[1]), ("two_cta", ctas == "pair")):
        assert repr(setting) in source.key


@pytest.mark.parametrize(
    ("direction", "variant"),
    sampled([("forward", "mods:relative_bias + causal"), ("backward", "mods:t5_bias")], 2),
)
def test_passes_that_are_left_out_change_nothing(
    frames: Any, monkeypatch: pytest.MonkeyPatch, direction: str, variant: str
) -> None:
    block = (256, 128) if direction == "forward" else None
    job = frames.Job(variant, (128, 128), "bfloat16", "sm_100a", "one", direction, False, block)
    (here,) = frames.sources(job)
    if not build._SKIPPED_PASSES.get((cutlass.__version__, here.arch)):
        pytest.skip("no passes are left out for this version of the DSL")
    monkeypatch.setattr(build, "_SKIPPED_PASSES", {})
    assert build.compile_source(here).code == kernel.kernel(here).artifact.code

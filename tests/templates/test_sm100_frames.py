"""No Blackwell kernel of the library has a stack frame at head dim 128: a sample of `benchmarks/frames.py`.

Each of these had one, with one of the assemblers that the DSL comes with.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("frames")


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("direction", "ctas", "variant"),
    [
        ("forward", "one", "masks:strided"),
        ("forward", "one", "masks:natten/3d-tiled"),
        ("forward", "one", "mods:log_relu + causal"),
        ("forward", "pair", "masks:fixed"),
        ("forward", "pair", "masks:paged"),
        ("backward", "one", "masks:natten/2d-tiled"),
        ("backward", "one", "mods:log_relu"),
        ("backward", "pair", "masks:causal/bottom-right"),
    ],
)
def test_no_stack_frame(frames: Any, direction: str, ctas: str, variant: str) -> None:
    job = frames.Job(variant, (128, 128), "bfloat16", "sm_100a", ctas, direction, False)
    (row,) = frames.run(job)
    assert row["pair"] == (ctas == "pair")
    assert row["stack"] == 0

"""Check the classification benchmark: its measurements, and that it fails above a limit."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import pytest
import torch

from attnkit import create_mask

PATH = Path(__file__).parents[2] / "benchmarks" / "classify.py"
BENCH = runpy.run_path(str(PATH))
OPTIONS = argparse.Namespace(device="cpu", repeats=1)
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@linux
def test_a_case_is_measured() -> None:
    row = BENCH["measure"]("causal", 1024, OPTIONS)
    assert (row["empty"], row["partial"], row["full"]) == (28, 8, 28)
    assert row["evaluated_whole"] == row["nodes"] == 0
    assert 0 < row["least_ms"] <= row["median_ms"]
    # rows and runs in int32: pointers of 4 x (8 + 1), 8 partial runs and 7 full ones, both ways
    assert row["stored_mb"] == pytest.approx(4 * (4 * 9 + 2 * (2 * 8 + 2 * 7)) / 1e6)


@linux
def test_a_mask_of_the_library_is_measured() -> None:
    row = BENCH["measure"]("library/padding", 256, OPTIONS)
    assert row["empty"] + row["partial"] + row["full"] == 2 * 2 * 2


def test_every_case_can_be_made() -> None:
    for case, (lengths, _) in BENCH["CASES"].items():
        made = BENCH["example"](case, 256, torch.device("cpu"))
        assert lengths
        assert (made.q_len, made.kv_len, made.batch, made.heads) == (256, 256, 1, 1)
        assert create_mask(made.mask, None, None, 256, 256).any()


def test_limits_decide() -> None:
    row = {"case": "causal", "length": 1 << 20, "least_ms": 199.0, "peak_mb": 3.0, "stored_mb": 0.4}
    assert not BENCH["is_over"](row)
    for change in ({"least_ms": 201.0}, {"peak_mb": 251.0}, {"stored_mb": 1.1}):
        assert BENCH["is_over"](row | change)
    assert not BENCH["is_over"](row | {"length": 8192, "least_ms": 1e6})
    assert BENCH["verdict"]([row | {"least_ms": 201.0}], library=False) == 1
    assert BENCH["verdict"]([row], library=False) == 0
    assert BENCH["verdict"]([{"least_ms": 31.0}] * 3, library=True) == 1

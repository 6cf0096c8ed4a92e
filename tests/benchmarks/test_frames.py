"""Check the rows that `benchmarks/frames.py --save` writes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

ROOT = Path(__file__).parents[2]


def test_kernels_that_differ_in_their_variant_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    frames = importlib.import_module("frames")

    def row(variant: str, stack: int, seconds: float, **own: Any) -> dict[str, Any]:
        shared = dict.fromkeys(frames.GROUP, "same") | own
        return shared | {"variant": variant, "stack": stack, "code": 100, "seconds": seconds}

    first, other = frames.grouped(
        [
            row("a", 0, 2.0),
            row("b", 8, 9.5),
            row("a", 0, 3.0, dtype="float16"),
            row("c", 0, 4.0),
        ]
    )
    assert (first["kernels"], other["kernels"]) == (3, 1)
    assert (first["dtype"], other["dtype"]) == ("same", "float16")
    assert first["with_frame"] == {"b": 8}
    assert first["slow"] == {"b": 9.5}
    assert (first["seconds_median"], first["seconds_most"], other["slow"]) == (4.0, 9.5, {})

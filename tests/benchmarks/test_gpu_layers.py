"""Check the benchmark of layers on a CPU: its calls are right with transformers and without it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

gpu_layers = importlib.import_module("gpu_layers")
gpu_timing = importlib.import_module("gpu_timing")
gpu_variants = importlib.import_module("gpu_variants")
interfaces = importlib.import_module("layer_interfaces")
ALL = ("attnkit", "flex_attention", "sdpa", "flash_attention_2")


class Counting:
    """Timer that runs each function once, and reports one millisecond more for each."""

    def __init__(self) -> None:
        self.functions: list[Any] = []

    def prepare(self, function: Any) -> float:
        function()
        self.functions.append(function)
        return float(len(self.functions))

    def measure(self, function: Any, prepared: float) -> Any:
        return gpu_timing.Reading(prepared, None)


@pytest.fixture(params=[pytest.param("with transformers", marks=pytest.mark.exhaustive), "without"])
def run(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that runs small layers and returns the rows."""
    if request.param == "without":
        monkeypatch.setattr(interfaces, "transformers", None)
    else:
        pytest.importorskip("transformers", "5")
    monkeypatch.setitem(gpu_variants.MASKS, "window_4096", gpu_variants.window(24))
    monkeypatch.setitem(gpu_variants.WINDOWS, "window_4096", 24)
    small = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    cases = [dict(case, shape=small, dtype="float32") for case in gpu_layers.CASES]
    monkeypatch.setattr(gpu_layers, "CASES", cases)
    file = tmp_path / "rows.jsonl"

    def append(row: dict[str, Any]) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")

    written = SimpleNamespace(append=append)
    monkeypatch.setattr(gpu_layers, "row_file", lambda save, commit: written)

    def found(only: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
        monkeypatch.setattr(interfaces, "NAMES", names)
        options = gpu_layers.arguments().parse_args(["--seconds", "1000", "--only", only])
        assert gpu_layers.run(options, Counting(), torch.device("cpu"), 80) == 0
        rows = [json.loads(text) for text in file.read_text().splitlines()]
        for row in rows:
            assert row["benchmark"] == "transformers layer"
            assert "transformers" in row["interface"]
            if "skipped" not in row:
                assert row["error"] <= row["error_allowed"], row
        return rows

    return found


@pytest.mark.exhaustive  # FlexAttention compiles for the layer
def test_softcap_in_a_window(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("Gemma 2 9B, window 4096", ALL)
    assert len(rows) == 2 * len(ALL)
    reasons = {(r["contender"], r["direction"]): r.get("skipped", "") for r in rows}
    for direction in ("forward", "backward"):
        assert reasons["attnkit", direction] == ""
        assert "softcap" in reasons["sdpa", direction]
        assert "not installed" in reasons["flash_attention_2", direction]
    assert reasons["flex_attention", "forward"] == ""
    assert "backward on CPU" in reasons["flex_attention", "backward"]


def test_grouped_heads_and_a_causal_mask(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run("Llama", ("attnkit", "sdpa"))
    assert [row["contender"] for row in rows] == ["attnkit", "sdpa"] * 2
    assert not any("skipped" in row for row in rows)
    assert all(row["ratio"] == 1 for row in rows if row["contender"] == "attnkit")


def test_it_needs_a_gpu_and_a_known_layer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_layers.main(["--only", "nothing"]) == 2
    assert "Gemma 2 9B, window 4096" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_layers.main([]) == 2
    assert "CUDA" in capsys.readouterr().err

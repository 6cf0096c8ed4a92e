"""Check the benchmark of a training step.

It must run the same model for all contenders and report losses that differ.
"""

from __future__ import annotations

import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
SMALL = "--device cpu --eager --layers 2 --heads 2 --width 32 --vocabulary 64 --batch 2".split()
SMALL += "--length 150 --document 40 --rounds 6".split()


def test_contenders_take_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    gpt2, committed = map(importlib.import_module, ("gpt2", "committed"))
    monkeypatch.setattr(committed, "committed", lambda given: "0" * 12)  # this tree may be dirty
    timing = importlib.import_module("gpu_timing")
    monkeypatch.setattr(timing, "UNCERTAIN", float("inf"))  # and this machine busy
    rows = tmp_path / "rows.jsonl"
    command = [*SMALL, "--save", str(rows), "--contenders", "attnkit,SDPA dense,no attention"]
    assert gpt2.main(command) == 0
    found = {row["contender"]: row for row in map(json.loads, rows.read_text().splitlines())}
    ours, dense, none = (found[name] for name in ("attnkit", "SDPA dense", "no attention"))
    assert ours["losses"] == pytest.approx(dense["losses"], abs=1e-3)
    assert ours["losses"] != pytest.approx(none["losses"], abs=1e-5)
    assert ours["ratio"] == 1
    assert 0 < ours["density"] < 0.5
    assert all(row["tokens_a_second"] > 0 for row in found.values())


def test_unknown_contenders_are_named() -> None:
    command = [sys.executable, str(FOLDER / "gpt2.py"), "--contenders", "attnkit,magic"]
    done = subprocess.run([*command, *SMALL], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "magic" in done.stderr


def test_documents_and_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = runpy.run_path(str(FOLDER / "gpt2.py"))
    sizes = names["Sizes"](batch=3, length=400, document=50)
    batch = names["Batch"].drawn(sizes, torch.device("cpu"))
    first = batch.documents.diff(dim=1, prepend=torch.full((3, 1), -1)) != 0
    assert torch.equal(batch.places == 0, first)  # every document begins at place 0
    assert batch.count == first.sum()
    kept = (batch.documents[:, :, None] == batch.documents[:, None]).tril()
    assert batch.density == pytest.approx(float(kept.double().mean()))
    rows = [{"contender": n, "losses": [x]} for n, x in (("attnkit", 9.0), ("a", 9.01), ("b", 9.1))]
    assert names["disagreeing"](rows) == ["b"]
    rows[1]["losses"] = [float("nan")]
    assert names["disagreeing"](rows) == ["a", "b"]

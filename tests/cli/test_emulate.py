"""Check that `attnkit emulate` runs real kernels of small variants."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from attnkit.cli import main

pytest.importorskip("cutlass")


def test_a_variant_is_checked_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "t.svg"
    sizes = ["--q-len", "200", "--heads", "2", "--kv-heads", "1", "--head-dim", "64"]
    command = ["emulate", "masks:causal()", *sizes, "--seeds", "1", "--timeline", str(picture)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "output: error" in out
    assert "3 runs, 0 findings" in out
    assert "clocks predicted for one CTA" in out
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_gradients_too(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--q-len", "70", "--heads", "1", "--head-dim", "64", "--mode", "race"]
    assert main(["emulate", "mods:softcap(20.0)", *sizes, "--backward"]) == 0
    out = capsys.readouterr().out
    for name in ("output", "dquery", "dkey", "dvalue"):
        assert f"{name}: error" in out


def test_a_mask_with_lengths_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "masks:natten((8,8),3)", "--mode", "eager"]) == 0
    assert "eager" in capsys.readouterr().out


def test_what_would_take_too_long_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--q-len", "100", "--head-dim", "64", "--minutes", "1e-6", "--mode", "eager"]
    assert main(["emulate", "masks:causal()", *sizes]) == 2
    assert "the limit is 1e-06" in capsys.readouterr().err


def test_misuse_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["emulate", "masks:causal()", "--mode", "lazy"]) == 2
    assert "invalid choice: 'lazy'" in capsys.readouterr().err

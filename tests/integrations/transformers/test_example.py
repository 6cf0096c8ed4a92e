"""The example runs, and its tokens are equal."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "transformers_llama.py"


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(
        "transformers", "5", reason="needs transformers 5: pip install 'attnkit[transformers]'"
    )
    runpy.run_path(str(EXAMPLE))["main"]([])
    printed = capsys.readouterr().out
    assert "tokens     equal: True" in printed
    assert "gradients  for 21 parameters" in printed

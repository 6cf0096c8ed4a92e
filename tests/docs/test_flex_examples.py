"""The training examples learn the same with PyTorch's FlexAttention and with attnkit's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 8


@pytest.fixture(params=["gpt2", "gemma2"])
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    # the example switches off PyTorch's refusal to differentiate on a CPU; this puts it back
    monkeypatch.setattr(theirs, "_validate_device", theirs._validate_device)
    name = f"attnkit_example_{request.param}"
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{request.param}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dynamo imports it by its name
    spec.loader.exec_module(module)
    return vars(module)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_loss_curves_are_equal(example: dict[str, Any]) -> None:
    """The largest error of a loss against float64 is at most twice that of PyTorch's."""
    train = example["train"]
    exact = train("torch", STEPS, dtype=torch.float64)
    ours, dense = train("attnkit", STEPS), train("torch", STEPS)
    error, allowed = (
        max(abs(a - b) for a, b in zip(losses, exact, strict=True)) for losses in (ours, dense)
    )
    assert error <= 2 * allowed + 4 * torch.finfo(torch.float32).eps * max(exact)
    assert exact[-1] < exact[0]
    again = train("attnkit", STEPS, dtype=torch.float64)
    assert again == pytest.approx(exact, rel=1e-12)  # rounding of float64, after 8 steps


def test_they_learn_and_say_so(example: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert example["main"](["--steps", "2", "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert "FAILED: the model did not learn" in printed.err
    assert example["main"](["--steps", "110", "--device", "cpu"]) == 0
    assert "attnkit: loss" in capsys.readouterr().out

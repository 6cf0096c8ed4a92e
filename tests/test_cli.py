"""The command line, through `main`: what it prints, where, and its exit status."""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import attnkit
from attnkit import splice
from attnkit.cli import main

FILE = """
import torch
from attnkit import Variant

slopes = torch.rand(4, requires_grad=True)

def score_mod(score, b, h, q, kv):
    return score - slopes[h] * (q - kv).abs()

def mask_mod(b, h, q, kv):
    return q >= kv

def far(score, b, h, q, kv):
    return score + slopes[q + 100]

def branch(b, h, q, kv):
    return q >= kv if q > 3 else kv > 3

variant = Variant(score_mod, mask_mod)
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my.py"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize(
    "target",
    [
        "{file}:variant",
        "{file}:mask_mod",
        "masks:causal() & sliding_window(9)",
        "mods:softcap(2.0)",
    ],
)
def test_check_passes(target: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", target.replace("{file}", file), "--examples", "3"]) == 0
    out, err = capsys.readouterr()
    assert "passed: 3 cases" in out
    assert "dkey through lse" in out
    assert err == ""


def test_check_passes_its_options_on(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--q-len 5 --kv-len 6:7 --heads 2 --batch 2 --dtype bfloat16,float16 --seed 3"
    given: dict[str, Any] = {}
    real = attnkit.testing.check_variant

    def record(variant: Any, **kwargs: Any) -> Any:
        given.update(kwargs)
        return real(variant, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attnkit.testing, "check_variant", record)
        assert main(["check", f"{file}:variant", "--examples", "2", *options.split()]) == 0
    assert (given["q_len"], given["kv_len"], given["heads"], given["batch"]) == (5, (6, 7), 2, 2)
    assert [str(d) for d in given["dtype"]] == ["torch.bfloat16", "torch.float16"]
    assert (given["examples"], given["seed"]) == (2, 3)


def test_check_fails_with_status_1_and_code_that_fails_too(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = splice.CpuHooks.dscore
    monkeypatch.setattr(splice.CpuHooks, "dscore", lambda *args: 1.01 * real(*args))
    assert main(["check", f"{file}:score_mod", "--examples", "20"]) == 1
    out, _ = capsys.readouterr()
    assert "FAILED" in out
    code = out.partition("run this to see it again:\n")[2]
    assert f"variant = load('{file}:score_mod')" in code
    with pytest.raises(attnkit.testing.CheckError):
        exec(code, {"__name__": "again"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("check nowhere.py:x", "attnkit: there is no file 'nowhere.py'"),
        ("check {file}:nothing", "my.py has no 'nothing'; it has Variant, branch, far, mask_mod"),
        ("check {file}:number", "my.py:number is of type int: 3; expected a Variant"),
        ("check {file}:branch --examples 2", "the truth of a traced value is not known"),
        ("check {file}:far --examples 2", "no sizes could be drawn that the variant allows"),
        ("check masks:casual", "attnkit.masks has no 'casual'; did you mean 'causal'?"),
        ("check masks:sliding_window(-1)", "attnkit: left must be at least 0"),
        ("check masks:causal --q-len 0", "argument --q-len: '0' is not a positive number"),
        ("check masks:causal --q-len 9:3", "argument --q-len: '9:3' is not a range low:high"),
        ("check masks:causal --examples some", "argument --examples: 'some' is not a positive num"),
        ("check masks:causal --dtype float8", "argument --dtype: 'float8' is not a dtype"),
        ("check masks:causal --device gpu", "argument --device: cannot use 'gpu'"),
        ("check", "the following arguments are required: target"),
        ("explain masks:causal", "the following arguments are required: --q-len"),
        ("explain {file}:far --q-len 9", "captured tensor 'slopes' has 4 entries"),
        ("explain causal --q-len 9", "'causal' is not a target; the name is missing"),
        ("swim masks:causal", "invalid choice: 'swim'"),
        ("", "the following arguments are required: command"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    arguments: str, message: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.replace("{file}", file).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_explain(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--q-len 256 --kv-len 512 --heads 4 --batch 2"
    assert main(["explain", f"{file}:variant", *sizes.split()]) == 0
    out, _ = capsys.readouterr()
    variant = attnkit.testing.load(f"{file}:variant")
    expected = attnkit.explain(variant, q_len=256, kv_len=512, heads=4, batch=2)
    assert out == f"{expected}\n"
    assert "mask(b, h, q, kv) = kv <= q" in out
    assert "B=2 H=4 Sq=256 Skv=512" in out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "check" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"attnkit {attnkit.__version__}\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["check", "masks:causal", "--examples", "2"]) == 0
    assert "\r1 of 2 calls\r2 of 2 calls\r" in terminal.getvalue()


def test_python_m_attnkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["attnkit", "explain", "masks:causal", "--q-len", "64"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("attnkit", run_name="__main__")
    assert stop.value.code == 0

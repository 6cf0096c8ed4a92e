"""Check which targets can be loaded, and the errors for all others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attnkit import create_mask, masks, mods
from attnkit.errors import ArgumentError, AttnkitError, OptionError
from attnkit.runtime.variant import Variant
from attnkit.testing import load, load_object
from attnkit.tracing.mask import Mask

FILE = """
import torch
from attnkit import Mask, Variant, create_block_mask
import helper

def score_mod(score, b, h, q, kv, factor=2.0):
    return score * factor

def mask_mod(b, h, q, kv):
    return q >= kv

def shifted(by=3):
    return Mask(lambda b, h, q, kv: q >= kv + by)

class Window:
    def __init__(self, size):
        self.size = size
    def __call__(self, b, h, q, kv):
        return (q - kv).abs() <= self.size

class Holder:
    mask = Window(2)

window = Window(4)
variant = Variant(score_mod, mask_mod)
block_mask = create_block_mask(mask_mod, None, None, 8, 8)
number = helper.NUMBER

def three(a, b, c):
    return a

def broken():
    raise KeyError("lost")

def itself():
    return itself
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "helper.py").write_text("NUMBER = 3\n")
    path = tmp_path / "my.py"
    path.write_text(FILE)
    return str(path)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("score_mod", "score(score, b, h, q, kv) = score * 2.0"),
        ("mask_mod", "mask(b, h, q, kv) = kv <= q"),
        ("shifted", "mask(b, h, q, kv) = kv + 3 <= q"),
        ("shifted(by=1)", "mask(b, h, q, kv) = kv + 1 <= q"),
        ("window", "mask(b, h, q, kv) = abs(q - kv) <= 4"),
        ("Window(7)", "mask(b, h, q, kv) = abs(q - kv) <= 7"),
        ("Holder.mask", "mask(b, h, q, kv) = abs(q - kv) <= 2"),
        ("block_mask", "mask(b, h, q, kv) = kv <= q"),
        ("~shifted(1) & mask_mod", "mask(b, h, q, kv) = ~(kv + 1 <= q) & (kv <= q)"),
        ("variant", "score(score, b, h, q, kv) = score * 2.0\nmask(b, h, q, kv) = kv <= q"),
    ],
)
def test_names_in_a_file(file: str, name: str, formula: str) -> None:
    assert str(load(f"{file}:{name}")) == formula


@pytest.mark.parametrize(
    ("target", "same"),
    [
        ("masks:causal", masks.causal()),
        ("masks:causal()", masks.causal()),
        ("masks:sliding_window(left=3, right=None)", masks.sliding_window(3, None)),
        (
            "masks:causal & ~prefix(2) | dilated(6, 2)",
            masks.causal() & ~masks.prefix(2) | masks.dilated(6, 2),
        ),
        ("masks:natten((4, 4), 3)", masks.natten((4, 4), 3)),
        ("masks:causal().shift(q=2)", masks.causal().shift(q=2)),
        (
            "masks:(causal & prefix(3)).shift(kv=-1) | prefix(1)",
            (masks.causal() & masks.prefix(3)).shift(kv=-1) | masks.prefix(1),
        ),
    ],
)
def test_names_in_the_library(target: str, same: Mask) -> None:
    made = load_object(target)
    assert repr(made) == repr(same)
    assert create_mask(made, 1, 1, 16, 16).equal(create_mask(same, 1, 1, 16, 16))


def test_a_score_mod_of_the_library() -> None:
    made = load_object("mods:softcap(2.0)")
    score = torch.linspace(-9, 9, 5)
    assert made(score, 0, 0, 0, 0).equal(mods.softcap(2.0)(score, 0, 0, 0, 0))
    assert load("mods:softcap(2.0)").mask is None


def test_a_mask_for_a_score_mod(file: str) -> None:
    assert str(load(f"{file}:score_mod", "masks:causal()")) == (
        "score(score, b, h, q, kv) = score * 2.0\nmask(b, h, q, kv) = kv <= q"
    )


@pytest.mark.parametrize(
    ("target", "mask", "message"),
    [
        ("masks:causal", "masks:prefix(2)", "masks:causal has a mask already, and the mask "),
        ("{file}:variant", "masks:causal", "my.py:variant has a mask already"),
        ("mods:softcap(2.0)", "{file}:score_mod", "my.py:score_mod is not a mask: it changes"),
        ("mods:softcap(2.0)", "masks:casual", "did you mean 'causal'?"),
    ],
)
def test_refuses_a_mask(file: str, target: str, mask: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        load(target.replace("{file}", file), mask.replace("{file}", file))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("causal", "'causal' is not a target; the name is missing; expected path/to/file.py:name"),
        ("nowhere.py:x", "there is no file 'nowhere.py'"),
        ("masks:casual", "attnkit.masks has no 'casual'; did you mean 'causal'?"),
        ("masks:examples", "attnkit.masks has no 'examples'"),
        ("masks:", "'' is not a name or a call"),
        ("masks:causal(", "is not a name or a call such as 'sliding_window(64)'"),
        ("masks:document", "missing a required argument"),
        ("masks:sliding_window(1, 2, 3)", "too many positional arguments"),
        ("masks:sliding_window(n)", "'n' is not a literal"),
        ("masks:prefix(**{})", "** is not allowed here"),
        ("masks:causal() + causal()", "is not allowed here; use names, calls"),
        ("masks:__import__('os').getcwd()", "attnkit.masks has no '__import__'"),
        ("masks:(causal() & causal()).intervals(3, 3)", "the one method is shift(...), of masks"),
        ("masks:causal().shift(q=n)", "'n' is not a literal"),
        ("{file}:nothing", "my.py has no 'nothing'; it has Holder, Mask, "),
        ("{file}:score_mo", "did you mean 'score_mod'?"),
        ("{file}:number", "my.py:number is of type int: 3; expected a Variant, a Mask"),
        ("{file}:Window", "my.py:Window is the class Window; expected a Variant"),
        ("{file}:torch", "my.py:torch is of type module"),
        ("{file}:three", "takes 3 arguments, (a, b, c)"),
        ("{file}:broken", "my.py:broken() raised KeyError: 'lost'"),
        ("{file}:broken()", "broken() raised KeyError: 'lost'"),
        ("{file}:itself", "my.py:itself gives itself"),
        ("{file}:number(3)", "number is not a function: 3"),
        ("{file}:variant.nothing", "variant has no attribute 'nothing'"),
        ("{file}:variant & variant", "unsupported operand"),
    ],
)
def test_refuses(file: str, target: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        load(target.replace("{file}", file))


def test_errors_of_the_library_pass_through() -> None:
    with pytest.raises(OptionError, match="left must be at least 0"):
        load("masks:sliding_window(-3)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1 / 0", r"bad.py raised ZeroDivisionError when it was run: .*bad.py, line 1"),
        ("def f(:", "bad.py raised SyntaxError when it was run"),
        ("import not_there", "bad.py raised ModuleNotFoundError when it was run"),
    ],
)
def test_a_file_that_fails(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ArgumentError, match=message):
        load(f"{tmp_path / 'bad.py'}:x")


def test_leaves_the_import_path_alone(file: str) -> None:
    before: list[Any] = list(sys.path)
    assert isinstance(load(f"{file}:variant"), Variant)
    assert sys.path == before


WITHOUT_HYPOTHESIS = """
import sys
sys.modules["hypothesis"] = None
import attnkit.testing
from attnkit.testing import Case, check_case, load
print(check_case(load("masks:causal"), Case(3, 4)).ok)
try:
    attnkit.testing.check_variant
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_without_hypothesis_cases_run_and_the_rest_says_what_to_install() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_HYPOTHESIS],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert run.returncode == 0, run.stderr
    passed, error = run.stdout.splitlines()
    assert passed == "True"
    assert error.startswith("MissingPackageError attnkit.testing needs the package hypothesis")
    assert error.endswith("run: pip install 'attnkit[check]'")
    from attnkit.testing._require import MissingPackageError

    assert issubclass(MissingPackageError, AttnkitError)

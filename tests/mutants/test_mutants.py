"""Check the mutation runner itself: its edits apply and its verdicts are right."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.mutants.core import outcome
from tests.mutants.edits import ROOT, Edit, noticed, replacement
from tests.mutants.kernel_edits import FOLDERS, edits_of, kernel_edits, nearest_tests
from tests.mutants.run import named_edits

SOURCE = '''
"""Doc with 1 < 2."""

LIMIT = 3


def f(x: int, y: float = 4.0) -> "1 + 1":
    """Doc 5."""
    assert x < 6
    if x < y and not done(x):  # é is two bytes
        arrive(x)
    é: list[7] = [fmax(x + 1, y)]
    raise ValueError(f"{x + 8}")
'''
TEST = "import sys\nfrom product import double\ndef test():\n    assert double(3) == 6\n"


def test_named_edits_apply_and_their_tests_exist() -> None:
    edits = named_edits()
    assert len({e.name for e in edits}) == len(edits) > 20
    for edit in edits:
        source = (ROOT / edit.path).read_text()
        assert edit.applied(source) != source
        ast.parse(edit.applied(source))
        assert (ROOT / edit.tests[0]).exists()


def test_a_text_that_is_not_there_once() -> None:
    for before in ("no such text", "import"):
        with pytest.raises(ValueError, match="expected once"):
            replacement("name", "attnkit/__init__.py", before, "", ())


def test_edits_of_a_kernel() -> None:
    edits = list(edits_of(SOURCE, "k.py", ()))
    shown = sorted(e.name.partition(": ")[2] for e in edits)
    assert shown == ["+ -> -", "1 -> 2", "< -> <=", "arrive(x) -> pass", "not done(x) -> done(x)"]
    for edit in edits:
        assert edit.applied(SOURCE) != SOURCE
        ast.parse(edit.applied(SOURCE))


def test_every_template_is_edited_and_has_tests() -> None:
    edits = list(kernel_edits())
    assert len(edits) > 3000
    for folder in FOLDERS:
        assert sum(e.path.startswith(folder) for e in edits) > 300
    for path in {e.path for e in edits}:
        assert (ROOT / nearest_tests(path)[0]).exists(), path


def test_verdicts(tmp_path: Path) -> None:
    product, test = tmp_path / "product.py", tmp_path / "test_product.py"
    product.write_text("def double(x):\n    return 2 * x\n")
    test.write_text(TEST)

    def edit(text: str, *tests: str) -> Edit:
        source = product.read_text()
        start = source.index("2 * x")
        return Edit(text, "product.py", start, start + 5, text, tests or ("test_product.py",))

    before = product.read_text()
    assert noticed(edit("3 * x"), tmp_path)
    assert noticed(edit("2 *"), tmp_path)  # no Python
    assert not noticed(edit("x + x"), tmp_path)
    assert noticed(edit("double(x) if sys else [0 for _ in iter(int, 1)]"), tmp_path)
    with pytest.raises(ValueError, match="pytest ended with status 4"):
        noticed(edit("x + x", "test_missing.py"), tmp_path)
    assert product.read_text() == before


def test_outcomes_of_mutmut(tmp_path: Path) -> None:
    folder = tmp_path / "mutants" / "attnkit"
    folder.mkdir(parents=True)
    codes = {"a": 1, "b": 0, "c": 33, "d": None, "e": 36, "f": 0}
    (folder / "m.py.meta").write_text(json.dumps({"exit_code_by_key": codes}))
    found = outcome("abcde", tmp_path)
    assert (found.killed, found.survivors, found.uncovered) == (2, ("b",), ("c",))

"""Check the mutation runner itself: its edits apply and its verdicts are right."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import core
from tests.mutants.edits import ROOT, Edit, Trial, Verdict, failed_test, replacement
from tests.mutants.kernel_edits import FOLDERS, edits_of, kernel_edits, nearest_tests
from tests.mutants.record import Record
from tests.mutants.run import named_edits
from tests.mutants.type_checks import Checker, replaced

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
PRODUCT = "def double(x):\n    return 2 * x\n"
TEST = """
import os
from product import double
def test():
    assert double(3) == 6
def test_that_always_fails():
    assert not os
"""


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
        assert all((ROOT / tests).exists() for tests in nearest_tests(path)), path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one file of code and one of tests, which need no plugin."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of pytest's start
    (tmp_path / "product.py").write_text(PRODUCT)
    (tmp_path / "test_product.py").write_text(TEST)
    return tmp_path


def edit(text: str, tests: str = "test_product.py::test") -> Edit:
    """Return an edit of `folder`."""
    start = PRODUCT.index("2 * x")
    return Edit(text, "product.py", start, start + 5, text, (tests,))


@pytest.mark.parametrize(
    ("text", "tests", "outcome", "by"),
    [
        ("3 * x", "test_product.py::test", "killed", "test_product.py::test"),
        ("x + x", "test_product.py::test", "survived", ""),
        ("2 *", "test_product.py::test", "killed", "an error of collection"),
        ("__import__('os')._exit(7)", "test_product.py", "invalid", "exit status 7 of pytest"),
        ("__import__('os')._exit(7)", "test_product.py::test", "killed", "exit status 7 of pytest"),
        ("x + x", "test_product.py", "invalid", "test_product.py::test_that_always_fails"),
        ("x + x", "test_missing.py", "invalid", "an error of collection"),
    ],
)
def test_verdicts(folder: Path, text: str, tests: str, outcome: str, by: str) -> None:
    """A verdict names what failed, and is "invalid" where the same fails without the edit."""
    found = Trial(folder).verdict(edit(text, tests))
    assert (found.outcome, found.by) == (outcome, by)
    assert (folder / "product.py").read_text() == PRODUCT


def test_an_edit_that_never_ends(folder: Path) -> None:
    found = Trial(folder, seconds=2).verdict(edit("__import__('time').sleep(900)"))
    assert (found.outcome, found.by) == ("killed", "no end within 2 s")


def test_the_failed_test_is_read_from_the_output_of_pytest() -> None:
    line = "FAILED tests/a/test_b.py::test_c[(0.0, -7.9)-x y] - AssertionError: 1 - 2"
    assert (
        failed_test(f"F  [100%]\n{line}\n1 failed") == "tests/a/test_b.py::test_c[(0.0, -7.9)-x y]"
    )
    assert failed_test("FAILED test_b.py::test_c\n") == "test_b.py::test_c"
    assert failed_test("ERROR tests/a/test_b.py - ImportError") is None


def test_a_record_is_read_again(folder: Path) -> None:
    """A record returns the last verdict of an edit, until the edited file changes."""
    path = folder / "record.jsonl"
    killed, survived = Verdict("killed", 1.5, "test"), Verdict("survived", 2.0)
    record = Record(path, folder)
    record.add(edit("3 * x"), survived)
    record.add(edit("3 * x"), killed)
    record.add(edit("x + x"), survived)
    for read in (record, Record(path, folder)):
        assert read.get(edit("3 * x")) == killed
        assert read.get(edit("x + x")) == survived
        assert read.get(edit("3 * x", "other tests")) is None
        assert read.get(edit("4 * x")) is None
    (folder / "product.py").write_text(PRODUCT + "\n")
    assert record.get(edit("3 * x")) is None


# --- mutmut

MODULE = """
def _table(n):
    return [_entry(i) for i in range(n)]


def _entry(i, start=_base()):
    return lambda x: x + i


def _base():
    return 1


def _late():
    return 2


def _stored(x):
    return x


def _in_a_lambda(i):
    return i


@_entry(2)
def public(x):
    return _late() + x


TABLE = _table(3)
NAMED = {"stored": _stored, "lambda": lambda x: _in_a_lambda(x)}
"""
MUTATED = """
class Grid:
    def xǁGridǁsize__mutmut_orig(self, n):
        if n < 0:
            raise ValueError("n is negative", n)
        return "size" * n

    def xǁGridǁsize__mutmut_1(self, n):
        if n < 0:
            raise ValueError("XXn is negativeXX", n)
        return "size" * n

    def xǁGridǁsize__mutmut_2(self, n):
        if n < 0:
            raise ValueError("n is negative", None)
        return "size" * n

    def xǁGridǁsize__mutmut_3(self, n):
        if n < 0:
            raise ValueError("n is negative", n)
        return "SIZE" * n

    def xǁGridǁpairs__mutmut_orig(self, a, b):
        if not a:
            raise AssertionError(f"{a} is empty")
        if not b:
            self.fail("b is empty", b)
        return zip(a, b, strict=True)

    def xǁGridǁpairs__mutmut_1(self, a, b):
        if not a:
            raise AssertionError(None)
        if not b:
            self.fail("b is empty", b)
        return zip(a, b, strict=True)

    def xǁGridǁpairs__mutmut_2(self, a, b):
        if not a:
            raise AssertionError(f"{a} is empty")
        if not b:
            self.fail("B IS EMPTY", b)
        return zip(a, b, strict=False)

    def xǁGridǁpairs__mutmut_3(self, a, b):
        if not a:
            raise AssertionError(f"{a} is empty")
        if not b:
            self.fail("b is empty", None)
        return zip(a, b, strict=True)

    def xǁGridǁpairs__mutmut_4(self, a, b):
        if a:
            raise AssertionError(f"{a} is empty")
        if not b:
            self.fail("b is empty", b)
        return zip(a, b, strict=True)

    def xǁGridǁfirst__mutmut_orig(self, a, b):
        return zip(a, b, strict=False)

    def xǁGridǁfirst__mutmut_1(self, a, b):
        return zip(a, b, strict=True)
"""
DIFFERENCE = """# attnkit.graph.m.x_f__mutmut_4: survived
--- attnkit/graph/m.py
+++ attnkit/graph/m.py
@@ -1,4 +1,4 @@
 def f(a, b):
     return list(
-        zip(a, b, strict=True)
+        zip(a, b, strict=False)
     )
"""


def test_functions_that_run_only_while_their_module_is_imported() -> None:
    assert core.import_only(MODULE) == {"_table", "_entry", "_base"}


def test_names_of_mutants() -> None:
    name = "attnkit.graph.affine.xǁSidesǁ_sum_under__mutmut_12"
    assert core.location(name) == ("attnkit/graph/affine.py", "Sides._sum_under")
    name = "attnkit.graph.adjoint.x__abs__mutmut_1"
    assert core.location(name) == ("attnkit/graph/adjoint.py", "_abs")


def test_mutants_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    """Mutants of code that runs at import, the text of an error and assertions are left out."""
    for folder, text in ((tmp_path, MODULE), (tmp_path / "mutants", MUTATED)):
        (folder / "attnkit").mkdir(parents=True)
        (folder / "attnkit" / "m.py").write_text(text)
    assert core.wasted("attnkit.m.x__table__mutmut_1", tmp_path)

    def left_out(name: str, *numbers: int) -> list[bool]:
        names = [f"attnkit.m.xǁGridǁ{name}__mutmut_{i}" for i in numbers]
        return [core.wasted(mutant, tmp_path) for mutant in names]

    assert left_out("size", 1, 2, 3) == [True, False, False]
    assert left_out("pairs", 1, 2, 3, 4) == [True, True, False, False]
    assert left_out("first", 1) == [False]


def test_the_definition_that_a_mutant_is(tmp_path: Path) -> None:
    (tmp_path / "mutants" / "attnkit").mkdir(parents=True)
    (tmp_path / "mutants" / "attnkit" / "m.py").write_text(MUTATED)
    found = core.definition("attnkit.m.xǁGridǁfirst__mutmut_1", tmp_path)
    assert found == (
        "    def xǁGridǁfirst__mutmut_1(self, a, b):\n        return zip(a, b, strict=True)\n"
    )


TYPED = """
class Grid:
    @property
    def first(self) -> int:
        return 1


def first() -> int:
    return 2
"""


def test_a_definition_replaces_the_function() -> None:
    method = "    def xǁGridǁfirst__mutmut_1(self) -> int:\n        return 3\n"
    assert replaced(TYPED, "Grid.first", method) == TYPED.replace("return 1", "return 3")
    function = "def x_first__mutmut_1() -> int:\n    return 3"
    assert replaced(TYPED, "first", function) == TYPED.replace("return 2", "return 3")


def test_mypy_refuses_mutants(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text("[mypy]\nfiles = m.py\nstrict = true\n")
    (tmp_path / "m.py").write_text(TYPED)
    types = Checker(tmp_path)
    for number, refused in (("None", True), ("3", False), ("'2'", True)):
        text = f"def x_first__mutmut_1() -> int:\n    return {number}\n"
        assert types.refuses("m.py", "first", text) == refused
        assert (tmp_path / "m.py").read_text() == TYPED
    (tmp_path / "m.py").write_text("first: int = None\n")
    with pytest.raises(RuntimeError, match="without a mutant"):
        Checker(tmp_path)


def test_equivalent_mutants_are_found_by_their_lines() -> None:
    change = core.Change(
        "attnkit/graph/m.py", "f", "zip(a, b, strict=True)", "zip(a, b, strict=False)"
    )
    name = "attnkit.graph.m.x_f__mutmut_4"
    assert core.listed(name, DIFFERENCE, [change])
    for other in ({"path": "attnkit/graph/n.py"}, {"function": "g"}, {"after": "zip(a, b)"}):
        assert not core.listed(name, DIFFERENCE, [replace(change, **other)])


def test_equivalent_mutants_are_of_lines_that_exist() -> None:
    changes = core.equivalents()
    assert len({(c.path, c.function, c.before, c.after) for c in changes}) == len(changes)
    for change in changes:
        lines = [line.strip() for line in (ROOT / change.path).read_text().splitlines()]
        name = change.function.rpartition(".")[2]
        assert any(line.startswith(f"def {name}(") for line in lines), change
        assert all(line in lines for line in change.before.splitlines()), change
        assert change.after != change.before
        assert change.reason


def test_outcomes_of_mutmut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "difference", lambda name, root: name)
    monkeypatch.setattr(core, "listed", lambda name, difference, known: name == "f")
    monkeypatch.setattr(core, "refusals", lambda names, root: tuple(n for n in names if n == "g"))
    folder = tmp_path / "mutants" / "attnkit"
    folder.mkdir(parents=True)
    codes = {"a": 1, "b": 0, "c": 33, "d": None, "e": 36, "f": 0, "g": 0}
    (folder / "m.py.meta").write_text(json.dumps({"exit_code_by_key": codes}))
    found = core.outcome("abcdefg", 7, tmp_path)
    assert found == core.Outcome(2, ("b",), ("c",), ("f",), 7, ("g",))
    assert found.noticed == 3


def test_no_mutant_runs_if_the_tests_fail_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def mutmut(names: list[str], children: int) -> str:
        started.append(names)
        return "a test failed"

    monkeypatch.setattr(core, "_mutmut", mutmut)
    with pytest.raises(RuntimeError, match=r"before it ran a mutant.*a test failed"):
        core.run(5, 0, "", 1)
    assert started == [[core.NO_MUTANT]]

"""Check every line of a report."""

from __future__ import annotations

import math

from attnkit.testing import Case, CheckError, Report, Row
from attnkit.testing.report import table, worst

CASE = Case(3, 4)
GOOD = Row("out", "cpu", 1e-7, 4e-7, CASE)
BAD = Row("dquery", "cpu", 0.5, 0.25, CASE, "[0, 1]")


def test_table_is_aligned() -> None:
    assert table([GOOD, BAD]) == (
        "quantity  backend  dtype    error  allowed  used\n"
        "out       cpu      float32  1e-07  4e-07    25%\n"
        "dquery    cpu      float32  0.5    0.25     200% FAILED"
    )


def test_passed() -> None:
    report = Report("score = x", (GOOD,), cases=5, seconds=1.25, notes=("n",))
    lines = str(report).splitlines()
    assert lines[:2] == ["score = x", "passed: 5 cases, 1 quantities, 1.2 s"]
    assert lines[-1] == "note: n"
    assert report.ok


def test_failed() -> None:
    report = Report("m", (GOOD, BAD), failed=CASE, code="print(1)")
    assert not report.ok
    assert str(CheckError(report)) == str(report)
    assert str(report).startswith(
        "m\nFAILED: 1 case, 2 quantities, 1 of them wrong, 0.0 s\n"
        f"smallest failing case: {CASE}\n"
        "  dquery (cpu) is off by 0.5 at [0, 1]; allowed is 0.25, 2 times that\n"
    )
    assert str(report).endswith("\nrun this to see it again:\nprint(1)")


def test_every_kind_of_failure_has_its_sentence() -> None:
    rows = {
        Row("call", "cpu", math.inf, 0.0, CASE, "RuntimeError: no"): "raised RuntimeError: no",
        Row("out", "cpu", math.inf, 1.0, CASE, "[2]"): "is not finite, or not NaN where it should",
        Row("tiles", "tiles", 3.0, 0.0, CASE, "[1]"): "differs in 3 entries, one at [1]",
        Row("fully masked rows", "cpu", 2.0, 0.0, CASE): "differs in 2 entries",
        Row("out", "cpu", 1e-3, 0.0, CASE, "[0]"): "is off by 0.001 at [0]; allowed is 0",
    }
    for row, sentence in rows.items():
        assert f"({row.backend}) {sentence}" in str(Report("m", (row,), failed=CASE))


def test_worst_keeps_the_row_that_used_most() -> None:
    near = Row("out", "cpu", 3e-7, 4e-7, CASE)
    failed = Row("out", "cpu", math.nan, 4e-7, CASE)
    other = Row("out", "cpu other tiles", 0.0, 4e-7, CASE)
    assert worst([GOOD, near, other]) == (near, other)
    assert worst([failed, near]) == (failed,)
    exact, looser = Row("lse", "cpu", 0.0, 1e-7, CASE), Row("lse", "cpu", 0.0, 1e-3, CASE)
    assert worst([looser, exact]) == (exact,)

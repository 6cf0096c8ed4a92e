"""Make some hundred misused calls with fixed seeds (`make misuse` makes ten thousand)."""

from __future__ import annotations

import pytest

from tests.fuzz import misuse
from tests.fuzz.subjects import SUBJECTS

CALLS = 400


@pytest.mark.parametrize("first", range(0, CALLS, 100))
def test_no_foreign_error(first: int) -> None:
    outcomes = [misuse.misuse(n) for n in range(first, first + 100)]
    failures = [o for o in outcomes if o.kind in ("foreign", "hangs")]
    assert not failures, misuse.report(failures)


@pytest.mark.parametrize("name", SUBJECTS)
def test_right_arguments_are_accepted(name: str) -> None:
    """Every subject accepts its valid arguments, except the transforms without a rule."""
    subject = SUBJECTS[name]
    refused = {"vmap", "grad", "jvp", "forward mode", "second derivative", "functionalize"}
    refused |= {"batched gradients", "jacobian"}  # transforms without a rule
    if name in refused:
        with pytest.raises(misuse.AttnkitError):
            subject.call(subject.arguments())
    else:
        subject.call(subject.arguments())


def test_a_foreign_error_is_told_apart() -> None:
    def run(_: object) -> None:
        raise KeyError("foreign")

    subject = misuse.Subject(run, lambda: {"x": 1})
    outcomes = [misuse.misuse(n, {"broken": subject}) for n in range(10)]
    assert {o.kind for o in outcomes} == {"foreign"}
    assert "10 x foreign 0: broken(x: " in misuse.report(outcomes)
    assert "0 accepted, 0 refused, 10 foreign, 0 hangs" in misuse.report(outcomes)

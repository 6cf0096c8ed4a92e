"""Check that each fault in the published list is reported as listed, and no correct program is."""

from __future__ import annotations

import pytest

from tests.emulator.faults.faults import FAULTS, MISSED, Fault
from tests.emulator.faults.table import PAGE, section, split_page

PROGRAMS = {f.program.name: f.program for f in FAULTS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_without_a_fault_is_not_reported(name: str) -> None:
    program = PROGRAMS[name]
    report = program.check(program.text)
    assert report.findings == (), str(report)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.program.name}: {f.name}")
def test_the_fault_is_reported_as_the_list_says(fault: Fault) -> None:
    report = fault.program.check(fault.text)
    kinds = {f.kind for f in report.findings if f.severity == "error"}
    if fault.finding == MISSED:
        assert kinds == set(), "this fault is reported now: say so in the list"
    else:
        assert fault.finding in kinds, str(report)


def test_the_list_has_sixty_faults_and_95_percent_are_reported() -> None:
    assert len(FAULTS) >= 60
    assert len({(f.program.name, f.name) for f in FAULTS}) == len(FAULTS)
    assert sum(f.finding != MISSED for f in FAULTS) >= 0.95 * len(FAULTS)


def test_the_page_has_the_list() -> None:
    _, written, _ = split_page(PAGE.read_text())
    assert written == section(), "python -m tests.emulator.faults.table writes it again"

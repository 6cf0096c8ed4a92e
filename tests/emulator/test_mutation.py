"""Check that the emulator catches 95 % of the injected faults that change behaviour."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from attnkit import emulator
from tests.emulator.cases import CASES
from tests.emulator.mutation import FAULTS, equivalent, mutants, study
from tests.sampling import sampled


@pytest.mark.parametrize("which", sampled([(name,) for name in CASES], 2))
def test_faults_are_caught_and_correct_kernels_are_not_reported(which: str) -> None:
    exe, args, wrong = CASES[which]()
    rows = study(exe, args, wrong)
    changing = [(m, how) for m, how in rows if how or not equivalent(exe, m)]
    missed = [(m.fault, m.line) for m, how in changing if not how]
    assert len(changing) >= 13
    assert len(missed) <= 0.05 * len(changing), missed


@pytest.mark.parametrize("which", CASES)
def test_no_false_report_over_twenty_seeds(which: str) -> None:
    exe, args, _ = CASES[which]()
    for seed in range(20):
        assert emulator.run(exe, *args, mode="adversarial", seed=seed).findings == ()


def test_every_fault_edits_a_line_of_its_kind() -> None:
    text = """
    mbarrier.arrive.shared.b64 %rd1, [%r1];
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2;
    wgmma.wait_group.sync.aligned 0;
    """
    found = {m.fault: m.text for m in mutants(text)}
    assert "wait_group.sync.aligned 1;" in found["wgmma.wait_group deeper"]
    assert "[%r1], 0;" in found["constant parity"]
    assert "arrive" not in found["drop mbarrier.arrive"]
    assert set(found) <= set(FAULTS)

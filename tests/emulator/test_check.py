"""Check what `emulator.check` says of results that differ from run to run."""

from __future__ import annotations

import re

import numpy as np
import pytest

from attnkit import emulator
from attnkit.emulator.machine.global_memory import array_names
from tests.emulator.ptx_kit import kernel

# Every thread of eight warps writes its warp to one word; the last one to run wins.
LAST_WINS = """
    mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5;
    FAULT
    ld.param.u64 %d1, [p1]; st.global.b32 [%d1], %r2;
"""
# Eager order runs four warps together, and so sees that they initialise one mbarrier.
FAULT = "mov.b32 %r3, 1; mbarrier.init.shared.b64 [dynamic], %r3;"


@pytest.mark.parametrize(("fault", "first"), [("", "eager"), (FAULT, "adversarial")])
def test_a_difference_names_the_argument_and_the_two_runs(fault: str, first: str) -> None:
    text = kernel(LAST_WINS.replace("FAULT", fault), ".param .u32 p0, .param .u64 p1")
    target = emulator.Ptx(text, block=(256, 1, 1), shared=64)
    report = emulator.check(target, 5, np.zeros(1, np.uint32), seeds=4)
    assert report.runs[0].ok == (first == "eager")
    assert report.differences
    for finding in report.differences:
        want = rf"argument 1 differs between {first} order, seed 0, and (adversarial|race) order, seed \d"
        assert re.fullmatch(want, finding.text), finding.text


def test_arrays_are_named_by_their_argument() -> None:
    x = np.zeros(1)
    args = [3, x, [x, 1, (x,)], emulator.Undefined(x)]
    assert array_names(args) == ["argument 1", "argument 2[0]", "argument 2[2][0]", "argument 3"]

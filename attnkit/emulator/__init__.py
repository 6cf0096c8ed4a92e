"""Executes generated GPU kernels on the CPU, to test them without a GPU.

In: PTX, or a compiled kernel with its host code; numpy arrays or torch CPU tensors as arguments.
Out: the arrays as the kernel leaves them, reports of what is wrong with the kernel (`run`,
`check`), and a prediction of its time (`timeline`). The package contains no knowledge of attention.
It imports numpy and `attnkit.errors`, and the CuTe DSL only in functions that need it. It needs a C
compiler for host code. Only `jit` may import it. docs/emulator.md says what a report proves and
what it does not.
"""

from __future__ import annotations

from attnkit.emulator.api import CheckReport, Report, Stream, check, run
from attnkit.emulator.faults import (
    EmulatorError,
    Finding,
    KernelFault,
    Place,
    PtxError,
    UnknownOpcode,
)
from attnkit.emulator.launchables import Executable, Ptx, compile
from attnkit.emulator.machine.global_memory import Pointers, Undefined, restore, snapshot
from attnkit.emulator.ptx.wgmma_fences import missing_fences
from attnkit.emulator.timing.replay import Constants
from attnkit.emulator.timing.timeline import Timeline, timeline
from attnkit.emulator.timing.timeline_svg import picture

__all__ = [
    "CheckReport",
    "Constants",
    "EmulatorError",
    "Executable",
    "Finding",
    "KernelFault",
    "Place",
    "Pointers",
    "Ptx",
    "PtxError",
    "Report",
    "Stream",
    "Timeline",
    "Undefined",
    "UnknownOpcode",
    "check",
    "compile",
    "missing_fences",
    "picture",
    "restore",
    "run",
    "snapshot",
    "timeline",
]

"""Runs generated GPU kernels (PTX and their host code) on the CPU, to test them.

`run` executes a kernel in one of three ways, `check` in all of them; docs/emulator.md says what
that proves and what not. Needs numpy, and a C compiler for the host code of compiled kernels.
"""

from __future__ import annotations

from attnkit.emulator.api import (
    CheckReport,
    Executable,
    Ptx,
    Report,
    check,
    compile,
    run,
)
from attnkit.emulator.faults import (
    EmulatorError,
    Finding,
    KernelFault,
    Place,
    PtxError,
    UnknownOpcode,
)
from attnkit.emulator.machine.global_memory import Undefined, restore, snapshot
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
    "Ptx",
    "PtxError",
    "Report",
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

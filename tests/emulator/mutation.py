"""Inject one fault at a time into the PTX of a kernel, and test whether `check` detects it.

Run it as a program to print a table of faults: python -m tests.emulator.mutation CASE [LIMIT].
CASE is hopper, blackwell, ring, forward or backward. LIMIT is the most mutants of a kind of fault.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnkit import emulator
from attnkit.emulator import Executable
from attnkit.emulator.ptx.parser import parse

Edit = Callable[[str], str]


def _drop(line: str) -> str:
    """Return an empty line; a destination of the statement keeps its old value."""
    return ""


def _deeper(line: str) -> str:
    return re.sub(r"(\d+);", lambda m: f"{int(m.group(1)) + 1};", line)


def _other_parity(line: str) -> str:
    """Return the wait with its parity replaced by the constant 0."""
    return re.sub(r"(\[[^\]]*\], )([^,;]+)", r"\g<1>0", line, count=1)


def _no_wait(line: str) -> str:
    m = re.search(r"(mbarrier\.try_wait\S*)\s+(\S+),", line)
    assert m is not None
    return f"setp.eq.b32 {m.group(2)}, 0, 0;"


def _last(value: int) -> Edit:
    """Return an edit that sets the last operand of a statement to `value`."""
    return lambda line: re.sub(r", ([%\w]+);", f", {value};", line)


# Kind of fault -> (pattern of the lines that may have it, edit that injects it).
FAULTS: dict[str, tuple[str, Edit]] = {
    "drop mbarrier.arrive": (r"mbarrier\.arrive\.(?!expect)", _drop),
    "drop arrive.expect_tx": (r"mbarrier\.arrive\.expect_tx", _drop),
    "drop tcgen05.commit": (r"tcgen05\.commit", _drop),
    "drop mbarrier wait": (r"mbarrier\.try_wait", _no_wait),
    "drop bar.sync or arrive": (r"\bbar\.(sync|arrive)\b", _drop),
    "drop TMA load": (r"cp\.async\.bulk\.tensor.*shared::\w+\.global", _drop),
    "drop bulk store wait": (r"cp\.async\.bulk\.wait_group ", _drop),
    "drop bulk store commit": (r"cp\.async\.bulk\.commit_group", _drop),
    "drop tcgen05.wait": (r"tcgen05\.wait", _drop),
    "drop proxy fence": (r"fence\.proxy\.async", _drop),
    "drop wgmma.fence": (r"wgmma\.fence", _drop),
    "drop wgmma.commit": (r"wgmma\.commit_group", _drop),
    "wrong count": (r"mbarrier\.init", _last(3)),
    "constant parity": (r"mbarrier\.try_wait\.parity", _other_parity),
    "wrong bytes": (r"mbarrier\.arrive\.expect_tx", _last(48)),
    "wgmma.wait_group deeper": (r"wgmma\.wait_group", _deeper),
}


@dataclass(frozen=True)
class Mutant:
    fault: str
    line: int
    text: str


def mutants(text: str, limit: int | None = None, seed: int = 0) -> Iterator[Mutant]:
    """Yield every mutant of a PTX text, or at most `limit` per kind of fault, drawn with `seed`."""
    lines, rng = text.split("\n"), random.Random(seed)
    for fault, (pattern, edit) in FAULTS.items():
        sites = [i for i, line in enumerate(lines) if re.search(pattern, line)]
        if limit is not None and len(sites) > limit:
            sites = sorted(rng.sample(sites, limit))
        for i in sites:
            line = edit(lines[i])
            if line != lines[i]:
                yield Mutant(fault, i + 1, "\n".join([*lines[:i], line, *lines[i + 1 :]]))


def caught_by(
    exe: Executable,
    mutant: Mutant,
    args: list[Any],
    wrong: Callable[[], str | None],
    deterministic: bool = True,
) -> str:
    """Return what detects the fault first ("static", "mode: kind" or "results: ..."), or ""."""
    changed = exe.with_ptx(mutant.text)
    known = {f.text for k in exe.kernels.values() for f in emulator.missing_fences(k)}
    static = [f for k in parse(mutant.text).values() for f in emulator.missing_fences(k)]
    if any(f.text not in known for f in static):
        return "static"
    report = emulator.check(
        changed, *args, seeds=3, expect=wrong, strict_loads=True, deterministic=deterministic
    )
    for run in report.runs:
        if run.findings:
            return f"{run.mode}: {run.findings[0].kind}"
    return f"results: {report.differences[0].text}" if report.differences else ""


def study(
    exe: Executable,
    args: list[Any],
    wrong: Callable[[], str | None],
    limit: int | None = None,
    deterministic: bool = True,
) -> list[tuple[Mutant, str]]:
    """Return (mutant, what detected it) for each mutant of a kernel.

    Raises:
        AssertionError: the kernel without a fault is reported.
    """
    start = emulator.snapshot(args)
    out = []
    for m in (Mutant("none", 0, exe.ptx), *mutants(exe.ptx, limit)):
        emulator.restore(args, start)
        how = caught_by(exe, m, args, wrong, deterministic)
        if m.fault == "none" and how:
            raise AssertionError(f"the kernel without a fault is reported: {how}")
        out.append((m, how))
    return out[1:]


# Text of a source line at which a fault cannot change what the kernel does -> the reason.
EQUIVALENT = {
    "producer_tail": "drains the ring before exit, after which nothing happens",
    ".tail()": "drains the ring before exit, after which nothing happens",
    "ha.release()": "frees a stage that is filled once: nobody waits for it",
    "ap.acquire_and_advance()": "waits for a fresh barrier, which passes at once",
}


def equivalent(exe: Executable, mutant: Mutant, idle: Collection[int] = ()) -> str:
    """Return why a mutant behaves like the original kernel, or "" if it should not.

    Args:
        exe: the original kernel.
        mutant: the mutant.
        idle: numbers of lines that were not executed.
    """
    if mutant.line in idle:
        return "is not executed with these operands"
    sources = {c.line: c.source for k in exe.kernels.values() for c in k.instructions()}
    source = sources.get(mutant.line)
    if source is None:
        return ""
    text = Path(source.file).read_text().split("\n")[source.line - 1]
    return next((why for mark, why in EQUIVALENT.items() if mark in text), "")


def main() -> None:
    from tests.emulator import cases

    which = sys.argv[1] if len(sys.argv) > 1 else "hopper"
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else None
    exe, args, wrong = cases.STUDIES[which]()
    start = emulator.snapshot(args)
    idle = emulator.run(exe, *args).launches[0].missed
    emulator.restore(args, start)
    rows = study(exe, args, wrong, limit, which not in cases.UNORDERED)
    same = [m for m, how in rows if not how and equivalent(exe, m, idle)]
    total = Counter(m.fault for m, _ in rows)
    missed = [m for m, how in rows if not how and m not in same]
    for fault in total:
        ways = Counter(how.split(":")[0] for m, how in rows if m.fault == fault)
        print(f"{fault:26s} {total[fault]:3d}  {dict(ways)}")  # noqa: T201
    changing = len(rows) - len(same)
    print(f"caught {changing - len(missed)} of {changing} that change behaviour")  # noqa: T201
    for m in same:
        print(f"equivalent: {m.fault}, PTX line {m.line}: {equivalent(exe, m, idle)}")  # noqa: T201
    for m in missed:
        print(f"missed: {m.fault}, PTX line {m.line}")  # noqa: T201


if __name__ == "__main__":
    main()

"""Run mutmut on the core (`[tool.mutmut]` in pyproject.toml) and read its results."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.edits import ROOT

SURVIVED, UNCOVERED, NOT_RUN = 0, 33, None  # exit statuses in mutmut's files; others are kills
NO_MUTANT = "no_such_mutant"


@dataclass(frozen=True)
class Outcome:
    """Hold the results of a mutation run.

    Attributes:
        killed: number of mutants that a test detected or that ran out of time.
        survivors: names of the mutants that no test detected.
        uncovered: names of the mutants in functions that no test calls.
    """

    killed: int
    survivors: tuple[str, ...]
    uncovered: tuple[str, ...]


def run(sample: int, seed: int, only: str, children: int) -> Outcome:
    """Draw mutants of the core and run the tests that call each mutated function.

    Args:
        sample: number of mutants to draw; 0 for all.
        seed: seed of the draw.
        only: draw only mutants whose name contains this.
        children: number of processes that run in parallel.
    """
    _mutmut([NO_MUTANT], children)  # writes the mutants, and finds out which test calls what
    names = sorted(name for name, _ in statuses() if only in name)
    if sample:
        names = random.Random(seed).sample(names, min(sample, len(names)))
    _mutmut(names, children)
    return outcome(names)


def statuses(root: Path = ROOT) -> Iterator[tuple[str, int | None]]:
    """Yield (name, exit status) of each mutant that mutmut generated."""
    for file in sorted((root / "mutants").rglob("*.py.meta")):
        yield from json.loads(file.read_text())["exit_code_by_key"].items()


def outcome(names: Sequence[str], root: Path = ROOT) -> Outcome:
    """Summarize the mutants in `names` that have run."""
    found = dict(statuses(root))
    ran = {name: found[name] for name in names if found[name] is not NOT_RUN}
    survivors = tuple(name for name, status in ran.items() if status == SURVIVED)
    uncovered = tuple(name for name, status in ran.items() if status == UNCOVERED)
    return Outcome(len(ran) - len(survivors) - len(uncovered), survivors, uncovered)


def difference(name: str) -> str:
    """Return the change that a mutant makes, as a unified diff."""
    command = [sys.executable, "-m", "mutmut", "show", name]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return shown.stdout


def _mutmut(names: Sequence[str], children: int) -> None:
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(children), *names]
    subprocess.run(command, cwd=ROOT, check=False)

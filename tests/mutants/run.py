"""Run mutants: `python -m tests.mutants.run named`, `core --sample 200`, `kernels --sample 20`.

`named` runs the edits of named.toml, each of which a test must detect. `core` draws mutants of
mutmut. `kernels` draws edits of the kernel templates; each compiles its kernels again, which takes
minutes. The program prints the survivors and returns 1 if fewer than `--least` percent are killed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.mutants import core
from tests.mutants.edits import ROOT, Edit, copy_repository, noticed, replacement
from tests.mutants.kernel_edits import kernel_edits

NAMED = Path(__file__).parent / "named.toml"


def named_edits(root: Path = ROOT) -> list[Edit]:
    """Return the edits that named.toml describes."""
    return [
        replacement(m["name"], m["path"], m["before"], m["after"], tuple(m["tests"]), root)
        for m in tomllib.loads(NAMED.read_text())["mutant"]
    ]


def drawn_edits(sample: int, seed: int, only: str) -> list[Edit]:
    """Draw `sample` kernel edits whose name contains `only`; return all if `sample` is 0."""
    edits = [e for e in kernel_edits() if only in e.name]
    return random.Random(seed).sample(edits, min(sample, len(edits))) if sample else edits


def run_edits(edits: Sequence[Edit], seconds: float) -> list[Edit]:
    """Run edits in a copy of the repository and print the verdicts; return the survivors."""
    survivors = []
    with tempfile.TemporaryDirectory(prefix="attnkit-mutants-") as folder:
        copy_repository(Path(folder))
        for edit in edits:
            killed = noticed(edit, Path(folder), seconds)
            print("killed  " if killed else "SURVIVED", edit.name, flush=True)
            if not killed:
                survivors.append(edit)
    return survivors


def run_core(sample: int, seed: int, only: str) -> tuple[int, int]:
    """Run mutmut and print the survivors; return (number killed, number run)."""
    found = core.run(sample, seed, only, children=os.cpu_count() or 1)
    for name in (*found.survivors, *found.uncovered):
        print(core.difference(name))
    print(f"{len(found.uncovered)} mutants are in functions that no test calls")
    left = len(found.survivors) + len(found.uncovered)
    return found.killed, found.killed + left


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="tests.mutants.run", description=__doc__)
    parser.add_argument("which", choices=["named", "core", "kernels"])
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--sample", type=int, default=20, help="how many to draw, 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit for each edit")
    parser.add_argument("--least", type=float, default=100.0, help="percent that must be killed")
    options = parser.parse_args(arguments)
    if options.which == "core":
        killed, count = run_core(options.sample, options.seed, options.only)
    else:
        named = options.which == "named"
        edits = [e for e in named_edits() if options.only in e.name] if named else None
        if edits is None:
            edits = drawn_edits(options.sample, options.seed, options.only)
        count = len(edits)
        killed = count - len(run_edits(edits, options.seconds))
    print(f"{killed} of {count} mutants killed")
    return 0 if count and killed >= options.least / 100 * count else 1


if __name__ == "__main__":
    sys.exit(main())

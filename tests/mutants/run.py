"""Run mutants: `python -m tests.mutants.run named`, `core --sample 200`, `kernels --sample 20`.

`named` runs the edits of named.toml, each of which a test must detect. `core` draws mutants of
mutmut. `kernels` draws edits of the kernel templates; each compiles its kernels again, which takes
minutes. The program prints each verdict and returns 1 if fewer than `--least` percent are killed.

With `--record FILE`, the verdicts of `named` and `kernels` are appended to FILE, and edits that have
one are not run again, so that an interrupted run continues. `--again` runs those that survived.
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
from tests.mutants.edits import ROOT, Edit, Trial, copy_repository, replacement
from tests.mutants.kernel_edits import kernel_edits
from tests.mutants.record import Record

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


def run_edits(edits: Sequence[Edit], seconds: float, record: Record, again: bool) -> int:
    """Run edits in a copy of the repository and print the verdicts; return how many are killed.

    Args:
        edits: edits to run.
        seconds: limit for each.
        record: verdicts of earlier runs, which receives the new ones.
        again: whether to run edits once more that were not killed according to `record`.
    """
    killed = 0
    with tempfile.TemporaryDirectory(prefix="attnkit-mutants-") as folder:
        copy_repository(Path(folder))
        trial = Trial(Path(folder), seconds)
        for number, edit in enumerate(edits, 1):
            verdict = known = record.get(edit)
            if verdict is None or (again and verdict.outcome != "killed"):
                verdict, known = trial.verdict(edit), None
                record.add(edit, verdict)
            killed += verdict.outcome == "killed"
            word = verdict.outcome if verdict.outcome == "killed" else verdict.outcome.upper()
            took = "recorded" if known else f"{verdict.seconds:6.0f} s"
            by = f" ({verdict.by})" if verdict.by else ""
            print(f"[{number}/{len(edits)}] {word:8} {took}  {edit.name}{by}", flush=True)
    return killed


def run_core(sample: int, seed: int, only: str, children: int) -> tuple[int, int]:
    """Run mutmut and print the survivors; return (number killed, number that could be)."""
    found = core.run(sample, seed, only, children)
    for name in (*found.survivors, *found.uncovered):
        print(core.difference(name))
    for name in found.equivalent:
        print(f"equivalent: {name}")
    for name in found.refused:
        print(f"refused by mypy: {name}")
    print(f"{found.wasted} mutants were left out: import time, assertions, or the text of an error")
    print(f"{found.killed} mutants were detected by tests, {len(found.refused)} others by mypy")
    print(f"{len(found.equivalent)} mutants are equivalent to the code, see equivalent.toml")
    print(f"{len(found.uncovered)} mutants are in functions that no test calls")
    left = len(found.survivors) + len(found.uncovered)
    if not found.noticed + left:
        print("mutmut ran no mutants; its output, above, says why")
    return found.noticed, found.noticed + left


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="tests.mutants.run", description=__doc__)
    parser.add_argument("which", choices=["named", "core", "kernels"])
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--sample", type=int, default=20, help="how many to draw, 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit for each edit")
    parser.add_argument("--least", type=float, default=100.0, help="percent that must be killed")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep verdicts in FILE")
    parser.add_argument("--again", action="store_true", help="run recorded survivors again")
    parser.add_argument("--children", type=int, default=os.cpu_count(), help="processes of mutmut")
    options = parser.parse_args(arguments)
    if options.which == "core":
        killed, count = run_core(options.sample, options.seed, options.only, options.children or 1)
    else:
        named = options.which == "named"
        edits = [e for e in named_edits() if options.only in e.name] if named else None
        if edits is None:
            edits = drawn_edits(options.sample, options.seed, options.only)
        count = len(edits)
        killed = run_edits(edits, options.seconds, Record(options.record), options.again)
    print(f"{killed} of {count} mutants killed")
    return 0 if count and killed >= options.least / 100 * count else 1


if __name__ == "__main__":
    sys.exit(main())

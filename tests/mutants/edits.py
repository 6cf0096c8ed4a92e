"""Apply one edit (a mutant) to a copy of the repository and check whether tests detect it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
# Exit statuses of pytest if a file of tests cannot be imported, or a test that is named not found.
COLLECTION_ERRORS = (2, 4)


@dataclass(frozen=True)
class Edit:
    """Describe a replacement in a file, and the tests that should fail with it.

    Attributes:
        name: name for reports.
        path: path of the file, relative to the root of the repository.
        start, end: range of characters to replace.
        text: replacement text.
        tests: arguments for pytest.
    """

    name: str
    path: str
    start: int
    end: int
    text: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """Return the file's text with the edit applied."""
        return source[: self.start] + self.text + source[self.end :]


def replacement(
    name: str, path: str, before: str, after: str, tests: tuple[str, ...], root: Path = ROOT
) -> Edit:
    """Return the edit that replaces `before`, which the file contains exactly once, by `after`.

    Raises:
        ValueError: the file does not contain `before`, or contains it more than once.
    """
    source = (root / path).read_text()
    if (count := source.count(before)) != 1:
        raise ValueError(f"{name}: {path} contains {before!r} {count} times, expected once")
    start = source.index(before)
    return Edit(name, path, start, start + len(before), after, tests)


def copy_repository(folder: Path, root: Path = ROOT) -> None:
    """Copy all files that git tracks or would add to `folder`; links stay links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        source, target = root / name, folder / name
        if not (source.is_symlink() or source.exists()):
            continue  # deleted in the working tree
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def run_tests(folder: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Run tests in a copy until one fails; return (status, output) of pytest.

    The status is None if the tests do not end within `seconds`.
    """
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "ci"),
    }
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout.decode(errors="replace")


def failed_test(output: str) -> str | None:
    """Return the test that failed according to pytest's output; None if it names none."""
    found = re.search(r"^FAILED (\S+?::.*?)(?: - .*)?$", output, re.MULTILINE)
    return found[1] if found else None


@dataclass(frozen=True)
class Verdict:
    """Hold the result of one edit.

    Attributes:
        outcome: whether a test failed with the edit. "invalid" means that the same test fails
            without the edit too, so that the result says nothing.
        seconds: how long the tests ran with the edit.
        by: the test that failed, or how the run ended otherwise; empty if the edit survived.
    """

    outcome: Literal["killed", "survived", "invalid"]
    seconds: float
    by: str = ""


class Trial:
    """Applies edits to a copy of the repository, one at a time, and runs their tests.

    Args:
        folder: root of the copy.
        seconds: limit of each run. A run that takes longer counts as a failure.
    """

    def __init__(self, folder: Path, seconds: float = 900.0) -> None:
        self.folder = folder
        self.seconds = seconds
        self._passes: dict[tuple[str, ...], bool] = {}  # tests -> whether they pass without edits

    def verdict(self, edit: Edit) -> Verdict:
        """Apply an edit, run its tests and revert it; return the result."""
        path = self.folder / edit.path
        source = path.read_text()
        begin = time.monotonic()
        path.write_text(edit.applied(source))
        try:
            status, output = run_tests(self.folder, edit.tests, self.seconds)
        finally:
            path.write_text(source)
        took = time.monotonic() - begin
        if status == 0:
            return Verdict("survived", took)
        by, again = failed_test(output), edit.tests
        if by is not None:
            again = (by,)
        elif status in COLLECTION_ERRORS:
            by, again = "an error of collection", (*edit.tests, "--collect-only")
        elif status is None:
            by = f"no end within {self.seconds:.0f} s"
        else:
            by = f"exit status {status} of pytest"
        return Verdict("killed" if self._passes_unedited(again) else "invalid", took, by)

    def _passes_unedited(self, tests: tuple[str, ...]) -> bool:
        if tests not in self._passes:
            self._passes[tests] = run_tests(self.folder, tests, self.seconds)[0] == 0
        return self._passes[tests]

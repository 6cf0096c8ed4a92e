"""Apply one edit (a mutant) to a copy of the repository, and see whether tests notice it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Exit statuses of pytest that mean that a test failed, or that the edited code cannot be imported.
NOTICED = (1, 2)


@dataclass(frozen=True)
class Edit:
    """Describes a replacement in a file, and the tests that should fail with it.

    Attributes:
        name: for reports.
        path: file, from the root of the repository.
        start, end: the characters that are replaced.
        text: what replaces them.
        tests: arguments for pytest.
    """

    name: str
    path: str
    start: int
    end: int
    text: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """Return the file's text with the edit."""
        return source[: self.start] + self.text + source[self.end :]


def replacement(
    name: str, path: str, before: str, after: str, tests: tuple[str, ...], root: Path = ROOT
) -> Edit:
    """Describe the replacement of a text that a file contains exactly once.

    Raises:
        ValueError: the file does not contain it, or more than once.
    """
    source = (root / path).read_text()
    if (count := source.count(before)) != 1:
        raise ValueError(f"{name}: {path} contains {before!r} {count} times, expected once")
    start = source.index(before)
    return Edit(name, path, start, start + len(before), after, tests)


def copy_repository(folder: Path, root: Path = ROOT) -> None:
    """Copy the files that git tracks or would add, links as links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        source, target = root / name, folder / name
        if not (source.is_symlink() or source.exists()):
            continue  # deleted in the working tree
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


def run_tests(folder: Path, tests: tuple[str, ...], seconds: float) -> int | None:
    """Run tests in a copy until one fails; return pytest's exit status, None if time ran out."""
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
        return None
    return done.returncode


def noticed(edit: Edit, folder: Path, seconds: float = 900.0) -> bool:
    """Apply an edit to a copy, run its tests, and take it back; return whether a test failed.

    A run that does not end within `seconds` counts as failed.

    Raises:
        ValueError: pytest did not run the tests: it found none, or did not know an argument.
    """
    path = folder / edit.path
    source = path.read_text()
    path.write_text(edit.applied(source))
    try:
        status = run_tests(folder, edit.tests, seconds)
    finally:
        path.write_text(source)
    if status not in (None, 0, *NOTICED):
        raise ValueError(f"{edit.name}: pytest ended with status {status} for {edit.tests}")
    return status != 0

"""Apply one edit (a mutant) to a copy of the repository and check whether tests detect it."""

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


def run_tests(folder: Path, tests: tuple[str, ...], seconds: float) -> int | None:
    """Run tests in a copy until one fails; return pytest's exit status, None on a timeout."""
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
    """Apply an edit to a copy, run its tests, and revert it; return whether a test failed.

    A run that does not end within `seconds` counts as failed.

    Raises:
        ValueError: pytest did not run the tests, because it found none or rejected an argument.
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

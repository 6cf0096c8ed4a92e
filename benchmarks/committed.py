"""Ensure that benchmark rows are written from committed code only.

The `commit` field of a row names the code that was measured. In a git checkout the product's files
must equal those of HEAD. For a copy without git, pass `--commit COMMIT:DIGEST`, which `python
benchmarks/machine.py --stamp` prints in a clean checkout. The digest must equal that of the files
in the copy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("attnkit", "templates", "masks", "mods")
PATTERNS = ("benchmarks/*.py", "benchmarks/*.toml", "*.toml")
SUFFIXES = (".py", ".c", ".typed", ".toml")  # a test checks that they cover git's files
STAMP = re.compile(r"([0-9a-f]{7,40}):([0-9a-f]{16})")
HOW = "`python benchmarks/machine.py --stamp` prints it in a clean checkout"


class NotCommitted(Exception):
    """Raised if no commit describes the code that is running; the message says why."""


def product_files(root: Path = ROOT) -> list[Path]:
    """Return the files under `root` that can affect a measurement, sorted by path."""
    found = {path for pattern in PATTERNS for path in root.glob(pattern)}
    for folder in FOLDERS:
        found |= {path for path in (root / folder).rglob("*") if path.suffix in SUFFIXES}
    return sorted(path for path in found if path.is_file())


def digest(root: Path = ROOT) -> str:
    """Return a hash of the paths and contents of the product's files, as 16 hexadecimal digits."""
    total = hashlib.sha256()
    for path in product_files(root):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def _git(root: Path, *words: str) -> str | None:
    """Run `git *words` in `root` and return its output, or None if git fails or is missing."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def head(root: Path = ROOT) -> str | None:
    """Return the short commit of the checkout at `root`, None if `root` is not its top folder."""
    top = _git(root, "rev-parse", "--show-toplevel")
    # a copy inside another repository must not report the commit of that repository
    if top is None or Path(top).resolve() != root.resolve():
        return None
    return _git(root, "rev-parse", "--short=12", "HEAD")


def changes(root: Path = ROOT) -> list[str]:
    """Return the product's files that differ from HEAD, including untracked and ignored files."""
    where = [*FOLDERS, *(f":(glob){pattern}" for pattern in PATTERNS)]
    status = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *where) or ""
    tracked = set((_git(root, "ls-files", "-z", "--", *where) or "").split("\0"))
    own = {path.relative_to(root).as_posix() for path in product_files(root)}
    return sorted({line[3:] for line in status.splitlines()} | (own - tracked))


def described(root: Path = ROOT) -> str:
    """Return the commit for display: with suffix "+changes" if files differ, "" without git."""
    commit = head(root)
    if commit is None:
        return ""
    return commit + ("+changes" if changes(root) else "")


def stamp(root: Path = ROOT) -> str:
    """Return `COMMIT:DIGEST` for a clean checkout.

    Raises:
        NotCommitted: there is no git, or a file differs from HEAD.
    """
    return f"{_clean_head(root, '')}:{digest(root)}"


def committed(given: str | None = None, root: Path = ROOT) -> str:
    """Return the commit that describes the code at `root`.

    Args:
        given: `COMMIT:DIGEST`. Required where there is no git; verified whenever it is passed.
        root: top folder of the checkout or copy.

    Raises:
        NotCommitted: a file differs from the commit, or the commit is unknown.
    """
    _check_import(root)
    if given is None:
        return _clean_head(root, f"; where there is no git, pass --commit COMMIT:DIGEST ({HOW})")
    parts = STAMP.fullmatch(given)
    if parts is None:
        raise NotCommitted(f"--commit is {given!r}; expected COMMIT:DIGEST ({HOW})")
    commit, wanted = parts.groups()
    if (own := digest(root)) != wanted:
        raise NotCommitted(
            f"the files of {root} have the digest {own}, and --commit says {wanted}: copy the "
            f"checkout again, or stamp the commit that was copied ({HOW})"
        )
    if head(root) is not None and not _clean_head(root, "").startswith(commit[:12]):
        raise NotCommitted(f"--commit says {commit}, and {root} is at {head(root)}")
    return commit


def _clean_head(root: Path, hint: str) -> str:
    commit = head(root)
    if commit is None:
        raise NotCommitted(f"{root} is no git checkout{hint}")
    if differing := changes(root):
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise NotCommitted(
            f"rows come from committed trees only, and these files differ from {commit}: "
            f"{', '.join(differing[:5])}{more}; commit them first"
        )
    return commit


def _check_import(root: Path) -> None:
    """Raise `NotCommitted` if `import attnkit` loads a package from outside `root`."""
    spec = find_spec("attnkit")  # the package that is imported, or would be
    place = Path(spec.origin).resolve().parent if spec and spec.origin else None
    if place is not None and place != (root / "attnkit").resolve():
        raise NotCommitted(
            f"attnkit is imported from {place}, and the rows would name the commit of {root}: "
            f"set PYTHONPATH={root}"
        )


class RowFile:
    """Append rows to a JSON lines file, each with the commit of the measured code.

    Args:
        path: the file. If None, `append` does nothing.
        given: `COMMIT:DIGEST`, where there is no git.

    Raises:
        NotCommitted: `path` is given and no commit describes the code.
    """

    def __init__(self, path: Path | None, given: str | None = None) -> None:
        self.path = path
        self.commit = committed(given) if path is not None else ""

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row immediately, so that a later crash does not lose it."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({**row, "commit": self.commit}) + "\n")


def row_file(path: Path | None, given: str | None = None) -> RowFile:
    """Return a `RowFile`; exit with status 2 and the reason if no commit describes the code."""
    try:
        return RowFile(path, given)
    except NotCommitted as error:
        print(f"{path} is not written: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def add_commit(parser: argparse.ArgumentParser) -> None:
    """Add the option `--commit` to the parser of a program that writes rows."""
    parser.add_argument(
        "--commit", metavar="COMMIT:DIGEST", help=f"commit of a checkout without git; {HOW}"
    )

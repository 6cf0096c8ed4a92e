"""Write rows of committed trees only: a row's `commit` names the code that it measured.

In a git checkout the product's files must be those of HEAD. A copy without git is told
`COMMIT:DIGEST`, which `python benchmarks/machine.py --stamp` prints in a clean checkout, and the
digest must be that of the copy's own files.
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
SUFFIXES = (".py", ".c", ".typed", ".toml")  # a test holds them against what git tracks
STAMP = re.compile(r"([0-9a-f]{7,40}):([0-9a-f]{16})")
HOW = "`python benchmarks/machine.py --stamp` prints it in a clean checkout"


class NotCommitted(Exception):
    """Say why the code that runs cannot be named by a commit."""


def product_files(root: Path = ROOT) -> list[Path]:
    """Return the files whose contents a measurement depends on, sorted by path."""
    found = {path for pattern in PATTERNS for path in root.glob(pattern)}
    for folder in FOLDERS:
        found |= {path for path in (root / folder).rglob("*") if path.suffix in SUFFIXES}
    return sorted(path for path in found if path.is_file())


def digest(root: Path = ROOT) -> str:
    """Hash the paths and contents of the product's files; 16 hexadecimal digits."""
    total = hashlib.sha256()
    for path in product_files(root):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def _git(root: Path, *words: str) -> str | None:
    """Ask git about a folder; None where it has no answer."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def head(root: Path = ROOT) -> str | None:
    """Return the commit of a checkout; None if the folder is not the top of one."""
    top = _git(root, "rev-parse", "--show-toplevel")
    # a copy inside of another repository must not take that one's commit
    if top is None or Path(top).resolve() != root.resolve():
        return None
    return _git(root, "rev-parse", "--short=12", "HEAD")


def changes(root: Path = ROOT) -> list[str]:
    """Return the product's files that differ from HEAD, untracked and ignored ones included."""
    where = [*FOLDERS, *(f":(glob){pattern}" for pattern in PATTERNS)]
    status = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *where) or ""
    tracked = set((_git(root, "ls-files", "-z", "--", *where) or "").split("\0"))
    own = {path.relative_to(root).as_posix() for path in product_files(root)}
    return sorted({line[3:] for line in status.splitlines()} | (own - tracked))


def described(root: Path = ROOT) -> str:
    """Return the commit to print; "+changes" follows where files differ, "" without git."""
    commit = head(root)
    if commit is None:
        return ""
    return commit + ("+changes" if changes(root) else "")


def stamp(root: Path = ROOT) -> str:
    """Return `COMMIT:DIGEST` of a clean checkout.

    Raises:
        NotCommitted: there is no git, or a file differs from HEAD.
    """
    return f"{_clean_head(root, '')}:{digest(root)}"


def committed(given: str | None = None, root: Path = ROOT) -> str:
    """Return the commit whose code this is.

    Args:
        given: `COMMIT:DIGEST`; needed where there is no git, verified wherever it is passed.
        root: of the checkout or copy.

    Raises:
        NotCommitted: a file differs from the commit, or the commit is not known.
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
    """Refuse an attnkit that is imported from another tree than the one that is named."""
    spec = find_spec("attnkit")  # what is imported already, or will be
    place = Path(spec.origin).resolve().parent if spec and spec.origin else None
    if place is not None and place != (root / "attnkit").resolve():
        raise NotCommitted(
            f"attnkit is imported from {place}, and the rows would name the commit of {root}: "
            f"set PYTHONPATH={root}"
        )


class RowFile:
    """Append rows to a file, each with the commit; do nothing where no file is named.

    Args:
        path: of the JSON lines, or None.
        given: `COMMIT:DIGEST` where there is no git.

    Raises:
        NotCommitted: a file is named, and the tree is not that of a commit.
    """

    def __init__(self, path: Path | None, given: str | None = None) -> None:
        self.path = path
        self.commit = committed(given) if path is not None else ""

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row at once, so that what was measured before a crash is kept."""
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({**row, "commit": self.commit}) + "\n")


def row_file(path: Path | None, given: str | None = None) -> RowFile:
    """Open a file of rows for a program, before it measures; exit with 2 if it may not write."""
    try:
        return RowFile(path, given)
    except NotCommitted as error:
        print(f"{path} is not written: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def add_commit(parser: argparse.ArgumentParser) -> None:
    """Add the option `--commit` of the programs that write rows."""
    parser.add_argument(
        "--commit", metavar="COMMIT:DIGEST", help=f"where the checkout has no git; {HOW}"
    )

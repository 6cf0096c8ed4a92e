"""Keep the verdicts of edits in a file, so that an interrupted run can continue."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from tests.mutants.edits import ROOT, Edit, Verdict


def key(edit: Edit, root: Path = ROOT) -> str:
    """Return a digest of an edit, of the file that it edits, and of its arguments for pytest.

    The text of the tests is not part of it.
    """
    edited = edit.applied((root / edit.path).read_text())
    return hashlib.sha256(json.dumps([edit.path, edited, edit.tests]).encode()).hexdigest()[:16]


class Record:
    """Holds verdicts by edit, and appends each new one to a file of JSON lines.

    Args:
        path: the file, which need not exist; None to keep the verdicts in memory alone.
        root: root of the repository that the edits are of.
    """

    def __init__(self, path: Path | None, root: Path = ROOT) -> None:
        self.path = path
        self.root = root
        self._verdicts: dict[str, Verdict] = {}
        lines = path.read_text().splitlines() if path and path.exists() else []
        for row in map(json.loads, lines):
            verdict = Verdict(row["outcome"], row["seconds"], row["by"])
            self._verdicts[row["key"]] = verdict  # a later line replaces an earlier one

    def get(self, edit: Edit) -> Verdict | None:
        """Return the verdict of an edit; None if it has none or its file has changed since."""
        return self._verdicts.get(key(edit, self.root))

    def add(self, edit: Edit, verdict: Verdict) -> None:
        """Store the verdict of an edit."""
        digest = key(edit, self.root)
        self._verdicts[digest] = verdict
        if self.path:
            with self.path.open("a") as file:
                row = {"key": digest, "name": edit.name, **asdict(verdict)}
                file.write(json.dumps(row) + "\n")

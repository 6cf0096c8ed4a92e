"""Find the mutants that mypy refuses: `make lint` notices them, so no test needs to."""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.edits import ROOT, copy_repository


@contextmanager
def checker(root: Path = ROOT) -> Iterator[Checker]:
    """Copy the repository to a temporary folder, in which mypy checks mutants one by one."""
    with tempfile.TemporaryDirectory(prefix="attnkit-types-") as folder:
        copy_repository(Path(folder), root)
        yield Checker(Path(folder))


class Checker:
    """Runs mypy with one function of a copy of the repository replaced.

    Args:
        folder: root of the copy. mypy accepts it as it is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not self._accepted():
            raise RuntimeError("mypy refuses the code without a mutant; `make lint` says why")

    def refuses(self, path: str, function: str, text: str) -> bool:
        """Return whether mypy refuses a file in which `text` defines a function."""
        file = self._folder / path
        source = file.read_text()
        try:
            file.write_text(replaced(source, function, text))
            return not self._accepted()
        finally:
            file.write_text(source)

    def _accepted(self) -> bool:
        command = [sys.executable, "-m", "mypy", "--no-error-summary"]
        return not subprocess.run(command, cwd=self._folder, capture_output=True).returncode


def replaced(source: str, function: str, text: str) -> str:
    """Return the source of a module with another definition of a function.

    Args:
        source: source of the module.
        function: name of the function, `Class.method` for a method.
        text: the new definition, from `def` on; its name is replaced.
    """
    scope: Collection[ast.stmt] = ast.parse(source).body
    *classes, name = function.split(".")
    for owner in classes:
        scope = next(s.body for s in scope if isinstance(s, ast.ClassDef) and s.name == owner)
    found = [s for s in scope if isinstance(s, ast.FunctionDef) and s.name == name]
    lines = source.splitlines(keepends=True)
    before, after = lines[: found[-1].lineno - 1], lines[found[-1].end_lineno :]
    head, _, rest = text.partition("(")
    indented = head[: len(head) - len(head.lstrip())]
    return "".join([*before, f"{indented}def {name}({rest.rstrip()}\n", *after])

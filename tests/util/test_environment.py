"""Check that the table of environment variables is complete, and that all readers use it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from attnkit.util import environment

ROOT = Path(__file__).resolve().parents[2]
FILES = [p for p in (ROOT / "attnkit").rglob("*.py") if p.is_file()]
FILES += [p for name in ("mods", "masks", "templates") for p in (ROOT / name).rglob("*.py")]
NAMES = {variable.name for variable in environment.VARIABLES}

# Files that read the environment themselves, and what they read.
OWN = {
    "attnkit/util/environment.py": {"name", "whole"},  # the names of the table
    "attnkit/emulator/host/host_function.py": {"'CC'"},  # the emulator imports nothing of attnkit
    "attnkit/jit/loader.py": {"whole"},  # passes everything on to the C compiler
}


def reads(path: Path) -> set[str]:
    """Return what a file reads from the environment: expressions, or "whole" for all of it."""
    tree = ast.parse(path.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = set()
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "id", ""))
        if name not in ("environ", "environb", "getenv"):
            continue
        user = parents[node]
        while isinstance(user, ast.Attribute):  # os.environ.get
            node, user = user, parents[user]
        if isinstance(user, ast.Call) and user.func is node and user.args:
            found.add(ast.unparse(user.args[0]))
        else:
            found.add(ast.unparse(user.slice) if isinstance(user, ast.Subscript) else "whole")
    return found


def test_every_reader_goes_through_the_table() -> None:
    assert {p.relative_to(ROOT).as_posix(): r for p in FILES if (r := reads(p))} == OWN
    assert "CC" in NAMES


def test_every_variable_that_code_or_pages_name_is_in_the_table() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    named = {n for p in (*FILES, *pages) for n in re.findall(r"\bATTNKIT_[A-Z_]+\b", p.read_text())}
    assert named == {name for name in NAMES if name.startswith("ATTNKIT_")}


def test_every_variable_of_the_table_is_read() -> None:
    code = "\n".join(p.read_text() for p in FILES if p.name != "environment.py")
    for name in NAMES - {"TMPDIR"}:  # which `tempfile` reads
        assert f'"{name.removesuffix("*")}' in code, name


def test_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNKIT_LOG", "debug")
    assert environment.read("ATTNKIT_LOG") == "debug"
    monkeypatch.delenv("ATTNKIT_LOG")
    assert environment.read("ATTNKIT_LOG") == ""
    with pytest.raises(KeyError, match="ATTNKIT_LOGS"):
        environment.read("ATTNKIT_LOGS")
    with pytest.raises(KeyError, match=r"PATH\*"):
        environment.read_prefixed("PATH")


def test_settings_of_the_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.read_prefixed("CUTE_DSL_"):
        monkeypatch.delenv(name)
    family = next(v for v in environment.VARIABLES if v.name == "CUTE_DSL_*")
    assert environment.current_value(family) == ""
    monkeypatch.setenv("CUTE_DSL_B", "2")
    monkeypatch.setenv("CUTE_DSL_A", "1")
    monkeypatch.setenv("CUTE_DSL_LIBS", "x")  # which has a row of its own
    assert environment.current_value(family) == "CUTE_DSL_A=1 CUTE_DSL_B=2"

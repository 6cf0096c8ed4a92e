"""Check that the reference has every public name and every command."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import docstrings
import pytest
import site_hooks

import attnkit
from attnkit import masks, mods, testing
from attnkit.cli import COMMANDS
from attnkit.util.environment import VARIABLES

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize(
    ("page", "module"),
    [("api", attnkit), ("masks", masks), ("mods", mods), ("testing", testing)],
    ids=["api", "masks", "mods", "testing"],
)
def test_every_public_name_is_there(page: str, module: object) -> None:
    name = module.__name__  # type: ignore[attr-defined]
    text = (REFERENCE / f"{page}.md").read_text()
    listed = re.findall(rf"^::: {re.escape(name)}\.(\w+)$", text, re.MULTILINE)
    names = set(module.__all__)  # type: ignore[attr-defined]
    public = {n for n in names if not isinstance(getattr(module, n), ModuleType)}
    missing = [f"::: {name}.{n}" for n in sorted(public - set(listed))]
    assert not missing, f"add to docs/reference/{page}.md: {missing}"
    assert public == set(listed)
    assert len(listed) == len(set(listed))


def test_every_command_is_there_with_its_options() -> None:
    page = (REFERENCE / "cli.md").read_text()
    names = {command.__name__.rpartition(".")[2] for command in COMMANDS}
    assert names == set(site_hooks.COMMAND.findall(page)) - {""}
    for name in names:
        assert f"usage: attnkit {name} " in site_hooks.help_of(name)
    assert "show" in site_hooks.help_of("")


def test_environment_variables_are_on_the_page() -> None:
    assert site_hooks.ENVIRONMENT in (REFERENCE / "cli.md").read_text()
    table = site_hooks.variables().splitlines()
    assert len(table) == 2 + len(VARIABLES)
    assert "| `ATTNKIT_CACHE_DIR` | folder of compiled kernels |" in table[2]


def test_docstrings_are_prepared_for_the_site() -> None:
    text = "Add.\n\nArgs:\n    a, b: numbers,\n        any.\n    c: not used.\n\nRaises:\n    A, B: never.\n\n>>> 1 + 1\n2\n"
    assert docstrings.separated(text) == text.replace(
        "    a, b: numbers,\n        any.\n",
        "    a: numbers,\n        any.\n    b: numbers,\n        any.\n",
    )
    assert docstrings.fenced(text).endswith("\n```pycon\n>>> 1 + 1\n2\n```\n")

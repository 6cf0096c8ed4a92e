"""Write the list of rooms in docs/architecture.md from the contract that `make lint` enforces."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
ROOMS = re.compile(r"(<!-- rooms -->\n).*?(<!-- end of rooms -->)", re.DOTALL)


def layers() -> list[list[str]]:
    """Return the layers of the contract from top to bottom, each as a list of rooms."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contract = next(c for c in lint["contracts"] if c["id"] == "rooms")
    found = [re.findall(r"\w+", layer) for layer in contract["layers"]]
    return [layer for layer in found if layer != ["__main__"]]


def purpose(room: str) -> str:
    """Return the first paragraph of a room's docstring, which says what the room is for."""
    folder = ROOT / "attnkit" / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    words = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(words.partition("\n\n")[0].split())


def listing() -> str:
    """Return a numbered Markdown list with one item per layer and one sentence per room."""
    lines = []
    for layer in layers():
        lines.append("1. " + "<br>".join(f"`{room}`: {purpose(room)}" for room in layer))
    return "\n".join(lines)


def files() -> dict[Path, str]:
    """Return {path: text} of the page, with its list filled in."""
    return {PAGE: ROOMS.sub(lambda m: f"{m[1]}\n{listing()}\n\n{m[2]}", PAGE.read_text())}

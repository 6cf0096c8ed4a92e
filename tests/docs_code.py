"""Read Python functions from pages of the documentation, so that tests can compare them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).parent.parent / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def functions_of(page: str, *names: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of these names that the Python blocks of a page define."""
    found: dict[str, Any] = {"torch": torch}
    for code in _BLOCK.findall((DOCS / page).read_text()):
        for node in ast.parse(code).body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                exec(compile(ast.Module([node], []), page, "exec"), found)
    return {name: found[name] for name in names}

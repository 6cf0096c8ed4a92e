"""Compare the page that lists the functions of a mod with the handlers that there are."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from attnkit.tracing.proxy import HANDLERS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "functions.md"
OF_SPARSE = {"dsmm", "spmm"}  # other names of mm


def handled() -> set[str]:
    """Return the public names of all functions of torch that have a handler."""
    known = {function for function in HANDLERS if callable(function)}
    found = set()
    for space in (torch, torch.Tensor, torch.nn.functional, torch.special):
        for name in dir(space):
            function = getattr(space, name)
            if not name.startswith("_") and callable(function) and function in known:
                found.add(name)
    return found


def test_the_page_lists_every_function_once() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) == handled() - OF_SPARSE

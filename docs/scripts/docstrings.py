"""Prepare docstrings for mkdocstrings.

Doctests become code blocks, and arguments that share an entry get one entry each.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?m)^( *)>>> (?:.+\n?)+")

ARGUMENTS = re.compile(r"(?m)^Args:\n(?:(?: .*)?\n)+")
JOINED = re.compile(r"(?m)^    (\w+(?:, \w+)+): (.*(?:\n {5,}.*)*)")


def fenced(text: str) -> str:
    """Return the docstring with a code fence around each doctest and its output."""

    def fence(match: re.Match[str]) -> str:
        indent = match[1]
        return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"

    return DOCTEST.sub(fence, text)


def separated(text: str) -> str:
    """Return the docstring with entries such as `query, key: ...` split, one per argument."""

    def entries(match: re.Match[str]) -> str:
        return "\n".join(f"    {name}: {match[2]}" for name in match[1].split(", "))

    return ARGUMENTS.sub(lambda section: JOINED.sub(entries, section[0]), text)


class Docstrings(griffe.Extension):
    """Griffe extension that prepares the docstring of every object before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = separated(fenced(obj.docstring.value))

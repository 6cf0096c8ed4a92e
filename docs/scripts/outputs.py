"""Code of the pages that runs, and what it prints.

On every page but the laboratory notes, blocks marked `python` run, in order, in one namespace a
page; blocks marked `py` are to read. A block marked `text` right below a `python` block is what
that block prints; right below an `sh` block, what its `attnkit` commands print. In it, `...` stands
for anything within a line, and a line `...` for any lines.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import shlex
from pathlib import Path
from unittest import mock

from attnkit.cli import main

DOCS = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^```(?:python\n(?P<code>.*?)^```\n|sh\n(?P<commands>[^`]*?)^```\n(?=\n```text\n))"
    r"(?:\n```text\n(?P<text>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


class Terminal(io.StringIO):
    """Collects what is printed, as a terminal that shows any character."""

    encoding = "utf-8"


def pages() -> list[Path]:
    """Pages with code that runs."""
    found = [path for path in sorted(DOCS.rglob("*.md")) if "notes" not in path.parts]
    return [path for path in found if BLOCK.search(path.read_text())]


def printed(page: str, name: str) -> list[tuple[re.Match[str], str]]:
    """Each block of a page, and what it prints when all run one after another."""
    names: dict[str, object] = {"__name__": "__main__"}
    linecache.cache[name] = (len(page), None, page.splitlines(keepends=True), name)  # for errors
    results = []
    for match in BLOCK.finditer(page):
        out = Terminal()
        with contextlib.redirect_stdout(out), mock.patch.dict(os.environ, COLUMNS="80"):
            if match["commands"] is not None:
                run_commands(match["commands"])
            else:
                line = page[: match.start("code")].count("\n")
                # dont_inherit: this file's __future__ imports are not the reader's
                code = compile("\n" * line + match["code"], name, "exec", dont_inherit=True)
                exec(code, names)
        results.append((match, out.getvalue()))
    return results


def run_commands(text: str) -> None:
    """Run commands of `attnkit`, a line each."""
    for line in text.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program != "attnkit" or main(arguments) != 0:
            raise ValueError(f"not a command of attnkit that succeeds: {line}")


def agrees(text: str, out: str) -> bool:
    """Whether an output is the text, which may have `...` for what changes."""
    lines = [re.escape(line.rstrip()) for line in text.rstrip().splitlines()]
    lines = [r".*" if line == r"\.\.\." else line.replace(r"\.\.\.", r"[^\n]*") for line in lines]
    tidy = "\n".join(line.rstrip() for line in out.rstrip().splitlines())
    return re.fullmatch("\n".join(lines), tidy, re.S) is not None


def rewrite() -> None:
    """Replace every output that does not agree by what is printed now."""
    for path in pages():
        page, parts, end = path.read_text(), [], 0
        for match, out in printed(page, path.name):
            if match["text"] is not None and not agrees(match["text"], out):
                tidy = "\n".join(line.rstrip() for line in out.rstrip().splitlines())
                parts += [page[end : match.start("text")], tidy + "\n"]
                end = match.end("text")
        if parts:
            path.write_text("".join([*parts, page[end:]]))

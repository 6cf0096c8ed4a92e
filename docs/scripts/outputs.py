"""Run the code in the documentation pages and compare or replace its printed output.

This applies to every page except the laboratory notes. Blocks marked `python` run in order, in one
namespace per page; blocks marked `py` do not run. A block marked `text` directly below a `python`
block is the expected output of that block; directly below an `sh` block, it is the expected output
of its `attnkit` commands. In expected output, `...` matches anything within a line, and a line
`...` matches any lines.
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
    """Text stream that collects output and reports UTF-8 as its encoding, like a terminal."""

    encoding = "utf-8"


def pages() -> list[Path]:
    """Return the pages that have code to run."""
    found = [path for path in sorted(DOCS.rglob("*.md")) if "notes" not in path.parts]
    return [path for path in found if BLOCK.search(path.read_text())]


def printed(page: str, name: str) -> list[tuple[re.Match[str], str]]:
    """Run the blocks of a page in order; return each block's match and its output."""
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
    """Run `attnkit` commands, one per line; raise ValueError if one fails."""
    for line in text.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program != "attnkit" or main(arguments) != 0:
            raise ValueError(f"not a command of attnkit that succeeds: {line}")


def agrees(text: str, out: str) -> bool:
    """Return whether the output `out` matches the expected `text`, in which `...` is a wildcard."""
    lines = [re.escape(line.rstrip()) for line in text.rstrip().splitlines()]
    lines = [r".*" if line == r"\.\.\." else line.replace(r"\.\.\.", r"[^\n]*") for line in lines]
    tidy = "\n".join(line.rstrip() for line in out.rstrip().splitlines())
    return re.fullmatch("\n".join(lines), tidy, re.S) is not None


def rewrite() -> None:
    """Replace each expected output that does not match by the actual output."""
    for path in pages():
        page, parts, end = path.read_text(), [], 0
        for match, out in printed(page, path.name):
            if match["text"] is not None and not agrees(match["text"], out):
                tidy = "\n".join(line.rstrip() for line in out.rstrip().splitlines())
                parts += [page[end : match.start("text")], tidy + "\n"]
                end = match.end("text")
        if parts:
            path.write_text("".join([*parts, page[end:]]))

"""Code of the pages that runs, and what it prints.

On every page but the laboratory notes, blocks marked `python` run, in order, in one namespace a page;
blocks marked `py` are to read. A block marked `text` right below a `python` block is what that
block prints; in it, `...` stands for anything within a line, and a line `...` for any lines.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from pathlib import Path

DOCS = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<text>.*?)^```\n)?", re.M | re.S
)


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
        line = page[: match.start("code")].count("\n")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            # dont_inherit: this file's __future__ imports are not the reader's
            code = compile("\n" * line + match["code"], name, "exec", dont_inherit=True)
            exec(code, names)
        results.append((match, out.getvalue()))
    return results


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

"""Define mkdocs hooks that insert help and variables, and publish the measured rows as files."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "results"
COMMAND = re.compile(r"<!-- help: ?([a-z]*) -->")
ENVIRONMENT = "<!-- environment variables -->"


def on_files(files: Any, *, config: Any) -> Any:
    """Add the files of measured rows to the site, so that pages can link to them."""
    for path in sorted(ROWS.glob("*.jsonl")):
        files.append(File.generated(config, f"rows/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Insert help texts and variables at their comments; point links to rows at the site's files."""
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"]({up}../benchmarks/results/", f"]({up}rows/")
    markdown = markdown.replace(ENVIRONMENT, variables())
    return COMMAND.sub(lambda found: help_of(found[1]), markdown)


def help_of(command: str) -> str:
    """Return the help of an `attnkit` command as a code block; of `attnkit` itself if ""."""
    from attnkit.cli import parser

    whole = parser()
    if command:
        commands = next(a for a in whole._actions if isinstance(a, argparse._SubParsersAction))
        whole = commands.choices[command]
    whole.formatter_class = _Formatter
    return f"```text\n{whole.format_help().strip()}\n```"


def variables() -> str:
    """Return the table of environment variables that attnkit reads, as Markdown."""
    from attnkit.util.environment import VARIABLES

    rows = [f"| `{name}` | {meaning} | {default} |" for name, meaning, default in VARIABLES]
    return "\n".join(["| Variable | Meaning | Default |", "| --- | --- | --- |", *rows])


class _Formatter(argparse.HelpFormatter):
    """Help formatter with a fixed width of 88 columns, independent of the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=88)

"""Check that the code on the pages runs and prints the output shown."""

from __future__ import annotations

import re
from pathlib import Path

import outputs
import pytest

AGAIN = "run `python docs/scripts/write.py` if the page should say what is printed now"


def relative(path: Path) -> str:
    return path.relative_to(outputs.DOCS).as_posix()


@pytest.mark.parametrize("path", outputs.pages(), ids=relative)
def test_code_runs_and_prints_what_the_page_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # pages may write files
    for match, out in outputs.printed(path.read_text(), path.name):
        if match["text"] is not None:
            assert outputs.agrees(match["text"], out), f"{AGAIN}; printed:\n{out}"


def test_files_that_pages_name_exist() -> None:
    root = outputs.DOCS.parent
    pages = [path for path in outputs.DOCS.rglob("*.md") if "notes" not in path.parts]  # diaries
    named = {
        (relative(page), name)
        for page in pages
        for name in re.findall(
            r"`((?:attnkit|benchmarks|docs|templates|tests)/[\w/.]+)`", page.read_text()
        )
    }
    assert len(named) > 4
    assert not {(page, name) for page, name in named if not (root / name).exists()}


def test_every_tutorial_has_code_that_runs() -> None:
    pages = {relative(path) for path in outputs.pages()}
    tutorials = {relative(path) for path in (outputs.DOCS / "tutorials").glob("*.md")}
    assert tutorials - {"tutorials/index.md"} <= pages
    assert {"index.md", "get-started.md", "from-flexattention.md", "from-flash-attn.md"} <= pages


def test_outputs_are_compared() -> None:
    page = "```python\nprint(1)\nprint(2)\n```\n\n```text\n{}\n```\n"
    for text, same in (
        ("1\n2", True),
        ("1\n3", False),
        ("...", True),
        ("1\n...", True),
        ("1", False),
    ):
        [(match, out)] = outputs.printed(page.format(text), "page")
        assert outputs.agrees(match["text"], out) is same
    assert outputs.agrees("took ... ms", "took 1.5 ms")
    assert not outputs.agrees("took ... ms", "took 1.5\nms")


def test_commands_are_run_where_their_output_is_shown() -> None:
    page = "```sh\nattnkit show masks:causal --q-len 9  # small\n```\n\n```text\n...\n```\n"
    [(match, out)] = outputs.printed(page, "page")
    assert match["commands"].startswith("attnkit show")
    assert out.startswith("causal()\n9 queries x 9 keys")
    assert outputs.printed("```sh\nrm -r site\n```\n", "page") == []
    for command in ("rm -r site", "attnkit show masks:none"):
        with pytest.raises(ValueError, match="not a command"):
            outputs.printed(f"```sh\n{command}\n```\n\n```text\n```\n", "page")


def test_an_error_shows_the_line_of_the_page() -> None:
    page = "# Title\n\n```python\nraise ValueError\n```\n"
    with pytest.raises(ValueError, match=r"^$") as error:
        outputs.printed(page, "page.md")
    assert error.traceback[-1].lineno == 3  # counted from 0

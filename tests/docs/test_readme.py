"""Check README.md: its code runs, and the names, commands and figures that it uses exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnkit import masks, mods

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    # dont_inherit: this file's __future__ imports are not the reader's
    exec(compile(code, "README.md", "exec", dont_inherit=True), names)
    if "explain" in code:
        assert "d slopes[h] = " in capsys.readouterr().out


def test_first_block_comes_early_and_gives_gradients() -> None:
    assert README.index("```python") < 500
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(PYTHON[0], "README.md", "exec", dont_inherit=True), names)
    for name in ("query", "key", "value", "slopes"):
        gradient = names[name].grad  # type: ignore[attr-defined]
        assert gradient is not None
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("library", [masks, mods], ids=["masks", "mods"])
def test_every_library_name_is_listed(library: object) -> None:
    public = {name for name in library.__all__ if name.islower()} - {"examples"}  # type: ignore[attr-defined]
    listed = set(re.findall(r"`(\w+)`", README))
    assert public - listed == set(), "add the name to its list in README.md"
    assert len(public) > 10


def test_make_targets_files_and_links_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    paths = re.findall(r"\]\(([\w./]+)\)", README) + re.findall(r"python ([\w/]+\.py)", README)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


def test_command_line_examples_run() -> None:
    commands = re.findall(r'^attnkit explain "([^"]+)" --q-len (\d+)$', README, re.MULTILINE)
    assert commands
    for target, length in commands:
        command = [sys.executable, "-m", "attnkit", "explain", target, "--q-len", length]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "% computed" in done.stdout


def test_readme_is_short() -> None:
    assert README.count("\n") <= 120


def test_it_has_no_figures_of_speed_but_the_plot() -> None:
    """README.md shows speed only in its plot.

    Measured numbers belong in docs/benchmarks.md, where a test compares them with their rows.
    """
    assert "](docs/images/speed.svg)" in README
    assert not re.search(r"\d\s?(x|ms|us|TFLOP/s|MB|GiB)\b", README)

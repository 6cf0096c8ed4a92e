"""Check that the examples run, learn and are exact, and that they report failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(
    name: str, *options: str | Path, stderr: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run an example on one thread; return the finished process."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, ROOT / "examples" / name, *options],
        env=env,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=300,
        check=False,
    )


def packed_documents(
    out: Path, *options: str, stderr: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return run("packed_documents.py", "--quick", "--out", out, *options, stderr=stderr)


def test_packed_documents_learns_and_is_exact(tmp_path: Path) -> None:
    """The example succeeds and writes its picture.

    Without a terminal it prints its progress once per quarter of the steps.
    """
    done = packed_documents(tmp_path, "--steps", "8")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for word in ("loss", "mask", "exact", "time", "picture", "never computed", "d slopes"):
        assert word in done.stdout
    assert (tmp_path / "packed_documents.png").read_bytes().startswith(b"\x89PNG")
    progress = [line for line in done.stdout.splitlines() if line.startswith("training")]
    assert [line.split(",")[0] for line in progress] == [
        f"training  step {step} of 8" for step in (2, 4, 6, 8)
    ]


def test_failure_with_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """The example fails when nothing is learned, and shows a progress bar on a terminal."""
    termios = pytest.importorskip("termios", reason="Windows has no pseudo-terminals")
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, 80))
    try:
        # the loss of the one step is that of the untrained model
        done = packed_documents(tmp_path, "--steps", "1", stderr=end)
        shown = os.read(terminal, 1 << 16).decode()
    finally:
        os.close(end)
        os.close(terminal)
    assert "1/1" in shown
    assert "training  step" not in done.stdout
    assert done.returncode == 1
    assert "FAILED: the loss" in shown


def test_block_diffusion_learns_and_is_exact() -> None:
    """The mask of every step is a new one, and gradients are those of dense attention."""
    done = run("block_diffusion.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for word in ("loss", "mask", "exact", "never computed"):
        assert word in done.stdout


def test_block_diffusion_reports_a_failure() -> None:
    done = run("block_diffusion.py", "--steps", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("FAILED: the loss")

"""The examples run, learn, are exact, and say so when they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def packed_documents(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The example in its fast mode, on one thread."""
    command = [sys.executable, ROOT / "examples" / "packed_documents.py", "--quick", "--out", out]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(
        [*command, *options], env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_packed_documents_learns_and_is_exact(tmp_path: Path) -> None:
    done = packed_documents(tmp_path, "--steps", "3")
    assert done.returncode == 0, done.stderr
    for word in ("loss", "mask", "exact", "time", "picture", "never computed", "d slopes"):
        assert word in done.stdout
    assert "3/3" in done.stderr  # the progress bar
    assert (tmp_path / "packed_documents.png").read_bytes().startswith(b"\x89PNG")


def test_packed_documents_fails_when_nothing_is_learned(tmp_path: Path) -> None:
    # the loss of the one step is that of the untrained model
    done = packed_documents(tmp_path, "--steps", "1")
    assert done.returncode == 1
    assert "FAILED: the loss" in done.stderr

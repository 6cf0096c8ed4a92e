"""Check what is logged of kernels: compiled, from memory or from disk; and the line on a terminal."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest


def test_where_a_kernel_comes_from_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass")
    from attnkit.jit import kernel as kernels
    from attnkit.splice.fingerprint_check import fingerprint_source

    monkeypatch.setenv("ATTNKIT_CACHE_DIR", str(tmp_path))
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("attnkit.jit")
    monkeypatch.setattr(logger, "handle", records.append)
    monkeypatch.setattr(logger, "isEnabledFor", lambda level: True)
    source = fingerprint_source((("int32", 1, True),), "sm_90a")
    kernels._forget_kernels()
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.delenv("ATTNKIT_PROGRESS", raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    for _ in range(2):
        kernels.kernel(source)
    lines = terminal.getvalue().split("\r\033[K")
    assert lines[1].startswith("attnkit: 0 s, compiling kernel ")
    assert lines[1].endswith(": fingerprint for sm_90a")
    assert lines[-1] == ""
    kernels._forget_kernels()
    kernels.kernel(source)
    compiled, memory, loaded = records
    assert compiled.levelno == logging.INFO
    text = compiled.getMessage()
    assert text.startswith("compiled kernel fingerprint for sm_90a in ")
    assert text.endswith(f" s, kept in {tmp_path}")
    assert memory.getMessage() == "kernel fingerprint for sm_90a is in memory"
    assert loaded.getMessage().startswith(
        f"loaded kernel fingerprint for sm_90a from {tmp_path} in"
    )
    assert terminal.getvalue().split("\r\033[K") == lines  # nothing else was compiled
    assert {memory.levelno, loaded.levelno} == {logging.DEBUG}

"""Check the line that shows a compilation on a terminal, and what is logged of kernels."""

from __future__ import annotations

import io
import logging
import sys
import time
from pathlib import Path

import pytest

from attnkit.jit import progress
from attnkit.jit.progress import compile_progress
from attnkit.util.status_line import StatusLine


class Terminal(io.StringIO):
    """Stands for a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_line_and_loses_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNKIT_PROGRESS", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_INTERVAL", 0.001)

    @compile_progress("forward", "sm_90a")
    def fails_to_compile() -> None:
        while terminal.getvalue().count("forward") < 3:
            time.sleep(0.001)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_to_compile()
    parts = terminal.getvalue().split("\r\033[K")
    assert parts[0] == parts[-1] == ""
    assert parts[1].startswith("attnkit: 0 s, compiling kernel ")
    assert parts[1].endswith(": forward for sm_90a")
    size = len(terminal.getvalue())
    time.sleep(0.01)
    assert len(terminal.getvalue()) == size  # nobody writes any more


@pytest.mark.parametrize(("stream", "value"), [(io.StringIO(), "1"), (Terminal(), "0")])
def test_nothing_is_shown_elsewhere(
    stream: io.StringIO, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNKIT_PROGRESS", value)
    monkeypatch.setattr(sys, "stderr", stream)
    with compile_progress("forward", "sm_90a"):
        pass
    StatusLine().show("text")
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)  # as in a program without a console
    with compile_progress("forward", "sm_90a"):
        pass


def test_a_line_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNKIT_PROGRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    StatusLine(terminal).show("x" * 30)
    assert terminal.getvalue() == "\r\033[K" + 19 * "x"


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
    for _ in range(2):
        kernels.kernel(source)
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
    assert {memory.levelno, loaded.levelno} == {logging.DEBUG}

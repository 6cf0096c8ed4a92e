"""Check the line of status on a terminal."""

from __future__ import annotations

import io
import sys
import time

import pytest

from attnkit.util import status_line
from attnkit.util.status_line import StatusLine, elapsed


class Terminal(io.StringIO):
    """Stands for a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_line_and_loses_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNKIT_PROGRESS", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(status_line, "_INTERVAL", 0.001)

    @elapsed("compiling")
    def fails_to_compile() -> None:
        while terminal.getvalue().count("compiling") < 3:
            time.sleep(0.001)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_to_compile()
    parts = terminal.getvalue().split("\r\033[K")
    assert parts[0] == parts[-1] == ""
    assert parts[1] == "attnkit: 0 s, compiling"
    size = len(terminal.getvalue())
    time.sleep(0.01)
    assert len(terminal.getvalue()) == size  # nobody writes any more


@pytest.mark.parametrize(("stream", "value"), [(io.StringIO(), "1"), (Terminal(), "0")])
def test_nothing_is_shown_elsewhere(
    stream: io.StringIO, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNKIT_PROGRESS", value)
    monkeypatch.setattr(sys, "stderr", stream)
    with elapsed("compiling"):
        pass
    StatusLine().show("text")
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)  # as in a program without a console
    with elapsed("compiling"):
        pass


def test_a_line_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNKIT_PROGRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    StatusLine(terminal).show("x" * 30)
    assert terminal.getvalue() == "\r\033[K" + 19 * "x"

"""Find the names of barriers in the source of a kernel, for use in reports."""

from __future__ import annotations

import linecache
import re

from attnkit.emulator.ptx.kernel import Source

_SPAN = 4  # a call may take at most this many lines
_MBARRIER = re.compile(r"mbarrier_init\(\s*([^,]+?)\s*,", re.S)
_NAMED = re.compile(r"barrier_id\s*=\s*([^,()]+(?:\([^()]*\))?)", re.S)


def mbarrier_name(source: Source | None) -> str:
    """Return the name of the mbarrier that a source line initialises; "" if there is none."""
    return _found(_MBARRIER, source)


def barrier_name(source: Source | None) -> str:
    """Return the name of the named barrier that a source line uses; "" if there is none."""
    return _found(_NAMED, source)


def _found(pattern: re.Pattern[str], source: Source | None) -> str:
    """Return the argument that `pattern` matches in a call that begins at a source line, or ""."""
    if source is None:
        return ""
    lines = [linecache.getline(source.file, source.line + i) for i in range(_SPAN)]
    match = pattern.search("".join(lines))
    at_start = match is not None and (
        "\n" not in "".join(lines)[: match.start()]  # the call must begin on the line itself
    )
    if match is None or not at_start:
        return ""
    return " ".join(match.group(1).split()).removeprefix("self.").removeprefix("bars.")

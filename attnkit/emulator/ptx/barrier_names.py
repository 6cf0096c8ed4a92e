"""Finds names of barriers for reports in the source that a kernel was compiled from."""

from __future__ import annotations

import linecache
import re

from attnkit.emulator.ptx.kernel import Source

_SPAN = 4  # lines over which a call is looked for
_MBARRIER = re.compile(r"mbarrier_init\(\s*([^,]+?)\s*,", re.S)
_NAMED = re.compile(r"barrier_id\s*=\s*([^,()]+(?:\([^()]*\))?)", re.S)


def mbarrier_name(source: Source | None) -> str:
    """Return what the source calls the mbarrier that it initialises at `source`, or ""."""
    return _found(_MBARRIER, source)


def barrier_name(source: Source | None) -> str:
    """Return what the source calls the named barrier that it uses at `source`, or ""."""
    return _found(_NAMED, source)


def _found(pattern: re.Pattern[str], source: Source | None) -> str:
    """Return the argument that `pattern` finds in a call at `source`, or ""."""
    if source is None:
        return ""
    lines = [linecache.getline(source.file, source.line + i) for i in range(_SPAN)]
    match = pattern.search("".join(lines))
    at_start = match is not None and (
        "\n" not in "".join(lines)[: match.start()]  # the call begins on the line itself
    )
    if match is None or not at_start:
        return ""
    return " ".join(match.group(1).split()).removeprefix("self.").removeprefix("bars.")

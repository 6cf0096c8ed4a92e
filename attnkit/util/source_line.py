"""Format the line of source that a frame executes, for error messages."""

from __future__ import annotations

import linecache
from types import FrameType


def source_line(frame: FrameType) -> str:
    """Format the file, line and source of a frame, with carets under the expression.

    There are no carets if the expression takes several lines, or if the source or the columns are
    not known.
    """
    code, line = frame.f_code, frame.f_lineno
    source = linecache.getline(code.co_filename, line)
    message = f"\n  {code.co_filename}:{line} in {code.co_name}\n    {source.strip()}"
    positions = list(code.co_positions())[frame.f_lasti // 2]
    first, last, start, end = positions
    if source and first == last == line and start is not None and end is not None:
        # columns count UTF-8 bytes
        shown = source.encode()[:start].decode(errors="replace")
        indent = len(shown) - (len(source) - len(source.lstrip()))
        width = len(source.encode()[start:end].decode(errors="replace"))
        message += "\n    " + " " * indent + "^" * width
    return message

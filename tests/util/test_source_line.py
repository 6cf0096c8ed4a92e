"""Check the line of source that messages show, with carets under an expression."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from attnkit.util.source_line import source_line


def shown(frame: Any) -> list[str]:
    """Return the lines of the text of a frame, which is given to this function at once."""
    return source_line(frame).splitlines()


def test_the_expression_is_underlined() -> None:
    """A frame is in the middle of an expression; the columns are those of characters."""
    line = sys._getframe().f_lineno + 1
    found = "äöü", shown(sys._getframe(len("ß") - 1)), "end"
    assert found[1] == [
        "",
        f"  {__file__}:{line} in test_the_expression_is_underlined",
        '    found = "äöü", shown(sys._getframe(len("ß") - 1)), "end"',
        "                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
    ]


def test_an_expression_of_several_lines_is_not_underlined() -> None:
    line = sys._getframe().f_lineno + 1
    found = shown(
        sys._getframe(),
    )
    name = "test_an_expression_of_several_lines_is_not_underlined"
    assert found == ["", f"  {__file__}:{line} in {name}", "    found = shown("]


def test_a_line_that_cannot_be_read() -> None:
    scope: dict[str, Any] = {"shown": shown, "sys": sys}
    exec(compile("\nfound = shown(sys._getframe())", "<made>", "exec"), scope)
    assert scope["found"] == ["", "  <made>:2 in <module>", "    "]


def test_a_line_that_was_edited_since(tmp_path: Path) -> None:
    """The columns may then be in the middle of a character."""
    file = tmp_path / "made.py"
    code = compile("found = shown(sys._getframe())", str(file), "exec")
    file.write_text("x" + "ä" * 20)
    scope: dict[str, Any] = {"shown": shown, "sys": sys}
    exec(code, scope)
    assert scope["found"][2] == "    x" + "ä" * 20
    assert set(scope["found"][3]) == {" ", "^"}


def test_a_line_whose_columns_are_not_known() -> None:
    """Python keeps no columns with -X no_debug_ranges."""

    def whole() -> list[str]:
        return shown(sys._getframe())

    code = whole.__code__
    entry = bytes([0x80 | 13 << 3 | 7, 2])  # 8 instructions without columns, on the next line
    units = len(code.co_code) // 2
    table = entry + bytes([entry[0], 0]) * (units // 8)
    whole.__code__ = code.replace(co_linetable=table)
    assert whole() == [
        "",
        f"  {__file__}:{code.co_firstlineno + 1} in whole",
        "    return shown(sys._getframe())",
    ]

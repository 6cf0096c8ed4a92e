"""Define correct CuTe DSL kernels, whose PTX the faults edit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from attnkit import emulator
from attnkit.emulator import CheckReport
from tests.emulator.cases import Case


@dataclass(eq=False)
class Compiled:
    """Compiled kernel with the interface of a `Program`."""

    name: str
    case: Callable[[], Case]
    seeds: int = 2
    strict_loads: bool = True
    strict_order: bool = False
    deterministic: bool = True

    @cached_property
    def _built(self) -> Case:
        return self.case()

    @property
    def text(self) -> str:
        """Return the PTX of the kernel."""
        return self._built[0].ptx

    def check(self, text: str) -> CheckReport:
        """Run `emulator.check` on the kernel with its PTX replaced by `text`."""
        exe, arguments, wrong = self._built
        before = emulator.snapshot(arguments)
        report = emulator.check(
            exe.with_ptx(text),
            *arguments,
            seeds=self.seeds,
            expect=wrong,
            deterministic=self.deterministic,
            strict_loads=self.strict_loads,
            strict_order=self.strict_order,
        )
        emulator.restore(arguments, before)
        return report


def edit_line(pattern: str, edit: Callable[[str], str], which: int = 0) -> Callable[[str], str]:
    """Return an edit that applies `edit` to the `which`-th line that matches a pattern."""

    def edited(text: str) -> str:
        lines = text.split("\n")
        at = [i for i, x in enumerate(lines) if re.search(pattern, x)][which]
        lines[at] = edit(lines[at])
        return "\n".join(lines)

    return edited


def without(pattern: str, which: int = 0) -> Callable[[str], str]:
    """Return an edit that removes the `which`-th line that matches a pattern."""
    return edit_line(pattern, lambda _: "", which)


def with_last(pattern: str, value: str, which: int = 0) -> Callable[[str], str]:
    """Return an edit that sets the last operand in the `which`-th line that matches a pattern."""
    return edit_line(pattern, lambda x: re.sub(r"([%\w]+);", f"{value};", x), which)

"""Write the list of faults to docs/emulator.md: python -m tests.emulator.faults.table."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tests.emulator.faults.faults import FAULTS, MISSED

PAGE = Path(__file__).parents[3] / "docs" / "emulator.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"


def section() -> str:
    """Return the Markdown sentence and table that list the faults."""
    reported = sum(f.finding != MISSED for f in FAULTS)
    lines = [
        f"{reported} of {len(FAULTS)} faults are reported.",
        "",
        "| Program | Fault | Reported as |",
        "| --- | --- | --- |",
    ]
    for program, faults in groupby(FAULTS, lambda f: f.program.name):
        for i, fault in enumerate(faults):
            finding = f"`{fault.finding}`" if fault.finding != MISSED else "**not reported**"
            lines.append(f"| {program if i == 0 else ''} | {fault.name} | {finding} |")
    return "\n".join([*lines, ""])


def split_page(text: str) -> tuple[str, str, str]:
    """Split the page into the text before the generated section, the section, and the rest."""
    before, rest = text.split(BEGIN)
    inside, after = rest.split(END)
    return before + BEGIN, inside, END + after


def main() -> None:
    before, _, after = split_page(PAGE.read_text())
    PAGE.write_text(before + section() + after)


if __name__ == "__main__":
    main()

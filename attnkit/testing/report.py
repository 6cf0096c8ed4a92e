"""Report the results of a check as a table with one line for each quantity and backend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from attnkit.errors import AttnkitError
from attnkit.testing.case import Case


@dataclass(frozen=True)
class Row:
    """Describes the comparison of one quantity of one backend with the oracle.

    Attributes:
        quantity: "out", "lse", "dquery", "dquery through lse", "d<captured tensor>", "tiles", ...
        backend: what was compared: "cpu", "cpu other tiles", "trace", "tiles", ...
        error: difference from the oracle in the row where most of the allowed error is used, or
            number of wrong values.
        allowed: largest error that passes there.
        case: the call.
        where: index of that difference, or the error that a call raised; may be empty.
    """

    quantity: str
    backend: str
    error: float
    allowed: float
    case: Case
    where: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the error is at most the allowed one; a NaN error fails."""
        return self.error <= self.allowed

    @property
    def ratio(self) -> float:
        """Return error / allowed; 0 for a zero error, inf for NaN or if no error is allowed."""
        if self.error == 0:
            return 0.0
        if math.isnan(self.error) or self.allowed == 0:
            return math.inf
        return self.error / self.allowed


@dataclass(frozen=True)
class Report:
    """Holds the results of a check; `str` formats them as a table.

    Attributes:
        name: the variant's formulas.
        rows: the worst comparison for each quantity and backend.
        cases: number of cases that were compared.
        seconds: duration of the check.
        notes: what was not compared, and why.
        failed: the smallest failing case that was found; None if all passed.
        code: Python source that reproduces the failed case; empty if all passed.
    """

    name: str
    rows: tuple[Row, ...]
    cases: int = 1
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    failed: Case | None = None
    code: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        """Return whether every comparison passed."""
        return all(row.ok for row in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
        """Return the failed comparisons, sorted by descending error / allowed."""
        return tuple(sorted((r for r in self.rows if not r.ok), key=lambda r: -r.ratio))

    def __str__(self) -> str:
        head = [self.name, f"{'passed' if self.ok else 'FAILED'}: {_count(self)}"]
        if self.failed is not None:
            head.append(f"smallest failing case: {self.failed}")
            head += [f"  {_sentence(row)}" for row in self.failures]
        notes = [f"note: {note}" for note in self.notes]
        code = ["run this to see it again:", self.code] if self.code else []
        return "\n".join([*head, table(self.rows), *notes, *code])


class CheckError(AttnkitError, AssertionError):
    """Raised when the results of a variant differ from those of the oracle.

    Attributes:
        report: all comparisons, with code that reproduces the failed case.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def worst(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return, for each quantity and backend, the row with the largest error / allowed."""
    selected: dict[tuple[str, str], Row] = {}
    for row in rows:
        known = selected.get((row.quantity, row.backend))
        # among rows without error, the strictest one allows least
        if known is None or (row.ratio, -row.allowed) > (known.ratio, -known.allowed):
            selected[row.quantity, row.backend] = row
    return tuple(selected.values())


def table(rows: Iterable[Row]) -> str:
    """Format rows as a table with quantity, backend, dtype, error, allowed and error / allowed."""
    head = ("quantity", "backend", "dtype", "error", "allowed", "used")
    lines = [head]
    for row in rows:
        share = f"{100 * row.ratio:.0f}%" if math.isfinite(row.ratio) else "-"
        used = share if row.ok else f"{share} FAILED"
        dtype = str(row.case.dtype).removeprefix("torch.")
        figures = (f"{row.error:.2g}", f"{row.allowed:.2g}", used)
        lines.append((row.quantity, row.backend, dtype, *figures))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _count(report: Report) -> str:
    bad = len(report.failures)
    failed = f", {bad} of them wrong" if bad else ""
    cases = "1 case" if report.cases == 1 else f"{report.cases} cases"
    return f"{cases}, {len(report.rows)} quantities{failed}, {report.seconds:.1f} s"


def _sentence(row: Row) -> str:
    """Return a sentence that describes a failed comparison."""
    what, place = f"{row.quantity} ({row.backend})", f" at {row.where}" if row.where else ""
    if row.quantity == "call":
        return f"{what} raised {row.where}"
    if not math.isfinite(row.error):
        return f"{what} is not finite, or not NaN where it should be,{place}"
    if row.allowed == 0 and row.error >= 1:
        return f"{what} differs in {row.error:.0f} entries{place and ', one'}{place}"
    excess = f", {row.ratio:.3g} times that" if math.isfinite(row.ratio) else ""
    return f"{what} is off by {row.error:.3g}{place}; allowed is {row.allowed:.3g}{excess}"

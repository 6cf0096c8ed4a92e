"""Draw a timeline as SVG: a row for each set of warps and each unit, clocks left to right."""

from __future__ import annotations

from html import escape

from attnkit.emulator.timing.replay import Interval
from attnkit.emulator.timing.timeline import Timeline

_COLOUR = {"code": "#4477aa", "issue": "#ccbb44", "wait": "#dddddd", "busy": "#228833"}
_WORDS = {
    "code": "instructions",
    "issue": "issuing products",
    "wait": "waiting",
    "busy": "unit busy",
}
_BUSY = ("#228833", "#88cc99", "#66ccee", "#aa3377")  # colours of work, by the warps that issued it
_NAMES, _WIDTH, _ROW, _HEAD, _FOOT = 330, 1100, 30, 64, 34
TURNS = 6  # iterations of the busiest loop to show, if the whole timeline does not fit


def picture(timeline: Timeline, window: tuple[float, float] | None = None) -> str:
    """Return the timeline as an SVG document.

    Args:
        window: first and last clock to show. None shows everything; or, if the busiest loop has
            more than twice six iterations, six iterations from the middle.
    """
    start, end = window or _window(timeline)
    rows = [*timeline.warps, timeline.tensor, timeline.copies]
    rows = [r for r in rows if any(i.end > start and i.start < end for i in r.intervals)]
    height = _HEAD + _ROW * len(rows) + _FOOT
    scale = _WIDTH / max(end - start, 1.0)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_NAMES + _WIDTH + 20}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(_title(timeline))}</text>',
        *_legend(),
    ]
    for number, row in enumerate(rows):
        y = _HEAD + _ROW * number
        out.append(f'<text x="10" y="{y + 17}">{escape(row.name[:48])}</text>')
        askers = sorted({i.text for i in row.intervals if i.kind == "busy"})
        for i in row.intervals:
            if start < i.end and i.start < end:
                busy = i.kind == "busy"
                fill = _BUSY[askers.index(i.text) % len(_BUSY)] if busy else _COLOUR[i.kind]
                out.append(_bar(i, y, start, end, scale, fill))
    out += _axis(start, end, scale, _HEAD + _ROW * len(rows))
    return "\n".join([*out, "</svg>"]) + "\n"


def _title(t: Timeline) -> str:
    turn = f", {t.period:.0f} for a turn of the busiest loop" if t.period else ""
    return f"{t.arch}: {t.clocks:.0f} clocks{turn}; limit: {t.limit}"


def _window(t: Timeline) -> tuple[float, float]:
    if not t.period or t.clocks <= 2 * TURNS * t.period:
        return 0.0, t.clocks
    first = t.clocks / 2
    return first, first + TURNS * t.period


def _legend() -> list[str]:
    out, x = [], 10
    for kind, words in _WORDS.items():
        out.append(f'<rect x="{x}" y="34" width="14" height="12" fill="{_COLOUR[kind]}"/>')
        out.append(f'<text x="{x + 19}" y="45">{words}</text>')
        x += 40 + 8 * len(words)
    return out


def _bar(i: Interval, y: int, start: float, end: float, scale: float, fill: str) -> str:
    a, b = max(i.start, start), min(i.end, end)
    words = f"{_WORDS[i.kind]} {i.text}".strip()
    return (
        f'<rect x="{_NAMES + scale * (a - start):.1f}" y="{y + 4}" '
        f'width="{max(scale * (b - a), 0.3):.1f}" height="{_ROW - 10}" fill="{fill}">'
        f"<title>{escape(words)}: {i.start:.0f} to {i.end:.0f}, {i.clocks:.0f} clocks</title></rect>"
    )


def _axis(start: float, end: float, scale: float, y: int) -> list[str]:
    step = 10.0 ** len(str(int((end - start) / 10)))
    step = next(s for s in (step / 10, step / 5, step / 2, step) if (end - start) / s <= 12)
    out, at = [], -(-start // step) * step
    while at <= end:
        x = _NAMES + scale * (at - start)
        out.append(f'<line x1="{x:.1f}" y1="{_HEAD}" x2="{x:.1f}" y2="{y + 4}" stroke="#bbbbbb"/>')
        out.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{at:.0f}</text>')
        at += step
    return out

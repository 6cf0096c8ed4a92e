"""Write the gallery of score mods: the page `mods.md` and a picture of each mod in `mods/`."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import NamedTuple

import torch
from measured import Case, measured
from torch import Tensor

import attnkit
from attnkit import mods

GALLERY = Path(__file__).parents[1] / "gallery"
NOT_MODS = ("Example", "ScoreMod", "examples")
LENGTH, HEADS = 24, 4

HEAD = """\
# Score mods

Every mod of `attnkit.mods`. Each entry says what the mod computes and shows an instance of it: the
code, the formula that attnkit traces from the function, its derivative by the score, the gradient of each
tensor that it captures, and a picture. In a formula `grad` is the gradient that arrives at the new score.
Learned tables are tensors of yours: set `requires_grad` on them, and the backward fills in their
gradients.

A picture with positions has queries down and keys to the right, 24 of each, one panel a head; it
shows the change of a score of 1: blue is more, orange is less. A picture with curves shows the new score over the old one, from -4
to 4, one curve a head. Times are rows of [gpu.jsonl](../../benchmarks/results/gpu.jsonl); a mod without
a row says so. The program `docs/scripts/write.py` writes this page, and a test compares it with the mods.
"""


class Shown(NamedTuple):
    """Hold an instance of a mod.

    Attributes:
        code: source that builds `mod`.
        mod: the mod.
    """

    code: str
    mod: mods.ScoreMod


# source of each instance: lines that define tables, then the call
INSTANCES: tuple[str, ...] = (
    "alibi(4)",
    "table = torch.randn(4, 17)  # learned; distances beyond 8 share an entry\nrelative_bias(table)",
    "table = torch.randn(4, 8)  # learned; 8 buckets\nt5_bias(table, max_distance=16)",
    "table = torch.randn(4, 7, 11)  # learned; a grid of 4 rows and 6 columns\nbias_2d(table)",
    "rate, reach = torch.rand(4), torch.rand(4)  # learned\nkerple(rate, reach)",
    "rate = torch.rand(4)  # learned\ndistance_decay(rate)",
    "gates = torch.rand(4, 24)  # learned, of the positions\n"
    "sums = gates.log().cumsum(-1)\nforgetting_gate(sums)",
    "sandwich(4, 24, dims=16)",
    "bias = torch.randn(24, 24)\nfull_bias(bias)",
    "table = torch.randn(4, 6)  # learned; path lengths 0 to 5\n"
    "distance = torch.randint(0, 6, (24, 24))\ngraphormer(table, distance)",
    "scale = torch.rand(4) + 0.5  # learned\nhead_scale(scale)",
    "gate = torch.randn(4)  # learned\nhead_gate(gate)",
    "log_length(4)",
    "scale = torch.rand(4) + 0.5  # learned\nscalable_softmax(scale)",
    "softcap(2.0)",
    "log_sigmoid()",
    "log_relu()",
    "compose(softcap(2.0), alibi(4))",
)

# mod name -> the GPU cases with this mod, each with the library call that builds it
ATTENTION = {
    "alibi": [
        Case("causal + ALiBi", "`alibi(16)` with `causal()`"),
        Case("full + ALiBi", "`alibi(16)`"),
    ],
    "softcap": [Case("causal + softcap 20", "`softcap(20.0)` with `causal()`")],
    "relative_bias": [
        Case("causal + relative bias", "`relative_bias(table)` with `causal()`"),
        Case("causal + learned relative bias", "`relative_bias(learned)` with `causal()`"),
    ],
    "forgetting_gate": [
        Case("causal + learned forgetting gate", "`forgetting_gate(learned)` with `causal()`")
    ],
    "head_scale": [
        Case("causal + learned scale per head", "`head_scale(learned)` with `causal()`")
    ],
}


def instances() -> dict[str, Shown]:
    """Return an instance of each mod, by name; random tables are drawn from a fixed seed."""
    shown = {}
    for code in INSTANCES:
        *setup, call = code.splitlines()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            scope = vars(mods) | {"torch": torch}
            exec("\n".join(setup), scope)
            mod = eval(call, scope)
        name = call.partition("(")[0]
        shown[name] = Shown("\n".join([*setup, f"mod = {call}"]), mod)
    return shown


def section(name: str, shown: Shown) -> str:
    """Return the Markdown section of one mod: summary, source, times, code, formulas, picture."""
    words = (inspect.getdoc(getattr(mods, name)) or "").split("\n\n")
    source = [" ".join(part.split()) for part in words if part.startswith("Source:")]
    explained = attnkit.explain(shown.mod, None, q_len=LENGTH, heads=HEADS)
    parts = [
        *(f"## {name}", words[0].replace("\n", " "), *source),
        measured(ATTENTION.get(name, [])),
        f"```py\n{shown.code}\n```",
        f"```text\n{explained.formula}\n\n{explained.derivative}\n```",
        f"![{name}](mods/{name}.svg)",
    ]
    return "\n\n".join(parts)


def markdown() -> str:
    """Return the text of `mods.md`."""
    return "\n\n".join([HEAD.rstrip("\n"), *(section(*one) for one in instances().items())]) + "\n"


# --- pictures

SIDE, GAP, TOP = 120, 16, 16
STEPS = 8  # colours on each side of zero
LOW, ZERO, HIGH = (193, 82, 32), (243, 243, 243), (39, 84, 138)
CURVES = ("#27548a", "#c8641b", "#4b7a2f", "#7a4b8f")


def change(mod: mods.ScoreMod) -> Tensor:
    """Return the change that the mod makes to a score of 1, float64 [HEADS, q, kv]."""
    h, q, kv = (
        torch.arange(n, dtype=torch.int32).view(shape)
        for n, shape in ((HEADS, (-1, 1, 1)), (LENGTH, (-1, 1)), (LENGTH, (-1,)))
    )
    one = torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.float64)
    return mod(one, torch.tensor(0), h, q, kv).double() - one


def by_position(mod: mods.ScoreMod) -> bool:
    """Return whether the new score depends on the query and key positions."""
    values = change(mod)
    return bool((values != values[:, :1, :1]).any())


def colour(share: float) -> str:
    """Return the hex colour of a value from -1 to 1, in `STEPS` steps on each side of 0."""
    step = round(round(share, 6) * STEPS) / STEPS
    end = HIGH if step > 0 else LOW
    return "#" + "".join(
        f"{round(z + (e - z) * abs(step)):02x}" for z, e in zip(ZERO, end, strict=True)
    )


def heat(values: Tensor, x: int) -> list[str]:
    """Return the SVG paths of one head's heat map, one path for each colour."""
    most = float(values.abs().max()) or 1.0
    cell, paths = SIDE // LENGTH, dict[str, str]()
    for i, row in enumerate((values / most).tolist()):
        colours, start = [colour(v) for v in row], 0
        for end in range(1, LENGTH + 1):
            if end == LENGTH or colours[end] != colours[start]:
                width, place = (end - start) * cell, f"M{x + start * cell} {TOP + i * cell}"
                stretch = f"{place}h{width}v{cell}h-{width}z"
                paths[colours[start]] = paths.get(colours[start], "") + stretch
                start = end
    return [f'<path fill="{fill}" d="{d}"/>' for fill, d in sorted(paths.items())]


def heat_maps(mod: mods.ScoreMod) -> str:
    """Return an SVG heat map per head, each with its own scale; only one if all heads are equal."""
    values = change(mod)
    heads = 1 if bool((values == values[:1]).all()) else HEADS
    parts = []
    for h in range(heads):
        x = GAP + h * (SIDE + GAP)
        label = "every head" if heads == 1 else f"head {h}"
        most = float(values[h].abs().max())
        parts.append(f'<text x="{x}" y="{TOP - 5}" fill="#444444">{label}, ±{most:.2g}</text>')
        parts += heat(values[h], x)
    return svg(GAP + heads * (SIDE + GAP), parts)


def curves(mod: mods.ScoreMod) -> str:
    """Return an SVG plot of new score over old score, one curve per head, cut at -4 and 4."""
    old = torch.linspace(-4, 4, 81, dtype=torch.float64)
    h = torch.arange(HEADS, dtype=torch.int32).view(-1, 1)
    zero = torch.tensor(0)
    new = mod(old.expand(HEADS, -1), zero, h, zero, zero)
    unit, x0, y0 = SIDE / 8, GAP + SIDE / 2, TOP + SIDE / 2
    axes = f"M{GAP} {y0:g}h{SIDE}M{x0:g} {TOP}v{SIDE}"
    ground = f'<rect x="{GAP}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="{colour(0)}"/>'
    parts = [ground, f'<path d="{axes}" stroke="#bbbbbb" fill="none"/>']
    for line, stroke in zip(new.tolist(), CURVES, strict=True):
        inside = [
            f"{x0 + a * unit:.1f},{y0 - b * unit:.1f}"
            for a, b in zip(old.tolist(), line, strict=True)
            if math.isfinite(b) and abs(b) <= 4
        ]
        parts.append(f'<polyline points="{" ".join(inside)}" stroke="{stroke}" fill="none"/>')
    return svg(SIDE + 2 * GAP, parts)


def svg(width: float, parts: list[str]) -> str:
    """Return an SVG document of the given width that contains the elements `parts`."""
    height = TOP + SIDE + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height}" '
        f'viewBox="0 0 {width:g} {height}" font-family="monospace" font-size="9">'
    )
    white = f'<rect width="{width:g}" height="{height}" fill="white"/>'
    return "\n".join([head, white, *parts, "</svg>\n"])


def files() -> dict[Path, str]:
    """Return {path: text} of the files that this module writes."""
    pictures = {
        GALLERY / "mods" / f"{name}.svg": (
            heat_maps(shown.mod) if by_position(shown.mod) else curves(shown.mod)
        )
        for name, shown in instances().items()
    }
    return {GALLERY / "mods.md": markdown()} | pictures

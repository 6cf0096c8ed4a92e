"""Writes docs/masks.md and docs/masks.svg, every mask of the library: `python docs/masks.py`."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import torch
from torch import Tensor

from attnkit import Mask, Variant, create_mask, masks
from attnkit.inspection.picture import show
from attnkit.sparsity.intervals.normal_form import Intervals, intervals_of

HERE = Path(__file__).parent
NOT_MASKS = ("Example", "examples", "tile_order")

HEAD = """\
# Masks

Every mask of `attnkit.masks`: what it keeps, a small instance as a call, its formula as attnkit
reads it, its rows as intervals of keys where they are such, and its picture. Queries go down, keys
go to the right. This page and the gallery are written by `python docs/masks.py`.

![every mask of the library](masks.svg)

Masks are values. They combine with `&`, `|`, `^` and `~`, with each other and with plain functions
`mask_mod(b, h, q, kv)`; `mask.shift(q=512)` is a window on a mask that begins at query 512;
`per_head([...])` and `per_batch([...])` choose one for each head or batch entry. A mask that has a
meaning for given lengths alone knows them, and is refused at others wherever it is used.

Look at any of them, or at a mask of your own, with

```
attnkit show "masks:causal() & sliding_window(256)" --q-len 4096
attnkit show my_file.py:my_mask --q-len 4096 --output mask.svg
attnkit explain masks:causal --q-len 4096
```

and in Python with `attnkit.inspection.picture.show`, `attnkit.inspection.picture.save` and `attnkit.explain`.
"""


class Shown(NamedTuple):
    """A small instance: the call as it is written, the mask, and the sizes that it is drawn at."""

    call: str
    mask: Mask
    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 1


def instances() -> dict[str, list[Shown]]:
    """At least one small instance of every mask, by the mask's name."""
    found: dict[str, list[Shown]] = {}
    scope = vars(masks) | {"tensor": torch.tensor}
    for text, *sizes in INSTANCES:
        call = str(text)
        made: Mask = eval(call, scope)
        name = call.partition("(")[0]
        found.setdefault(name, []).append(Shown(call, made, *(int(n) for n in sizes)))
    return found


INSTANCES: tuple[tuple[str | int, ...], ...] = (
    ("causal()", 16, 16),
    ('causal("bottom-right", q_len=8, kv_len=16)', 8, 16),
    ("sliding_window(4)", 16, 16),
    ("sliding_window(4, 2)", 16, 16),
    ('sliding_window(4, align="bottom-right", q_len=8, kv_len=16)', 8, 16),
    ("dilated(8, 2)", 16, 16),
    ("streaming_llm(4, sinks=2)", 16, 16),
    ("prefix(5)", 16, 16),
    ("prefix_lm(5)", 16, 16),
    ("strided(4)", 16, 16),
    ("fixed(4)", 16, 16),
    ("longformer(2, global_tokens=1)", 16, 16),
    ("block_diagonal(4)", 16, 16),
    ("bigbird(tensor([[5], [4], [6], [0], [7], [2], [1], [3]]), block=2)", 16, 16),
    ("topk_blocks(tensor([[0, -1], [0, 1], [0, 2], [1, 3]]), q_block=4, kv_block=4)", 16, 16),
    ("block_diffusion(length=8, block=2)", 16, 16),
    ("document(tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]))", 16, 16),
    ("document_from_lengths(tensor([3, 6, 4, 3]))", 16, 16),
    ("document_from_cu_seqlens(tensor([0, 3, 9, 13, 16]))", 16, 16),
    ("shared_prefix(5, tensor([4, 3, 4]))", 16, 16),
    ("padding(tensor([11]))", 16, 16),
    ("natten((16,), 5)", 16, 16),
    ("natten((4, 4), 3)", 16, 16),
    ("sliding_tile((12,), tile=2, kernel=3, text=4)", 16, 16),
    ("tree(tensor([-1, 0, 0, 1, 1, 2, 3, 3]), context=8)", 8, 16),
    ("tree_from_table(tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool(), context=5)", 3, 8),
    ("paged(causal(), tensor([[2, 0]]), page_size=4, pages=4)", 8, 16),
)


def dense(shown: Shown) -> Tensor:
    """The first batch entry and head, bool [q, kv]."""
    return create_mask(shown.mask, shown.batch, shown.heads, shown.q_len, shown.kv_len)[0, 0]


def section(name: str, several: list[Shown]) -> str:
    """One mask: its docstring's words, then its instances."""
    words = inspect.getdoc(getattr(masks, name)) or ""
    summary = words.partition("\n\n")[0].replace("\n", " ")
    source = [part for part in words.split("\n\n") if part.startswith("Source:")]
    parts = [f"## {name}", summary, *(" ".join(part.split()) for part in source)]
    return "\n\n".join([*parts, *(instance(shown) for shown in several)])


def instance(shown: Shown) -> str:
    """The call, its formula, its intervals and its picture."""
    sizes = {"q_len": shown.q_len, "kv_len": shown.kv_len, "batch": shown.batch}
    found = intervals_of(shown.mask, heads=shown.heads, **sizes)
    picture = show(shown.mask, shown.q_len, shown.kv_len, batch=shown.batch, block=1)
    drawn = [line for line in picture.splitlines() if line.endswith(("|", " kv"))]
    formula = textwrap.wrap(str(Variant(None, shown.mask)), 98, subsequent_indent="    ")
    text = [*formula, *intervals(found), "", *drawn]
    return "\n".join([f"`{shown.call}`", "", "```", *text, "```"])


def intervals(found: object) -> list[str]:
    """The ends of each row's intervals, where formulas give them."""
    if not isinstance(found, Intervals):
        return ["intervals: none"]
    lines = str(found).splitlines()
    if len(found.tensors) > found.captured:
        return [f"intervals: {lines[0]}, with ends from tables that are computed once"]
    return [f"intervals: {lines[0]}", *lines[1:]]


def markdown() -> str:
    """The page."""
    sections = [section(name, several) for name, several in instances().items()]
    return "\n\n".join([HEAD.rstrip("\n"), *sections]) + "\n"


# --- the gallery

CELL, GAP, ACROSS, TITLE = 8, 28, 6, 22
COLOURS = {"kept": "#27548a", "empty": "#f3f3f3", "text": "#444444"}


def runs(row: Tensor) -> list[tuple[int, int]]:
    """Start and length of each stretch of kept keys."""
    edges = torch.nn.functional.pad(row.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def panel(name: str, shown: Shown, x: int, y: int) -> list[str]:
    """One mask of the gallery, its corner at (x, y)."""
    kept = dense(shown)
    bars = "".join(
        f"M{x + start * CELL} {y + i * CELL}h{length * CELL}v{CELL}h-{length * CELL}z"
        for i, row in enumerate(kept)
        for start, length in runs(row)
    )
    width, height = shown.kv_len * CELL, shown.q_len * CELL
    return [
        f'<text x="{x}" y="{y - 6}" fill="{COLOURS["text"]}">{escape(name)}</text>',
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{COLOURS["empty"]}"/>',
        f'<path fill="{COLOURS["kept"]}" d="{bars}"/>',
    ]


def gallery() -> str:
    """One picture of the first instance of every mask, SVG."""
    shown = {name: several[0] for name, several in instances().items()}
    size = 16 * CELL
    lines = []
    for i, (name, one) in enumerate(shown.items()):
        x = GAP + i % ACROSS * (size + GAP)
        lines += panel(name, one, x, TITLE + i // ACROSS * (size + GAP + TITLE))
    width = GAP + ACROSS * (size + GAP)
    height = -(-len(shown) // ACROSS) * (size + GAP + TITLE)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="monospace" font-size="9">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *lines,
            "</svg>\n",
        ]
    )


def main() -> None:
    (HERE / "masks.md").write_text(markdown())
    (HERE / "masks.svg").write_text(gallery())


if __name__ == "__main__":
    main()

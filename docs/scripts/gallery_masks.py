"""Write the gallery of masks: the page `masks.md` and one picture of all masks, `masks.svg`."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import torch
from measured import Case, measured
from torch import Tensor

import attnkit
from attnkit import Mask, Variant, create_mask, masks

GALLERY = Path(__file__).parents[1] / "gallery"
NOT_MASKS = ("Example", "examples", "tile_order", "zero_padding")

HEAD = """\
# Masks

Every mask of `attnkit.masks`. Each entry says what the mask keeps and shows small instances of it:
the call, the formula that attnkit reads from the function, the intervals of keys that each row
keeps (where formulas give them), and a picture. Queries go down, keys go to the right. Times are rows
of [gpu.jsonl](../../benchmarks/results/gpu.jsonl), [masks.jsonl](../../benchmarks/results/masks.jsonl)
and [classify.jsonl](../../benchmarks/results/classify.jsonl); a mask without a row says so. The
program `docs/scripts/write.py` writes this page, and a test compares it with the masks.

![every mask of the library](masks.svg)

Masks are values. They combine with `&`, `|`, `^` and `~`, with each other and with plain functions
`mask_mod(b, h, q, kv)`. `mask.shift(q=512)` is the same mask from query 512 on.
`attnkit.per_head([...])` and `attnkit.per_batch([...])` choose one mask for each head or batch
entry. Some masks are made for certain lengths: they refuse other lengths wherever they are used.
[Look at a mask and debug it](../tutorials/debug.md) shows the tools for masks of your own.
"""


class Shown(NamedTuple):
    """Hold a small instance of a mask.

    Attributes:
        call: source of the call that builds the mask.
        mask: the mask.
        q_len, kv_len: sizes at which the mask is drawn.
    """

    call: str
    mask: Mask
    q_len: int
    kv_len: int


INSTANCES: tuple[tuple[str, int, int], ...] = (
    ("causal()", 16, 16),
    ('causal("bottom-right", q_len=8, kv_len=16)', 8, 16),
    ("sliding_window(4)", 16, 16),
    ("sliding_window(4, 2)", 16, 16),
    ('sliding_window(4, align="bottom-right", q_len=8, kv_len=16)', 8, 16),
    ("dilated(8, 2)", 16, 16),
    ("chunked(6)", 16, 16),
    ("chunked(6, start=tensor([3]))", 16, 16),
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
    ("padding_from_mask(tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]]))", 16, 16),
    ("image_spans(tensor([0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0]))", 16, 16),
    ("image_spans(tensor([0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0]), size=3)", 16, 16),
    ("natten((16,), 5)", 16, 16),
    ("natten((4, 4), 3)", 16, 16),
    ("sliding_tile((12,), tile=2, kernel=3, text=4)", 16, 16),
    ("tree(tensor([-1, 0, 0, 1, 1, 2, 3, 3]), context=8)", 8, 16),
    ("tree_from_table(tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool(), context=5)", 3, 8),
    ("paged(causal(), tensor([[2, 0]]), page_size=4, pages=4)", 8, 16),
)

# mask name -> the GPU cases with this mask, each with the library call that builds it
ATTENTION = {
    "causal": [Case("causal", "`causal()`"), Case("causal S=16384", "`causal()`")],
    "sliding_window": [Case("causal window 1024", "`sliding_window(1023)`")],
    "prefix": [Case("causal or kv<1024", "`causal() | prefix(1024)`")],
    "document": [Case("causal, 16 documents", "`causal() & document(ids)`")],
}
TILES = {
    "causal": [Case("causal", "`causal()`")],
    "sliding_window": [Case("window 4096", "`sliding_window(4096)`")],
    "document": [
        Case("causal documents", "`causal() & document(ids)`"),
        Case("1500 documents, causal", "`causal() & document(ids)`"),
    ],
}


def instances() -> dict[str, list[Shown]]:
    """Return the small instances of each mask, by the mask's name."""
    shown: dict[str, list[Shown]] = {}
    scope = vars(masks) | {"tensor": torch.tensor}
    for call, q_len, kv_len in INSTANCES:
        mask: Mask = eval(call, scope)
        shown.setdefault(call.partition("(")[0], []).append(Shown(call, mask, q_len, kv_len))
    return shown


def dense(shown: Shown) -> Tensor:
    """Return the dense mask of an instance, bool [q, kv]."""
    return create_mask(shown.mask, 1, 1, shown.q_len, shown.kv_len)[0, 0]


def section(name: str, several: list[Shown]) -> str:
    """Return the Markdown section of one mask: summary, source, times and instances."""
    words = inspect.getdoc(getattr(masks, name)) or ""
    summary = words.partition("\n\n")[0].replace("\n", " ")
    source = [part for part in words.split("\n\n") if part.startswith("Source:")]
    parts = [f"## {name}", summary, *(" ".join(part.split()) for part in source)]
    parts.append(measured(ATTENTION.get(name, []), TILES.get(name, [])))
    return "\n\n".join([*parts, *(instance(shown) for shown in several)])


def instance(shown: Shown) -> str:
    """Return the Markdown of one instance: call, formula, intervals and picture."""
    formula = textwrap.wrap(str(Variant(None, shown.mask)), 98, subsequent_indent="    ")
    text = [*formula, *intervals(shown), "", *picture(dense(shown))]
    return "\n".join(["```py", shown.call, "```", "", "```text", *text, "```"])


def intervals(shown: Shown) -> list[str]:
    """Return lines with the interval bounds of each row; "none" if `explain` gives no formulas."""
    lines = attnkit.explain(
        None, shown.mask, q_len=shown.q_len, kv_len=shown.kv_len, heads=1, batch=1
    ).intervals.splitlines()
    if any("computed once" in line for line in lines):
        lines = [f"{lines[0]}, with ends from tables that are computed once"]
    elif not lines[0].partition(" ")[0].isdigit():
        lines = ["none"]
    return [f"intervals: {lines[0]}", *lines[1:]]


def picture(kept: Tensor) -> list[str]:
    """Draw a dense mask as lines of text, with two characters per position."""
    q_len, kv_len = kept.shape
    margin = len(str(q_len - 1))
    last = f"{kv_len - 1} kv"
    lines = [" " * margin + "  0" + last.rjust(2 * kv_len + 2)]
    for i, row in enumerate(kept.tolist()):
        label = str(i) if i in (0, q_len - 1) else ""
        lines.append(f"{label:>{margin}} |{''.join('██' if x else '··' for x in row)}|")
    return lines


def markdown() -> str:
    """Return the text of `masks.md`."""
    sections = [section(name, several) for name, several in instances().items()]
    return "\n\n".join([HEAD.rstrip("\n"), *sections]) + "\n"


# --- the picture of all

CELL, GAP, ACROSS, TITLE = 8, 28, 6, 22
COLOURS = {"kept": "#27548a", "empty": "#f3f3f3", "text": "#444444"}


def stretches(row: Tensor) -> list[tuple[int, int]]:
    """Return (start, length) of each run of kept keys in a row."""
    edges = torch.nn.functional.pad(row.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def panel(name: str, shown: Shown, x: int, y: int) -> list[str]:
    """Return the SVG elements of one mask, with its upper left corner at (x, y)."""
    bars = "".join(
        f"M{x + start * CELL} {y + i * CELL}h{length * CELL}v{CELL}h-{length * CELL}z"
        for i, row in enumerate(dense(shown))
        for start, length in stretches(row)
    )
    width, height = shown.kv_len * CELL, shown.q_len * CELL
    return [
        f'<text x="{x}" y="{y - 6}" fill="{COLOURS["text"]}">{escape(name)}</text>',
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{COLOURS["empty"]}"/>',
        f'<path fill="{COLOURS["kept"]}" d="{bars}"/>',
    ]


def gallery() -> str:
    """Return `masks.svg`: the first instance of every mask."""
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


def files() -> dict[Path, str]:
    """Return {path: text} of the files that this module writes."""
    return {GALLERY / "masks.md": markdown(), GALLERY / "masks.svg": gallery()}

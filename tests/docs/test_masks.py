"""docs/masks.md and its gallery are those that the script writes, for every mask there is."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from attnkit import create_mask, masks

DOCS = Path(__file__).parents[2] / "docs"
AGAIN = "is not what the script writes; run `python docs/masks.py`"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "masks.py"))


def test_every_mask_is_there(script: dict[str, Any]) -> None:
    assert set(script["instances"]()) == set(masks.__all__) - set(script["NOT_MASKS"])


@pytest.mark.parametrize(("file", "made_by"), [("masks.md", "markdown"), ("masks.svg", "gallery")])
def test_up_to_date(script: dict[str, Any], file: str, made_by: str) -> None:
    assert (DOCS / file).read_text() == script[made_by](), f"docs/{file} {AGAIN}"


def test_text_pictures_are_the_masks(script: dict[str, Any]) -> None:
    page = script["markdown"]()
    for several in script["instances"]().values():
        for shown in several:
            text = page.partition(f"`{shown.call}`\n\n```\n")[2].partition("```")[0]
            rows = [line.split("|")[1][::2] for line in text.splitlines() if line.endswith("|")]
            drawn = torch.tensor([[cell == "█" for cell in row] for row in rows])
            sizes = (shown.batch, shown.heads, shown.q_len, shown.kv_len)
            assert torch.equal(drawn, create_mask(shown.mask, *sizes)[0, 0])


def test_the_gallery_is_the_masks(script: dict[str, Any]) -> None:
    root = ElementTree.fromstring(script["gallery"]())
    paths = [e.get("d") or "" for e in root if e.tag.endswith("path")]
    assert len(paths) == len(script["instances"]())
    for path, several in zip(paths, script["instances"]().values(), strict=True):
        lengths = [int(part.split("v")[0]) for part in path.split("h")[1::2]]
        kept = create_mask(several[0].mask, 1, 1, several[0].q_len, several[0].kv_len)
        assert sum(lengths) == int(kept.sum()) * script["CELL"]

"""Check that the gallery equals what its scripts write, for every mask and mod."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import gallery_masks
import gallery_mods
import gpu_variants
import measured
import pytest
import torch

from attnkit import Mask, create_mask, masks, mods

AGAIN = "is not what the script writes; run `python docs/scripts/write.py`"
FILES = gallery_masks.files() | gallery_mods.files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_up_to_date(path: Path) -> None:
    assert path.read_text() == FILES[path], f"{path.name} {AGAIN}"


def test_every_mask_and_mod_is_there() -> None:
    for script, library, others in (
        (gallery_masks, masks, gallery_masks.NOT_MASKS),
        (gallery_mods, mods, gallery_mods.NOT_MODS),
    ):
        missing = set(library.__all__) - set(others) - set(script.instances())
        assert not missing, f"add instances to docs/scripts/{script.__name__}.py: {missing}"
        assert set(script.instances()) <= set(library.__all__)


def test_text_pictures_are_the_masks() -> None:
    page = gallery_masks.markdown()
    for several in gallery_masks.instances().values():
        for shown in several:
            text = page.partition(f"\n{shown.call}\n```\n\n```text\n")[2].partition("```")[0]
            rows = [line.split("|")[1][::2] for line in text.splitlines() if line.endswith("|")]
            drawn = torch.tensor([[cell == "█" for cell in row] for row in rows])
            assert torch.equal(drawn, gallery_masks.dense(shown))


def test_the_picture_of_all_is_the_masks() -> None:
    root = ElementTree.fromstring(gallery_masks.gallery())
    paths = [e.get("d") or "" for e in root if e.tag.endswith("path")]
    assert len(paths) == len(gallery_masks.instances())
    for path, several in zip(paths, gallery_masks.instances().values(), strict=True):
        lengths = [int(part.split("v")[0]) for part in path.split("h")[1::2]]
        assert sum(lengths) == int(gallery_masks.dense(several[0]).sum()) * gallery_masks.CELL


@pytest.mark.parametrize("name", sorted(gallery_mods.instances()))
def test_pictures_of_mods_are_drawings(name: str) -> None:
    mod = gallery_mods.instances()[name].mod
    root = ElementTree.fromstring(FILES[gallery_mods.GALLERY / "mods" / f"{name}.svg"])
    kinds = {e.tag.rpartition("}")[2] for e in root}
    assert ("polyline" in kinds) != gallery_mods.by_position(mod)


@pytest.mark.parametrize(
    ("benchmark", "ours"),
    [
        ("causal", masks.causal()),
        ("window", masks.sliding_window(1023)),
        ("prefix", masks.causal() | masks.prefix(1024)),
    ],
)
def test_measured_masks_are_those_of_the_library(benchmark: str, ours: Mask) -> None:
    theirs = gpu_variants.MASKS[benchmark](1300, torch.device("cpu"))
    assert torch.equal(create_mask(ours, 1, 1, 1300, 1300), create_mask(theirs, 1, 1, 1300, 1300))


def test_measured_cases_have_rows_and_figures_come_from_them() -> None:
    known = {row["case"] for row in measured.load("gpu")}
    page = gallery_masks.markdown() + gallery_mods.markdown()
    for cases in (gallery_masks.ATTENTION | gallery_mods.ATTENTION).values():
        for case in cases:
            assert case.name in known
            assert f"- {case.call}, " in page
    assert measured.measured([measured.Case("no such case", "")]) == measured.NO_ROW
    assert page.count(measured.NO_ROW) > 10

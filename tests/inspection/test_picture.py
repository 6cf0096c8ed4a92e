"""Check that pictures of masks show their tiles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnkit import create_block_mask, masks
from attnkit.errors import ArgumentError, OptionError, UnsupportedError
from attnkit.inspection import picture
from attnkit.inspection.picture import save, show, tile_shares
from attnkit.sparsity.block_runs import FULL, PARTIAL, BlockRuns
from attnkit.tracing.mask import Mask, per_head


def test_text() -> None:
    assert show(masks.causal(), 512, 768, block=128) == (
        "causal()\n"
        "512 queries x 768 keys in tiles of 128 x 128\n"
        "     0        767 kv\n"
        "  0 |▒▒··········|\n"
        "    |██▒▒········|\n"
        "    |████▒▒······|\n"
        "511 |██████▒▒····|\n"
        "· empty  ▒ partial  █ full\n"
        "tiles: 6 full, 4 partial, 14 empty; 41.7% computed\n"
        "runs: 3 full, 4 partial; at most 2 in a row of tiles"
    )


def test_text_of_one_tile() -> None:
    assert show(masks.prefix(3), 1) == (
        "prefix(3)\n1 queries x 1 keys in tiles of 128 x 128\n0 |██|\n"
        "· empty  ▒ partial  █ full\n"
        "tiles: 1 full, 0 partial, 0 empty; 100% computed\n"
        "runs: 1 full, 0 partial; at most 1 in a row of tiles"
    )


@settings(max_examples=20)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 200), st.integers(1, 90))
def test_text_fits(q_len: int, kv_len: int, block: int, width: int) -> None:
    text = show(masks.causal(), q_len, kv_len, block=block, width=width).splitlines()
    lines = [line for line in text if "|" in line]
    edge = len(str(q_len - 1))
    assert 1 <= len(lines) <= min(width, -(-q_len // block))
    assert {line.index("|") for line in lines} == {edge + 1}
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= edge + 3 + max(width, 1)
    if text[2].endswith(f"{kv_len - 1} kv"):
        assert text[2].index("0") == edge + 2
        assert len(text[2].removesuffix(" kv")) == len(lines[0]) - 1


def test_text_of_many_tiles() -> None:
    text = show(masks.causal(), 1024, block=4, width=16, plain=True).splitlines()
    lines = [line[line.index("|") + 1 : -1] for line in text[3:11]]
    for i, line in enumerate(lines):
        assert line[: 2 * i] == "#" * (2 * i)
        assert set(line[2 * i : 2 * i + 2]) <= set("-+*")
        assert line[2 * i + 2 :] == "." * (14 - 2 * i)
    assert ". nothing  -+* a part  # everything of 32 x 16 tiles" in text
    assert "\n".join(text).isascii()


def test_text_of_one_head() -> None:
    mask = per_head([masks.causal(), masks.prefix(4)])
    texts = [show(mask, 8, heads=2, at=(0, h), block=2) for h in range(2)]
    assert texts[0].splitlines()[0] == "per_head([causal(), prefix(4)]), h=0"
    assert texts[0].splitlines()[3:] == show(masks.causal(), 8, block=2).splitlines()[3:]
    assert texts[1].splitlines()[3:] == show(masks.prefix(4), 8, block=2).splitlines()[3:]


def test_block_mask_brings_its_sizes() -> None:
    blocks = create_block_mask(masks.causal(), None, None, 64, 96, BLOCK_SIZE=16)
    assert show(blocks) == show(masks.causal(), 64, 96, block=16)


@settings(max_examples=20)
@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 20), st.integers(1, 20),
    st.integers(0, 2**16),
)  # fmt: skip
def test_shares_of_reduced_pictures(
    rows: int, columns: int, out_rows: int, out_columns: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    states = torch.randint(0, 3, (2, 3, rows, columns), generator=random, dtype=torch.int8)
    runs = BlockRuns.from_states(states, rows, columns, (1, 1))
    weight = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    assert (PARTIAL, FULL) == (1, 2)
    for b in range(2):
        for h in range(3):
            found = tile_shares(runs, b, h, out_rows, out_columns)
            for i in range(out_rows):
                top, bottom = rows * i // out_rows, -(-rows * (i + 1) // out_rows)
                for j in range(out_columns):
                    left, right = columns * j // out_columns, -(-columns * (j + 1) // out_columns)
                    cell = weight[states[b, h, top:bottom, left:right].long()]
                    assert abs(float(found[i, j] - cell.mean())) < 1e-12


# --- files


def bars(path: Path, colour: str) -> int:
    """Count the SVG elements with a colour (tiles plus one in the legend)."""
    return sum(colour in (e.get("style") or "") for e in ElementTree.parse(path).iter())


def test_svg_has_a_bar_for_each_run(tmp_path: Path) -> None:
    path = tmp_path / "mask.svg"
    assert save(path, masks.streaming_llm(300, 4), 2048) == path
    runs = create_block_mask(masks.streaming_llm(300, 4), None, None, 2048, 2048).runs
    assert bars(path, "#27548a") == runs.full.start.numel() + 1
    assert bars(path, "#f6c28b") == runs.partial.start.numel() + 1
    assert "streaming_llm(300, 4)" in path.read_text()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"path must name a file .*nowhere.*No such file"):
        save(tmp_path / "nowhere" / "mask.png", masks.causal(), 96)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_same_mask_same_file(tmp_path: Path, suffix: str) -> None:
    mask = per_head([masks.causal(), masks.natten((96,), 7, dilation=3)])
    files = [tmp_path / f"{i}.{suffix}" for i in range(2)]
    for file in files:
        save(file, mask, 96, heads=2, block=16, title="two heads")
    assert files[0].read_bytes() == files[1].read_bytes()
    start = files[0].read_bytes()[:8]
    assert start == b"\x89PNG\r\n\x1a\n" if suffix == "png" else start.startswith(b"<?xml")


@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (17, 200), (200, 17)])
def test_any_size_is_drawn(tmp_path: Path, sizes: tuple[int, int]) -> None:
    assert save(tmp_path / "a.png", masks.causal(), *sizes, block=16).stat().st_size > 1000


def test_many_runs_are_drawn_as_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "_MOST_BARS", 10)
    monkeypatch.setattr(picture, "_MOST_POSITIONS", 10)
    monkeypatch.setattr(picture, "_MOST_CELLS", 8)
    blocks = create_block_mask(masks.causal(), None, None, 128, 128, BLOCK_SIZE=2)
    (axes,) = picture._figure(blocks, "title").axes
    (image,) = axes.images
    cells = torch.tensor(image.get_array())
    assert cells.shape == (8, 8)
    # of 8 x 8 tiles on the diagonal, 28 are full and 8 partial
    assert torch.equal(cells, torch.ones(8, 8).tril(-1).double() + torch.eye(8) * (32 / 64))
    assert image.get_extent() == [0, 128, 128, 0]
    assert axes.get_xlim() == (0, 128)
    assert axes.get_ylim() == (128, 0)


def test_heads_beyond_the_panels_are_named() -> None:
    shifts = torch.arange(12)
    mask = Mask(lambda b, h, q, kv: kv <= q + shifts[h], "shifted()")
    blocks = create_block_mask(mask, None, 12, 64, 64, BLOCK_SIZE=16)
    figure = picture._figure(blocks, "shifted()")
    assert len(figure.axes) == 8
    assert figure.get_suptitle() == "shifted() (first 8 of 12)"


# --- bad input


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="q_len is missing"):
        show(masks.causal())
    with pytest.raises(OptionError, match="Q_LEN must be a positive int"):
        show(masks.causal(), 0)
    with pytest.raises(OptionError, match="width must be a positive int"):
        show(masks.causal(), 8, width=0)
    with pytest.raises(OptionError, match="at must name a head from 0 to 0, got 1"):
        show(masks.causal(), 8, at=(0, 1))
    with pytest.raises(OptionError, match=r"path must end in \.png or \.svg, got .*mask\.jpg"):
        save(tmp_path / "mask.jpg", masks.causal(), 8)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "matplotlib", missing)
    with pytest.raises(UnsupportedError, match=r"needs matplotlib; install .*attnkit\[plot\]"):
        save(tmp_path / "mask.png", masks.causal(), 8)

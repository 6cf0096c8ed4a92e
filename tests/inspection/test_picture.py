"""Check that pictures of masks show their tiles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnkit import create_block_mask, create_mask, masks
from attnkit.errors import ArgumentError, OptionError, UnsupportedError
from attnkit.inspection import mask_figure
from attnkit.inspection.mask_cells import cells_of, tile_shares
from attnkit.inspection.picture import save, show
from attnkit.sparsity.block_mask import BlockMask
from attnkit.sparsity.block_runs import FULL, PARTIAL, BlockRuns
from attnkit.tracing.mask import Mask, per_head

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


def rgba(name: str) -> Tensor:
    from matplotlib.colors import to_rgba

    return torch.tensor(to_rgba(mask_figure._COLOURS[name]), dtype=torch.float64)


def drawn(blocks: BlockMask) -> Axes:
    """Draw a mask of one batch entry and head, and return its panel."""
    axes: Axes
    (axes,) = mask_figure.mask_figure(blocks, "title").axes
    return axes


def notes(blocks: BlockMask) -> str:
    """Return the legend's line about pixels."""
    (legend,) = mask_figure.mask_figure(blocks, "title").legends
    return str(legend.get_title().get_text())


@pytest.mark.parametrize(("length", "block"), [(64, 128), (64, 16), (100, 48)])
def test_what_partial_tiles_keep_is_drawn_on_them(length: int, block: int) -> None:
    mask = masks.natten((length,), 7)
    blocks = create_block_mask(mask, None, None, length, length, BLOCK_SIZE=block)
    axes = drawn(blocks)
    tiles = torch.zeros(length, length, dtype=torch.bool)
    _, partial, _ = axes.collections
    for path in partial.get_paths():
        (left, top), (right, bottom) = path.vertices.min(0), path.vertices.max(0)
        assert left % block == top % block == 0
        assert all(x % block == 0 or x == length for x in (right, bottom))
        tiles[int(top) : int(bottom), int(left) : int(right)] = True
    (image,) = axes.images
    assert image.get_extent() == [0, length, length, 0]
    pixels = torch.tensor(image.get_array())
    kept = pixels[..., 3] > 0
    assert torch.equal(kept, create_mask(mask, None, None, length, length)[0, 0] & tiles)
    torch.testing.assert_close(pixels[kept], rgba("kept").expand(int(kept.sum()), 4))
    assert notes(blocks) == ""


@settings(max_examples=30)
@given(
    st.integers(1, 90), st.integers(1, 90), st.integers(1, 40), st.integers(1, 40),
    st.integers(1, 40), st.sampled_from(["causal", "holes", "heads"]),
)  # fmt: skip
def test_cells_measure_the_mask(
    q_len: int, kv_len: int, height: int, width: int, most: int, name: str
) -> None:
    table = torch.rand(2, q_len, kv_len, generator=torch.Generator().manual_seed(most)) < 0.5
    mask = {
        "causal": masks.causal(),
        "holes": Mask(lambda b, h, q, kv: table[0, q, kv], "holes()"),
        "heads": Mask(lambda b, h, q, kv: table[h, q, kv] | (kv < 20), "heads()"),
    }[name]
    heads = 2 if name == "heads" else 1
    blocks = create_block_mask(mask, None, heads, q_len, kv_len, BLOCK_SIZE=(height, width))
    found = cells_of(blocks, heads, (most, most + 3), 1 << 20)
    dense = create_mask(mask, 1, heads, q_len, kv_len)[0]
    states = blocks.runs.states()[0].repeat_interleave(height, -2).repeat_interleave(width, -1)
    assert len(found) == heads
    for h, cells in enumerate(found):
        assert cells.kept is not None
        assert cells.kept.shape[0] <= most
        assert cells.kept.shape[1] <= most + 3
        state = states[h, :q_len, :kv_len]
        for i in range(cells.kept.shape[0]):
            for j in range(cells.kept.shape[1]):
                at = tuple(
                    slice(n * side, (n + 1) * side)
                    for n, side in zip((i, j), cells.size, strict=True)
                )
                in_partial = state[at] == PARTIAL
                for share, wanted in (
                    (cells.full, state[at] == FULL),
                    (cells.partial, in_partial),
                    (cells.kept, in_partial & dense[h][at]),
                ):
                    assert abs(float(share[i, j] - wanted.double().mean())) < 1e-12


def test_no_cells_of_partial_tiles_that_are_too_large() -> None:
    blocks = create_block_mask(masks.causal(), None, None, 64, 64, BLOCK_SIZE=16)
    at_most = blocks.runs.partial.length.sum() * 16 * 16
    assert cells_of(blocks, 1, (64, 64), int(at_most))[0].kept is not None
    assert cells_of(blocks, 1, (64, 64), int(at_most) - 1)[0].kept is None


def test_a_pixel_of_several_positions_shows_all_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask_figure, "_MOST_BARS", 10)
    monkeypatch.setattr(mask_figure, "_MOST_CELLS", 16)
    mask = Mask(lambda b, h, q, kv: (kv < 32) | ((q == 90) & (kv == 70)), "rare()")
    blocks = create_block_mask(mask, None, None, 128, 128, BLOCK_SIZE=2)
    axes = drawn(blocks)
    (image,) = axes.images
    pixels = torch.tensor(image.get_array())
    assert pixels.shape == (16, 16, 4)
    assert image.get_extent() == [0, 128, 128, 0]
    assert axes.get_xlim() == (0, 128)
    assert axes.get_ylim() == (128, 0)
    full, empty = rgba("full"), rgba("empty")
    torch.testing.assert_close(pixels[:, :4], full.expand(16, 4, 4))
    rare = pixels[11, 8]  # one of 64 positions
    assert float((rare - empty).abs().max()) > 0.1
    pixels[11, 8] = empty
    torch.testing.assert_close(pixels[:, 4:], empty.expand(16, 12, 4))
    assert notes(blocks) == (
        "a pixel stands for 8 x 8 positions (q x kv) and mixes their colours;\n"
        "rare ones are strengthened"
    )


def test_bars_with_pixels_of_several_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_figure, "_MOST_CELLS", 16)
    blocks = create_block_mask(masks.causal(), None, None, 64, 32, BLOCK_SIZE=16)
    (image,) = drawn(blocks).images
    pixels = torch.tensor(image.get_array())
    assert pixels.shape == (16, 16, 4)  # of 4 x 2 positions
    # cell (0, 0): 7 of 8 kept, in a partial tile
    torch.testing.assert_close(pixels[0, 0], (7 * rgba("kept") + rgba("partial")) / 8)
    assert float(pixels[0, 3, 3]) == float(pixels[8, 0, 3]) == 0  # not kept; full
    note = "a pixel stands for 4 x 2 positions (q x kv); the darker, the more are kept"
    assert notes(blocks) == note


def test_long_lengths_are_written_out() -> None:
    blocks = create_block_mask(masks.sliding_window(5), None, None, 1 << 20, 1 << 20)
    axes = drawn(blocks)
    axes.figure.canvas.draw()  # type: ignore[attr-defined]
    texts = [label.get_text() for label in axes.get_xticklabels()]
    assert {"0", "262144", "1048576"} <= set(texts)


def test_heads_beyond_the_panels_are_named() -> None:
    shifts = torch.arange(12)
    mask = Mask(lambda b, h, q, kv: kv <= q + shifts[h], "shifted()")
    blocks = create_block_mask(mask, None, 12, 64, 64, BLOCK_SIZE=16)
    figure = mask_figure.mask_figure(blocks, "shifted()")
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

"""Check the cycle model against the tables of FlashAttention-4, and the counts of work."""

from __future__ import annotations

import numpy as np
import pytest

from attnkit import emulator
from attnkit.emulator.timing.cycles import Product, TileClocks, busy, limit, rates_of, tile
from attnkit.errors import OptionError
from tests.emulator.ptx_kit import per_thread

SIDE = 128  # rows, columns and head dimension of the tiles in the tables
SQUARE = SIDE * SIDE


def test_forward_table() -> None:
    """The model gives the forward clocks of FlashAttention-4's table.

    The product for S reads both operands from shared memory; the product for O reads P from tensor
    memory.
    """
    scores, output = Product(SIDE, SIDE, SIDE), Product(SIDE, SIDE, SIDE, a_shared=False)
    assert tile([scores, output], SQUARE) == TileClocks(1024, 768, 1024)


@pytest.mark.parametrize(("ctas", "shared"), [(1, 3328), (2, 2688)])
def test_backward_table(ctas: int, shared: int) -> None:
    """The model gives the backward clocks of FlashAttention-4's table, for one CTA and for a pair.

    S, dP and dQ read both operands from shared memory, dV and dK one. dS is stored in 16 bits. dQ
    passes through shared memory in float32: it is stored, then read by the bulk reduction.
    """
    both, one = Product(SIDE, SIDE, SIDE), Product(SIDE, SIDE, SIDE, a_shared=False)
    other = 2 * SQUARE + 2 * 4 * SQUARE
    got = tile([both, both, one, one, both], SQUARE, other_shared_bytes=other, ctas=ctas)
    assert got == TileClocks(2560, shared, 1024)


def test_hopper_has_half_the_tensor_rate() -> None:
    p = [Product(SIDE, SIDE, SIDE)]
    assert tile(p, 0, arch="sm_90a").tensor == 2 * tile(p, 0, arch="sm_100a").tensor


def test_unknown_architecture() -> None:
    with pytest.raises(OptionError, match="sm_70"):
        rates_of("sm_70")


def test_busy_counts_what_was_executed() -> None:
    x = np.ones(128, np.float32)
    out = np.zeros_like(x)
    text = per_thread("ex2.approx.f32 %r5, {a0};" * 10 + "add.f32 {o}, {a0}, {a0};", [x], out)
    report = emulator.run(emulator.Ptx(text, block=(128, 1, 1)), x, out)
    clocks = busy(report.launches, "sm_90a")
    assert clocks["special"] == 10 * 128 / 16
    assert clocks["float32"] == 1
    assert limit(clocks) == "special"
    # Per thread: move, 2 parameters, 2 products, 2 additions, load, 11 operations, store, return.
    assert report.warp_instructions == 4 * 21


def test_unreached_instructions_are_listed() -> None:
    """Two instructions that every thread branches over are listed as not executed."""
    x, out = np.ones(32, np.float32), np.zeros(32, np.float32)
    skip = (
        "setp.ne.f32 %p1, {a0}, {a0};\n@!%p1 bra $L_on;\nabs.f32 {a0}, {a0};\nneg.f32 {a0}, {a0};\n"
    )
    text = per_thread(skip + "$L_on:\nadd.f32 {o}, {a0}, {a0};", [x], out)
    (stats,) = emulator.run(emulator.Ptx(text), x, out).launches
    assert [text.split("\n")[i - 1].split(".")[0] for i in sorted(stats.missed)] == ["abs", "neg"]
    assert 0.8 < stats.covered < 1

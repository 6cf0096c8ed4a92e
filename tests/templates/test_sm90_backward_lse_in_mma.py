"""Check the LSE as additional columns in the products of the Hopper backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit import masks, mods
from attnkit.graph.staging import Level
from attnkit.schedule.work_list import full_runs
from attnkit.splice.backward_template import BackwardCase
from attnkit.splice.sm90_backward import switches
from attnkit.templates.sm90.backward_config import BackwardConfig
from tests.sampling import sampled
from tests.templates.backward_kit import FP16, check, draw, poisoned  # noqa: F401

BACKEND = "emulate:sm_90a"

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 128), (FP16, 64)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-4, 0.088, -0.088, 8.0])
def test_softmax_scales(scale: float, dtype: torch.dtype, dim: int) -> None:
    """Gradients are exact for scales of any sign and size.

    With the largest scale, LSE is near 400 and differs by hundreds between rows.
    """
    drawn = draw(140, 260, dims=(dim, dim), heads=(1, 1), dtype=dtype)
    check(drawn, backend=BACKEND, scale=scale)


@pytest.mark.parametrize("dims", sampled([((64, 128),), ((128, 128),), ((64, 64),)], 3), ids=str)
def test_mods_that_add(dims: tuple[int, int]) -> None:
    """Gradients are exact with LSE in the products, additive mods and fully masked rows."""
    mod = lambda: mods.compose(mods.alibi(2), lambda s, b, h, q, kv: s + 0.5 * h)
    mask = masks.causal() & masks.sliding_window(70) & (lambda b, h, q, kv: q // 32 != 2)
    check(draw(200, 300, dims=dims), mod, mask, mode="check", backend=BACKEND)


@pytest.mark.parametrize(
    ("given", "less"),
    [
        ({"additive": True, "learned": frozenset()}, True),
        ({"additive": True, "learned": frozenset({Level.ROW})}, False),
        ({"additive": False, "learned": frozenset()}, False),
    ],
)
def test_which_kernels_subtract_lse(given: Any, less: bool) -> None:
    runs = full_runs(64, 128, (64, 128), torch.device("cpu"))
    for widths in ((64, 64), (128, 128), (64, 128)):
        found = switches(BackwardCase(widths, runs, lists_override_mask=False, **given))
        assert found == {"less_lse": less}
    for widths in ((192, 128), (256, 256)):
        found = switches(BackwardCase(widths, runs, lists_override_mask=False, **given))
        assert "less_lse" not in found


def test_shared_memory_is_enough_at_every_head_dim() -> None:
    for less in (False, True):
        for width, depth, rows in ((64, 64, 128), (64, 128, 64), (128, 64, 64), (128, 128, 64)):
            config = BackwardConfig(head_dim=width, head_dim_v=depth, block_q=rows, less_lse=less)
            assert config.problem() is None

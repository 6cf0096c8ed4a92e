"""Check LSE and delta as an additional k-step of the products (see `common.lse_in_mma`)."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from cutlass import cute

from attnkit import emulator, masks, mods
from attnkit.codegen.score_form import score_form
from attnkit.splice.fake_backward_arguments import preprocess_arguments
from attnkit.templates.common.preprocess import MASKED_ROW, Preprocess
from attnkit.templates.sm100.backward_config import BackwardConfig
from attnkit.tracing.tracer import trace
from tests.templates.backward_kit import FP16, check, draw, poisoned  # noqa: F401

BACKEND = "emulate:sm_100a"
ROWS, DEPTH = 128, 128

pytestmark = pytest.mark.usefixtures("poisoned")


@functools.cache
def prepare() -> emulator.Executable:
    """Compile the preprocess kernel for an LSE that has a gradient."""
    kernel = Preprocess(BackwardConfig(two_cta=True, less_lse=True), True)
    fakes = preprocess_arguments("bfloat16", DEPTH)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --dump-dir={folder} --gpu-arch sm_100a"
        return emulator.Executable(cute.compile(kernel, *fakes, options=options), fakes)


# the last two columns, used for slopes: each row's index in its q tile; multiplied by zeros here
PLACES = torch.arange(ROWS).double()[:, None].expand(-1, 2)


def written(lse: Tensor, delta: Tensor) -> list[Tensor]:
    """Return the columns that the preprocess writes for LSE and delta, each bfloat16 [ROWS, 8]."""
    zeros = torch.zeros(1, 1, ROWS, DEPTH, dtype=torch.bfloat16)
    rows = [torch.full((4 * ROWS,), torch.nan) for _ in range(2)]
    given = (zeros, zeros, lse.view(1, 1, -1), delta.view(1, 1, -1), *rows)
    emulator.run(prepare(), *given, torch.zeros(ROWS * DEPTH), [], [], [], [])
    return [t.view(torch.bfloat16).view(ROWS, 8) for t in rows]


def total(columns: Tensor, factor: float) -> Tensor:
    """Return the product of the columns with those of `factor`, in float64."""
    first = torch.tensor(factor, dtype=torch.float32)
    parts = []
    for _ in range(3):
        parts.append(first.bfloat16())
        first = first - parts[-1].float()
    a = torch.stack([parts[i] for i in (0, 0, 1, 0, 1, 2)]).double()
    return 2 * columns[:, :6].double() @ a


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e20])
def test_columns_hold_float32(size: float) -> None:
    """Columns represent float32 numbers exactly, and their products with a factor to 2^-22."""
    values = size * torch.randn(2, ROWS)
    lse, delta = written(*values)
    for columns, exact in ((lse, -values[0].double()), (delta, values[1].double())):
        assert torch.equal(columns[:, [0, 1, 3]].double().sum(1), exact)
        assert torch.equal(columns[:, [0, 0, 1]], columns[:, [2, 5, 4]])
        assert torch.equal(columns[:, 6:].double(), PLACES)
        for factor in (0.5, 0.5 * 128**0.5, 1 / 3):
            error = (total(columns, factor) - 2 * factor * exact).abs()
            assert (error <= 2.0**-22 * 2 * factor * exact.abs()).all()


def test_rows_that_keep_nothing_are_finite() -> None:
    lse, delta = written(torch.full((ROWS,), -torch.inf), torch.randn(ROWS))
    assert (lse[:, 0] == MASKED_ROW).all()
    assert not lse[:, [1, 3]].any()
    assert not delta[:, :6].any()
    assert torch.equal(delta[:, 6:].double(), PLACES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-4, 0.088, -0.088, 8.0])
def test_softmax_scales(scale: float, dtype: torch.dtype) -> None:
    """Gradients are exact for scales of any sign and size.

    With the largest scale, LSE is near 400 and differs by hundreds between rows.
    """
    drawn = draw(140, 260, dims=(128, 128), heads=(1, 1), dtype=dtype)
    check(drawn, backend=BACKEND, scale=scale)


def test_mods_that_add() -> None:
    """Gradients are exact with LSE in the products for ALiBi plus a bias per head."""
    mod = lambda: mods.compose(mods.alibi(2), lambda s, b, h, q, kv: s + 0.5 * h)
    check(draw(200, 300, dims=(128, 128)), mod, masks.causal(), mode="check", backend=BACKEND)


@pytest.mark.parametrize(
    ("mod", "additive"),
    [
        (None, True),
        (lambda s, b, h, q, kv: s + 3 * (q - kv), True),
        (lambda s, b, h, q, kv: 2 * s, False),
        (lambda s, b, h, q, kv: torch.tanh(s), False),
        (lambda s, b, h, q, kv: torch.where(s > 0, s, s - 1), False),
        (lambda s, b, h, q, kv: torch.where(q > kv, s, s - 1), False),  # not seen to be
    ],
)
def test_which_mods_are_additive(mod: Any, additive: bool) -> None:
    """A score form is additive only if its mod adds to the score.

    The products may subtract LSE only in this case.
    """
    root = None if mod is None else trace(mod, "score").root
    assert score_form(root).additive == additive

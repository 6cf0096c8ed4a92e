"""Compare Blackwell's kernels of head dims above 256, executed on the CPU, with the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit import flex_attention, masks
from attnkit.jit import emulation
from attnkit.splice import workers
from tests.sampling import sampled
from tests.templates.backward_kit import (
    CAUSAL,
    MODS,
    check,
    draw,
    ordered,
    poisoned,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned")

BACKEND = "emulate:sm_100a"


def forward(
    q_len: int, kv_len: int, dims: tuple[int, int], mask: Any, mod: Any = None, mode: str = "check"
) -> list[str]:
    """Compare output and LSE with float64; return the names of the kernels that ran."""
    inputs, _ = draw(q_len, kv_len, dims=dims, heads=(1, 1))
    results: list[tuple[Tensor, Tensor]] = []
    for backend, dtype in ((BACKEND, torch.bfloat16), ("eager", torch.float64),
                           ("eager", torch.bfloat16)):  # fmt: skip
        qkv = [t.to(torch.bfloat16).to(dtype) for t in inputs]
        with emulation.session(mode=mode, seeds=1) as session:
            found = flex_attention(
                *qkv, mod, mask, enable_gqa=True, return_lse=True, backend=backend
            )
        assert session.ok, [str(report) for _, report in session.reports]
        results.append(found)
        if backend == BACKEND:
            names = [name.split()[0] for name, _ in session.reports]
    for ours, exact, dense in zip(*results, strict=True):
        assert torch.equal(ours.isfinite(), exact.isfinite())
        ours, exact, dense = (t.double().nan_to_num(0, 0, 0) for t in (ours, exact, dense))
        allowed = 2 * (dense - exact).abs().amax() + exact.abs().amax() * 2**-16
        assert (ours - exact).abs().amax() <= allowed
    return names


@pytest.mark.parametrize(
    ("dims", "mask", "mod"),
    sampled(
        [
            ((576, 512), CAUSAL, None),  # three parts of K, two of the value
            ((264, 64), None, MODS["none"][0]()),
            ((512, 512), CAUSAL & masks.sliding_window(90), None),
            ((40, 512), CAUSAL, MODS["none"][0]()),
        ],
        4,
    ),
)
def test_forward(dims: tuple[int, int], mask: Any, mod: Any) -> None:
    """Several work tiles for each CTA, laps of all rings, and ragged ends."""
    assert forward(200, 310, dims, mask, mod) == ["forward"]


def test_parts_of_split_rows_have_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "EMULATED_SMS", 8)
    assert forward(16, 700, (512, 512), None, mode="eager") == ["forward", "combine"]


@pytest.mark.parametrize(
    ("dims", "lengths", "mask"),
    sampled(
        [
            ((512, 512), (150, 140), CAUSAL),
            ((320, 40), (300, 200), CAUSAL & masks.sliding_window(90)),
            ((40, 384), (130, 1), None),
        ],
        3,
    ),
)
def test_backward(dims: tuple[int, int], lengths: tuple[int, int], mask: Any) -> None:
    check(draw(*lengths, dims=dims, heads=(1, 1)), mask=mask, mode="check", backend=BACKEND)


@pytest.mark.parametrize("name", sampled([("relative",), ("row",), ("two",), ("bias",)], 4))
def test_gradients_of_captured_tensors_count_once(name: str) -> None:
    mod, captured = MODS[name]
    check(draw(200, dims=(264, 320)), mod, CAUSAL, captured(), backend=BACKEND)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["row", None])
def test_deterministic_bits_do_not_depend_on_workers_or_order(name: str | None) -> None:
    first = ordered(BACKEND, "eager", 2, (384, 384), name=name)
    second = ordered(BACKEND, "adversarial", 3, (384, 384), name=name)
    assert all(map(torch.equal, first, second))

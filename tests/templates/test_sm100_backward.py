"""Compare the Blackwell backward kernels, executed on the CPU, with autograd of the float64 oracle.

The kernels have not run on a Blackwell GPU. The tests check the generated code under the semantics
of the emulator, and the output of the assembler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attnkit
from attnkit import create_block_mask, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation, kernel
from attnkit.splice import sm100_backward
from attnkit.templates.sm100.backward import Backward
from attnkit.templates.sm100.backward_config import BackwardConfig
from tests.sampling import first_of, sampled
from tests.templates.backward_kit import (
    BF16,
    CAUSAL,
    FP16,
    MODS,
    check,
    draw,
    gradients,
    ordered,
    poisoned,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned", "one_cta")

BACKEND = "emulate:sm_100a"


@pytest.fixture
def one_cta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable CTA pairs, which head dims of 128 use (see test_sm100_backward_2cta.py)."""
    monkeypatch.setattr(sm100_backward, "refusal", lambda case: "this test is of single CTAs")
    attnkit.clear_caches()
    yield
    attnkit.clear_caches()


def main_kernel(*arguments: Any) -> Any:
    """Compile and return the main kernel of a backward."""
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        gradients(BACKEND, *arguments)
    (source,) = (s for s in sources if s.name.startswith("backward"))
    return kernel.kernel(source)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_these_are_kernels_of_single_ctas(dims: tuple[int, int]) -> None:
    ptx = main_kernel(*draw(420, 300, dims=dims, heads=(1, 1)), (), None, CAUSAL, None).ptx
    assert "tcgen05.mma.cta_group::1" in ptx
    assert "cta_group::2" not in ptx


@pytest.mark.parametrize(
    ("dims", "mask"),
    first_of(
        [
            ((64, 64), CAUSAL & masks.sliding_window(90)),
            ((128, 128), CAUSAL),
            ((192, 128), CAUSAL),
            ((256, 256), CAUSAL & masks.sliding_window(90)),
        ]
    ),
    ids=str,
)
def test_masks_in_all_orders(dims: tuple[int, int], mask: Any) -> None:
    drawn = draw(420, 300, dims=dims, heads=(1, 1))
    check(drawn, mask=mask, mode="check", backend=BACKEND)


@pytest.mark.parametrize(
    ("dims", "dtype"),
    first_of([((40, 72), BF16), ((128, 64), BF16), ((64, 128), FP16), ((160, 96), FP16)]),
)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(draw(150, dims=dims, heads=(1, 1), dtype=dtype), mask=CAUSAL, backend=BACKEND)


@pytest.mark.parametrize("dims", sampled([((160, 40),), ((40, 200),), ((200, 136),)], 2))
def test_columns_that_only_the_kernel_has(dims: tuple[int, int]) -> None:
    """Blocks of columns outside of a gradient are not stored."""
    check(draw(150, dims=dims, heads=(1, 1)), mask=CAUSAL, backend=BACKEND)


@pytest.mark.parametrize("name", first_of([("row",), ("relative",), ("two",)]))
def test_work_tiles_that_share_a_kv_block(name: str) -> None:
    """At head dim 256 each has half of the columns; gradients of captured tensors count once."""
    mod, captured = MODS[name]
    drawn = draw(140, dims=(256, 256), heads=(2, 1))
    check(drawn, mod, CAUSAL, captured(), mode="check", backend=BACKEND)


@pytest.mark.parametrize(
    "lengths", sampled([((1, 1),), ((17, 200),), ((200, 17),), ((257, 129),)], 3)
)
def test_ragged_lengths(lengths: tuple[int, int]) -> None:
    check(draw(*lengths), backend=BACKEND)


def test_shared_heads_and_batches() -> None:
    check(draw(200, heads=(4, 2), batch=(2, 2)), mask=CAUSAL, backend=BACKEND)
    check(draw(200, dims=(192, 128), heads=(2, 1), batch=(2, 1)), backend=BACKEND)


def test_fully_masked_rows_and_columns_have_no_gradient() -> None:
    keep = lambda b, h, q, kv: (q >= 70) & (kv <= q) & (kv < 128)
    mask = create_block_mask(keep, None, None, 200, 200, device="cpu")
    inputs, weights = draw(200)
    check((inputs, weights), mask=mask, backend=BACKEND)
    dq, dk, dv = gradients(BACKEND, inputs, weights, (), None, mask, None)
    assert not dq[:, :, :70].any()
    assert not dk[:, :, 128:].any()
    assert not dv[:, :, 128:].any()


def test_scores_far_below_zero() -> None:
    inputs, weights = draw(150, 140)
    inputs[0], inputs[1] = inputs[0].abs() * 8, -inputs[1].abs() * 8
    check((inputs, weights), backend=BACKEND)


@pytest.mark.parametrize("name", first_of([("head",), ("row",), ("relative",), ("two",)]))
def test_gradients_of_captured_tensors(name: str) -> None:
    mod, captured = MODS[name]
    check(draw(200), mod, CAUSAL, captured(), backend=BACKEND)


@pytest.mark.parametrize("dims", first_of([((64, 64),), ((256, 256),)]))
def test_deterministic_bits_do_not_depend_on_workers_or_order(dims: tuple[int, int]) -> None:
    first = ordered(BACKEND, "eager", 2, dims)
    second = ordered(BACKEND, "adversarial", 3, dims)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("name", sampled([("relative",), ("head",)], 2))
def test_deterministic_bits_of_captured_gradients(name: str) -> None:
    first = ordered(BACKEND, "eager", 2, name=name)
    second = ordered(BACKEND, "adversarial", 3, name=name)
    assert all(map(torch.equal, first, second))


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("name", "dims"),
    sampled(
        [
            ("none", (64, 64)),
            ("none", (128, 128)),
            ("row", (192, 128)),
            ("none", (256, 256)),
            ("relative", (192, 128)),
            ("row", (256, 256)),
            ("relative", (512, 512)),
            ("bias", (256, 256)),
            ("bias", (384, 384)),
        ],
        3,
    ),
)
def test_no_spilled_registers(name: str, dims: tuple[int, int]) -> None:
    mod, captured = MODS[name]
    found = main_kernel(*draw(200, dims=dims), captured(), mod, CAUSAL, None)
    assert found.artifact.arch == "sm_100a"
    assert found.artifact.problems == ()
    assert [s.stack for s in found.stats] == [0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"head_dim": 256}, "head dims of 256 and 128: expected 64 or 128 each, 192 and 128"),
        (
            {"head_dim": 192, "block_q": 128},
            "block_q=128 with head_dim=192: expected 128, or 64 above",
        ),
        ({"dtype": "float32"}, "dtype='float32': expected 'bfloat16' or 'float16'"),
        ({"sum_order": "up"}, "sum_order='up': expected '', 'ascending' or 'descending'"),
    ],
)
def test_what_is_not_supported_says_so(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Backward(BackwardConfig(**settings), None)

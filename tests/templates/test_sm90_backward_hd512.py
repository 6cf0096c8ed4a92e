"""Compare the Hopper backward for head dims above 256, in the emulator, with the float64 oracle.

The limits are those of `test_sm90_backward`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import create_block_mask, flex_attention, masks, mods

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import dsl_runtime, emulation, kernel
from attnkit.templates.sm90.backward_hd512_config import Hd512Config
from tests.sampling import sampled
from tests.templates.backward_kit import (
    CAUSAL,
    FP16,
    MODS,
    check,
    draw,
    gradients,
    poisoned,  # noqa: F401
)
from tests.templates.test_sm90_backward_compile import VARIANTS

pytestmark = pytest.mark.usefixtures("poisoned")

WIDE = (512, 512)


def requested(
    mod: Any = None, mask: Any = CAUSAL, of: Any = WIDE, heads: int = 2, **options: Any
) -> list[kernel.Source]:
    """Return the sources of the main kernels that a backward requests."""
    shapes = (2, of[0]), (heads, of[0]), (heads, of[1])
    qkv = [torch.zeros(1, h, 256, d, dtype=torch.bfloat16, requires_grad=True) for h, d in shapes]
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        out = flex_attention(*qkv, mod, mask, backend="emulate", enable_gqa=True, **options)
        out.sum().backward()
    return [s for s in sources if s.name.startswith("backward")]


# dims, of the kernel: wider, narrower and unequal heads
DIMS = [(WIDE, None), ((264, 264), FP16), ((512, 72), None), ((72, 512), None), ((384, 128), None)]


@pytest.mark.parametrize(("dims", "dtype"), sampled(DIMS, len(DIMS)))
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype | None) -> None:
    check(draw(100, dims=dims, heads=(1, 1), dtype=dtype or torch.bfloat16), mask=CAUSAL)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["check", "adversarial"])
@pytest.mark.parametrize("mask", [None, CAUSAL], ids=str)
def test_masks_in_all_orders(mask: Any, mode: str) -> None:
    check(draw(200, dims=WIDE, heads=(1, 1)), mask=mask, mode=mode)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", [(257, 129), (17, 200), (5, 130)])
def test_ragged_lengths(lengths: tuple[int, int]) -> None:
    check(draw(*lengths, dims=WIDE, heads=(1, 1)))


@pytest.mark.exhaustive
def test_shared_heads_and_batches() -> None:
    check(draw(100, dims=WIDE, heads=(4, 2), batch=(2, 1)), mask=CAUSAL, mode="check")


@pytest.mark.exhaustive
def test_a_term_that_is_added_to_the_score() -> None:
    mask = CAUSAL & masks.sliding_window(90)
    check(draw(150, dims=WIDE, dtype=FP16), lambda: mods.alibi(2), mask)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODS)
def test_captured_tensors_and_slopes(name: str) -> None:
    mod, captured = MODS[name]
    check(draw(200, dims=WIDE), mod, CAUSAL, captured())


@pytest.mark.exhaustive
def test_captured_tensors_in_any_order() -> None:
    """The CTAs of a pair have the same gradients, of which one is added."""
    mod, captured = MODS["two"]
    check(draw(200, dims=(264, 512)), mod, CAUSAL, captured(), mode="check")


@pytest.mark.exhaustive
def test_columns_that_no_query_keeps_have_no_gradient() -> None:
    keep = lambda b, h, q, kv: (kv < 40) | (kv >= 200) & (kv < 210)
    inputs, weights = draw(100, 256, dims=WIDE, heads=(1, 1))
    check((inputs, weights), mask=keep, mode="check")
    found = gradients("emulate", inputs, weights, (), None, keep, None)
    for grad in found[1:3]:
        assert not grad[:, :, 40:200].any()
        assert not grad[:, :, 210:].any()


@pytest.mark.exhaustive
def test_block_masks() -> None:
    keep = lambda b, h, q, kv: (q - kv < 70) & (kv - q < 130)
    mask = create_block_mask(keep, None, None, 250, 310, device="cpu", BLOCK_SIZE=(128, 192))
    check(draw(250, 310, dims=WIDE, heads=(1, 1)), mask=mask)


@pytest.mark.exhaustive
def test_a_kernel_that_runs_again() -> None:
    """The counter of work tiles is zero after a launch, and later launches need no preparation."""
    inputs, weights = draw(200, dims=WIDE, heads=(2, 1))
    for _ in range(2):
        check((inputs, weights), mask=CAUSAL)


OTHERS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "BackwardHd512"),
    ({"deterministic": True}, None),
    ({"of": (264, 8)}, "BackwardHd512"),
    ({"of": (576, 512)}, None),
    ({"dropout_p": 0.1}, "BackwardHd512"),
    ({"of": (256, 256)}, "BackwardHd256Roles"),
]


@pytest.mark.parametrize(("call", "name"), sampled(OTHERS, len(OTHERS)))
def test_which_calls_have_this_kernel(call: dict[str, Any], name: str | None) -> None:
    """Sums in a fixed order and wider heads are left to torch operators."""
    names = [type(s.build().function).__name__ for s in requested(**call)]
    assert names == ([] if name is None else [name])


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"head_dim": 448}, "448 and 512"),
        ({"block_q": 128}, "block_q=128"),
        ({"sum_order": "ascending"}, "sum_order='ascending'"),
        ({"split_columns": False}, "split_columns=False"),
    ],
)
def test_sizes_that_do_not_work_are_named(sizes: dict[str, Any], named: str) -> None:
    assert named in str(Hd512Config(**sizes).problem())


@pytest.mark.parametrize("dims", [(512, 512), (384, 384), (512, 128), (128, 512)])
def test_a_cta_has_enough_shared_memory(dims: tuple[int, int]) -> None:
    assert Hd512Config(head_dim=dims[0], head_dim_v=dims[1]).problem() is None


COMPILED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in VARIANTS),
    ("causal", {"heads": 1}),
    ("causal", {"of": (384, 384)}),
    ("causal", {"of": (384, 128)}),
    ("causal", {"dropout_p": 0.1}),
    ("causal", {"normalization": "sigmoid"}),
    ("causal", {"normalization": "none"}),
]


@pytest.mark.assembled
@pytest.mark.parametrize(("name", "call"), sampled(COMPILED, len(COMPILED)))
def test_no_spills_and_no_serialised_products(
    name: str, call: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if "heads" in call and "cu12" in dsl_runtime.library().parts:
        request.applymarker(pytest.mark.xfail(strict=True, reason="48 bytes are spilled"))
    score, mask = VARIANTS[name]()
    (source,) = requested(score, mask, **call)
    found = kernel.kernel(source)
    assert found.artifact.problems == ()
    assert [s.stack for s in found.stats] == [0]

"""Compare the Hopper backward for head dims above 128, in the emulator, with the float64 oracle.

The limits are those of `test_sm90_backward`. The compiled kernels must spill no registers and
serialise no products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import create_block_mask, flex_attention, masks, mods

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import dsl_runtime, emulation, kernel
from attnkit.splice.sm90_backward import block_kv, widths
from attnkit.templates.sm90.backward_hd256_config import Hd256Config
from tests.sampling import diagonal, first_of, sampled
from tests.templates.backward_kit import (
    CAUSAL,
    FP16,
    MODS,
    check,
    draw,
    every_other,
    gradients,
    ordered,
    poisoned,  # noqa: F401,
    torch_forward,
)

pytestmark = pytest.mark.usefixtures("poisoned")

PLAIN = Hd256Config()


MASKS = [None, CAUSAL, CAUSAL & masks.sliding_window(90)]


@pytest.mark.parametrize(("mask", "dims"), diagonal(MASKS, [(192, 192), (256, 256)]), ids=str)
def test_masks_in_all_orders(mask: Any, dims: tuple[int, int]) -> None:
    check(draw(330, dims=dims, heads=(1, 1)), mask=mask, mode="check")


DIMS = [(136, 136), (192, 192), (192, 64), (256, 72), (64, 256), (200, 168)]


@pytest.mark.parametrize("dims", first_of([(d,) for d in DIMS]))
def test_head_dims(dims: tuple[int, int]) -> None:
    check(draw(200, 150, dims=dims, heads=(1, 1), dtype=FP16), mask=CAUSAL)


def test_ragged_lengths() -> None:
    for lengths in ((1, 1), (17, 200), (257, 129)):
        check(draw(*lengths, dims=(256, 256), heads=(1, 1)))


def test_shared_heads_and_batches() -> None:
    check(draw(140, dims=(192, 192), heads=(4, 2), batch=(2, 1)), mask=CAUSAL, mode="adversarial")


def test_dead_rows_have_no_gradient() -> None:
    keep = lambda b, h, q, kv: (q >= 70) & (kv <= q)
    mask = create_block_mask(keep, None, None, 200, 200, device="cpu")
    inputs, weights = draw(200, dims=(256, 256))
    check((inputs, weights), mask=mask)
    found = gradients("emulate", inputs, weights, (), None, mask, None)
    assert not found[0][:, :, :70].any()


@pytest.mark.parametrize("block", sampled([((192, 80),), ((128, 128),)], 2))
def test_block_masks(block: tuple[int, int]) -> None:
    """Block masks are exact for block sizes that the kernel's blocks divide, and for one other."""
    keep = lambda b, h, q, kv: (q - kv < 70) & (kv - q < 130)
    mask = create_block_mask(keep, None, None, 250, 310, device="cpu", BLOCK_SIZE=block)
    check(draw(250, 310, dims=(256, 256), heads=(1, 1)), mask=mask)


@pytest.mark.parametrize("name", sampled([("two",), ("none",), ("head",), ("relative",)], 4))
def test_gradients_of_captured_tensors(name: str) -> None:
    mod, captured = MODS[name]
    check(draw(200, dims=(256, 256)), mod, CAUSAL, captured())


@pytest.mark.parametrize("dims", sampled([((192, 128),), ((256, 256),)], 2))
def test_deterministic_bits_do_not_depend_on_workers_or_order(dims: tuple[int, int]) -> None:
    first = ordered("emulate", "eager", 2, dims)
    second = ordered("emulate", "adversarial", 3, dims)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("ctas", [1, 4])
def test_no_warp_misses_the_end_of_a_fixed_order(ctas: int) -> None:
    """Warps that wait for turns and pass them see all q blocks, also in a CTA without work tiles."""
    inputs, (weight, _) = draw(140, dims=(192, 128), heads=(1, 1))
    learned = [t.detach().requires_grad_() for t in inputs]
    with torch_forward():
        out = flex_attention(*learned, None, CAUSAL, deterministic=True, backend="emulate")
    with emulation.session(mode="race", ctas=ctas) as session:
        torch.autograd.grad((out * weight).sum(), learned)
    assert any(name.startswith("backward") for name, _ in session.reports)
    assert session.ok, "\n".join(str(report) for _, report in session.reports)


@pytest.mark.exhaustive
def test_turns_pass_tiles_that_keep_nothing() -> None:
    mask = every_other(400, 400)
    first = ordered("emulate", "eager", 1, (256, 256), mask)
    for a, b in zip(first, ordered("emulate", "adversarial", 3, (256, 256), mask), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("relative", marks=pytest.mark.exhaustive),
        pytest.param("row", marks=pytest.mark.exhaustive),
    ],
)
def test_deterministic_bits_of_captured_gradients(name: str) -> None:
    first = ordered("emulate", "eager", 2, (256, 256), name=name)
    second = ordered("emulate", "adversarial", 3, (256, 256), name=name)
    assert all(map(torch.equal, first, second))


# --- compiled kernels


LENGTH = 256
HEADS = 2


def _per_head(scales: Tensor) -> Callable[..., Any]:
    return lambda s, b, h, q, kv: s * scales[h]


def _relative(bias: Tensor) -> Callable[..., Any]:
    return lambda s, b, h, q, kv: s + bias[h, q - kv + LENGTH - 1]


VARIANTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "plain": lambda: (None, None),
    "softcap": lambda: (mods.softcap(20.0), CAUSAL),
    "documents": lambda: (None, masks.document(torch.arange(LENGTH) // 100) & CAUSAL),
    "learned scale": lambda: (_per_head(torch.rand(HEADS, requires_grad=True)), CAUSAL),
    "learned bias": lambda: (
        _relative(torch.rand(HEADS, 2 * LENGTH - 1, requires_grad=True)),
        CAUSAL,
    ),
}


# What is known to spill, by assembler: 8 bytes.
SPILLS = {("plain", (256, 256)): "cu12"}


def clean(variant: tuple[Any, Any], dims: tuple[int, int], shared: int, *, fixed: bool) -> None:
    """Check that the main kernel of a backward spills no registers and serialises no products."""
    shapes = ((HEADS, dims[0]), (HEADS // shared, dims[0]), (HEADS // shared, dims[1]))
    qkv = [
        torch.zeros(1, h, LENGTH, d, dtype=torch.bfloat16, requires_grad=True) for h, d in shapes
    ]
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        out = flex_attention(
            *qkv, *variant, enable_gqa=True, backend="emulate", deterministic=fixed
        )
        out.sum().backward()
    (source,) = (s for s in sources if s.name.startswith("backward"))
    found = kernel.kernel(source)
    assert found.artifact.problems == ()
    assert [s.stack for s in found.stats] == [0]


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("name", "dims"),
    first_of([(n, d) for n in VARIANTS for d in ((192, 192), (256, 256))]),
)
def test_no_spills_and_no_serialised_products(
    name: str, dims: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    if SPILLS.get((name, dims)) in dsl_runtime.library().parts:
        request.applymarker(pytest.mark.xfail(strict=True, reason="8 bytes are spilled"))
    clean(VARIANTS[name](), dims, 1, fixed=False)


@pytest.mark.assembled
def test_a_fixed_order_spills_nothing() -> None:
    clean((None, CAUSAL), (256, 256), 1, fixed=True)


@pytest.mark.exhaustive
@pytest.mark.assembled
@pytest.mark.parametrize("fixed", sampled([(False,), (True,)], 2))
def test_shared_heads_as_well(fixed: bool) -> None:
    clean((None, CAUSAL), (256, 256), 2, fixed=fixed)


def test_every_head_dim_has_a_kernel() -> None:
    for head_dim in range(8, 257, 8):
        for value_dim in range(8, 257, 8):
            found = widths((head_dim, value_dim))
            assert found is not None
            if max(found) > 128:
                assert Hd256Config(head_dim=found[0], head_dim_v=found[1]).problem() is None
                assert block_kv(found, {}) == PLAIN.block_kv


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"head_dim": 96}, "96 and 256"),
        ({"block_q": 128}, "block_q=128"),
        ({"sum_order": "up"}, "sum_order"),
    ],
)
def test_sizes_that_do_not_work_are_named(sizes: dict[str, Any], named: str) -> None:
    assert named in str(Hd256Config(**sizes).problem())

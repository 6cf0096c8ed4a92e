"""Check the Hopper backward of biases to which the accumulator of S is initialised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import create_block_mask, flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import dsl_runtime, emulation, kernel
from tests.sampling import first_of, sampled
from tests.templates.backward_kit import BF16, CAUSAL, FP16, check, draw

LENGTH = 150  # three q blocks, of which the last one is incomplete
HEADS = 2
FULL = HEADS, LENGTH, LENGTH
TABLE, ROWS, SLOPES = torch.randn(FULL), torch.randn(LENGTH), torch.tensor([0.5, 0.25])
SHARED = torch.randn(LENGTH, LENGTH)
IDS = torch.arange(LENGTH, dtype=torch.int32) * 7 % 5

Mod = Callable[..., Any]
LEARNED: dict[str, tuple[Callable[[Tensor], Mod], tuple[int, ...]]] = {
    "by head": (lambda w: lambda s, b, h, q, kv: s + w[h, q, kv], FULL),
    "by batch element": (lambda w: lambda s, b, h, q, kv: s + w[b, h, q, kv], (1, *FULL)),
    "transposed": (lambda w: lambda s, b, h, q, kv: s + w[kv, q], (LENGTH, LENGTH)),
    "minus": (lambda w: lambda s, b, h, q, kv: s - w[h, q, kv], FULL),
    "shifted": (lambda w: lambda s, b, h, q, kv: s + w[q + 3, kv], (LENGTH + 3, LENGTH)),
    "with a slope": (
        lambda w: lambda s, b, h, q, kv: s + w[h, q, kv] + SLOPES[h] * (kv - q),
        FULL,
    ),
    "with a row": (lambda w: lambda s, b, h, q, kv: s + w[h, q, kv] + ROWS[q], FULL),
}
FROZEN: dict[str, Mod] = {
    "by head": lambda s, b, h, q, kv: s + TABLE[h, q, kv],
    "shared": lambda s, b, h, q, kv: s + SHARED[q, kv],
    "with a slope": lambda s, b, h, q, kv: s + TABLE[h, q, kv] + SLOPES[h] * (kv - q),
}
OTHERS: dict[str, Mod] = {
    "factor": lambda s, b, h, q, kv: s * TABLE[h, q, kv],
    "softcap": lambda s, b, h, q, kv: torch.tanh(s + TABLE[h, q, kv]),
    "table of pairs": lambda s, b, h, q, kv: s + TABLE[h, IDS[q], IDS[kv]],
    "distance": lambda s, b, h, q, kv: s + ROWS[torch.clamp(q - kv, 0, LENGTH - 1)],
    "row": lambda s, b, h, q, kv: s + ROWS[q],
}
DIAGONAL = create_block_mask(
    lambda b, h, q, kv: (q // 64 == kv // 64) & (q != 70), 1, 1, LENGTH, LENGTH, "cpu"
)


def main_source(mod: Mod, *, head_dim: int = 128, **options: Any) -> Any:
    """Return the source of the main kernel of a causal call's backward."""
    inputs = (
        torch.zeros(1, HEADS, LENGTH, head_dim, dtype=BF16, requires_grad=True) for _ in range(3)
    )
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        out = flex_attention(*inputs, mod, CAUSAL, backend="emulate", **options)
        out.sum().backward()
    (source,) = (s for s in sources if s.name.startswith("backward"))
    return source


def bias_is_first(mod: Mod, **options: Any) -> bool:
    return "('bias_first', True)" in main_source(mod, **options).key


def checked(name: str, mode: str = "eager", mask: Any = CAUSAL, **options: Any) -> None:
    """Check the gradients of a learned bias."""
    mod, shape = LEARNED[name]
    sizes = {
        name: options.pop(name) for name in ("dims", "heads", "batch", "dtype") if name in options
    }
    assert bias_is_first(mod(torch.randn(shape, requires_grad=True)))
    check(draw(LENGTH, **sizes), mod, mask, [torch.randn(shape)], mode, **options)


@pytest.mark.parametrize("name", first_of([(n,) for n in LEARNED]))
def test_gradients(name: str) -> None:
    checked(name)


@pytest.mark.parametrize(
    ("name", "sizes", "mask"),
    sampled(
        [
            ("by head", {"heads": (2, 1), "dtype": FP16}, masks.sliding_window(70)),
            ("by head", {"dims": (128, 128), "batch": (2, 2)}, CAUSAL),
            ("transposed", {"dims": (128, 64)}, None),
            ("by head", {"batch": (2, 2)}, DIAGONAL),  # work tiles of one q block
        ],
        4,
    ),
)
def test_in_all_orders(name: str, sizes: dict[str, Any], mask: Any) -> None:
    checked(name, "check", mask, **sizes)


@pytest.mark.parametrize(
    ("shape", "mod"),
    first_of(
        [
            ((HEADS, 192, 192), lambda w: lambda s, b, h, q, kv: s + w[h, q, kv]),
            ((192, 193), lambda w: lambda s, b, h, q, kv: s + w[q, kv + 1]),
        ]
    ),
)
def test_rows_in_whole_vectors(shape: tuple[int, ...], mod: Callable[[Tensor], Mod]) -> None:
    """Four neighbouring elements are added at once if they are aligned and inside the tensor."""
    check(draw(192), mod, CAUSAL, [torch.randn(shape)], "check")


@pytest.mark.parametrize("name", first_of([(n,) for n in FROZEN]))
@pytest.mark.parametrize("sizes", first_of([({"dims": (128, 128)},), ({"dims": (64, 64)},)]))
def test_frozen_bias(name: str, sizes: dict[str, Any]) -> None:
    assert bias_is_first(FROZEN[name])
    check(draw(LENGTH, **sizes), lambda: FROZEN[name], CAUSAL, mode="check")


@pytest.mark.exhaustive
def test_query_heads_that_share_a_kv_block() -> None:
    check(
        draw(LENGTH, dims=(128, 128), heads=(4, 1)), lambda: FROZEN["shared"], CAUSAL, mode="check"
    )


@pytest.mark.parametrize("scale", first_of([(0.0,), (-0.5,)]))
def test_scale(scale: float) -> None:
    """The bias is divided by the scale, which may be 0."""
    mod, shape = LEARNED["by head"]
    check(draw(LENGTH), mod, CAUSAL, [torch.randn(shape)], scale=scale)


@pytest.mark.parametrize("size", first_of([(-1e10,), (-1e30,), (1e12,)]))
def test_padded_rows_of_a_very_large_bias(size: float) -> None:
    """Rows whose output has no gradient add zeros, although their P is not exact."""
    mod, shape = LEARNED["by head"]
    inputs, weights = draw(LENGTH)
    for t in weights:
        t[:, :, 40:50] = 0
    bias = torch.randn(shape)
    bias[:, 40:50] = size
    check((inputs, weights), mod, CAUSAL, [bias])


@pytest.mark.parametrize("low", first_of([(-1e30,), (-torch.inf,)]))
def test_bias_as_mask(low: float) -> None:
    """A bias that is very low where a mask would be empty, also in whole rows of a block."""
    bias = torch.randn(FULL)
    bias[:, 64:100, :64] = low
    check(draw(LENGTH), lambda: lambda s, b, h, q, kv: s + bias[h, q, kv])


@pytest.mark.exhaustive
def test_in_a_fixed_order() -> None:
    mod, shape = LEARNED["by head"]
    torch.use_deterministic_algorithms(True)
    try:
        check(draw(LENGTH), mod, CAUSAL, [torch.randn(shape)])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", sampled([(n,) for n in OTHERS], 5))
def test_other_mods_are_computed_from_the_scores(name: str) -> None:
    assert not bias_is_first(OTHERS[name])


def test_a_bias_whose_index_reads_a_tensor() -> None:
    shape = 5, LENGTH, LENGTH
    mod = lambda w: lambda s, b, h, q, kv: s + w[IDS[q], q, kv]
    assert not bias_is_first(mod(torch.randn(shape, requires_grad=True)), head_dim=64)
    check(draw(LENGTH), mod, CAUSAL, [torch.randn(shape)])


@pytest.mark.parametrize(
    "options",
    first_of([({"head_dim": 192},), ({"dropout_p": 0.5},)]),
)
def test_other_calls_compute_it_from_the_scores(options: dict[str, Any]) -> None:
    assert not bias_is_first(FROZEN["by head"], **options)


@pytest.mark.exhaustive
@pytest.mark.assembled
@pytest.mark.parametrize("head_dim", sampled([(128,), (64,)], 2))
@pytest.mark.parametrize("name", sampled([(n,) for n in LEARNED], len(LEARNED)))
def test_learned_bias_without_spills(
    name: str, head_dim: int, request: pytest.FixtureRequest
) -> None:
    if name == "shifted" and (head_dim == 128 or "cu13" not in dsl_runtime.library().parts):
        request.applymarker(pytest.mark.xfail(strict=True, reason="8 bytes are spilled"))
    mod, shape = LEARNED[name]
    source = main_source(mod(torch.zeros(shape, requires_grad=True)), head_dim=head_dim)
    assert_no_spills(source)


@pytest.mark.exhaustive
@pytest.mark.assembled
@pytest.mark.parametrize("head_dim", sampled([(128,), (64,)], 2))
@pytest.mark.parametrize("name", sampled([(n,) for n in FROZEN], len(FROZEN)))
def test_frozen_bias_without_spills(name: str, head_dim: int) -> None:
    assert_no_spills(main_source(FROZEN[name], head_dim=head_dim))


def assert_no_spills(source: Any) -> None:
    found = kernel.kernel(source)
    assert found.artifact.problems == ()
    assert [s.stack for s in found.stats] == [0]

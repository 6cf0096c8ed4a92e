"""Check gradients of tables of pairs that the Hopper backward sums over classes in an MMA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import dsl_runtime, emulation, kernel
from attnkit.splice import backward_call
from attnkit.splice.class_sums import mean_run
from attnkit.tracing.guards import trace_cached
from tests.sampling import first_of, sampled
from tests.templates.backward_kit import BF16, CAUSAL, FP16, check, draw

LENGTH = 200
HEADS = 2
NUMBERS = torch.arange(LENGTH, dtype=torch.int32)
TYPES = NUMBERS * 37 % 64
FEW = NUMBERS * 7 % 5
SIGNED = FEW.long() - 5  # negative indices count from the end
SORTED = NUMBERS // 90
SIDE = torch.randn(LENGTH)

Mod = Callable[..., Any]
MODS: dict[str, tuple[Callable[[Tensor], Mod], tuple[int, ...]]] = {
    "types": (lambda w: lambda s, b, h, q, kv: s + w[h, TYPES[q], TYPES[kv]], (2, 64, 64)),
    "documents of rows": (lambda w: lambda s, b, h, q, kv: s + w[SORTED[q], FEW[kv]], (3, 5)),
    "column first": (lambda w: lambda s, b, h, q, kv: s + w[FEW[kv], TYPES[q]], (5, 64)),
    "negative": (lambda w: lambda s, b, h, q, kv: s + w[-1 - h, FEW[q], SIGNED[kv]], (3, 5, 5)),
    "every row": (lambda w: lambda s, b, h, q, kv: s + SIDE[kv] + w[q, kv // 9], (LENGTH, 40)),
}


def checked(name: str, mode: str = "eager", mask: Any = CAUSAL, **sizes: Any) -> None:
    mod, shape = MODS[name]
    assert in_mma(mod, shape, sizes.get("dims", (64, 64))[0])
    check(draw(LENGTH, **sizes), mod, mask, [torch.randn(shape)], mode)


@pytest.mark.parametrize("name", first_of([(n,) for n in MODS]))
def test_gradients(name: str) -> None:
    checked(name)


@pytest.mark.parametrize(
    ("sizes", "mask"),
    sampled(
        [
            ({"heads": (2, 1), "dtype": FP16}, masks.sliding_window(70)),  # shared dK and dV
            ({"dims": (128, 128), "batch": (2, 2)}, CAUSAL),
        ],
        2,
    ),
)
def test_in_all_orders(sizes: dict[str, Any], mask: Any) -> None:
    checked("types", "check", mask, **sizes)


OTHERS: dict[str, tuple[Callable[[Tensor], Mod], tuple[int, ...]]] = {
    "many classes": (lambda w: lambda s, b, h, q, kv: s + w[FEW[q], kv], (5, LENGTH)),
    "sorted": (lambda w: lambda s, b, h, q, kv: s + w[SORTED[q], SORTED[kv]], (3, 3)),
    "factor": (lambda w: lambda s, b, h, q, kv: s * w[FEW[q], FEW[kv]], (5, 5)),
    "read twice": (lambda w: lambda s, b, h, q, kv: s + w[FEW[q], FEW[kv]] + w[0, FEW[kv]], (5, 5)),
    "minus": (lambda w: lambda s, b, h, q, kv: s - w[FEW[q], FEW[kv]], (5, 5)),
    "distance": (lambda w: lambda s, b, h, q, kv: s + w[h, (q - kv) // 9], (2, 30)),
}


@pytest.mark.parametrize("name", sampled([(n,) for n in OTHERS], 6))
def test_other_tables_are_summed_by_threads(name: str) -> None:
    assert not in_mma(*OTHERS[name], 64)


def test_odd_rows() -> None:
    """Entries of neighbouring rows are in different banks."""
    for columns in (5, 64):
        table = torch.randn(2, 3, columns, requires_grad=True)
        copy = backward_call.odd_rows(table)
        assert torch.equal(copy, table)
        assert copy.stride(-2) % 2 == 1
        assert not copy.requires_grad


@pytest.mark.exhaustive
def test_another_learned_tensor_shifts_the_rows() -> None:
    shift = torch.randn(LENGTH, requires_grad=True)

    def mod(w: Tensor) -> Mod:
        return lambda s, b, h, q, kv: s + shift[q] + w[h, TYPES[q], TYPES[kv]]

    assert in_mma(mod, MODS["types"][1], 64)
    check(draw(LENGTH), mod, CAUSAL, [torch.randn(MODS["types"][1])], "eager")


def test_mean_run() -> None:
    ids = torch.tensor([0] * 50 + [1] * 100 + [0] * 50)
    traced = trace_cached(lambda s, b, h, q, kv: s + SIDE[ids[kv]], "score", ids.device)
    index, tensors = traced.root.args[1].args[0], traced.tensors
    assert mean_run(index, tensors, LENGTH, ids.device) == pytest.approx(LENGTH / 3)
    assert mean_run(index, [0 * t for t in tensors], LENGTH, ids.device) == LENGTH


CALLS: list[tuple[int, dict[str, Any]]] = [
    (64, {"deterministic": True}),
    (192, {}),
    (64, {"dropout_p": 0.5}),
    (64, {"normalization": "sigmoid"}),
    (64, {"backend": "emulate:sm_100a"}),
]


@pytest.mark.parametrize(("head_dim", "options"), sampled(CALLS, 5))
def test_other_calls_sum_by_threads(head_dim: int, options: dict[str, Any]) -> None:
    mod, shape = MODS["types"]
    assert not in_mma(mod, shape, head_dim, **options)


def backward_source(
    build: Callable[[Tensor], Mod],
    shape: tuple[int, ...],
    head_dim: int,
    backend: str = "emulate",
    **options: Any,
) -> kernel.Source:
    """Return the source of the main kernel of a causal call's backward."""
    table = torch.zeros(shape, requires_grad=True)
    inputs = (
        torch.zeros(1, HEADS, LENGTH, head_dim, dtype=BF16, requires_grad=True) for _ in range(3)
    )
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        out = flex_attention(*inputs, build(table), CAUSAL, backend=backend, **options)
        out.sum().backward()
    (source,) = (s for s in sources if s.name.startswith("backward"))
    return source


def in_mma(*arguments: Any, **options: Any) -> bool:
    return "('one_hot', True)" in backward_source(*arguments, **options).key


@pytest.mark.exhaustive
@pytest.mark.assembled
@pytest.mark.parametrize("head_dim", sampled([(128,), (64,)], 2))
def test_no_spills_and_no_serialised_products(
    head_dim: int, request: pytest.FixtureRequest
) -> None:
    if head_dim == 128 and "cu13" in dsl_runtime.library().parts:
        request.applymarker(pytest.mark.xfail(strict=True, reason="72 bytes are spilled"))
    found = kernel.kernel(backward_source(*MODS["types"], head_dim))
    assert found.artifact.problems == ()
    assert [s.stack for s in found.stats] == [0]

"""Check that compiled Hopper backward kernels spill no registers and serialise no products.

No GPU is needed: emulated calls request the same kernels as calls on a GPU, and nothing is executed
here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from attnkit import flex_attention, masks, mods

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation, kernel
from tests.sampling import first_of, sampled

LENGTH = 256
HEADS = 2
CAUSAL = masks.causal()
IDS = torch.arange(LENGTH) // 100


def _scaled() -> tuple[Any, Any]:
    scale = torch.ones(HEADS, requires_grad=True)
    return lambda s, b, h, q, kv: s * scale[h], CAUSAL


def _biased() -> tuple[Any, Any]:
    bias = torch.zeros(HEADS, 2 * LENGTH, requires_grad=True)
    return lambda s, b, h, q, kv: s + bias[h, q - kv + LENGTH], CAUSAL


def _row_scaled() -> tuple[Any, Any]:
    scale = torch.ones(HEADS, LENGTH, requires_grad=True)
    return lambda s, b, h, q, kv: s * scale[h, q], CAUSAL


def _gated() -> tuple[Any, Any]:
    gate = torch.zeros(HEADS, LENGTH, requires_grad=True)
    return lambda s, b, h, q, kv: s + gate[h, q] - gate[h, kv], CAUSAL


PAIRS = torch.arange(LENGTH * LENGTH).view(LENGTH, LENGTH) % 3 > 0


VARIANTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "plain": lambda: (None, None),
    "causal": lambda: (None, CAUSAL),
    "window": lambda: (None, CAUSAL & masks.sliding_window(100)),
    "documents": lambda: (None, masks.document(IDS) & CAUSAL),
    "alibi": lambda: (mods.alibi(HEADS), CAUSAL),
    "table of pairs": lambda: (None, lambda b, h, q, kv: PAIRS[q, kv]),
    "pattern": lambda: (None, lambda b, h, q, kv: (q // 7 + kv // 5) % 3 != 0),
    "softcap": lambda: (mods.softcap(20.0), CAUSAL),
    "softcap and alibi": lambda: (mods.compose(mods.softcap(20.0), mods.alibi(HEADS)), CAUSAL),
    "learned scale": _scaled,
    "learned relative bias": _biased,
    "learned row scale": _row_scaled,
    "forgetting gate": _gated,
}
# the widest alone, to save time
ONE_WIDTH = ("window", "alibi", "pattern", "learned row scale", "forgetting gate")


# a table of pairs spills 184 bytes at 64, in tiles of 128 rows
CASES = [(n, d) for n in VARIANTS for d in (64, 128) if (n, d) != ("table of pairs", 64)]
CASES = [(n, d) for n, d in CASES if d == 128 or n not in ONE_WIDTH]


ORDERED = ("causal", "documents", "softcap", "learned scale", "learned relative bias")


@pytest.mark.assembled
@pytest.mark.parametrize(("name", "head_dim"), sampled(CASES, 13))
def test_no_spills_and_no_serialised_products(name: str, head_dim: int) -> None:
    clean(name, head_dim)


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("name", "head_dim"), sampled([(n, d) for n in ORDERED for d in (64, 128)], 11)
)
def test_sums_in_a_fixed_order_spill_nothing(name: str, head_dim: int) -> None:
    clean(name, head_dim, deterministic=True)


@pytest.mark.assembled
@pytest.mark.parametrize(
    ("head_dim", "normalization"), first_of(product([64, 128, 256], ["sigmoid", "none"]))
)
def test_weights_without_a_softmax(head_dim: int, normalization: str) -> None:
    clean("causal", head_dim, normalization=normalization)


def clean(name: str, head_dim: int, **options: Any) -> None:
    score, mask = VARIANTS[name]()
    inputs = (
        torch.zeros(1, HEADS, LENGTH, head_dim, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        out = flex_attention(*inputs, score, mask, backend="emulate", **options)
        out.sum().backward()
    (source,) = (s for s in sources if s.name.startswith("backward"))
    found = kernel.kernel(source)
    assert found.artifact.arch == "sm_90a"
    assert found.artifact.problems == ()
    assert [s.stack for s in found.stats] == [0]

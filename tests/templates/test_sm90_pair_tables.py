"""Check the Hopper forward with a table of pairs in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation, kernel
from tests.sampling import first_of, sampled
from tests.templates.test_sm90_forward import BF16, check, draw

LENGTH = 200
CAUSAL = masks.causal()
NUMBERS = torch.arange(LENGTH, dtype=torch.int32)
TYPES = NUMBERS * 37 % 64
FEW = NUMBERS * 7 % 5
SIGNED = FEW.long() - 5  # negative indices count from the end
SORTED = NUMBERS // 90


MORE = torch.randn(64, 64)
Mod = Callable[..., Any]
Kinds = dict[str, tuple[Callable[[Any], Mod], tuple[int, ...]]]
MODS: Kinds = {  # the mod of a table, and the table's shape
    "64 types": (lambda w: lambda s, b, h, q, kv: s + w[h, TYPES[q], TYPES[kv]], (2, 64, 64)),
    "one table": (lambda w: lambda s, b, h, q, kv: s + w[FEW[q], FEW[kv]], (5, 5)),
    "column first": (lambda w: lambda s, b, h, q, kv: s + w[TYPES[kv], FEW[q]], (64, 5)),
    "factor": (lambda w: lambda s, b, h, q, kv: s * w[h, SORTED[q], TYPES[kv]], (2, 3, 64)),
    "negative": (lambda w: lambda s, b, h, q, kv: s + w[-1 - h, SIGNED[q], FEW[kv]], (3, 5, 5)),
    "half precision": (lambda w: _of_sorted(w.half()), (3, 3)),
    "two tables": (lambda w: _times_more(w), (5, 5)),
    "strided": (lambda w: lambda s, b, h, q, kv: s + w.mT[FEW[q], TYPES[kv]], (64, 64)),
    "no score": (lambda w: lambda s, b, h, q, kv: w[h, FEW[q], SORTED[kv]], (2, 5, 3)),
    "b and h": (lambda w: lambda s, b, h, q, kv: s + w[b, h, FEW[q], FEW[kv]], (2, 2, 5, 5)),
}


def _of_sorted(w: Tensor) -> Mod:
    return lambda s, b, h, q, kv: s + w[SORTED[q], SORTED[kv]]


def _times_more(w: Tensor) -> Mod:
    return lambda s, b, h, q, kv: torch.tanh(s + w[FEW[q], FEW[kv]]) * MORE[TYPES[q], TYPES[kv]]


def modded(kinds: Kinds, name: str) -> Mod:
    build, shape = kinds[name]
    return build(torch.randn(shape))


@pytest.mark.parametrize("name", first_of([(n,) for n in MODS]))
def test_table(name: str) -> None:
    """Several work tiles follow one another in a CTA, with different heads."""
    mod = modded(MODS, name)
    assert in_shared_memory(mod, 64)
    check(draw(LENGTH, heads=(2, 2), batch=(2, 2)), mod, CAUSAL)


def test_each_column_has_its_own_entry() -> None:
    table = torch.randn(5, 60)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return s + table[FEW[q], kv]

    check(draw(LENGTH, 60), mod)


def test_head_dim_128() -> None:
    check(draw(LENGTH, dims=(128, 128)), modded(MODS, "64 types"), CAUSAL)


OTHERS: Kinds = {
    "large": (lambda w: lambda s, b, h, q, kv: s + w[q // 4, FEW[kv]], (65, 5)),
    "wide": (lambda w: lambda s, b, h, q, kv: s + w[FEW[q], kv // 4], (5, 65)),
    "twice": (lambda w: lambda s, b, h, q, kv: s + w[FEW[q], FEW[kv]] + w[FEW[kv], 0], (5, 5)),
    "distances": (lambda w: lambda s, b, h, q, kv: s + w[FEW[q], q - kv + LENGTH], (5, 400)),
    "of an element": (lambda w: lambda s, b, h, q, kv: s + w[(q - kv) // 99, FEW[kv]], (5, 5)),
    "integers": (lambda w: _of_sorted(w.int()), (3, 3)),
}


@pytest.mark.parametrize("name", first_of((case,) for case in list(OTHERS)))
def test_other_loads_read_global_memory(name: str) -> None:
    assert not in_shared_memory(modded(OTHERS, name), 64)


def in_shared_memory(mod: Mod, head_dim: int) -> bool:
    """Return whether the kernel of a causal call copies the table of `mod`."""
    inputs = (torch.zeros(2, 2, LENGTH, head_dim, dtype=BF16) for _ in range(3))
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        flex_attention(*inputs, mod, CAUSAL, backend="emulate")
    (source,) = (s for s in sources if s.name.startswith("forward"))
    return "('pair_table', True)" in source.key


@pytest.mark.assembled
@pytest.mark.parametrize("head_dim", sampled([(128,), (64,), (192,), (256,)], 4))
def test_no_spills(head_dim: int) -> None:
    inputs = (torch.zeros(1, 2, LENGTH, head_dim, dtype=BF16) for _ in range(3))
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        flex_attention(*inputs, modded(MODS, "64 types"), CAUSAL, backend="emulate")
    (source,) = (s for s in sources if s.name.startswith("forward"))
    found = kernel.kernel(source)
    assert found.artifact.problems == ()
    assert [s.stack for s in found.stats] == [0]

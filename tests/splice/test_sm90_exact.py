"""The Hopper kernels in the emulator are exact: drawn variants, sums in order, captured numbers.

As on a GPU (`tests/gpu`), at sizes that the emulator runs in seconds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import masks
from attnkit.testing import Case, Limits
from attnkit.variant import Variant
from tests.gpu import backward_kit, cute_kit, test_compositions

pytest.importorskip("cutlass")
FP16 = torch.float16


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_kit, "DEVICE", "cpu")
    monkeypatch.setattr(cute_kit, "BACKEND", "emulate")


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_drawn_variants(dims: tuple[int, int]) -> None:
    limits = Limits(q_len=(1, 140), kv_len=(1, 140), batch=(1, 2), heads=(1, 2))
    test_compositions.draw(sum(dims), limits, dims, examples=1)


@pytest.mark.parametrize("dims", [(64, 128), (128, 64)], ids=str)
def test_shared_heads_in_a_fixed_order(dims: tuple[int, int]) -> None:
    case = Case(
        70, 150, batch=2, heads=2, head_dim=dims[0], value_dim=dims[1], dtype=FP16
    )  # kv heads and batch elements are shared
    backward_kit.check(Variant(None, masks.causal()), case, deterministic=True)


@pytest.mark.parametrize("lengths", [(13, 49), (70, 145)], ids=str)
def test_learned_tables_at_ragged_ends(lengths: tuple[int, int]) -> None:
    """Sums along diagonals, rows and columns of which some lie beyond the end."""
    random = torch.Generator().manual_seed(1)
    along, rows, columns = (torch.randn(n, generator=random, requires_grad=True) for n in [300] * 3)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * (1 + rows[q] / 4) + along[q - kv] + columns[kv]

    case = Case(*lengths, head_dim=64, value_dim=64, dtype=FP16)
    backward_kit.check(Variant(mod), case)


def test_captured_numbers() -> None:
    """Tensors without dimensions: bounds of a mask, parts of an index, learned."""
    table, shift = torch.randn(400), torch.tensor(3)
    window, gain = torch.tensor(40), torch.tensor(0.7, requires_grad=True)

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * gain + table[q - kv + shift]

    variant = Variant(mod, lambda b, h, q, kv: (q - kv).abs() < window)
    backward_kit.check(variant, Case(100, 140, head_dim=64, value_dim=64, dtype=FP16))

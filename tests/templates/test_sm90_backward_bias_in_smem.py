"""Check the Hopper backward of biases that an idle warp copies to shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import create_block_mask, flex_attention

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation, kernel
from attnkit.splice import copied_bias
from tests.sampling import diagonal, first_of
from tests.templates.backward_kit import BF16, CAUSAL, FP16, check, draw, observed

Q_LEN, KV_LEN = 136, 264
DTYPES = [torch.float32, BF16, FP16]
Mod = Callable[..., Any]


def table(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers, by default one for each head, row and column."""
    return torch.randn(*(shape or (2, Q_LEN, KV_LEN))).to(dtype)


def by_head(bias: Tensor) -> Mod:
    return lambda s, b, h, q, kv: s + bias[h, q, kv]


BIAS, ROWS = table(), torch.randn(Q_LEN)
BY_BATCH, WIDER = table(2, 2, Q_LEN, KV_LEN), table(2, Q_LEN, KV_LEN + 4)
LATER = table(Q_LEN + 3, KV_LEN)  # read from row 3 on, as by queries after a cache
FROZEN: dict[str, Mod] = {
    "by batch element": lambda s, b, h, q, kv: s + BY_BATCH[b, h, q, kv],
    "of a product": lambda s, b, h, q, kv: s - 0.5 * BIAS[h, q, kv],
    "with a row": lambda s, b, h, q, kv: s + BIAS[h, q, kv] + ROWS[q],
    "of a wider table": by_head(WIDER[:, :, :KV_LEN]),
}
LEARNED: dict[str, Callable[[Tensor], Mod]] = {
    "by head": by_head,
    "with a row": lambda w: lambda s, b, h, q, kv: s + w[h, q, kv] + ROWS[q],
}


def main_source(mod: Mod, *, head_dim: int = 128) -> Any:
    """Return the source of the main kernel of a causal call's backward."""
    query, key, value = (
        torch.zeros(1, 2, n, head_dim, dtype=BF16, requires_grad=True)
        for n in (Q_LEN, KV_LEN, KV_LEN)
    )
    with emulation.session(execute=False), kernel.requested_sources() as sources:
        out = flex_attention(query, key, value, mod, CAUSAL, backend="emulate")
        out.sum().backward()
    (source,) = (s for s in sources if s.name.startswith("backward"))
    return source


def is_copied(mod: Mod, **options: Any) -> bool:
    return "'bias_bytes'" in main_source(mod, **options).key


@pytest.mark.parametrize(("dim", "dtype"), diagonal([128, 64], DTYPES))
def test_frozen_bias(dim: int, dtype: torch.dtype) -> None:
    mod = by_head(table(dtype=dtype))
    assert is_copied(mod, head_dim=dim)
    check(draw(Q_LEN, KV_LEN, dims=(dim, dim)), lambda: mod, CAUSAL, mode="check")


@pytest.mark.parametrize(("dim", "ctas"), diagonal([128, 64], [1, 3]))
def test_work_tiles_that_follow_each_other(
    dim: int, ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles of the bias are where K of the next work tile will be."""
    observed(monkeypatch, ctas)
    check(
        draw(Q_LEN, KV_LEN, dims=(dim, dim), batch=(2, 2)), by_head, CAUSAL, [table()],
        mode="check",
    )  # fmt: skip


@pytest.mark.parametrize("name", first_of([(n,) for n in FROZEN]))
def test_mods(name: str) -> None:
    assert is_copied(FROZEN[name])
    check(draw(Q_LEN, KV_LEN, dims=(128, 128)), lambda: FROZEN[name], CAUSAL)


@pytest.mark.parametrize("name", first_of([(n,) for n in LEARNED]))
def test_learned_bias(name: str) -> None:
    assert is_copied(LEARNED[name](table().requires_grad_()))
    check(draw(Q_LEN, KV_LEN, batch=(2, 2)), LEARNED[name], CAUSAL, [table()])


def _short(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Keep one, two or three q blocks of a kv block; one kv block is empty."""
    return ((kv < 128) & (q < 64)) | ((kv >= 256) & (q < 100 + 70 * h))


MASKS: dict[str, Any] = {
    "evaluated for each score": lambda b, h, q, kv: (q + kv) % 3 > 0,
    "none": None,
    "short work tiles": create_block_mask(_short, None, 2, Q_LEN, KV_LEN, device="cpu"),
}


@pytest.mark.parametrize("name", first_of([(n,) for n in MASKS]))
def test_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    observed(monkeypatch, 2)
    check(draw(Q_LEN, KV_LEN, dims=(128, 128)), by_head, MASKS[name], [table()], mode="check")


@pytest.mark.parametrize("dim", [128])
def test_query_heads_that_share_a_kv_block(dim: int) -> None:
    mod = lambda s, b, h, q, kv: s + LATER[q + 3, kv]
    inputs = draw(Q_LEN, KV_LEN, dims=(dim, dim), heads=(4, 1))
    check(inputs, lambda: mod, CAUSAL, mode="check")


@pytest.mark.parametrize(
    ("lengths", "dtype"),
    [((130, 64), torch.float32), ((64, 500), torch.float32), ((64, 500), BF16)],
)
def test_lengths(lengths: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows and columns beyond the tensors have a bias of zero."""
    q_len, kv_len = lengths
    width = -(-kv_len // 8) * 8  # rows of a multiple of 16 bytes
    bias = table(2, q_len, width, dtype=dtype)[:, :, :kv_len]
    check(draw(q_len, kv_len, dims=(128, 128)), lambda: by_head(bias))


@pytest.mark.parametrize("dtype", [torch.float32, FP16])
def test_other_alignment(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for aligned rows gets the address of other rows in a later call."""
    monkeypatch.setattr(copied_bias, "begins_aligned", lambda t: True)
    mod = by_head(table(2, Q_LEN, KV_LEN + 16, dtype=dtype)[:, :, 1 : KV_LEN + 1])
    assert is_copied(mod)
    check(draw(Q_LEN, KV_LEN, dims=(128, 128)), lambda: mod, CAUSAL)


@pytest.mark.parametrize("scale", [0.0])
def test_scale(scale: float) -> None:
    check(draw(Q_LEN, KV_LEN, dims=(128, 128)), by_head, CAUSAL, [table()], scale=scale)


def test_rows_that_are_not_aligned_are_not_copied() -> None:
    """The forward's tests have more such biases; both directions decide by the same function."""
    assert not is_copied(by_head(table(2, Q_LEN, 265)))


def test_sums_in_a_fixed_order_do_not_copy() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_copied(by_head(BIAS))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.exhaustive
@pytest.mark.assembled
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.float32), (128, BF16), (64, torch.float32)])
def test_no_spills(dim: int, dtype: torch.dtype, learned: bool) -> None:
    found = kernel.kernel(
        main_source(by_head(table(dtype=dtype).requires_grad_(learned)), head_dim=dim)
    )
    assert found.artifact.problems == ()
    assert [s.stack for s in found.stats] == [0]

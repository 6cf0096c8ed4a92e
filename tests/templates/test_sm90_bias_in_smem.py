"""Check the Hopper forward of biases that idle warps copy to shared memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnkit import AuxRequest, create_block_mask, flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit.kernel import kernel as compiled_kernel
from attnkit.splice import copied_bias
from tests.sampling import diagonal, first_of, sampled
from tests.templates.test_sm90_bias_first import source_of
from tests.templates.test_sm90_forward import BF16, FP16, check, close, draw

CAUSAL = masks.causal()
Q_LEN, KV_LEN = 200, 264
DTYPES = [torch.float32, BF16, FP16]


def table(dtype: torch.dtype = torch.float32, *shape: int) -> Tensor:
    """Return random numbers, by default one for each head, row and column."""
    return torch.randn(*(shape or (6, Q_LEN, KV_LEN))).to(dtype)


def by_head(bias: Tensor) -> Any:
    return lambda s, b, h, q, kv: s + bias[h, q, kv]


BIAS = table()
BY_BATCH = table(torch.float32, 2, 2, Q_LEN, KV_LEN)
LATER = table(torch.float32, Q_LEN + 3, KV_LEN)  # read from row 3 on, as by queries after a cache
SHARED = table(torch.float32, 1, Q_LEN, KV_LEN).expand(6, -1, -1)  # with a stride of 0
ROWS = torch.randn(Q_LEN)
WIDER = table(torch.float32, 6, Q_LEN, KV_LEN + 4)
MODS: dict[str, Any] = {
    "by batch element": lambda s, b, h, q, kv: s + BY_BATCH[b, h % 2, q, kv],
    "later rows": lambda s, b, h, q, kv: s + LATER[q + 3, kv],
    "rows upwards": lambda s, b, h, q, kv: s + LATER[Q_LEN - q, kv],
    "of a product": lambda s, b, h, q, kv: s - 0.5 * BIAS[h, q, kv],
    "with a row": lambda s, b, h, q, kv: s + BIAS[h, q, kv] + ROWS[q],
    "of all heads": by_head(SHARED),
    "of a wider table": by_head(WIDER[:, :, :KV_LEN]),
}


def is_copied(*arguments: Any, **options: Any) -> bool:
    return "'bias_stages'" in source_of(*arguments, **options).key


@pytest.mark.parametrize(("dim", "dtype"), diagonal([128, 64, 96], DTYPES))
def test_heads_that_change_between_work_tiles(dim: int, dtype: torch.dtype) -> None:
    """One CTA computes work tiles of several heads, one after the other."""
    mod = by_head(table(dtype))
    assert is_copied(mod, dim)
    check(draw(Q_LEN, KV_LEN, dims=(dim, dim), heads=(4, 2)), mod, CAUSAL, ctas=1)


@pytest.mark.parametrize("name", first_of([(n,) for n in MODS]))
def test_mods(name: str) -> None:
    assert is_copied(MODS[name])
    check(draw(Q_LEN, KV_LEN, batch=(2, 2)), MODS[name], CAUSAL)


def _every_third(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q + kv) % 3 > 0


MASKS: dict[str, Any] = {
    "evaluated for each score": _every_third,
    "tiles without blocks": lambda b, h, q, kv: (q >= kv) & ((q < 128) | (h == 1)),
    "none": None,
    "lists": create_block_mask(_every_third, None, None, Q_LEN, KV_LEN, device="cpu"),
}


@pytest.mark.parametrize("name", first_of([(n,) for n in MASKS]))
def test_masks(name: str) -> None:
    check(draw(Q_LEN, KV_LEN), by_head(BIAS), MASKS[name], ctas=2)


@pytest.mark.parametrize("lengths", [(130, 64), (64, 500)])
@pytest.mark.parametrize("dtype", first_of([(d,) for d in DTYPES]))
def test_lengths(lengths: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows and columns beyond the tensors have a bias of zero."""
    q_len, kv_len = lengths
    width = -(-kv_len // 8) * 8  # rows of a multiple of 16 bytes
    bias = table(dtype, 2, q_len, width)[:, :, :kv_len]
    check(draw(q_len, kv_len, dims=(128, 128)), by_head(bias))


@pytest.mark.parametrize("dtype", sampled([(d,) for d in DTYPES], 2))
def test_ends_inside_a_copy(dtype: torch.dtype) -> None:
    """The last block is copied number by number, and nothing behind the tensor is read."""
    bias = torch.empty(2 * 72 * 264 - 3, dtype=dtype).normal_()
    bias = bias.as_strided((2, 72, 261), (72 * 264, 264, 1))
    check(draw(72, 261, dims=(128, 128)), by_head(bias))


@pytest.mark.parametrize("dtype", first_of([(d,) for d in DTYPES]))
def test_other_alignment(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for aligned rows gets the address of other rows in a later call."""
    monkeypatch.setattr(copied_bias, "begins_aligned", lambda t: True)
    mod = by_head(table(dtype, 2, Q_LEN, KV_LEN + 16)[:, :, 1 : KV_LEN + 1])
    assert is_copied(mod)
    check(draw(Q_LEN, KV_LEN, dims=(128, 128)), mod, CAUSAL)


@pytest.mark.parametrize("first", [0, 1])
def test_alignments_in_turn(first: int) -> None:
    """Views of one table, with the same strides."""
    bias = table(BF16, 2, 72, 136)
    for start in (first, 1 - first):
        mod = by_head(bias[:, :, start : start + 128])
        check(draw(72, 128, dims=(128, 128)), mod, CAUSAL)


@pytest.mark.parametrize("scale", first_of([(0.0,), (-0.5,), (4.0,)]))
def test_scale(scale: float) -> None:
    check(draw(Q_LEN, KV_LEN), by_head(BIAS), CAUSAL, scale=scale, mode="eager")


@pytest.mark.parametrize("low", first_of([(-torch.inf,), (-1e30,)]))
def test_bias_as_mask(low: float) -> None:
    """A bias that is very low in whole blocks of some rows."""
    bias = BIAS.clone()
    bias[:, 64:100, :128] = low
    check(draw(Q_LEN, KV_LEN), by_head(bias), mode="eager")


@pytest.mark.parametrize(
    "aux", first_of([(AuxRequest(entropy=True),), (AuxRequest(max_scores=True),)])
)
def test_statistics(aux: AuxRequest) -> None:
    qkv = draw(Q_LEN, KV_LEN, heads=(2, 2))
    options: Any = {"score_mod": by_head(BIAS), "block_mask": CAUSAL, "return_aux": aux}
    assert is_copied(options["score_mod"], 64, return_aux=aux)
    _, found = flex_attention(*qkv, **options, backend="emulate")
    wide = tuple(t.double() for t in qkv)
    _, exact = flex_attention(*wide, **options, backend="eager")
    _, dense = flex_attention(*qkv, **options, backend="eager")
    for name in ("entropy", "max_scores"):
        if getattr(aux, name):
            close(name, *(getattr(x, name) for x in (found, exact, dense)))


ENTROPY: dict[str, Any] = {"return_aux": AuxRequest(entropy=True)}
ORDER = torch.randperm(Q_LEN)
OTHER = table(torch.float32, 6, Q_LEN, KV_LEN)
OTHERS: dict[str, Any] = {
    "rows of odd length": by_head(table(torch.float32, 6, Q_LEN, 265)),
    "rows of 8 bytes more": by_head(table(BF16, 6, Q_LEN, 268)),
    "transposed": by_head(table(torch.float32, 6, KV_LEN, Q_LEN).mT),
    "later columns": lambda s, b, h, q, kv: s + WIDER[h, q, kv + 4],
    "a row in any order": lambda s, b, h, q, kv: s + BIAS[h, ORDER[q], kv],
    "two biases": lambda s, b, h, q, kv: s + BIAS[h, q, kv] + OTHER[h, q, kv],
    "not aligned": by_head(table(torch.float32, 6, Q_LEN, 276)[:, :, 1:265]),
    "of 8 bytes": by_head(table(torch.float64)),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_other_biases_are_not_copied(name: str) -> None:
    assert not is_copied(OTHERS[name])


@pytest.mark.parametrize("options", [{"dropout_p": 0.25}, {"head_dim": 192}])
def test_other_calls_do_not_copy(options: dict[str, Any]) -> None:
    assert not is_copied(by_head(BIAS), **options)


@pytest.mark.exhaustive
@pytest.mark.assembled
@pytest.mark.parametrize(
    ("dim", "dtype", "options"),
    [(dim, dtype, {}) for dim in (128, 64, 96) for dtype in DTYPES]
    + [(dim, dtype, ENTROPY) for dim, dtype in zip((128, 64, 96), DTYPES, strict=True)],
)
def test_no_spills_and_no_serialised_products(
    dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    found = compiled_kernel(source_of(by_head(table(dtype)), dim, **options))
    assert found.artifact.problems == ()
    assert [s.stack for s in found.stats] == [0]

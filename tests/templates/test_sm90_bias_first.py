"""Check the Hopper forward of biases to which the accumulator of S is initialised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnkit import AuxRequest, flex_attention, masks

pytest.importorskip("cutlass", reason="the DSL exists for Linux only")

from attnkit.jit import emulation
from attnkit.jit.kernel import kernel as compiled_kernel
from attnkit.jit.kernel import requested_sources
from tests.sampling import diagonal, first_of, sampled
from tests.templates.test_sm90_forward import BF16, FP16, check, close, draw

CAUSAL = masks.causal()
Q_LEN, KV_LEN = 200, 262  # rows of 8 bytes more than whole copies, see `copied_bias`
BIAS, BY_BATCH = torch.randn(6, Q_LEN, KV_LEN), torch.randn(2, 2, Q_LEN, KV_LEN)
ROWS = torch.randn(Q_LEN)
LATER = torch.randn(Q_LEN + 3, KV_LEN)  # read from row 3 on, as by queries that follow a cache
MODS: dict[str, Any] = {
    "by head": lambda s, b, h, q, kv: s + BIAS[h, q, kv],
    "by batch element": lambda s, b, h, q, kv: s + BY_BATCH[b, h % 2, q, kv],
    "shifted": lambda s, b, h, q, kv: s + LATER[q + 3, kv],
    "transposed": lambda s, b, h, q, kv: s - BIAS.mT[h, kv, q],
    "with a row": lambda s, b, h, q, kv: s + BIAS[h, q, kv] + ROWS[q],
    "of the tensors' dtype": lambda s, b, h, q, kv: s + BIAS.to(BF16)[h, q, kv],
}


def source_of(mod: Any, head_dim: int = 128, **options: Any) -> Any:
    """Return the source of the forward kernel of a causal call."""
    inputs = (torch.zeros(1, 2, n, head_dim, dtype=BF16) for n in (Q_LEN, KV_LEN, KV_LEN))
    with emulation.session(execute=False), requested_sources() as sources:
        flex_attention(*inputs, mod, CAUSAL, backend="emulate", **options)
    (source,) = (s for s in sources if s.name.startswith("forward"))
    return source


def bias_is_first(*arguments: Any, **options: Any) -> bool:
    return "('bias_first', True)" in source_of(*arguments, **options).key


@pytest.mark.parametrize(("dim", "dtype"), diagonal([128, 64, 96], [BF16, FP16]))
def test_heads_that_change_between_work_tiles(dim: int, dtype: torch.dtype) -> None:
    """One CTA computes work tiles of several heads, one after the other."""
    qkv = draw(Q_LEN, KV_LEN, dims=(dim, dim), heads=(4, 2), dtype=dtype)
    check(qkv, MODS["by head"], CAUSAL, ctas=1)


@pytest.mark.parametrize("name", first_of([(n,) for n in MODS]))
def test_mods(name: str) -> None:
    assert bias_is_first(MODS[name])
    check(draw(Q_LEN, KV_LEN, batch=(2, 2)), MODS[name], CAUSAL)


@pytest.mark.parametrize(
    "mask",
    first_of(
        [
            (lambda b, h, q, kv: (q + kv) % 3 > 0,),  # evaluated for each score
            (lambda b, h, q, kv: (q >= kv) & ((q < 128) | (h == 1)),),  # some tiles have no block
            (None,),
        ]
    ),
)
def test_masks(mask: Any) -> None:
    check(draw(Q_LEN, KV_LEN), MODS["by head"], mask, ctas=2)


def test_small_bias() -> None:
    """A table of pairs of this size would be copied to shared memory."""
    bias = torch.randn(2, 64, 64)
    check(draw(64, heads=(2, 2)), lambda s, b, h, q, kv: s + bias[h, q, kv], CAUSAL)


@pytest.mark.parametrize("scale", first_of([(0.0,), (-0.5,), (4.0,)]))
def test_scale(scale: float) -> None:
    """The bias is divided by the scale, which may be 0 or below."""
    check(draw(Q_LEN, KV_LEN), MODS["by head"], CAUSAL, scale=scale, mode="eager")


@pytest.mark.parametrize("low", first_of([(-torch.inf,), (-1e30,)]))
def test_bias_as_mask(low: float) -> None:
    """A bias that is very low in a whole block of some rows."""
    bias = BIAS.clone()
    bias[:, 64:100, :128] = low
    check(draw(Q_LEN, KV_LEN), lambda s, b, h, q, kv: s + bias[h, q, kv], mode="eager")


def test_large_bias() -> None:
    """The MMAs add the score to a bias that is a thousand times as large."""
    bias = 1000.0 * BIAS
    check(draw(Q_LEN, KV_LEN), lambda s, b, h, q, kv: s + bias[h, q, kv], CAUSAL, mode="eager")


@pytest.mark.parametrize("columns", first_of([(KV_LEN,), (264,)]))  # loaded and copied
@pytest.mark.parametrize("size", first_of([(-1e10,), (-1e30,), (1e12,)]))
def test_rows_of_a_very_large_bias(size: float, columns: int) -> None:
    """The product of a score with the factor must not be compared with a rounded product."""
    bias = torch.randn(6, Q_LEN, columns)
    bias[:, 50:60] = size  # whole rows
    bias[:, 70, :130] = size
    bias[:, 80:90] = -torch.inf
    check(draw(Q_LEN, columns), lambda s, b, h, q, kv: s + bias[h, q, kv], CAUSAL, mode="eager")


@pytest.mark.parametrize(
    "aux", first_of([(AuxRequest(entropy=True),), (AuxRequest(max_scores=True),)])
)
def test_statistics(aux: AuxRequest) -> None:
    qkv = draw(Q_LEN, KV_LEN, heads=(2, 2))
    options: Any = {"score_mod": MODS["by head"], "block_mask": CAUSAL, "return_aux": aux}
    _, found = flex_attention(*qkv, **options, backend="emulate")
    wide = tuple(t.double() for t in qkv)
    _, exact = flex_attention(*wide, **options, backend="eager")
    _, dense = flex_attention(*qkv, **options, backend="eager")
    for name in ("entropy", "max_scores"):
        if getattr(aux, name):
            close(name, *(getattr(x, name) for x in (found, exact, dense)))


def test_dropout_adds_it_to_the_scores() -> None:
    assert not bias_is_first(MODS["by head"], dropout_p=0.25)


@pytest.mark.parametrize(
    ("mod", "head_dim"),
    sampled(
        [
            (lambda s, b, h, q, kv: 2 * s + BIAS[h, q, kv], 128),
            (lambda s, b, h, q, kv: torch.tanh(s + BIAS[h, q, kv]), 128),
            (lambda s, b, h, q, kv: s + BIAS[h, q // 2, kv // 2], 64),
            (MODS["by head"], 192),
            (lambda s, b, h, q, kv: s * LATER[q + 3, kv], 64),
        ],
        4,
    ),
)
def test_other_variants_add_it_to_the_scores(mod: Any, head_dim: int) -> None:
    assert not bias_is_first(mod, head_dim)


@pytest.mark.exhaustive
@pytest.mark.assembled
@pytest.mark.parametrize(
    ("name", "dim", "options"),
    [(name, dim, {}) for name in MODS for dim in (128, 64)]
    + [("by head", dim, {"return_aux": AuxRequest(entropy=True)}) for dim in (128, 64)],
)
def test_no_spills_and_no_serialised_products(name: str, dim: int, options: dict[str, Any]) -> None:
    found = compiled_kernel(source_of(MODS[name], dim, **options))
    assert found.artifact.problems == ()
    assert [s.stack for s in found.stats] == [0]
